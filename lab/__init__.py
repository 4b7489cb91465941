"""The laboratory: benches, studies, results and predictions, and the environments made for them."""
