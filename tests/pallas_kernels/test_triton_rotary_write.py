"""The Triton rotary embedding and write: lowered for CUDA, and (mark gpu) run.

`triton_interpreted_cases` compares it with the jnp version on the CPU.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.fused import xla_fused
from pallas_kernels.fused.kv_write import write_by_scatter
from pallas_kernels.triton_gpu.triton_rotary_write import rotary_write
from tests.pallas_kernels.test_rotary_write import assert_close, make_inputs

# From jax-triton 0.4 on, which still has no other way for an array that XLA donates.
pytestmark = pytest.mark.filterwarnings("ignore:input_output_aliases is dep:DeprecationWarning")


def import_jax_triton():
    return pytest.importorskip("jax_triton", exc_type=ImportError)


@pytest.mark.parametrize("capability", [80, 86, 90])
def test_it_lowers_for_cuda_and_updates_the_pages_in_place(monkeypatch, capability):
    library = import_jax_triton().triton_lib.triton_kernel_call_lib
    monkeypatch.setattr(library, "get_compute_capability", lambda device: capability)
    args, options = make_inputs(1, (2, 3), (96, 64, 128), parts=2, norm=True, bias=True)
    run = jax.jit(functools.partial(rotary_write, **options), donate_argnums=(1, 2))
    text = run.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    [kernel] = [line for line in text.splitlines() if "@triton_kernel_call" in line]
    for output in (1, 2):
        assert f"output_tuple_indices = [{output}], operand_index = " in kernel
    assert text.count("tf.aliasing_output") + text.count("jax.buffer_donor") == 2


def test_float32_pages_and_a_missing_package_are_refused(monkeypatch):
    args, options = make_inputs(4, (2, 2), (32, 32, 64), dtype="float32")
    with pytest.raises(ValueError, match="pages must be bfloat16 or float16; got float32"):
        rotary_write(*args, **options)
    args, options = make_inputs(4, (2, 2), (32, 32, 64))
    with pytest.raises(ValueError, match="come together"):
        rotary_write(*args, q_gains=jnp.ones((3, 32), "bfloat16"), **options)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ValueError, match="must have jax-triton"):
        rotary_write(*args, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [0, 4])
@pytest.mark.parametrize("tokens", [1, 33])
@pytest.mark.parametrize(
    ("heads", "sizes"),
    [((8, 4), (128, 128, 128)), ((2, 7), (64, 32, 64)), ((3, 3), (96, 96, 128))],
)
def test_kernel_matches_the_jnp_version_on_a_gpu(heads, sizes, tokens, parts):
    import_jax_triton()
    args, options = make_inputs(tokens, heads, sizes, parts=parts, norm=True, bias=True)
    got = rotary_write(*args, **options)
    assert_close(got, xla_fused.rotary_write(*args, write=write_by_scatter, **options))
