"""Flax model definitions over a paged KV cache, and the loaders of their weights."""
