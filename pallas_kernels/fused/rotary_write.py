"""Bias, q and k norm, rotary embedding and the write of K and V in one Mosaic GPU kernel."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fused.fused_inputs import check_rotary_inputs
from pallas_kernels.fused.mosaic_rows import (
    COMPILER_PARAMS,
    WARP_LANES,
    WARPS,
    check_model_dtype,
    divide,
    interpret_option,
    power_of_two_below,
)
from pallas_kernels.fused.rotary_heads import (
    LANES,
    HeadSizes,
    RotaryInputs,
    add_bias,
    head_lanes,
    load_angles,
    load_bias,
    load_gains,
    load_heads,
    normalise,
    rotate,
    store_head,
)

MANY_TOKENS = 1024  # from here on, bandwidth counts and no longer a token's latency


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryWriteTuning:
    """How heads and tokens are shared out.

    Attributes:
      query_heads: of one KV head that a program rotates for its block of tokens; a divisor of the
        group, which shares the angles in registers.
      written_tokens: whose keys and values a program writes.
      query_kv_heads: whose queries a program rotates, one KV head after another, for its block of
        tokens; a divisor of K. It reads the angles once.
    """

    query_heads: int
    written_tokens: int
    query_kv_heads: int = 1


@functools.partial(
    jax.jit,
    static_argnames=(
        "num_kv_heads", "head_dim", "eps", "gain_offset", "interpret", "tuning",
    ),
)  # fmt: skip
def rotary_write(
    qkv: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    layer: jax.Array,
    cache_layer: jax.Array,
    slots: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    num_kv_heads: int,
    head_dim: int,
    bias: jax.Array | None = None,
    q_gains: jax.Array | None = None,
    k_gains: jax.Array | None = None,
    eps: float = 0.0,
    gain_offset: float = 0.0,
    interpret: Any = None,
    tuning: RotaryWriteTuning | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Make queries, keys and values of the qkv product, and write keys and values to their pages.

    Args:
      qkv: [T, K * (G + 2) * H] bfloat16 or float16, as [K, G + 2, H]: the queries of a KV head,
        its key, its value; or float32[P, T, K * (G + 2) * H] whose total over P is first rounded
        to the pages' dtype.
      k_pages: [Lg, P, B, K, Hs] in the model dtype, Hs at least H. Donate it: it is updated in
        place.
      v_pages: as k_pages.
      layer: int32[1], which bias and gains to read.
      cache_layer: int32[1], which layer of the pages to write.
      slots: int32[T], page * B + offset. Padding tokens point into page 0, which no sequence
        owns, and may do so several times.
      cos: float32[T, rotary_dim / 2], cosines of the positions.
      sin: as cos.
      num_kv_heads: K.
      head_dim: H.
      bias: [L, K * (G + 2) * H] in the model dtype, of all layers.
      q_gains: [L, H]; each query head is normalised by them before it is rotated.
      k_gains: [L, H]; the same of the key heads. Both or none.
      eps: added to the mean square.
      gain_offset: added to the gains in float32.
      interpret: `plgpu.InterpretGPUParams()` runs the kernel on the CPU.
      tuning: None = chosen by the shape.

    Returns:
      [T, K * G, Hs] rotated queries in the model dtype, and the pages after the write. Dimensions
      from H on are zero.

    Raises:
      ValueError: shapes or dtypes do not fit, or `fits_rotary_write` says no.
    """
    check_model_dtype("pages", k_pages.dtype)
    group = check_rotary_inputs(
        qkv, k_pages, v_pages, slots, (cos, sin), bias, (q_gains, k_gains), num_kv_heads, head_dim
    )
    T, stored = slots.shape[0], k_pages.shape[4]
    if not fits_rotary_write(head_dim, 2 * cos.shape[1], stored):
        raise ValueError(
            "rotary_dim / 2, head_dim - rotary_dim and the stored head dim - head_dim must be "
            f"multiples of {LANES[-1]}; got {2 * cos.shape[1]}, {head_dim} and {stored}"
        )
    tuning = tuning or choose_rotary_write_tuning(T, group, num_kv_heads)
    if group % tuning.query_heads:
        raise ValueError(f"query_heads must divide {group}; got {tuning.query_heads}")
    if num_kv_heads % tuning.query_kv_heads:
        raise ValueError(f"query_kv_heads must divide {num_kv_heads}; got {tuning.query_kv_heads}")
    plan = _Plan(
        heads=HeadSizes.of(head_dim, cos, k_pages, eps=eps, gain_offset=gain_offset),
        tokens=T,
        kv_heads=num_kv_heads,
        group=group,
        page_size=k_pages.shape[2],
        tuning=tuning,
        has_bias=bias is not None,
        has_gains=q_gains is not None,
    )
    weights = [weight for weight in (bias, q_gains, k_gains) if weight is not None]
    return _launch(plan, qkv, weights, (cos, sin, slots, layer, cache_layer), (k_pages, v_pages),
                   interpret)  # fmt: skip


