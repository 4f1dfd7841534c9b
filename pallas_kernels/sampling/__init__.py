"""Sampling without a sort: Mosaic GPU, plain XLA, and the meaning of both."""
