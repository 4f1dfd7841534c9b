"""ProgramStore: compiled programs of earlier starts, kept whole, so that nothing is traced again.

JAX's own cache finds a program by its lowered form, and lowering takes most of a second start. Here
a program is found by what it is made of: the model's numbers, the shapes, the versions of all
libraries, the device, the flags and the sources of this project.
"""

import atexit
import contextlib
import functools
import hashlib
import importlib.metadata
import logging
import os
import pickle
import re
import shutil
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from jax.stages import Compiled
from jaxlib import xla_client

from jaxserve.execution.device_setup import XLA_FOLDER
from jaxserve.execution.model_setup import ModelSetup
from models.registry import model_class

logger = logging.getLogger(__name__)

NUM_KEPT_FOLDERS = 8
"""Folders of programs, one for each model and set of versions; older ones are deleted."""
NUM_KEPT_PROGRAMS = 256
"""Programs of a folder, several times what a start needs: each number of pages has its own."""
CHECK_SECONDS, QUIET_CHECKS = 0.2, 5
"""So often an engine is looked at, and so many times in a row it must be idle."""

_SOURCES = ("jaxserve", "models", "pallas_kernels")
_LIBRARIES = re.compile(r"(jax|flax|numpy|triton|nvidia[-_])", re.IGNORECASE)
_VARIABLES = re.compile(r"(XLA|JAX|TF|MOSAIC|NVIDIA|CUDA|CUBLAS)_")
_NO_MATTER = re.compile(
    r"CACHE|XLA_PYTHON_CLIENT|HOST_MEMORY|CUDA_VISIBLE|NVIDIA_(VISIBLE|DRIVER)|_LOG", re.I
)


class ProgramStore:
    """Compiled programs in a folder of this user's own, one file each.

    The files are pickles and machine code: reading one runs what it says. So the folder must
    belong to the user, and nobody else may write to it. A file that cannot be read counts as
    missing, with a warning.
    """

    def __init__(self, folder: Path, devices: Sequence[Any], *key_parts: object):
        """Read and write below a folder.

        Args:
          folder: of all stores; made if it is missing.
          devices: that run the programs, in the order of their mesh.
          key_parts: what the programs depend on beside what `read` and `write` are told, the
            libraries, the device, the flags and the sources.

        Raises:
          OSError: the folder cannot be made, or is not this user's alone.
        """
        key = _hash(repr((key_parts, describe_environment(devices))))
        self._devices, self._folder = tuple(devices), folder / key
        folder.parent.mkdir(parents=True, exist_ok=True)
        for checked in (folder, self._folder):
            checked.mkdir(mode=0o700, exist_ok=True)
            status = checked.stat()
            if status.st_uid != os.getuid() or status.st_mode & 0o022:
                raise PermissionError(f"{checked} must be writable by this user alone")
        os.utime(self._folder)
        _delete_old(folder, NUM_KEPT_FOLDERS)
        _delete_old(self._folder, NUM_KEPT_PROGRAMS)

    @property
    def is_empty(self) -> bool:
        """Whether no program of any plan is kept for this model."""
        return not any(self._folder.glob("*.program"))

    def read(self, description: str) -> Compiled | None:
        """The program of that description, loaded onto the devices; None if it is missing."""
        path = self._path(description)
        try:
            content = path.read_bytes()
            os.utime(path)
            if hashlib.sha256(content[32:]).digest() != content[:32]:
                raise ValueError("its checksum does not fit")
            program, in_tree, out_tree = pickle.loads(content[32:])
            return serialize_executable.deserialize_and_load(
                program,
                in_tree,
                out_tree,
                backend=self._devices[0].client,
                execution_devices=self._devices,
            )
        except FileNotFoundError:
            return None
        except Exception as error:  # of pickle and XLA, which raise anything for a damaged file
            logger.warning("the program %s cannot be read and is compiled anew: %s", path, error)
            return None

    def write(self, description: str, compiled: Compiled) -> None:
        """Keep a program; one that cannot be kept costs a warning only."""
        path = self._path(description)
        temporary = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        try:
            content = pickle.dumps(serialize_executable.serialize(compiled))
            temporary.write_bytes(hashlib.sha256(content).digest() + content)
            temporary.replace(path)
        except Exception as error:  # of pickle and XLA: not every program can be kept
            logger.warning("the program %s cannot be kept: %s", path, error)
            temporary.unlink(missing_ok=True)

    @contextlib.contextmanager
    def without_xla_cache(self) -> Iterator[None]:
        """Compile what is to be kept anew, even where JAX's own cache has it.

        A program that was loaded from there cannot be kept: on CPUs it loads again, but then misses
        some of its functions (jax 0.11.2).
        """
        was_enabled = jax.config.jax_enable_compilation_cache
        _enable_xla_cache(False)
        try:
            yield
        finally:
            _enable_xla_cache(was_enabled)

    def _path(self, description: str) -> Path:
        return self._folder / f"{_hash(description)}.program"


class HasUnfinished(Protocol):
    """As far as a store looks at an engine."""

    @property
    def has_unfinished(self) -> bool:
        """Whether anybody waits for it."""
        ...


_UNWRITTEN: set["LateProgramStore"] = set()
"""What the exit has to wait for."""


def write_all() -> None:
    """Write what late stores of this process have not written yet."""
    for store in tuple(_UNWRITTEN):
        store.finish()


@atexit.register
def _write_at_exit() -> None:
    if _UNWRITTEN:
        logger.info("keeping compiled programs for the next start")
    write_all()


