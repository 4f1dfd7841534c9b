"""Weights of other formats: told apart by name or by their first bytes, and never opened."""

from pathlib import Path

from models.errors import ModelLoadError

CONVERT = "convert it to safetensors"
FOREIGN_SUFFIXES = {
    **dict.fromkeys((".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib"), "a pickle"),
    **dict.fromkeys((".npy", ".npz"), "numpy arrays, which can hold a pickle"),
    **dict.fromkeys((".h5", ".keras", ".pb", ".tflite"), "a TensorFlow file"),
    **dict.fromkeys((".msgpack", ".onnx", ".mlmodel"), "of a format that is not read"),
}
"""End of a file's name -> what the file is."""


def refuse_foreign_weights(path: Path) -> None:
    """Refuse a file of a foreign format, or a folder that holds one.

    Raises:
      ModelLoadError: names the first such file, with what to do instead.
    """
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    for file in files:
        kind = FOREIGN_SUFFIXES.get(file.suffix.lower())
        if kind is not None:
            raise ModelLoadError(
                f"{path} must hold safetensors or GGUF weights; got {file.name}, {kind}: {CONVERT}"
            )


def describe_start(start: bytes) -> str:
    """What a file with these first eight bytes is instead of safetensors; "" if they do not tell.

    The caller has found the file broken already: a good one may begin with the same bytes.
    """
    if start[:4] == b"PK\x03\x04":
        return f"; this is a zip file (a torch checkpoint?): {CONVERT}"
    if start[0] == 0x80 and start[1] <= 5:
        return f"; this looks like a pickle, which is never loaded: {CONVERT}"
    if start[:4] == b"GGUF":
        return "; this is a GGUF file: name it .gguf"
    if start[:7] == b"version":
        return "; this is a Git LFS pointer: fetch the file itself"
    return ""
