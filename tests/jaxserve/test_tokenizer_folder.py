"""Damaged and foreign tokenizer files are refused with one sentence, whatever the damage."""

import json
import os
from pathlib import Path

import pytest

from jaxserve.text import tokenizer_folder
from jaxserve.text.tokenizer import load_tokenizer
from models.errors import ModelLoadError
from tests.jaxserve import small_tokenizers
from tests.models.damaged_files import cut_lengths, replaced

FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json")


@pytest.fixture
def folder(tmp_path) -> Path:
    small_tokenizers.byte_level().backend.save(str(tmp_path / "tokenizer.json"))
    config = '{"eos_token": "<|im_end|>", "chat_template": "T", "add_bos_token": false}'
    (tmp_path / "tokenizer_config.json").write_text(config)
    for name in FILES[2:]:
        (tmp_path / name).write_text('{"eos_token_id": [3, 4], "other": {"x": null}}')
    return tmp_path


def refuse(folder: Path, name: str, reason: str = "") -> None:
    with pytest.raises(ModelLoadError, match=name) as caught:
        load_tokenizer(folder)
    assert reason in str(caught.value)


@pytest.mark.parametrize("name", FILES[:3])
def test_a_file_cut_anywhere_is_refused(folder, name):
    path = folder / name
    whole = path.read_bytes()
    for length in cut_lengths(len(whole), []):
        path.write_bytes(whole[:length])
        refuse(folder, name)
    path.write_bytes(whole + b"{}")
    refuse(folder, name)


def sweep_flips(path: Path, step: int) -> int:
    """How many flips are refused; the rest give a tokenizer of other words, none another error."""
    data, num_refused = path.read_bytes(), 0
    for position in range(0, len(data), step):
        with replaced(path, position, bytes([data[position] ^ 1 << position // step % 8])):
            try:
                load_tokenizer(path.parent).encode("ab <|im_end|> é")
            except ModelLoadError as error:
                assert path.name in str(error) and "\n" not in str(error)
                num_refused += 1
    return num_refused


def test_a_flipped_bit_of_tokenizer_json_makes_no_other_error(folder):
    assert sweep_flips(folder / "tokenizer.json", step=11) > 100


@pytest.mark.slow
def test_flipped_bits_of_tokenizer_json_make_no_other_error(folder):
    assert sweep_flips(folder / "tokenizer.json", step=1) > 1000


def test_a_panic_of_the_library_is_a_load_error(folder, monkeypatch):
    class PanicException(BaseException):
        """As pyo3's: no Exception."""

    def panic(_: bytes) -> None:
        raise PanicException("called `Option::unwrap()` on a `None` value")

    monkeypatch.setattr(tokenizer_folder.Backend, "from_buffer", panic)
    refuse(folder, "tokenizer.json", "must be a tokenizer; called")


def test_an_interrupt_is_no_load_error(folder, monkeypatch):
    def interrupt(_: bytes) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tokenizer_folder.Backend, "from_buffer", interrupt)
    with pytest.raises(KeyboardInterrupt):
        load_tokenizer(folder)


def test_a_file_that_is_too_long_is_refused(folder, monkeypatch):
    monkeypatch.setattr(tokenizer_folder, "MAX_TOKENIZER_BYTES", 1000)
    refuse(folder, "tokenizer.json", "must have at most 1000 bytes")
    monkeypatch.undo()
    monkeypatch.setattr(tokenizer_folder, "MAX_TEMPLATE_BYTES", 3)
    (folder / "chat_template.jinja").write_text("long")
    refuse(folder, "chat_template.jinja", "must have at most 3 bytes")


@pytest.mark.parametrize("name", [*FILES[:3], "chat_template.jinja"])
def test_a_link_that_leaves_the_folder_is_refused(folder, tmp_path_factory, name):
    outside = tmp_path_factory.mktemp("outside") / name
    outside.write_bytes((folder / name).read_bytes() if (folder / name).exists() else b"T")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(outside)
    refuse(folder, name, "must not link to a file outside")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", FILES[:3])
def test_a_pipe_is_refused_and_not_waited_for(folder, name):
    (folder / name).unlink()
    os.mkfifo(folder / name)
    refuse(folder, name, "must be a file")


def test_a_chat_template_that_is_no_text_is_refused(folder):
    for value in ("5", "true", '{"default": "T"}', "[5]"):
        (folder / "tokenizer_config.json").write_text(f'{{"chat_template": {value}}}')
        refuse(folder, "tokenizer_config.json", "chat_template: must be text")


def test_a_tokenizer_that_fails_at_every_text_is_refused(folder):
    path = folder / "tokenizer.json"
    values = json.loads(path.read_bytes())
    single = [
        {"SpecialToken": {"id": "<x>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    values["post_processor"] = {
        "type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": {},
    }  # fmt: skip
    path.write_text(json.dumps(values))
    refuse(folder, "tokenizer.json", "must be a tokenizer")
