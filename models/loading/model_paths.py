"""Where a model's files may lie: links that leave the model are refused."""

import os
from pathlib import Path

from models.errors import ModelLoadError


def is_there(path: Path) -> bool:
    """Whether the path exists; False also for what no path can be, such as one that is too long."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def check_inside(path: Path, folder: Path) -> None:
    """Refuse a link that leaves the model's folder; a Hub cache's links to its own blobs are fine.

    Raises:
      ModelLoadError: the path leads out of the folder.
    """
    root = Path(os.path.realpath(folder))
    if root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--"):
        root = root.parent.parent
    target = Path(os.path.realpath(path))
    if not target.is_relative_to(root):
        raise ModelLoadError(f"{path} must not link to a file outside {root}; got {target}")
