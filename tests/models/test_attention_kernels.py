"""The attention kernels of a backend, alone and split over the heads of a mesh."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from models.attention_kernels import HEADS, PAGES, WHOLE, attention_kernels
from pallas_kernels import decode_attention, kv_write, prefill_attention, xla_attention
from tests.models.tiny_models import one_device

S, B, H = 8, 16, 128

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
        arrays += [whole(S + 1), whole(1)]
    if name == "write":
        arrays, options = [pages, whole(1), whole(S), array((S, num_kv_heads, H), HEADS)], {}
    kernel = getattr(attention_kernels("mosaic", "gpu", mesh), name)
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
    text = lower_for_cuda("write", 32, 8, mesh_of(2))
    (scatter,) = re.findall(r"\"stablehlo.scatter\"(?:.|\n)*?\}\) : (\(.*\))", text)
    assert scatter.count(f"x4x{H}xbf16") == 2  # pages and new keys


@pytest.mark.parametrize("mesh", [None, mesh_of(1), one_device().mesh])
def test_one_device_runs_the_kernels_as_they_are(mesh):
    on_cpu = attention_kernels("xla", "cpu", mesh)
    assert on_cpu.decode is xla_attention.decode_attention
    assert on_cpu.prefill is xla_attention.prefill_attention
    assert on_cpu.write is kv_write.write_by_loop
    on_gpu = attention_kernels("mosaic", "gpu", mesh)
    assert on_gpu.decode is decode_attention.decode_attention
    assert on_gpu.prefill is prefill_attention.prefill_attention
    assert on_gpu.write is kv_write.write_by_scatter
