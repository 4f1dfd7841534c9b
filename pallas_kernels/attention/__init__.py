"""Paged attention: Mosaic GPU, plain XLA, and the meaning of both."""
