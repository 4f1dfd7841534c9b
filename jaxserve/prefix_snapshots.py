"""PrefixSnapshots: named prefixes on disk, whose keys and values survive a restart."""

import dataclasses
import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

import jaxserve
from jaxserve.engine_builder import BuiltEngine
from jaxserve.errors import EngineConfigError, InvalidRequestError, ModelLoadError, describe_value
from jaxserve.execution.page_copies import copy_in, copy_out
from jaxserve.execution.weight_sample import digest_weights
from jaxserve.request import Request
from jaxserve.scheduling.page_digests import root_digest
from jaxserve.scheduling.prefix_pages import PrefixPages
from jaxserve.snapshot_file import SnapshotFile, write_snapshot
from jaxserve.step import PageMove

FORMAT = "jaxserve prefix 1"
FOLDER = "prefixes"
"""Of snapshots, inside the folder of the compilation cache."""
TOKENS = "token_ids"
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_MUST_BE_EQUAL = {
    "format": "format",
    "model": "model (the numbers of its config)",
    "dtype": "dtype",
    "page_size": "page size",
    "geometry": "cache geometry",
    "num_devices": "number of devices",
    "weights": "weights",
    "cache_salt": "cache_salt (its digest)",
    "batch_invariant": "batch_invariant mode",
}
"""Keys of the metadata, and what they are called; a snapshot is refused by the first that differs.
"""


