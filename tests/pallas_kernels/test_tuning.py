"""Every stored head dim has a config, and an entry of the table goes before it."""

import pytest

from pallas_kernels.attention import tuning
from pallas_kernels.attention.mosaic_attention import STORED_HEAD_DIMS
from pallas_kernels.attention.tuning import DecodeTuningConfig, decode_tuning, prefill_tuning


@pytest.mark.parametrize("head_dim", STORED_HEAD_DIMS)
def test_every_stored_head_dim_has_a_config(head_dim):
    for lookup in (decode_tuning, prefill_tuning):
        config = lookup("some GPU", head_dim, "bfloat16")
        assert config.block_tokens % 64 == 0
        assert config.num_stages >= 2


def test_an_entry_of_the_table_goes_first(monkeypatch):
    measured = DecodeTuningConfig(block_tokens=128, num_stages=3)
    monkeypatch.setitem(tuning._DECODE, ("NVIDIA H200", 128, "bfloat16"), measured)
    assert decode_tuning("NVIDIA H200", 128, "bfloat16") is measured
    assert decode_tuning("NVIDIA H100", 128, "bfloat16") is not measured
