"""Random paged caches for the attention tests: ragged rows, permuted pages, garbage elsewhere."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.reference import paged_attention

GARBAGE_ID = 2**30


class PagedCase(NamedTuple):
    """One call of paged attention, `num_queries` and `seq_lens` by row."""

    num_queries: tuple[int, ...]
    seq_lens: tuple[int, ...]
    heads: tuple[int, int, int] = (4, 2, 64)  # N, K, H
    page_size: int = 16
    dtype: str = "bfloat16"
    window: int | None = None
    cap: float | None = None
    padding: int = 0  # tokens past the last row
    first_row: int = 0
    is_freed: bool = False  # pages that lie wholly before the windows were given back

    @property
    def options(self) -> dict:
        scale = self.heads[2] ** -0.5
        return {"scale": scale, "sliding_window": self.window, "soft_cap": self.cap}


class PagedInputs(NamedTuple):
    q: jax.Array
    k_pages: jax.Array
    v_pages: jax.Array
    layer: jax.Array
    page_table: jax.Array
    seq_lens: jax.Array
    query_start_loc: jax.Array


def decode_case(*seq_lens: int, **fields) -> PagedCase:
    return PagedCase((1,) * len(seq_lens), seq_lens, **fields)


def make_inputs(case: PagedCase, seed: int = 0) -> PagedInputs:
    """Draw inputs. Pages, ids and slots that no row owns hold NaN or ids out of range."""
    rng = np.random.default_rng(seed)
    num_heads, num_kv_heads, head_dim = case.heads
    used = [-(-n // case.page_size) for n in case.seq_lens]
    num_pages = sum(used) + 2
    pages = np.full((2, 2, num_pages, case.page_size, num_kv_heads, head_dim), np.nan, np.float32)
    table = np.full((len(used), max(used) + 2), GARBAGE_ID, np.int32)
    free = iter(rng.permutation(num_pages))
    for row, (count, length) in enumerate(zip(used, case.seq_lens, strict=True)):
        for index in range(count):
            table[row, index] = page = next(free)
            tokens = min(length - index * case.page_size, case.page_size)
            pages[:, 1, page, :tokens] = rng.standard_normal((2, tokens, num_kv_heads, head_dim))
    if case.is_freed:
        _give_back_pages(case, table, pages, null_page=next(free))
    starts = np.cumsum((0, *case.num_queries))
    q = rng.standard_normal((starts[-1] + case.padding, num_heads, head_dim))
    return PagedInputs(
        jnp.asarray(q, case.dtype),
        jnp.asarray(pages[0], case.dtype),
        jnp.asarray(pages[1], case.dtype),
        jnp.array([1], jnp.int32),
        jnp.asarray(table),
        jnp.array(case.seq_lens, jnp.int32),
        jnp.asarray(starts, jnp.int32),
    )


def _give_back_pages(case: PagedCase, table: np.ndarray, pages: np.ndarray, null_page: int) -> None:
    """Point the entries of pages that no query of this step sees at a page of NaN."""
    assert case.window is not None
    for row, (count, length) in enumerate(zip(case.num_queries, case.seq_lens, strict=True)):
        first_key = length - count - case.window + 1
        num_freed = max(0, first_key // case.page_size)
        pages[:, 1, table[row, :num_freed]] = np.nan
        table[row, :num_freed] = null_page


def assert_matches_reference(got: jax.Array, case: PagedCase, inputs: PagedInputs) -> None:
    """Compare with the reference in float32; what no row asked for must be exactly zero."""
    exact = inputs._replace(q=inputs.q.astype(jnp.float32))
    want = np.array(jax.jit(lambda *args: paged_attention(*args, **case.options))(*exact))
    result = np.asarray(got, np.float32)
    assert got.dtype == inputs.q.dtype
    asked = np.zeros(len(result), bool)
    starts = np.asarray(inputs.query_start_loc)
    for row, length in enumerate(case.seq_lens):
        if row >= case.first_row and length:
            asked[starts[row] : starts[row + 1]] = True
    assert asked.any()
    assert not result[~asked].any()
    error = np.linalg.norm(result - want, axis=(1, 2)) / np.linalg.norm(
        want + ~asked[:, None, None], axis=(1, 2)
    )
    tolerance = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}[case.dtype]
    assert error[asked].max() < tolerance