def fits_rotary_write(head_dim: int, rotary_dim: int, stored_head_dim: int) -> bool:
    """Whether the kernel takes heads of these sizes."""
    return head_lanes(head_dim, rotary_dim // 2, stored_head_dim) is not None


def choose_rotary_write_tuning(num_tokens: int, group: int, num_kv_heads: int) -> RotaryWriteTuning:
    """Few tokens: as many programs as there are heads; many: angles are read once for several.

    8,192 tokens of 8 KV heads with 2 query heads each take 35.0 us behind their product, 41.8 where
    a program reads the angles for the heads of one KV head only (one H200).
    """
    if num_tokens < MANY_TOKENS:
        return RotaryWriteTuning(query_heads=1, written_tokens=1)
    heads = max(heads for heads in range(1, 9) if group % heads == 0)
    kv_heads = 4 if heads <= 2 and num_kv_heads % 4 == 0 else 1
    return RotaryWriteTuning(query_heads=heads, written_tokens=4, query_kv_heads=kv_heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Static numbers of one kernel."""

    heads: HeadSizes
    tokens: int
    kv_heads: int
    group: int
    page_size: int
    tuning: RotaryWriteTuning
    has_bias: bool
    has_gains: bool

    def rows(self, count: int) -> int:
        """Rows of `count` tokens or heads that a program holds in registers at a time."""
        return min(WARPS * WARP_LANES // self.heads.lanes, power_of_two_below(count))

    @property
    def token_blocks(self) -> int:
        return -(-self.tokens // self.rows(self.tokens))

    @property
    def head_blocks(self) -> int:
        return -(-self.kv_heads // self.rows(self.kv_heads))

    @property
    def query_programs(self) -> int:
        kv_heads = self.kv_heads // self.tuning.query_kv_heads
        return self.token_blocks * kv_heads * (self.group // self.tuning.query_heads)

    @property
    def write_programs(self) -> int:
        return -(-self.tokens // self.tuning.written_tokens) * self.head_blocks


def _launch(plan: _Plan, qkv, weights, others, pages, interpret: Any):
    """Run the kernel on the pages as they stand: the references make them input and output."""
    T, K, G = plan.tokens, plan.kv_heads, plan.group
    head_shape = (K, G + 2, plan.heads.head_dim)
    qkv = qkv.reshape(*qkv.shape[:-1], *head_shape)
    if plan.has_bias:
        weights = [weights[0].reshape(-1, *head_shape), *weights[1:]]
    page_refs = [jax.new_ref(array) for array in pages]
    run = plgpu.kernel(
        functools.partial(_kernel, plan),
        out_type=jax.ShapeDtypeStruct((T, K, G, plan.heads.stored), plan.heads.dtype),
        grid=(plan.query_programs + plan.write_programs,),
        grid_names=("program",),
        compiler_params=COMPILER_PARAMS,
        **interpret_option(interpret),
    )
    q = run(qkv, *weights, *others, *page_refs)
    k_pages, v_pages = (jax.freeze(ref) for ref in page_refs)
    return q.reshape(T, K * G, plan.heads.stored), k_pages, v_pages


def _kernel(plan: _Plan, *refs: Any) -> None:
    """The first programs make queries, the others write keys and values."""
    inputs, others = RotaryInputs.take(refs, has_bias=plan.has_bias, has_gains=plan.has_gains)
    k_pages, v_pages, q_out = others
    program = lax.axis_index("program")

    @pl.when(program < plan.query_programs)
    def _queries():
        _make_queries(plan, inputs, q_out, program)

    @pl.when(program >= plan.query_programs)
    def _keys_and_values():
        _write_tokens(plan, inputs, (k_pages, v_pages), program - plan.query_programs)


def _make_queries(plan: _Plan, inputs: RotaryInputs, q_out: Any, program: jax.Array) -> None:
    """Rotate some heads of some KV heads for a block of tokens: the rows are tokens."""
    rows, count = plan.rows(plan.tokens), plan.tuning.query_heads
    in_turn = plan.tuning.query_kv_heads
    program, kv_block = divide(program, plan.kv_heads // in_turn)
    block, part = divide(program, plan.group // count)
    # The last block starts early enough to be full; what is done twice has the same result.
    tokens = pl.ds(jnp.minimum(block * rows, plan.tokens - rows), rows)
    layer = inputs.layer_index()

    def load_shared():
        angles = load_angles(plan.heads, inputs.angles, tokens, rows)
        return angles, load_gains(plan.heads, inputs.gains[0], layer, rows)

    def make(kv_head, shared=None):
        places = [(kv_head, part * count + i) for i in range(count)]
        heads = [load_heads(plan.heads, inputs.qkv, (tokens, *place), rows) for place in places]
        angles, gains = shared or load_shared()
        biases = [load_bias(plan.heads, inputs.bias, (layer, *place), rows) for place in places]
        for place, head, bias in zip(places, heads, biases, strict=True):
            head = normalise(plan.heads, add_bias(plan.heads, head, bias), gains)
            store_head(plan.heads, q_out, (tokens, *place), rotate(head, angles))

    if in_turn == 1:
        make(kv_block)
    else:
        shared = load_shared()
        pl.loop(0, in_turn)(lambda i: make(kv_block * in_turn + i, shared))


def _write_tokens(
    plan: _Plan, inputs: RotaryInputs, pages: tuple[Any, Any], program: jax.Array
) -> None:
    """Write keys and values of some tokens: the rows are KV heads."""
    rows, count = plan.rows(plan.kv_heads), plan.tuning.written_tokens
    block, head_block = divide(program, plan.head_blocks)
    kv_heads = pl.ds(jnp.minimum(head_block * rows, plan.kv_heads - rows), rows)
    places = [(kv_heads, plan.group), (kv_heads, plan.group + 1)]
    tokens = [jnp.minimum(block * count + i, plan.tokens - 1) for i in range(count)]
    layer = inputs.layer_index()

    slots = [divide(inputs.slots[token], plan.page_size) for token in tokens]
    cache_layer = inputs.cache_layer[0]
    heads = [
        [load_heads(plan.heads, inputs.qkv, (token, *place), rows) for place in places]
        for token in tokens
    ]
    angles = [load_angles(plan.heads, inputs.angles, token, rows) for token in tokens]
    biases = [load_bias(plan.heads, inputs.bias, (layer, *place), rows) for place in places]
    gains = load_gains(plan.heads, inputs.gains[1], layer, rows)
    for token_heads, token_angles, slot in zip(heads, angles, slots, strict=True):
        key, value = (
            add_bias(plan.heads, head, bias) for head, bias in zip(token_heads, biases, strict=True)
        )
        key = rotate(normalise(plan.heads, key, gains), token_angles)
        for ref, head in zip(pages, (key, value), strict=True):
            store_head(plan.heads, ref, (cache_layer, *slot, kv_heads), head)
