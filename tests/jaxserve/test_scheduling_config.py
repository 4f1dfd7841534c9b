"""Limits that contradict each other are refused."""

import pytest

from jaxserve.errors import EngineConfigError
from tests.jaxserve.scheduler_builders import make_scheduler


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1; got 0"),
        ({"max_model_len": 1}, "max_model_len must be at least 2; got 1"),
        ({"max_steps_in_flight": 0}, "max_steps_in_flight must be at least 1; got 0"),
        ({"max_decode_row_tokens": 0}, "max_decode_row_tokens must be at least 1; got 0"),
        ({"max_num_batched_tokens": 3}, "max_num_batched_tokens must be at least 4; got 3"),
        ({"max_multi_token_rows": -1}, "max_multi_token_rows must be at least 0; got -1"),
        ({"token_buckets": (8, 4, 64)}, "token_buckets must be ascending"),
        ({"token_buckets": ()}, "token_buckets must be ascending and positive"),
        ({"token_buckets": (8, 32)}, "token_buckets must end with at least 64"),
        ({"row_buckets": (2,)}, "row_buckets must end with at least 4"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold must be at least 0"),
        ({"num_host_pages": -1}, "num_host_pages must be at least 0; got -1"),
        ({"watermark": 1.0}, r"watermark must be in \[0, 1\); got 1.0"),
    ],
)
def test_contradicting_limits_are_refused(limits, message):
    with pytest.raises(EngineConfigError, match=message):
        make_scheduler(**limits)
