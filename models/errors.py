"""The root of every error that the project raises on purpose, and what a bad model gives."""


class JaxServeError(Exception):
    """Root of the tree that `jaxserve/errors.py` shows; on this floor because loading needs it."""


class ModelLoadError(JaxServeError):
    """A model's files are missing, refused, or do not fit its architecture."""
