"""The jaxserve command."""