class LateProgramStore(ProgramStore):
    """A store that writes in the background while the engine is idle, the rest by `write_all`.

    To serialise a program takes a fifth of a second, and XLA holds the GIL meanwhile: a start that
    lowers dozens of others would wait for it, and so would a request.
    """

    def __init__(self, folder: Path, devices: Sequence[Any], *key_parts: object):
        """As `ProgramStore`; raises as that."""
        super().__init__(folder, devices, *key_parts)
        self._pending: deque[tuple[str, Compiled]] = deque()
        self._is_writing = threading.Lock()

    def write(self, description: str, compiled: Compiled) -> None:
        """Remember a program, to be kept later."""
        self._pending.append((description, compiled))
        _UNWRITTEN.add(self)

    def write_while_idle(self, engine: HasUnfinished) -> None:
        """Begin to write in a thread of its own; an engine that is gone counts as idle."""
        if self._pending:
            arguments = (weakref.ref(engine),)
            thread = threading.Thread(
                target=self._write_while_idle, args=arguments, name="keep-programs", daemon=True
            )
            thread.start()

    def forget(self) -> None:
        """Keep nothing of what is not written yet."""
        with self._is_writing:
            self._pending.clear()
            _UNWRITTEN.discard(self)

    def finish(self) -> None:
        """Write all that is left; returns when it is kept."""
        while self._write_one():
            pass

    def _write_while_idle(self, engine: weakref.ref[HasUnfinished]) -> None:
        num_quiet = 0
        is_left = True
        while is_left:
            time.sleep(CHECK_SECONDS)
            watched = engine()
            is_busy = watched is not None and watched.has_unfinished
            del watched  # else this thread would keep it alive
            num_quiet = 0 if is_busy else num_quiet + 1
            if num_quiet >= QUIET_CHECKS:
                is_left = self._write_one()

    def _write_one(self) -> bool:
        """Write the oldest; False when nothing is left."""
        with self._is_writing:
            if not self._pending:
                _UNWRITTEN.discard(self)
                return False
            super().write(*self._pending.popleft())
            return True


def open_program_store(setup: ModelSetup, cache_dir: Path) -> LateProgramStore | None:
    """The store of a model's programs; None where it cannot be kept safely or described fully.

    What earlier engines of this process have compiled is written first, so that it is found.

    Args:
      setup: the model on its devices.
      cache_dir: the user's own folder of caches.
    """
    if jax.config.jax_compilation_cache_dir != str(cache_dir / XLA_FOLDER):
        return None  # JAX was given a cache of its user's, which is then the only one
    family = model_class(setup.model.architecture)
    if family.__module__.split(".")[0] not in _SOURCES:
        logger.info("programs are not kept: the sources of %s are not known", family.__name__)
        return None
    write_all()
    devices = tuple(setup.sharder.mesh.devices.flat)
    key_parts = (family.__qualname__, setup.shared_model, setup.geometries, setup.dtype)
    kernels = (setup.backend, setup.stack, setup.config.batch_invariant)
    try:
        return LateProgramStore(cache_dir / "programs", devices, *key_parts, *kernels)
    except OSError as error:
        logger.warning("programs are not kept: %s", error)
        return None


def describe_environment(devices: Sequence[Any]) -> tuple[object, ...]:
    """What every program depends on: libraries, devices, settings of JAX and XLA, our sources."""
    libraries = {
        (found.name, found.version)
        for found in importlib.metadata.distributions()
        if _LIBRARIES.match(found.name or "")
    }
    variables = [
        pair for pair in os.environ.items() if _is_setting(pair[0]) and _VARIABLES.match(pair[0])
    ]
    settings = [pair for pair in jax.config.values.items() if _is_setting(pair[0])]
    kinds = [(device.id, device.device_kind) for device in devices]
    client = devices[0].client
    return (
        sorted(libraries),
        sorted(variables),
        sorted(map(repr, settings)),
        (client.platform, client.platform_version, kinds, _instruction_set(devices)),
        _hash_sources(),
    )


def _instruction_set(devices: Sequence[Any]) -> int | None:
    """Stands for the instructions of a CPU, which has no kind; machines may share a home folder."""
    if devices[0].platform != "cpu":
        return None
    # JAX's own cache asks the same; there is no public way to ask.
    return xla_client.get_topology_for_devices(devices).fingerprint()


def _enable_xla_cache(is_enabled: bool) -> None:
    jax.config.update("jax_enable_compilation_cache", is_enabled)
    compilation_cache.reset_cache()  # JAX reads the setting once


def _is_setting(name: str) -> bool:
    return _NO_MATTER.search(name) is None


@functools.cache
def _hash_sources() -> str:
    """Of all Python files of the packages that a step comes from."""
    root = Path(__file__).resolve().parents[2]
    paths = [path for package in _SOURCES for path in (root / package).rglob("*.py")]
    digest = hashlib.sha256()
    for path in sorted(paths):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root)} {len(content)} ".encode())
        digest.update(content)
    return digest.hexdigest()


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _delete_old(folder: Path, num_kept: int) -> None:
    """Delete the files and folders in it that were not used for the longest time."""
    used = {}
    for entry in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):  # another start deletes old ones, too
            used[entry.path] = entry.stat().st_mtime
    for path in sorted(used, key=lambda path: -used[path])[num_kept:]:
        if os.path.isdir(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            Path(path).unlink(missing_ok=True)
