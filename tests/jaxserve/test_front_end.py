"""FrontEnd: what is refused before an engine is built, and by which file."""

import json
import shutil
from pathlib import Path

import pytest

from jaxserve.config import EngineConfig
from jaxserve.execution.slot_record import MAX_STOP_IDS
from jaxserve.processing.front_end import FrontEnd
from models.errors import ModelLoadError
from tests.tiny_llm import GOLDEN, write_tokenizer


@pytest.fixture
def folder(tmp_path) -> Path:
    folder = write_tokenizer(tmp_path / "model")
    shutil.copy(GOLDEN.folder / "config.json", folder)
    return folder


def open_front_end(folder: Path) -> FrontEnd:
    return FrontEnd.open(EngineConfig(model=str(folder), load_format="dummy"))


@pytest.mark.parametrize("num_ends", [MAX_STOP_IDS, MAX_STOP_IDS + 1])
def test_more_end_ids_than_a_request_can_hold_are_refused_at_the_start(folder, num_ends):
    values = {"eos_token_id": list(range(num_ends))}
    (folder / "generation_config.json").write_text(json.dumps(values))
    if num_ends <= MAX_STOP_IDS:
        assert open_front_end(folder).eos_token_ids == tuple(range(num_ends))
        return
    with pytest.raises(ModelLoadError, match="eos_token_id must name at most 32 tokens; got 33"):
        open_front_end(folder)


def test_a_broken_generation_config_is_not_blamed_on_the_tokenizer(folder):
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="generation_config.json must be strict") as caught:
        open_front_end(folder)
    assert "name one as tokenizer" not in str(caught.value)
