"""The Triton kernel of rotary_write: one head of some tokens, from the product to its place."""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def rotary_write_kernel(
    qkv_ptr,
    layer_ptr,
    cache_layer_ptr,
    slots_ptr,
    cos_ptr,
    sin_ptr,
    bias_ptr,
    q_gains_ptr,
    k_gains_ptr,
    k_ptr,
    v_ptr,
    num_tokens,
    q_ptr,
    PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_GAINS: tl.constexpr,
    EPS: tl.constexpr,
    GAIN_OFFSET: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    STORED: tl.constexpr,
    LAYER_STRIDE: tl.constexpr,
    TOKENS: tl.constexpr,
    LANES: tl.constexpr,
    REST_LANES: tl.constexpr,
):
    """Make one query, key or value head of TOKENS tokens; grid (K * (G + 2), blocks of tokens).

    The arrays are those of `rotary_write`; bias and gains are not read without HAS_BIAS and
    HAS_GAINS. A head is held in three pieces: the two halves that are rotated into each other, of
    LANES places, and what is not rotated or lies beyond the head, of REST_LANES places.

    Args:
      qkv_ptr: [T, W], or float32[PARTS, T, W] if PARTS is not 0.
      layer_ptr: int32[1].
      cache_layer_ptr: int32[1].
      slots_ptr: int32[T].
      cos_ptr: float32[T, HALF].
      sin_ptr: as cos_ptr.
      bias_ptr: [L, W].
      q_gains_ptr: [L, H].
      k_gains_ptr: [L, H].
      k_ptr: [Lg, P, B, K, Hs], written.
      v_ptr: as k_ptr.
      num_tokens: T.
      q_ptr: [T, K * G, Hs], written.
      PARTS: P of the product's partial sums; 0 = it is whole.
      HAS_BIAS: whether there is one.
      HAS_GAINS: whether queries and keys are normalised.
      EPS: added to the mean square.
      GAIN_OFFSET: added to the gains.
      GROUP: G.
      NUM_KV_HEADS: K.
      HEAD_DIM: H.
      HALF: half of the dimensions that are rotated.
      STORED: Hs.
      LAYER_STRIDE: elements of a layer's pages.
      TOKENS: of a program.
      LANES: a power of two, at least HALF.
      REST_LANES: a power of two, at least Hs - 2 * HALF.
    """
    head = tl.program_id(0)
    kv_head, place = head // (GROUP + 2), head % (GROUP + 2)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    exists = token < num_tokens
    lane = tl.arange(0, LANES)
    in_half = exists[:, None] & (lane[None, :] < HALF)
    width = NUM_KV_HEADS * (GROUP + 2) * HEAD_DIM
    layer = tl.load(layer_ptr).to(tl.int64)
    bias = bias_ptr + layer * width + head * HEAD_DIM
    source = qkv_ptr + token.to(tl.int64) * width + head * HEAD_DIM
    part_stride = tl.cast(num_tokens, tl.int64) * width
    dtype = k_ptr.dtype.element_ty

    rest_dim = 2 * HALF + tl.arange(0, REST_LANES)
    in_rest = exists[:, None] & (rest_dim[None, :] < HEAD_DIM)
    a = load_piece(source, bias, lane, in_half, part_stride, PARTS, HAS_BIAS, dtype)
    b = load_piece(source, bias, HALF + lane, in_half, part_stride, PARTS, HAS_BIAS, dtype)
    rest = load_piece(source, bias, rest_dim, in_rest, part_stride, PARTS, HAS_BIAS, dtype)
    if place <= GROUP:
        if HAS_GAINS:
            gains = q_gains_ptr
            if place == GROUP:
                gains = k_gains_ptr
            gains += layer * HEAD_DIM
            squares = tl.sum(a * a, 1) + tl.sum(b * b, 1) + tl.sum(rest * rest, 1)
            factor = tl.rsqrt(squares / HEAD_DIM + EPS)[:, None]
            a = normalize(a, factor, gains, lane, lane < HALF, GAIN_OFFSET, dtype)
            b = normalize(b, factor, gains, HALF + lane, lane < HALF, GAIN_OFFSET, dtype)
            in_head = rest_dim < HEAD_DIM
            rest = normalize(rest, factor, gains, rest_dim, in_head, GAIN_OFFSET, dtype)
        angle = token[:, None] * HALF + lane[None, :]
        cos = tl.load(cos_ptr + angle, mask=in_half, other=0.0)
        sin = tl.load(sin_ptr + angle, mask=in_half, other=0.0)
        rotated = a * cos - b * sin
        b = b * cos + a * sin
        a = rotated
    if place < GROUP:
        row = token.to(tl.int64) * (NUM_KV_HEADS * GROUP) + (kv_head * GROUP + place)
        target = q_ptr + row * STORED
    else:
        slot = tl.load(slots_ptr + token, mask=exists, other=0).to(tl.int64)
        offset = tl.load(cache_layer_ptr).to(tl.int64) * LAYER_STRIDE
        offset += (slot * NUM_KV_HEADS + kv_head) * STORED
        pages = k_ptr
        if place > GROUP:
            pages = v_ptr
        target = pages + offset
    in_stored = exists[:, None] & (rest_dim[None, :] < STORED)
    tl.store(target[:, None] + lane[None, :], a.to(dtype), mask=in_half)
    tl.store(target[:, None] + (HALF + lane)[None, :], b.to(dtype), mask=in_half)
    tl.store(target[:, None] + rest_dim[None, :], rest.to(dtype), mask=in_stored)


