"""GgufMetadata: the keys of a GGUF file with their types checked as they are read."""

import math
import re
from collections.abc import Mapping
from typing import NoReturn

import numpy as np

from models.errors import ModelLoadError
from models.loading.gguf_header import Value, shortened

_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_ID_KEYS = (*_END_KEYS, "bos_token_id", "padding_token_id", "unknown_token_id")
_BYTE_TOKEN_TYPE = 6
_MATCHED_TYPES = (3, 4)
_END_TEXTS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|end_of_text|>",
)  # fmt: skip
"""Control tokens that end a turn or a text in the chats of all models that have them."""


class GgufMetadata:
    """Typed access to the keys; None stands for a missing one, a wrong type is an error.

    Attributes:
      values: every key as it stands in the file; numeric arrays are numpy arrays.
      source: the file, named in errors.
    """

    def __init__(self, values: Mapping[str, Value], source: str):
        """Keep the keys; `check_vocabulary` looks at those of the tokenizer."""
        self.values, self.source = values, source

    def string(self, key: str) -> str | None:
        """A text."""
        value = self.values.get(key)
        if value is None or isinstance(value, str):
            return value
        self._refuse_type(key, "a string", value)

    def boolean(self, key: str) -> bool | None:
        """A boolean; integers are refused."""
        value = self.values.get(key)
        if value is None or isinstance(value, bool):
            return value
        self._refuse_type(key, "a boolean", value)

    def integer(self, key: str) -> int | None:
        """An integer of any width, at least 0; booleans are refused."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            self._refuse_type(key, "an integer", value)
        if value < 0:
            self.refuse(key, f"must be at least 0; got {value}")
        return value

    def number(self, key: str) -> float | None:
        """A float, finite and above 0."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, float):
            self._refuse_type(key, "a float", value)
        if not (math.isfinite(value) and value > 0):
            self.refuse(key, f"must be finite and above 0; got {value}")
        return value

    def strings(self, key: str) -> list[str] | None:
        """An array of texts."""
        value = self.values.get(key)
        if value is None or isinstance(value, list):
            return value
        self._refuse_type(key, "an array of strings", value)

    def numbers(self, key: str, kinds: str) -> np.ndarray | None:
        """A numeric array whose declared elements are of one of numpy's `kinds`: "iu" or "f"."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or value.dtype.kind not in kinds:
            self._refuse_type(key, f"an array of kind {kinds!r}", value)
        return value

    def token_id(self, name: str) -> int | None:
        """The id in `tokenizer.ggml.NAME`."""
        return self.integer(f"tokenizer.ggml.{name}")

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """The ids that end a text, a turn or a message.

        Few files declare more than one, though Phi-3 ends its turns with another token than its
        texts: so tokens of well-known names end as well, as in llama.cpp.
        """
        ids = [self.token_id(name) for name in _END_KEYS]
        declared = [token_id for token_id in ids if token_id is not None]
        return tuple(dict.fromkeys([*declared, *self._named_ends()]))

    def _named_ends(self) -> list[int]:
        types = self.numbers("tokenizer.ggml.token_type", "iu")
        if types is None:
            return []
        tokens = self.strings("tokenizer.ggml.tokens") or []
        matched = np.flatnonzero(np.isin(types[: len(tokens)], _MATCHED_TYPES))
        return [int(token_id) for token_id in matched if tokens[token_id] in _END_TEXTS]

    def check_vocabulary(self, num_rows: int | None) -> None:
        """Check that the tokenizer's keys fit each other and the embedding.

        Args:
          num_rows: of the embedding, None where the file has none.

        Raises:
          ModelLoadError: arrays of different length, an id outside the vocabulary, a malformed
            byte token, more tokens than rows.
        """
        tokens = self.strings("tokenizer.ggml.tokens")
        if tokens is None:
            return
        types = self.numbers("tokenizer.ggml.token_type", "iu")
        scores = self.numbers("tokenizer.ggml.scores", "f")
        for name, values in (("token_type", types), ("scores", scores)):
            if values is not None and len(values) != len(tokens):
                rule = f"must have {len(tokens)} items, as tokens has"
                self.refuse(f"tokenizer.ggml.{name}", f"{rule}; got {len(values)}")
        for name in _ID_KEYS:
            token_id = self.token_id(name)
            if token_id is not None and token_id >= len(tokens):
                rule = f"must be below the {len(tokens)} tokens"
                self.refuse(f"tokenizer.ggml.{name}", f"{rule}; got {token_id}")
        for index in [] if types is None else np.flatnonzero(types == _BYTE_TOKEN_TYPE):
            if not re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", tokens[index]):
                rule = "a byte token must be <0xNN>"
                self.refuse("tokenizer.ggml.tokens", f"{rule}; got {tokens[index]!r}")
        if num_rows is not None and num_rows < len(tokens):
            rule = f"must have a row for each of the {len(tokens)} tokens"
            self.refuse("token_embd.weight", f"{rule}; got {num_rows}")

    def refuse(self, key: str, reason: str) -> NoReturn:
        """Raise the ModelLoadError "file: key: reason", both cut, since the file wrote them."""
        raise ModelLoadError(f"{self.source}: {shortened(key, 100)}: {shortened(reason, 300)}")

    def _refuse_type(self, key: str, wanted: str, value: Value) -> NoReturn:
        got = f"array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
        self.refuse(key, f"must be {wanted}; got {got}")
