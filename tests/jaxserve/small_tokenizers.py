"""Tokenizers of a few hundred tokens, one of each kind of decoder, made in the process."""

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from jaxserve.text.tokenizer import Tokenizer

CHAT_ML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that the tokenizer has."""
    found = tokenizer.backend.token_to_id(token)
    assert found is not None, token
    return found


def byte_level(add_bos: bool | None = None) -> Tokenizer:
    """All bytes, some merges, control tokens of ChatML, "<think>" and "</think>" as plain added."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("Ġ", "a"), ("Ġa", "b"), ("Ġ", "Ġ"), ("Ċ", "Ċ"), ("Ã", "©"), ("ð", "Ł")]
    tokens = letters + [left + right for left, right in merges]
    model = models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges)
    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    others = ("<think>", "</think>", "<é x>")
    backend.add_tokens([AddedToken(token, normalized=False) for token in others])
    return Tokenizer(
        backend,
        special_tokens={"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"},
        eos_token_ids=(len(tokens) + special.index("<|im_end|>"),),
        chat_templates={"default": CHAT_ML},
        add_bos=add_bos,
    )


def byte_fallback() -> Tokenizer:
    """As SentencePiece: "▁" for a space, <0xNN> for what has no piece, one space stripped."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b")]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, "▁", "a", "b", "é", *map("".join, merges)]
    model = models.BPE(
        vocab={t: i for i, t in enumerate(tokens)},
        merges=merges,
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Backend(model)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(
        [AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")]
    )
    return Tokenizer(
        backend,
        special_tokens={"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        eos_token_ids=(2,),
        add_bos=True,
    )


def unigram() -> Tokenizer:
    """A Unigram model, which holds its control tokens in the vocabulary and matches them there."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("▁", -2.0)]
    pieces += [(letter, -3.0) for letter in "absx<>/"] + [("▁ab", -1.0)]
    backend = Backend(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace("▁", prepend_scheme="first")
    backend.add_special_tokens(
        [AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")]
    )
    return Tokenizer(
        backend,
        special_tokens={"eos_token": "</s>", "unk_token": "<unk>"},
        chat_templates={"default": "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}"},
    )


def words() -> Tokenizer:
    """Whole words, no decoder: tokens are joined with spaces."""
    backend = Backend(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["[X]", "[Y]"])
    return Tokenizer(backend, special_tokens={"unk_token": "[UNK]"})


ALL = {
    "byte level": byte_level,
    "byte fallback": byte_fallback,
    "unigram": unigram,
    "words": words,
}