class PrefixSnapshots:
    """Writes the computed pages of a prefix to a file, and puts a file's pages into the KV cache.

    A file holds token ids, so it belongs to no tokenizer. It is taken only where the engine would
    have computed the same pages: same model, weights and cache.
    """

    def __init__(self, built: BuiltEngine, folder: str | os.PathLike[str] | None = None):
        """Use the snapshots of a folder.

        Args:
          built: the engine.
          folder: None = beside the compilation cache.

        Raises:
          EngineConfigError: the engine has no prefix cache.
        """
        self._built, self._engine = built, built.engine
        self._folder = built.cache_dir / FOLDER if folder is None else Path(folder).expanduser()
        if not self._engine.scheduler.has_prefix_cache:
            raise EngineConfigError("enable_prefix_caching must be True for prefixes; got False")

    def save(self, name: str, request: Request, compute: Callable[[], object]) -> int:
        """Write the full pages of a request's prompt.

        Args:
          name: of the snapshot; one of that name is replaced.
          request: its prompt and its salt count.
          compute: runs the request to its end; called where pages are missing.

        Returns:
          Tokens in the snapshot.

        Raises:
          InvalidRequestError: the name is no plain name, the prompt fills no page or could not be
            computed, or another request is unfinished.
          EngineNotReadyError: the engine sleeps.
          OSError: the file cannot be written.
        """
        path = self._path(name)
        self._make_ready()
        root = root_digest(request.cache_salt)
        prefix = PrefixPages(self._engine.scheduler.page_pools, request.prompt_token_ids, root)
        if not prefix.num_tokens:
            size = self._engine.scheduler.page_pools[0].page_size
            rule = f"must fill a page of {size} tokens"
            raise InvalidRequestError.for_field("prompt", rule, len(request.prompt_token_ids))
        tables = prefix.find()
        if tables is None:
            compute()
            tables = prefix.find()
        if tables is None:
            raise InvalidRequestError(
                "prompt must be computed before it is saved; its request ended early"
            )
        token_ids = np.asarray(request.prompt_token_ids[: prefix.num_tokens], np.int32)
        tensors = {TOKENS: token_ids}
        for group, pages in enumerate(tables):
            keys, values = copy_out(self._engine.runner.cache, group, pages)
            tensors |= {f"{group}.keys": keys, f"{group}.values": values}
        about = {"made_by": f"jaxserve {jaxserve.__version__}", "path": str(self._built.path)}
        write_snapshot(path, self._identity(root) | about, tensors)
        return prefix.num_tokens

    def load(self, name: str, cache_salt: str | None = None) -> int:
        """Put a snapshot's pages into the KV cache, where requests of that salt find them.

        They are idle pages: they give way, as all do, when memory is short.

        Args:
          name: of the snapshot.
          cache_salt: under which it was saved.

        Returns:
          Tokens in the snapshot.

        Raises:
          InvalidRequestError: the name is no plain name; the file is missing, damaged, or of
            another model or cache; the KV cache is too small; or a request is unfinished.
          EngineNotReadyError: the engine sleeps.
        """
        path, root = self._path(name), root_digest(cache_salt)
        self._make_ready()
        try:
            file = SnapshotFile(path)
            self._check_identity(name, file.metadata, root)
            file.check_digest()
        except ModelLoadError as error:
            raise InvalidRequestError(str(error), parameter="name", value=name) from error
        token_ids = file.tensors.get(TOKENS, np.empty(0, np.int32))
        prefix = PrefixPages(self._engine.scheduler.page_pools, token_ids.tolist(), root)
        num_pages = self._count_pages(name, prefix, file.tensors)

        def write(group: int, offloads: list[PageMove], rows: list[int], pages: list[int]) -> None:
            runner, arrays = self._engine.runner, file.tensors
            if offloads and runner.page_mover is not None:
                runner.page_mover.apply(offloads, (), runner.cache)
            keys, values = arrays[f"{group}.keys"], arrays[f"{group}.values"]
            change = functools.partial(
                copy_in, group=group, pages=pages, rows=rows, keys=keys, values=values
            )
            runner.change_cache(change)

        prefix.fill(num_pages, write)
        return prefix.num_tokens

    def _make_ready(self) -> None:
        self._engine.make_ready()
        if self._engine.has_unfinished:
            ids = self._engine.scheduler.unfinished_request_ids
            raise InvalidRequestError(
                f"prefixes must be saved and loaded while no request is unfinished; got {len(ids)}"
            )

    def _path(self, name: str) -> Path:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            rule = (
                "must be 1 to 128 of the characters A-Z, a-z, 0-9, '.', '_' and '-', no '.' first"
            )
            raise InvalidRequestError.for_field("name", rule, name)
        return self._folder / f"{name}.safetensors"

    def _identity(self, root: bytes) -> dict[str, str]:
        """What must be equal for pages to be the same; a salt is told by its digest alone."""
        runner, model = self._engine.runner, self._built.model_config
        geometries = [group.geometry for group in runner.cache.groups]
        return {
            "format": FORMAT,
            "model": hashlib.sha256(repr(model).encode()).hexdigest(),
            "dtype": " ".join(geometry.dtype for geometry in geometries),
            "page_size": " ".join(str(geometry.page_size) for geometry in geometries),
            "geometry": json.dumps([dataclasses.asdict(geometry) for geometry in geometries]),
            "num_devices": str(len(runner.weights[0].sharding.device_set)),
            "weights": digest_weights(runner.weights),
            "cache_salt": root.hex(),
            # Pages of this mode may be taken in any other, but not the other way round.
            **({"batch_invariant": "True"} if self._built.batch_invariant else {}),
        }

    def _check_identity(self, name: str, found: Mapping[str, str], root: bytes) -> None:
        for key, wanted in self._identity(root).items():
            got = found.get(key)
            if got != wanted:
                raise ModelLoadError(
                    f"prefix {name!r} must have this engine's {_MUST_BE_EQUAL[key]}, "
                    f"{describe_value(wanted)}; got {describe_value(got)}"
                )

    def _count_pages(
        self, name: str, prefix: PrefixPages, tensors: Mapping[str, np.ndarray]
    ) -> list[int]:
        """Pages of each group in a file; refuses arrays that are not this cache's."""
        counts = []
        for group, of_group in enumerate(self._engine.runner.cache.groups):
            num_layers, _, *page_shape = of_group.k_pages.shape
            arrays = [tensors.get(f"{group}.{part}") for part in ("keys", "values")]
            count = 0 if arrays[0] is None or not arrays[0].ndim else len(arrays[0])
            wanted = ((count, num_layers, *page_shape), of_group.k_pages.dtype)
            if any(array is None or (array.shape, array.dtype) != wanted for array in arrays):
                raise InvalidRequestError(f"prefix {name!r} must hold pages of group {group}")
            counts.append(count)
        if not prefix.num_tokens or not prefix.accepts(counts):
            raise InvalidRequestError(f"prefix {name!r} must hold all pages of its tokens")
        return counts
