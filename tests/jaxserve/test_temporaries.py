"""The estimate of a step's temporaries, beside what an H200 was measured to need."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import EngineConfig
from jaxserve.execution.buckets import BucketTable
from jaxserve.execution.model_setup import ModelSetup
from jaxserve.execution.temporaries import estimate_temporaries
from jaxserve.processing.model_files import open_configured_model

MEASURED_BYTES = 3.48 * 2**30
BUCKETS = BucketTable((8, 1024), (128, 2048, 8192))
SHAPE = {  # Qwen3-0.6B; temporaries do not grow with the layers
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}


@pytest.fixture
def setup_of(tmp_path: Path):
    def make(num_devices: int = 1, **numbers: Any) -> ModelSetup:
        (tmp_path / "config.json").write_text(json.dumps(SHAPE | numbers))
        config = EngineConfig(
            model=str(tmp_path), load_format="dummy", tensor_parallel_size=num_devices
        )
        model = open_configured_model(config).model_config()
        return ModelSetup.choose(config, model, for_absent_gpu=True)

    return make


def test_logits_of_many_rows_cost_what_was_measured(setup_of) -> None:
    assert estimate_temporaries(setup_of(), BUCKETS) == pytest.approx(MEASURED_BYTES, rel=0.01)


def test_several_devices_share_the_rows_that_divide_by_them(setup_of) -> None:
    setup, alone = setup_of(4), estimate_temporaries(setup_of(), BUCKETS)
    assert estimate_temporaries(setup, BUCKETS) == alone // 4
    odd = BucketTable((1023,), (1024,))
    assert estimate_temporaries(setup, odd) == alone // 1024 * 1023


def test_many_tokens_of_a_small_vocabulary_cost_their_activations(setup_of) -> None:
    setup = setup_of(vocab_size=256)
    # Residual, what is added to it and its norm; gate, up and their product; bfloat16.
    assert estimate_temporaries(setup, BUCKETS) == 8192 * (3 * 1024 + 3 * 3072) * 2
    narrow = setup_of(vocab_size=256, intermediate_size=128)
    # Instead of the MLP: queries, keys and values; rotated queries; what attention gives.
    assert estimate_temporaries(narrow, BUCKETS) == 8192 * (3 * 1024 + (32 + 2 * 16) * 128) * 2
