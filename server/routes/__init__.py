"""The HTTP routes, one file an area."""
