"""The language model: its decoder and files, the engine that samples from it, and the chat that it speaks."""
