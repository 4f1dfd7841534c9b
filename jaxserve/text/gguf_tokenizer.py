"""Builds the tokenizers.Tokenizer of a GGUF file from its vocabulary, scores and merges."""

import numpy as np
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from models.loading.gguf import GgufFile

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_PHI3_KEEPS_SPACE = frozenset({"<unk>", "<s>", "<|endoftext|>"})
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _split_at_case(after_word: str, digits: str) -> str:
    """A pattern that ends a word before a capital letter."""
    words = (f"[{_UPPER}]*[{_LOWER}]+", f"[{_UPPER}]+[{_LOWER}]*")
    parts = [rf"[^\r\n\p{{L}}\p{{N}}]?{word}{after_word}" for word in words]
    return "|".join([*parts, digits, _PATHS])


_PATTERNS = {
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "tekken": _split_at_case("", r"\p{N}"),
    "gpt-4o": _split_at_case(f"{_CONTRACTIONS}?", r"\p{N}{1,3}"),
}
_PREFIX = "tokenizer.ggml."

KNOWN_PRE_TOKENIZERS = ("smollm", "gpt-2", "default", *_PATTERNS)
"""Values of `tokenizer.ggml.pre` whose splitting is known; "default" splits as "gpt-2"."""
WHOLE_WORDS_FIRST = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})
"""Those that take a word of the vocabulary as it is, without merges, and begin with BOS."""


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
        is_phi3 = kind == "llama" and keys.string("general.architecture") == "phi3"
        _add_tokens(backend, tokens, types, takes_space_after=is_phi3)
    return backend


def _byte_level(file: GgufFile, vocabulary: dict[str, int], pre_tokenizer: str | None) -> Backend:
    name = pre_tokenizer or file.metadata.string(f"{_PREFIX}pre")
    if name not in KNOWN_PRE_TOKENIZERS:
        rule = f"must be one of {', '.join(KNOWN_PRE_TOKENIZERS)}"
        file.metadata.refuse(f"{_PREFIX}pre", f"{rule}; got {name!r}")
    lines = file.metadata.strings(f"{_PREFIX}merges")
    if lines is None:
        file.metadata.refuse(f"{_PREFIX}merges", "the key is missing")
    merges: list[tuple[str, str]] = []
    for line in lines:
        left, _, right = line.partition(" ")
        if left + right not in vocabulary or left not in vocabulary or right not in vocabulary:
            file.metadata.refuse(f"{_PREFIX}merges", f"must join tokens to a token; got {line!r}")
        merges.append((left, right))
    model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=name in WHOLE_WORDS_FIRST)
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
    split = pre_tokenizers.Split(Regex(_PATTERNS[name]), "isolated")
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


def _add_tokens(
    backend: Backend, tokens: list[str], types: np.ndarray, *, takes_space_after: bool
) -> None:
    """Add the tokens that are matched whole.

    Args:
      backend: is changed.
      tokens: the vocabulary.
      types: of its tokens.
      takes_space_after: control tokens swallow the white space behind them, which a GGUF file
        does not say: llama.cpp knows it of Phi-3.
    """
    added: list[AddedToken] = []
    for token_id in np.flatnonzero(np.isin(types, (_CONTROL, _UNKNOWN, _USER_DEFINED))):
        token, is_special = tokens[token_id], bool(types[token_id] != _USER_DEFINED)
        takes_space = takes_space_after and is_special and token not in _PHI3_KEEPS_SPACE
        added.append(AddedToken(token, normalized=False, special=is_special, rstrip=takes_space))
    backend.add_tokens(added)
