"""The language model: decoder, attention layouts, sampling engine, chat formats, logprobs, optimizers."""
