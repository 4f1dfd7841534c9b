"""Each layer against numpy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.kernels import model_kernels
from models.layers import DenseFormat, Embedding, GatedMLP, Linear, RMSNorm, compute_logits

KERNELS = model_kernels("xla", "cpu")
rng = np.random.default_rng(0)


def fill(parameter, dtype: str = "float32") -> np.ndarray:
    """Give a parameter random values, and return them as it holds them, in float64."""
    values = jnp.asarray(rng.normal(size=parameter.shape), dtype)
    assert parameter.dtype == values.dtype
    parameter.set_value(values)
    return np.asarray(values, np.float64)


def weight_of(linear: Linear) -> nnx.Param:
    return vars(linear)[linear.parameter_names[0]]


def draw(*shape: int, dtype: str = "float32") -> tuple[jnp.ndarray, np.ndarray]:
    values = jnp.asarray(rng.normal(size=shape), dtype)
    return values, np.asarray(values, np.float64)


@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_contracts_its_input_dims_and_adds_its_bias(has_bias):
    linear = Linear(
        (2, 3),
        (4, 5),
        axes=("kv_heads", "head_dim", "gate_up", "mlp"),
        weight_format=DenseFormat("float32", KERNELS),
        bias_dtype="float32" if has_bias else None,
    )
    weight = fill(weight_of(linear))
    bias = 0 if linear.bias is None else fill(linear.bias)
    x, exact = draw(7, 2, 3)
    want = np.einsum("tij,ijkl->tkl", exact, weight) + bias
    np.testing.assert_allclose(linear(x), want, rtol=1e-5, atol=1e-5)
    assert weight_of(linear).get_metadata()["logical_axes"] == (
        "kv_heads",
        "head_dim",
        "gate_up",
        "mlp",
    )
    if linear.bias is not None:
        assert linear.bias.get_metadata()["logical_axes"] == ("gate_up", "mlp")


def test_float32_products_ask_for_the_highest_precision_and_16_bits_do_not():
    def precision(dtype: str) -> str:
        x, _ = draw(2, 3, dtype=dtype)
        return str(jax.make_jaxpr(lambda x, w: compute_logits(w, x))(x, draw(4, 3, dtype=dtype)[0]))

    assert "HIGHEST" in precision("float32")
    assert "HIGHEST" not in precision("bfloat16")


def test_weight_formats_are_equal_when_their_types_are():
    def dense(dtype: str) -> DenseFormat:
        return DenseFormat(dtype, KERNELS)

    assert dense("float32") == dense("float32") != dense("bfloat16")
    assert hash(dense("float32")) == hash(dense("float32"))


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 1e-2)])
def test_rms_norm_divides_by_the_root_mean_square(dtype, tolerance):
    norm = RMSNorm(32, eps=0.1, dtype=dtype, kernels=KERNELS)
    weight = fill(norm.weight, dtype)
    x, exact = draw(3, 32, dtype=dtype)
    got = norm(x)
    assert got.dtype == x.dtype
    want = rms_norm(exact, weight, 0.1)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=tolerance, atol=tolerance)


def test_rms_norm_takes_its_statistics_in_float32():
    norm = RMSNorm(4096, eps=1e-6, dtype="float16", kernels=KERNELS)
    norm.weight.set_value(jnp.ones(4096, jnp.float16))
    got = norm(jnp.full((1, 4096), 300, jnp.float16))  # the square of 300 is past float16
    np.testing.assert_allclose(np.asarray(got, np.float32), 1, atol=1e-3)


def test_embedding_looks_tokens_up_and_clips_ids_out_of_bounds():
    embedding = Embedding(5, 3, dtype="float32")
    weight = fill(embedding.weight)
    got = embedding(jnp.array([4, 0, 0, 99]))
    np.testing.assert_array_equal(got, weight[[4, 0, 0, 4]].astype(np.float32))


@pytest.mark.parametrize("has_bias", [False, True])
def test_gated_mlp_normalises_gates_by_silu_and_projects_down(has_bias):
    norm = RMSNorm(6, eps=1e-6, dtype="float32", kernels=KERNELS)
    gains = fill(norm.weight)
    mlp = GatedMLP(6, 8, dtype="float32", kernels=KERNELS, bias=has_bias)
    gate_up, down = (fill(weight_of(p)) for p in (mlp.gate_up_proj, mlp.down_proj))
    gate_bias, up_bias = (0, 0) if not has_bias else fill(mlp.gate_up_proj.bias)
    down_bias = 0 if not has_bias else fill(mlp.down_proj.bias)
    (x, exact_x), (delta, exact_delta) = draw(4, 6), draw(4, 6)
    residual = exact_x + exact_delta
    exact = residual / np.sqrt((residual**2).mean(1, keepdims=True)) * gains
    gate, up = exact @ gate_up[:, 0] + gate_bias, exact @ gate_up[:, 1] + up_bias
    want = (gate / (1 + np.exp(-gate)) * up) @ down + down_bias
    got_residual, got = mlp(x, delta, norm)
    np.testing.assert_allclose(got_residual, residual, rtol=1e-6)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_float32_whatever_the_weights_are(dtype):
    weight, exact_weight = draw(9, 16, dtype=dtype)
    hidden, exact_hidden = draw(4, 16, dtype=dtype)
    logits = compute_logits(weight, hidden)
    assert (logits.shape, logits.dtype) == ((4, 9), jnp.float32)
    np.testing.assert_allclose(logits, exact_hidden @ exact_weight.T, rtol=1e-4, atol=1e-4)