@triton.jit
def rotary_write_kernel_of_both(
    qkv_ptr,
    layer_ptr,
    cache_layer_ptr,
    slots_ptr,
    cos_ptr,
    sin_ptr,
    bias_ptr,
    q_gains_ptr,
    k_gains_ptr,
    k_ptr,
    v_ptr,
    num_tokens,
    q_ptr,
    k_out_ptr,
    v_out_ptr,
    PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_GAINS: tl.constexpr,
    EPS: tl.constexpr,
    GAIN_OFFSET: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    STORED: tl.constexpr,
    LAYER_STRIDE: tl.constexpr,
    TOKENS: tl.constexpr,
    LANES: tl.constexpr,
    REST_LANES: tl.constexpr,
):
    """The same for jax-triton before 0.4, which hands over the updated pages once more."""
    rotary_write_kernel(
        qkv_ptr, layer_ptr, cache_layer_ptr, slots_ptr, cos_ptr, sin_ptr, bias_ptr, q_gains_ptr,
        k_gains_ptr, k_out_ptr, v_out_ptr, num_tokens, q_ptr, PARTS, HAS_BIAS, HAS_GAINS, EPS,
        GAIN_OFFSET, GROUP, NUM_KV_HEADS, HEAD_DIM, HALF, STORED, LAYER_STRIDE, TOKENS, LANES,
        REST_LANES,
    )  # fmt: skip


@triton.jit
def load_piece(
    source,
    bias,
    dim,
    exists,
    part_stride,
    PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    dtype: tl.constexpr,
):
    """Some dimensions of a head, float32[TOKENS, dims] rounded to the dtype; 0 where none is."""
    place = source[:, None] + dim[None, :]
    if PARTS == 0:
        x = tl.load(place, mask=exists, other=0.0).to(tl.float32)
    else:
        x = tl.load(place, mask=exists, other=0.0)
        for part in range(1, PARTS):
            x += tl.load(place + part * part_stride, mask=exists, other=0.0)
        x = x.to(dtype).to(tl.float32)
    if HAS_BIAS:
        x += tl.load((bias + dim)[None, :], mask=exists, other=0.0).to(tl.float32)
        x = x.to(dtype).to(tl.float32)
    return x


@triton.jit
def normalize(x, factor, gains, dim, exists, GAIN_OFFSET: tl.constexpr, dtype: tl.constexpr):
    """`x * factor * (GAIN_OFFSET + gains)`, rounded to the dtype."""
    gain = tl.load(gains + dim, mask=exists, other=0.0).to(tl.float32)
    return (x * factor * (GAIN_OFFSET + gain)[None, :]).to(dtype).to(tl.float32)
