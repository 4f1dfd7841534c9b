"""From a checkpoint's named tensors to a model's parameters: renaming, fusing, refusing."""

import fnmatch
import re
import warnings
from collections.abc import Callable, Iterable

import numpy as np

from models.config import ModelConfig
from models.errors import ModelLoadError
from models.loading.placements import Placement
from models.registry import model_class
from models.weight_layout import WeightStore

DANGEROUS_IF_UNUSED = ("*scale*", "*zero*", "*g_idx*", "*bias*", "*norm*")
"""Tensors that change the result: one that no parameter takes is an error, never skipped."""
WEIGHT_DTYPES = ("float16", "bfloat16", "float32")
"""What a parameter may be made of; other types mean nothing without scales that belong to them."""
MAX_SHOWN = 20
IGNORED = ("*.rotary_emb.inv_freq", "rope_freqs.weight", "rope_factors_*.weight")


class CheckpointLoader:
    """Feeds tensors to a WeightStore; holds the parts of at most a few fused weights at a time."""

    def __init__(self, config: ModelConfig, store: WeightStore, source: str = ""):
        """Make one for one model.

        Args:
          config: of the model.
          store: takes its parameters.
          source: folder or file of the checkpoint; errors begin with it.
        """
        self._store, self._source = store, source
        self._is_tied = config.tie_word_embeddings
        placements = model_class(config.architecture).placements(config)
        self._placement_of = {
            part: placement for placement in placements for part in placement.parts
        }
        self._waiting: dict[str, dict[str, np.ndarray]] = {}
        self._placed: set[str] = set()
        self._unused: list[str] = []
        self._tied_head: np.ndarray | None = None

    def load(self, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
        """Put every tensor where it belongs.

        Raises:
          ModelLoadError: a tensor has the wrong shape, a needed one is missing, one that would
            change the result has no place, or the head of tied embeddings is not the embedding.
        """
        for name, tensor in tensors:
            self._place(name, tensor)
        if self._store.missing:
            names = self._missing_tensors()
            raise self._error(
                f"the checkpoint must hold every tensor of the model; missing are "
                f"{len(names)}, among them {', '.join(names[:4])}"
            )
        self._check_tied_head()
        if self._unused:
            shown = self._unused[:MAX_SHOWN]
            more = f" and {len(self._unused) - len(shown)} more" if shown != self._unused else ""
            warnings.warn(f"unused tensors in the checkpoint: {shown}{more}", stacklevel=2)

    def _place(self, name: str, tensor: np.ndarray) -> None:
        if name == "lm_head.weight" and self._is_tied:
            self._tied_head = tensor
            return
        layer, placement = self._find(name)
        target = layer + placement.target if placement else name.removeprefix("model.")
        if not self._store.expects(target):
            self._refuse_or_note(name)
            return
        self._check_kind(name, target, tensor)
        if placement is None:
            self._put(target, name, lambda: tensor)
        else:
            parts = self._waiting.setdefault(target, {})
            parts[name.removeprefix(f"model.{layer}")] = tensor
            if len(parts) == len(placement.parts):
                del self._waiting[target]
                ordered = _of_one_type([parts[part] for part in placement.parts])
                self._put(target, name, lambda: placement.assemble(*ordered))

    def _check_kind(self, name: str, target: str, tensor: np.ndarray) -> None:
        if target in self._placed:
            raise self._error(f"{name}: its parameter must be given once; it has another name too")
        if tensor.dtype.name not in WEIGHT_DTYPES:
            raise self._error(
                f"{name}: must hold {', '.join(WEIGHT_DTYPES)} values; got {tensor.dtype.name}"
            )

    def _find(self, name: str) -> tuple[str, Placement | None]:
        match = re.fullmatch(r"model\.(layers\.\d+\.)(.+)", name)
        if match is None:
            return "", None
        return match[1], self._placement_of.get(match[2])

    def _put(self, target: str, name: str, make: Callable[[], np.ndarray]) -> None:
        try:
            self._store.put(target, make())
            self._placed.add(target)
        except (ValueError, TypeError, IndexError) as error:
            raise self._error(f"{name}: its shape must fit the config; {error}") from error

    def _error(self, text: str) -> ModelLoadError:
        return ModelLoadError(f"{self._source}: {text}" if self._source else text)

    def _missing_tensors(self) -> list[str]:
        """The missing parameters under their checkpoint names, part by part."""
        parts_of = {p.target: p.parts for p in self._placement_of.values()}
        names = []
        for path in self._store.missing:
            layer, target = re.fullmatch(r"(layers\.\d+\.)?(.+)", path).groups("")  # pyright: ignore[reportOptionalMemberAccess]
            prefix = "" if path.startswith("lm_head.") else f"model.{layer}"
            parts = parts_of.get(target, (target,)) if layer else (target,)
            found = self._waiting.get(path, {})
            names += [prefix + part for part in parts if part not in found]
        return names

    def _check_tied_head(self) -> None:
        """Transformers ties no head that differs, whatever the config says; we refuse it."""
        head, self._tied_head = self._tied_head, None
        if head is not None and not self._store.holds("embed_tokens.weight", head):
            raise self._error(
                "lm_head.weight: must equal model.embed_tokens.weight, since the config has "
                "tie_word_embeddings true; it differs; set tie_word_embeddings to false"
            )

    def _refuse_or_note(self, name: str) -> None:
        if any(fnmatch.fnmatch(name, pattern) for pattern in IGNORED):
            return
        if any(fnmatch.fnmatch(name, pattern) for pattern in DANGEROUS_IF_UNUSED):
            raise self._error(f"{name}: the architecture must have a parameter for it; it has not")
        self._unused.append(name)


def _of_one_type(parts: list[np.ndarray]) -> list[np.ndarray]:
    """The parts in float32 where their types differ: numpy mixes no float16 with bfloat16."""
    if len({part.dtype for part in parts}) == 1:
        return parts
    return [part.astype(np.float32) for part in parts]
