"""Faults that others shipped in their loaders and tokenizers; R65 and R66 stand with the sweeps."""

import itertools
import json
import random
import shutil
import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from jaxserve.text.chat_prompt import encode_chat
from jaxserve.text.tokenizer import Tokenizer, load_tokenizer
from models.errors import ModelLoadError
from models.kv_cache import allocate_cache, cache_geometries
from models.loading.checkpoint import CheckpointLoader
from models.loading.gguf import GgufFile
from models.loading.safetensors import SafetensorsFolder
from models.loading.source import open_model
from models.weight_layout import WeightStore
from tests.end_to_end.test_goldens import NUM_PAGES, PAGE_SIZE, prompt_batch
from tests.goldens_loader import load_golden
from tests.jaxserve import small_tokenizers
from tests.jaxserve.test_tokenizer import write_bpe, write_spm
from tests.models.test_loading_gguf import gguf_name, permute, raw_header, tensor_info
from tests.models.tiny_models import logits_of, make_layout, one_device

pytestmark = pytest.mark.bugbank

HUGE = (0, 1, (1 << 31) - 1, 1 << 32, (1 << 42) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
TYPE_I8, TYPE_Q8_0 = 24, 8


def refuse(path: Path, data: bytes) -> None:
    """The bytes are refused by name, without much memory."""
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(ModelLoadError, match=path.name):
            GgufFile(path)
        assert tracemalloc.get_traced_memory()[1] < len(data) + (4 << 20)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", [TYPE_I8, TYPE_Q8_0, 0])
def test_bugbank_R68_dimensions_whose_product_overflows_are_refused(tmp_path, kind):
    dims = [[(1 << 63) - 1, 2, 1, 1], [(1 << 42) + 1, 1], [1 << 32, 1 << 32], [32, 1 << 59, 32]]
    for case in dims:
        info = tensor_info(b"x", case, kind, 0)
        refuse(tmp_path / "m.gguf", raw_header(info, num_tensors=1, num_keys=0) + bytes(256))


def test_bugbank_R68_counts_are_not_trusted(tmp_path):
    size_of_info = 8 + 1 + 4 + 8 + 4 + 8
    for count in (*HUGE[2:], (1 << 63) // size_of_info, 65_537):
        refuse(tmp_path / "m.gguf", raw_header(num_tensors=count) + bytes(64))
        refuse(tmp_path / "m.gguf", raw_header(num_keys=count) + bytes(64))


@settings(max_examples=300, deadline=None)
@given(
    dims=st.lists(st.sampled_from(HUGE) | st.integers(0, (1 << 64) - 1), max_size=6),
    kind=st.integers(0, 45),
    offset=st.sampled_from(HUGE),
)
def test_bugbank_R68_no_header_makes_another_error_or_a_tensor_beyond_the_file(
    tmp_path_factory, dims, kind, offset
):
    path = tmp_path_factory.getbasetemp() / "any.gguf"
    info = tensor_info(b"x", dims, kind, offset)
    path.write_bytes(raw_header(info, num_tensors=1, num_keys=0) + bytes(512))
    try:
        file = GgufFile(path)
    except ModelLoadError as error:
        assert path.name in str(error)
        return
    (found,) = file._infos.values()
    assert found.start + found.num_bytes <= path.stat().st_size


def what_it_says(path: Path) -> tuple[object, ...]:
    tokenizer = load_tokenizer(path)
    ids = tokenizer.encode("ab c\u00e9</think><|end|>")
    special = (tokenizer.special_tokens, tokenizer.eos_token_ids, tokenizer.special_token_ids)
    return ids, tokenizer.vocab_size, *special


@pytest.mark.parametrize("write", [write_bpe, write_spm])
def test_bugbank_R69_a_key_of_any_other_type_is_refused_or_reads_the_same(tmp_path, write):
    """Of each key the type tag, and of each array that of its elements, becomes each of the 13."""
    path = write(tmp_path / "t.gguf")
    data, expected = path.read_bytes(), what_it_says(path)
    keys = [key for key in GgufFile(path).metadata.values if key.startswith("tokenizer.")]
    num_refused = 0
    for key, type_id in itertools.product(keys, range(13)):
        start = data.index(struct.pack("<Q", len(key)) + key.encode()) + 8 + len(key)
        is_array = data[start] == 9
        for position in (start, start + 4) if is_array else (start,):
            path.write_bytes(data[:position] + bytes([type_id]) + data[position + 1 :])
            try:
                assert what_it_says(path) == expected, (key, type_id)
            except ModelLoadError as error:
                assert path.name in str(error)
                num_refused += 1
    assert num_refused > 8 * len(keys)


@pytest.mark.parametrize("value", [0, 3, 24, 1 << 31, -1, 1 << 20])
def test_bugbank_R69_an_alignment_of_a_wrong_size_names_its_key(tmp_path, value):
    key = struct.pack("<Q", 17) + b"general.alignment" + struct.pack("<Iq", 11, value)
    path = tmp_path / "m.gguf"
    path.write_bytes(raw_header(key))
    with pytest.raises(ModelLoadError, match=r"m\.gguf: 'general.alignment': must be 2\*\*n"):
        GgufFile(path)


@pytest.mark.parametrize("num_scores", [0, 1, 265, 267])
def test_bugbank_R69_scores_that_are_fewer_or_more_than_tokens_name_their_key(tmp_path, num_scores):
    path = tmp_path / "t.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"t{number}" for number in range(266)])
    writer.add_array("tokenizer.ggml.scores", [0.5] * max(num_scores, 1))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match=r"tokenizer\.ggml\.scores: must have 266 items"):
        load_tokenizer(path)


def write_llama31_gguf(path: Path) -> Path:
    """The golden of Llama 3.1's rope and tied embeddings, as llama.cpp's converter writes it."""
    golden = load_golden("llama_llama3_rope_tied")
    source = SafetensorsFolder(golden.folder)
    config = source.config_dict()
    rope, head_dim = config["rope_scaling"], config["head_dim"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)  # wrong, and rightly not looked at
    frequencies = config["rope_theta"] ** (-np.arange(0, head_dim, 2) / head_dim)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    factors = 1 / ((1 - smooth) / factor + smooth)
    writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, values in source.tensors():
        count = next((n for part, n in heads.items() if part in name), None)
        stored = np.array(values, np.float32)
        writer.add_tensor(gguf_name(name), permute(stored, count) if count else stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_bugbank_R71_rope_freqs_are_applied_and_a_missing_output_is_the_embedding(tmp_path):
    opened = open_model(str(write_llama31_gguf(tmp_path / "m.gguf")), "auto")
    config = opened.model_config()
    assert config.tie_word_embeddings
    layout = make_layout(config)
    store = WeightStore(layout, one_device())
    CheckpointLoader(config, store).load(opened.source.tensors())
    leaves = store.leaves()
    geometries = cache_geometries(config, page_size=PAGE_SIZE, dtype="float32")
    case = load_golden("llama_llama3_rope_tied").logits[-1]
    cache = allocate_cache(geometries, (NUM_PAGES,), one_device())
    logits = logits_of(layout, leaves, prompt_batch(case.prompt, len(cache.groups)), cache)
    assert np.abs(logits - case.logits).max() <= 1e-4 * np.abs(case.logits).max()


ALPHABETS = (
    "abcdefghijklmnopqrstuvwxyz' ",
    "0123456789 ,.",
    "àéîõüß ÀÉ",
    "漢字仮名 한글",
    "\r\n\t  ",
)
HARD = (
    "Hello world! Café déjà vu (with accents) - 123 and an emoji 👋",
    "e\u0301 \u00e9 12345 67 8\r\n\r\nx  y   z\t\n",
    "我说中文。日本語も。한국어도",
    "👩‍👩‍👧‍👦 🏳️‍🌈 I'LL don't WE'VE it's",
    " " * 500 + "x" + "\n" * 50,
    "def f(x):\n    return x**2  # 3.14e-10\n",
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""As tokenizer.json of Qwen2 and Qwen3 has it; Llama 3 takes up to three digits together."""


def family_tokenizer(pre: str) -> Backend:
    """A trained byte-level tokenizer that splits as the family's tokenizer.json does."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend = Backend(models.BPE())
    if pre in ("qwen2", "llama-bpe"):
        digits = r"\p{N}" if pre == "qwen2" else r"\p{N}{1,3}"
        pattern = QWEN2.replace(r"|\p{N}|", f"|{digits}|")
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    else:
        steps = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
        if pre == "smollm":
            steps.insert(0, pre_tokenizers.Digits(individual_digits=True))  # pyright: ignore[reportArgumentType]
        backend.pre_tokenizer = pre_tokenizers.Sequence(steps)  # pyright: ignore[reportArgumentType]
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([*HARD, *random_lines(300, seed=1)], trainer)
    return backend


def random_lines(count: int, seed: int) -> list[str]:
    """Short words of one script each, so that pairs repeat, with all kinds of space between."""
    chance = random.Random(seed)
    words = [
        "".join(chance.choices(a, k=chance.randint(1, 5))) for a in ALPHABETS for _ in range(60)
    ]
    return ["".join(chance.choices(words, k=chance.randint(1, 12))) for _ in range(count)]


def write_as_gguf(path: Path, backend: Backend, pre: str) -> Path:
    """Vocabulary and merges of a tokenizer, as llama.cpp's converter writes them."""
    vocabulary = sorted(backend.get_vocab().items(), key=lambda item: item[1])
    merges = json.loads(backend.to_str())["model"]["merges"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types([1] * len(vocabulary))
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_add_bos_token(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe", "smollm", "gpt-2"])
def test_bugbank_R73_a_gguf_tokenizer_gives_the_ids_of_the_family_s_own(tmp_path, pre):
    backend = family_tokenizer(pre)
    tokenizer = load_tokenizer(write_as_gguf(tmp_path / "t.gguf", backend, pre))
    lines = [*HARD, *random_lines(2000, seed=2)]
    expected = [encoding.ids for encoding in backend.encode_batch(lines)]
    assert max(map(max, expected)) > 256 + 100, "merges must be in use"
    for line, ids in zip(lines, expected, strict=True):
        assert tokenizer.encode(line) == ids, line


@pytest.mark.parametrize("pre", ["falcon", "llama4", None])
def test_bugbank_R73_an_unknown_pre_tokenizer_is_an_error(tmp_path, pre):
    with pytest.raises(ModelLoadError, match=rf"tokenizer\.ggml\.pre: must be one of .*{pre!r}"):
        load_tokenizer(write_bpe(tmp_path / "t.gguf", pre))


TEMPLATES = {
    "writes BOS": "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}",
    "writes none": "{% for m in messages %}{{ m.content }}{% endfor %}",
}


def bos_of(tokenizer: Tokenizer) -> int:
    assert tokenizer.bos_token_id is not None
    return tokenizer.bos_token_id


@pytest.mark.parametrize("add_bos", [True, False, None])
@pytest.mark.parametrize("template", TEMPLATES)
def test_bugbank_R30_a_chat_prompt_has_the_bos_of_its_template_and_no_second(template, add_bos):
    tokenizer = small_tokenizers.byte_level(add_bos)
    messages = [{"role": "user", "content": "ab a"}]
    prompt = encode_chat(tokenizer, messages, chat_template=TEMPLATES[template])
    count = 1 if template == "writes BOS" else 0
    assert prompt.token_ids.count(bos_of(tokenizer)) == count
    rendered = (
        TEMPLATES[template].split("{%")[0].replace("{{ bos_token }}", "<|endoftext|>") + "ab a"
    )
    assert prompt.token_ids == tokenizer.backend.encode(rendered, add_special_tokens=False).ids


def test_bugbank_R30_a_raw_prompt_gets_bos_once_and_one_that_has_it_no_second():
    tokenizer = small_tokenizers.byte_level(True)
    bos = bos_of(tokenizer)
    for text in ("ab a", "<|endoftext|>ab a"):
        assert tokenizer.encode(text).count(bos) == 1 and tokenizer.encode(text)[0] == bos


def test_bugbank_R30_a_folder_whose_post_processor_adds_bos_adds_it_once(tmp_path):
    from tokenizers import processors

    made = small_tokenizers.byte_level()
    bos = bos_of(made)
    made.backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", bos)]
    )
    made.backend.save(str(tmp_path / "tokenizer.json"))
    config = '{"bos_token": "<|endoftext|>", "add_bos_token": true}'
    (tmp_path / "tokenizer_config.json").write_text(config)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("ab")[:2].count(bos) == 1
    copy = shutil.copytree(tmp_path, tmp_path / "copy")
    assert load_tokenizer(copy / "tokenizer.json").encode("ab") == tokenizer.encode("ab")
