"""Module paths that scripts written for vLLM import."""
