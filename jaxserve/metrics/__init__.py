"""What is counted of an engine, under vLLM's names; no JAX."""
