"""Who runs in the next step, and which pages they own: plain Python, no JAX."""
