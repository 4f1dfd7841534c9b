"""From a checkpoint's named tensors to a model's parameters: renaming, fusing, refusing."""

import fnmatch
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from models.config import ModelConfig
from models.errors import ModelLoadError
from models.loading.pieces import ParameterPieces, whole
from models.loading.placements import Placement
from models.loading.stored_tensor import StoredTensor
from models.registry import model_class
from models.weight_layout import WeightStore

DANGEROUS_IF_UNUSED = ("*scale*", "*zero*", "*g_idx*", "*bias*", "*norm*")
"""Tensors that change the result: one that no parameter takes is an error, never skipped."""
WEIGHT_DTYPES = ("float16", "bfloat16", "float32")
"""What a parameter may be made of; other types mean nothing without scales that belong to them."""
MAX_SHOWN = 20
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
ROWS_COMPARED = 4096
"""Of embedding and head at a time."""
IGNORED = ("*.rotary_emb.inv_freq", "rope_freqs.weight", "rope_factors_*.weight")


@dataclass(frozen=True, slots=True)
class _Parameter:
    """A parameter and those of its tensors that were found, by name within the layer."""

    placement: Placement
    tensors: dict[str, StoredTensor] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return len(self.tensors) == len(self.placement.parts)

    def outline(self) -> ParameterPieces:
        """Its shape from the headers alone; reads nothing."""
        return self._assemble(StoredTensor.outline)

    def pieces(self) -> ParameterPieces:
        """Views of its tensors' values."""
        return self._assemble(lambda tensor: tensor.array())

    def release(self) -> None:
        for tensor in self.tensors.values():
            tensor.release()

    def _assemble(self, values_of: Callable[[StoredTensor], np.ndarray]) -> ParameterPieces:
        parts = [values_of(self.tensors[part]) for part in self.placement.parts]
        return ParameterPieces(self.placement.assemble(*parts))


class CheckpointLoader:
    """Feeds a WeightStore: checks the headers of all tensors, then reads parameter by parameter."""

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
        self._parameters: dict[str, _Parameter] = {}
        self._unused: list[str] = []
        self._tied_head: StoredTensor | None = None

    def load(
        self,
        tensors: Iterable[tuple[str, StoredTensor]],
        report: Callable[[int], None] | None = None,
    ) -> None:
        """Put every tensor where it belongs.

        Args:
          tensors: all of the checkpoint, with their names.
          report: hears how many of them are done, after each parameter.

        Raises:
          ModelLoadError: before any parameter is put: a tensor has the wrong shape or type, a
            needed one is missing, one that would change the result has no place, or the head of
            tied embeddings is not the embedding.
        """
        count = 0
        for name, tensor in tensors:
            self._place(name, tensor)
            count += 1
        self._check_complete()
        self._check_tied_head()
        self._warn_of_unused()
        count -= sum(len(parameter.tensors) for parameter in self._parameters.values())
        for path, parameter in self._parameters.items():
            self._store.put(path, parameter.pieces())
            parameter.release()
            count += len(parameter.tensors)
            if report is not None:
                report(count)

    def _place(self, name: str, tensor: StoredTensor) -> None:
        if name == HEAD and self._is_tied:
            self._tied_head = tensor
            return
        target, part, placement = self._find(name)
        if not self._store.expects(target):
            self._refuse_or_note(name)
            return
        parameter = self._parameters.setdefault(target, _Parameter(placement))
        if part not in parameter.placement.parts or parameter.is_complete:
            raise self._error(f"{name}: its parameter must be given once; it has another name too")
        if tensor.dtype.name not in WEIGHT_DTYPES:
            raise self._error(
                f"{name}: must hold {', '.join(WEIGHT_DTYPES)} values; got {tensor.dtype.name}"
            )
        parameter.tensors[part] = tensor
        if parameter.is_complete:
            self._check_shape(target, name, parameter)

    def _find(self, name: str) -> tuple[str, str, Placement]:
        """The parameter that a tensor belongs to, the tensor's name within the layer, and how."""
        match = re.fullmatch(r"model\.(layers\.\d+\.)(.+)", name)
        layer, part = match.groups() if match else ("", name.removeprefix("model."))
        placement = self._placement_of.get(part) if layer else None
        placement = placement or Placement(part, (part,), whole)
        return layer + placement.target, part, placement

    def _check_shape(self, path: str, name: str, parameter: _Parameter) -> None:
        try:
            self._store.check(path, parameter.outline())
        except (ValueError, TypeError, IndexError) as error:
            raise self._error(f"{name}: its shape must fit the config; {error}") from error

    def _error(self, text: str) -> ModelLoadError:
        return ModelLoadError(f"{self._source}: {text}" if self._source else text)

    def _check_complete(self) -> None:
        """Refuse missing tensors under their checkpoint names, part by part."""
        parts_of = {p.target: p.parts for p in self._placement_of.values()}
        names = []
        for path in self._store.missing:
            layer, target = re.fullmatch(r"(layers\.\d+\.)?(.+)", path).groups("")  # pyright: ignore[reportOptionalMemberAccess]
            prefix = "" if path == HEAD else f"model.{layer}"
            parts = parts_of.get(target, (target,)) if layer else (target,)
            found = self._parameters[path].tensors if path in self._parameters else {}
            names += [prefix + part for part in parts if part not in found]
        if names:
            raise self._error(
                f"the checkpoint must hold every tensor of the model; missing are "
                f"{len(names)}, among them {', '.join(names[:4])}"
            )

    def _check_tied_head(self) -> None:
        """Transformers ties no head that differs, whatever the config says; we refuse it."""
        head = self._tied_head
        if head is not None and not self._equals_embedding(head):
            raise self._error(
                "lm_head.weight: must equal model.embed_tokens.weight, since the config has "
                "tie_word_embeddings true; it differs; set tie_word_embeddings to false"
            )

    def _equals_embedding(self, head: StoredTensor) -> bool:
        """Whether a head holds the embedding, in the model's type."""
        (embedding,) = self._parameters[EMBEDDING].tensors.values()
        if head.shape != embedding.shape:
            return False
        dtype = self._store.dtype(EMBEDDING)
        heads, embeddings = head.array(), embedding.array()
        for start in range(0, len(heads), ROWS_COMPARED):
            rows = slice(start, start + ROWS_COMPARED)
            if not np.array_equal(heads[rows].astype(dtype), embeddings[rows].astype(dtype)):
                return False
            head.release()
            embedding.release()
        return True

    def _warn_of_unused(self) -> None:
        if self._unused:
            shown = self._unused[:MAX_SHOWN]
            more = f" and {len(self._unused) - len(shown)} more" if shown != self._unused else ""
            warnings.warn(f"unused tensors in the checkpoint: {shown}{more}", stacklevel=3)

    def _refuse_or_note(self, name: str) -> None:
        if any(fnmatch.fnmatch(name, pattern) for pattern in IGNORED):
            return
        if any(fnmatch.fnmatch(name, pattern) for pattern in DANGEROUS_IF_UNUSED):
            raise self._error(f"{name}: the architecture must have a parameter for it; it has not")
        self._unused.append(name)
