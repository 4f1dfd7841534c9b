"""The attention kernels of a backend, alone and split over the heads of a mesh."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from models.kernels import COLUMN_PAIRS, HEADS, PAGES, WHOLE, model_kernels
from models.layer_slice import LayerSlice
from models.products import multiply
from pallas_kernels.attention import decode_attention, prefill_attention, xla_attention
from pallas_kernels.triton_gpu import triton_decode, triton_prefill
from tests.models.tiny_models import one_device

S, B, H, F = 8, 16, 128, 512
HEAD_ROWS = PartitionSpec(None, "model", None, None)

# (query heads, KV heads, devices): a shape of Llama 3, one KV head a device, and many query heads.
SHAPES = [(32, 8, 2), (32, 8, 8), (64, 2, 2)]


def mesh_of(num_devices: int) -> AbstractMesh:
    axis_types = (AxisType.Auto, AxisType.Auto)
    return AbstractMesh((1, num_devices), ("data", "model"), axis_types=axis_types)


def lower_for_cuda(name: str, num_heads: int, num_kv_heads: int, mesh: AbstractMesh) -> str:
    """The program of one Mosaic kernel on arrays that the mesh shares."""

    def array(shape: tuple[int, ...], spec: PartitionSpec, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    def whole(*shape: int):
        return array(shape, WHOLE, jnp.int32)

    pages = array((1, 4, B, num_kv_heads, H), PAGES)
    arrays = [array((S, num_heads, H), HEADS), pages, pages, whole(1), whole(S, 64), whole(S)]
    options = {"scale": 0.1, "sliding_window": None, "soft_cap": None}
    if name == "prefill":
        arrays += [whole(S + 1), whole(1), array((S, num_heads, H), HEADS)]
    if name == "rotary_write":
        qkv = array((S, num_kv_heads, num_heads // num_kv_heads + 2, H), HEAD_ROWS)
        angles = [array((S, H // 2), WHOLE, jnp.float32)] * 2
        arrays = [qkv, pages, pages, whole(1), whole(S), *angles, None, None, None]
        options = {"eps": 0.0, "gain_offset": 0.0}
    if name == "gated_activation":
        arrays = [array((S, 2, F), COLUMN_PAIRS)]
        options = {"dtype": jnp.bfloat16, "activation": "silu"}
    kernel = getattr(model_kernels("mosaic", "gpu", mesh), name)
    traced = jax.jit(lambda *arrays: kernel(*arrays, **options)).trace(*arrays)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("name", ["decode", "prefill"])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "devices"), SHAPES)
def test_each_device_runs_the_mosaic_kernel_on_its_own_kv_heads(
    name, num_heads, num_kv_heads, devices
):
    text = lower_for_cuda(name, num_heads, num_kv_heads, mesh_of(devices))
    (call,) = re.findall(r"stablehlo.custom_call @mosaic_gpu_v2.* : (\(.*)", text)
    local = f"tensor<1x4x{B}x{num_kv_heads // devices}x{H}xbf16>"
    assert call.count(local) == 2
    assert f"x{num_kv_heads}x{H}xbf16" not in call.replace(local, "")


def test_each_device_writes_its_own_kv_heads():
    text = lower_for_cuda("rotary_write", 32, 8, mesh_of(2))
    (call,) = re.findall(r"stablehlo.custom_call @mosaic_gpu_v2.* : (\(.*)", text)
    local = f"tensor<1x4x{B}x4x{H}xbf16>"
    assert call.count(local) == 4  # keys and values, in and out
    assert f"x8x{H}xbf16" not in call


def test_each_device_gates_its_own_columns():
    text = lower_for_cuda("gated_activation", 32, 8, mesh_of(2))
    (call,) = re.findall(r"stablehlo.custom_call @mosaic_gpu_v2.* : (\(.*)", text)
    assert call.split(" -> ")[1].count(f"tensor<{S}x{F // 2}xbf16>") == 1


@pytest.mark.parametrize("mesh", [None, mesh_of(1), one_device().mesh])
def test_one_device_runs_the_kernels_as_they_are(mesh):
    on_cpu = model_kernels("xla", "cpu", mesh)
    assert on_cpu.decode is xla_attention.decode_attention
    assert on_cpu.prefill is xla_attention.prefill_attention
    assert on_cpu.product is multiply
    on_gpu = model_kernels("mosaic", "gpu", mesh)
    assert on_gpu.decode is decode_attention.decode_attention
    assert on_gpu.prefill is prefill_attention.prefill_attention
    assert on_gpu.product is not multiply
    by_triton = model_kernels("triton", "gpu", mesh)
    assert by_triton.decode is triton_decode.decode_attention
    assert by_triton.prefill is triton_prefill.prefill_attention
    assert by_triton.product is multiply


@pytest.mark.parametrize(
    ("dims", "rows", "is_skinny"),
    [((64, (2, 64)), 8, True), ((64, (2, 64)), 512, False), ((48, (2, 64)), 8, False)],
)
def test_few_rows_are_multiplied_by_the_skinny_kernel(dims, rows, is_skinny):
    in_size, out_dims = dims
    x = jax.ShapeDtypeStruct((rows, in_size), jnp.bfloat16)
    stack = jax.ShapeDtypeStruct((3, in_size, *out_dims), jnp.bfloat16)
    product = model_kernels("mosaic", "gpu").product
    traced = jax.jit(lambda x, w: product(x, LayerSlice.of_layer(w, 1), 1)).trace(x, stack)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert ("@mosaic_gpu_v2" in text) == is_skinny
    (out,) = jax.tree.leaves(traced.out_info)
    assert out.shape[-3:] == (rows, *out_dims)
    assert out.ndim == (4 if is_skinny else 3)
