"""Builds the tokenizers.Tokenizer of a GGUF file from its vocabulary, scores and merges."""

import numpy as np
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from models.loading.gguf import GgufFile

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_PREFIX = "tokenizer.ggml."

KNOWN_PRE_TOKENIZERS = ("smollm", "qwen2", "llama-bpe", "gpt-2", "default")
"""Values of `tokenizer.ggml.pre` whose splitting is known; "default" splits as "gpt-2"."""


def build_backend(file: GgufFile, pre_tokenizer: str | None = None) -> Backend:
    """Build the tokenizer; BOS and EOS are left to the caller.

    Args:
      file: with the keys `tokenizer.ggml.*`.
      pre_tokenizer: one of KNOWN_PRE_TOKENIZERS, used instead of the file's own.

    Raises:
      ModelLoadError: the vocabulary is missing or inconsistent, or its kind is not known.
    """
    keys = file.metadata
    tokens = keys.strings(f"{_PREFIX}tokens")
    kind = keys.string(f"{_PREFIX}model")
    if not tokens:
        keys.refuse(f"{_PREFIX}tokens", "the key is missing; pass another tokenizer")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        num_double = len(tokens) - len(vocabulary)
        keys.refuse(f"{_PREFIX}tokens", f"must all differ; got {num_double} double ones")
    if kind == "gpt2":
        backend = _byte_level(file, vocabulary, pre_tokenizer)
    elif kind == "llama":
        backend = _sentencepiece(file, vocabulary)
    else:
        keys.refuse(f"{_PREFIX}model", f"must be 'gpt2' or 'llama'; got {kind!r}")
    types = keys.numbers(f"{_PREFIX}token_type", "iu")
    if types is not None:
        _add_tokens(backend, tokens, types)
    return backend


def _byte_level(file: GgufFile, vocabulary: dict[str, int], pre_tokenizer: str | None) -> Backend:
    name = pre_tokenizer or file.metadata.string(f"{_PREFIX}pre")
    if name not in KNOWN_PRE_TOKENIZERS:
        rule = f"must be one of {', '.join(KNOWN_PRE_TOKENIZERS)}"
        advice = "name the model's tokenizer.json as tokenizer"
        file.metadata.refuse(f"{_PREFIX}pre", f"{rule}; got {name!r}; {advice}")
    lines = file.metadata.strings(f"{_PREFIX}merges")
    if lines is None:
        file.metadata.refuse(f"{_PREFIX}merges", "the key is missing")
    merges: list[tuple[str, str]] = []
    for line in lines:
        left, _, right = line.partition(" ")
        if left + right not in vocabulary or left not in vocabulary or right not in vocabulary:
            file.metadata.refuse(f"{_PREFIX}merges", f"must join tokens to a token; got {line!r}")
        merges.append((left, right))
    model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=name == "llama-bpe")
    backend = Backend(model)
    if name == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(name)
    backend.decoder = decoders.ByteLevel()
    return backend


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    if name in ("gpt-2", "default"):
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    split = pre_tokenizers.Split(Regex(_QWEN2 if name == "qwen2" else _LLAMA3), "isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, letters])


def _sentencepiece(file: GgufFile, vocabulary: dict[str, int]) -> Backend:
    """SentencePiece's BPE: pieces are merged by score, what is left falls back to bytes."""
    scores = file.metadata.numbers(f"{_PREFIX}scores", "f")
    if scores is None:
        file.metadata.refuse(f"{_PREFIX}scores", "the key is missing")
    unknown = file.metadata.token_id("unknown_token_id")
    unknown = 0 if unknown is None else unknown
    model = models.BPE(
        vocab=vocabulary,
        merges=_merges_of_scores(vocabulary, scores),
        unk_token=list(vocabulary)[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Backend(model)
    has_prefix = file.metadata.boolean(f"{_PREFIX}add_space_prefix") is not False
    prepend = [normalizers.Prepend("▁")] if has_prefix else []
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_of_scores(vocabulary: dict[str, int], scores: np.ndarray) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, pieces of a higher score first."""
    found: list[tuple[float, int, str, str]] = []
    for piece, token_id in vocabulary.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                found.append((-float(scores[token_id]), cut, left, right))
    found.sort(key=lambda merge: merge[:2])
    return [(left, right) for _, _, left, right in found]


def _add_tokens(backend: Backend, tokens: list[str], types: np.ndarray) -> None:
    added = np.flatnonzero(np.isin(types, (_CONTROL, _UNKNOWN, _USER_DEFINED)))
    special = types[added] != _USER_DEFINED
    backend.add_tokens(
        [
            AddedToken(tokens[token_id], normalized=False, special=bool(is_special))
            for token_id, is_special in zip(added, special, strict=True)
        ]
    )
