"""From a user's words to requests, and from tokens to outputs; no JAX."""
