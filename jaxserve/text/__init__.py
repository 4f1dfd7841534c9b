"""Between text and token ids, on the host: no JAX."""
