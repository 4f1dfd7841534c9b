"""The reference against dense attention written out token by token."""

import numpy as np
import pytest

from pallas_kernels.attention.reference import paged_attention
from tests.pallas_kernels.paged_cases import PagedCase, make_inputs


@pytest.mark.parametrize(
    "case",
    [
        PagedCase((3, 0, 1), (20, 0, 5), dtype="float32", padding=2),
        PagedCase((6,), (40,), dtype="float32", window=4, cap=2.0, heads=(6, 2, 64)),
    ],
)
def test_reference_is_softmax_attention_over_the_visible_keys(case):
    inputs = make_inputs(case)
    got = np.asarray(paged_attention(*inputs, **case.options))
    q, keys, values = (np.asarray(x, np.float64) for x in inputs[:3])
    num_heads, num_kv_heads, _ = case.heads
    token = 0
    for row, (queries, length) in enumerate(zip(case.num_queries, case.seq_lens, strict=True)):
        for position in range(length - queries, length):
            first = 0 if case.window is None else max(0, position - case.window + 1)
            places = [divmod(key, case.page_size) for key in range(first, position + 1)]
            slots = [(1, int(inputs.page_table[row, page]), at) for page, at in places]
            for head in range(num_heads):
                kv_head = head // (num_heads // num_kv_heads)
                logits = np.array([q[token, head] @ keys[slot][kv_head] for slot in slots])
                logits = logits * case.options["scale"]
                if case.cap is not None:
                    logits = case.cap * np.tanh(logits / case.cap)
                weights = np.exp(logits - logits.max())
                want = sum(
                    w * values[slot][kv_head] for w, slot in zip(weights, slots, strict=True)
                )
                np.testing.assert_allclose(got[token, head], want / weights.sum(), atol=1e-5)
            token += 1
    assert token == sum(case.num_queries)
    assert not got[token:].any()
