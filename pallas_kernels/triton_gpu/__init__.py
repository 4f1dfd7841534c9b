"""Attention and cache writes in Triton, for NVIDIA GPUs without a Mosaic version."""
