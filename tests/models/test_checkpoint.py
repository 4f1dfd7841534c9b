"""Checkpoint tensors land where the model reads them, and what has no place is refused."""

import functools
import warnings
import weakref
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

from models.config import ModelConfig
from models.errors import ModelLoadError
from models.loading.checkpoint import CheckpointLoader
from models.loading.stored_tensor import StoredTensor
from models.weight_layout import WeightStore
from tests.models.stored_tensors import all_stored
from tests.models.tiny_models import make_layout, one_device, tiny_config

D, H, K, G, F, LAYERS = 10, 4, 2, 2, 3, 3
N = K * G


def code(kind: int, layer: int, head: int, row: int, column: int) -> int:
    """One integer, exact in float32, for each element of a checkpoint."""
    return kind * 1_000_000 + layer * 100_000 + head * 10_000 + row * 100 + column


def head_rows(kind: int, layer: int, heads: int, columns: int) -> np.ndarray:
    """[heads * H, columns]: as q_proj and its like stand in a checkpoint."""
    rows = [
        [code(kind, layer, head, row, column) for column in range(columns)]
        for head in range(heads)
        for row in range(H)
    ]
    return np.array(rows, np.float32)


def matrix(kind: int, layer: int, rows: int, columns: int) -> np.ndarray:
    values = [[code(kind, layer, 0, r, c) for c in range(columns)] for r in range(rows)]
    return np.array(values, np.float32)


def output_rows(layer: int) -> np.ndarray:
    """o_proj [D, N * H]: its columns are heads and their rows."""
    values = [[code(4, layer, n, h, d) for n in range(N) for h in range(H)] for d in range(D)]
    return np.array(values, np.float32)


def layer_tensors(layer: int, has_bias: bool) -> dict[str, np.ndarray]:
    tensors = {
        "self_attn.q_proj.weight": head_rows(1, layer, N, D),
        "self_attn.k_proj.weight": head_rows(2, layer, K, D),
        "self_attn.v_proj.weight": head_rows(3, layer, K, D),
        "self_attn.o_proj.weight": output_rows(layer),
        "mlp.gate_proj.weight": matrix(5, layer, F, D),
        "mlp.up_proj.weight": matrix(6, layer, F, D),
        "mlp.down_proj.weight": matrix(7, layer, D, F),
        "input_layernorm.weight": matrix(8, layer, 1, D)[0],
        "post_attention_layernorm.weight": matrix(9, layer, 1, D)[0],
    }
    if has_bias:
        tensors |= {
            "self_attn.q_proj.bias": head_rows(11, layer, N, 1)[:, 0],
            "self_attn.k_proj.bias": head_rows(12, layer, K, 1)[:, 0],
            "self_attn.v_proj.bias": head_rows(13, layer, K, 1)[:, 0],
            "self_attn.o_proj.bias": matrix(14, layer, 1, D)[0],
            "mlp.gate_proj.bias": matrix(15, layer, 1, F)[0],
            "mlp.up_proj.bias": matrix(16, layer, 1, F)[0],
            "mlp.down_proj.bias": matrix(10, layer, 1, D)[0],
        }
    return {f"model.layers.{layer}.{name}": tensor for name, tensor in tensors.items()}


def checkpoint(has_bias: bool = False) -> dict[str, np.ndarray]:
    tensors = {"model.embed_tokens.weight": matrix(1, 8, 11, D)}
    for layer in range(LAYERS):
        tensors |= layer_tensors(layer, has_bias)
    return tensors | {
        "model.norm.weight": matrix(2, 8, 1, D)[0],
        "lm_head.weight": matrix(3, 8, 11, D),
    }


def load(tensors: dict[str, np.ndarray], config: ModelConfig | None = None):
    """A function from a parameter's path to its array."""
    config = config or tiny_config()
    layout = make_layout(config, "none")
    store = WeightStore(layout, one_device())
    CheckpointLoader(config, store).load(all_stored(tensors))
    leaves = store.leaves()
    return lambda path: np.asarray(leaves[layout.locate(path)[0]])


@pytest.fixture(scope="module")
def loaded():
    return load(checkpoint(has_bias=True), tiny_config(attention_bias=True, mlp_bias=True))


@pytest.mark.parametrize("layer", range(LAYERS))
def test_fused_qkv_holds_query_heads_by_kv_head_then_key_then_value(loaded, layer):
    weight = loaded(f"layers.{layer}.self_attn.qkv_proj.weight")
    assert weight.shape == (D, K, G + 2, H)
    for d, k, h in np.ndindex(D, K, H):
        queries = [code(1, layer, k * G + g, h, d) for g in range(G)]
        key_and_value = [code(2, layer, k, h, d), code(3, layer, k, h, d)]
        assert weight[d, k, :, h].tolist() == queries + key_and_value
    bias = loaded(f"layers.{layer}.self_attn.qkv_proj.bias")
    assert bias.shape == (K, G + 2, H)
    for k, h in np.ndindex(K, H):
        queries = [code(11, layer, k * G + g, h, 0) for g in range(G)]
        key_and_value = [code(12, layer, k, h, 0), code(13, layer, k, h, 0)]
        assert bias[k, :, h].tolist() == queries + key_and_value


@pytest.mark.parametrize("layer", range(LAYERS))
def test_fused_gate_and_up_stand_side_by_side(loaded, layer):
    weight = loaded(f"layers.{layer}.mlp.gate_up_proj.weight")
    assert weight.shape == (D, 2, F)
    for d, f in np.ndindex(D, F):
        assert weight[d, :, f].tolist() == [code(5, layer, 0, f, d), code(6, layer, 0, f, d)]
    bias = loaded(f"layers.{layer}.mlp.gate_up_proj.bias")
    for f in range(F):
        assert bias[:, f].tolist() == [code(15, layer, 0, 0, f), code(16, layer, 0, 0, f)]


@pytest.mark.parametrize("layer", range(LAYERS))
def test_output_projections_are_transposed(loaded, layer):
    o_proj = loaded(f"layers.{layer}.self_attn.o_proj.weight")
    down = loaded(f"layers.{layer}.mlp.down_proj.weight")
    assert o_proj.shape == (K, G, H, D)
    for k, g, h, d in np.ndindex(K, G, H, D):
        assert o_proj[k, g, h, d] == code(4, layer, k * G + g, h, d)
    for f, d in np.ndindex(F, D):
        assert down[f, d] == code(7, layer, 0, d, f)


def test_all_other_tensors_are_kept_as_they_are(loaded):
    tensors = checkpoint(has_bias=True)
    fused = (
        "q_proj",
        "k_proj",
        "v_proj",
        "gate_proj",
        "up_proj",
        "o_proj.weight",
        "down_proj.weight",
    )
    kept = [name for name in tensors if not any(part in name for part in fused)]
    assert len(kept) == 3 + LAYERS * 4
    for name in kept:
        np.testing.assert_array_equal(loaded(name.removeprefix("model.")), tensors[name])


def test_parts_may_come_in_any_order():
    tensors = list(checkpoint().items())
    shuffled = dict(tensors[i] for i in np.random.default_rng(0).permutation(len(tensors)))
    got, want = load(shuffled), load(dict(tensors))
    for parameter in make_layout(tiny_config()).parameters:
        np.testing.assert_array_equal(got(parameter.path), want(parameter.path))


def test_an_unknown_tensor_is_warned_of():
    with pytest.warns(UserWarning, match=r"unused tensors in the checkpoint: \['model.vision.w'\]"):
        load(checkpoint() | {"model.vision.w": np.ones(3, np.float32)})


def test_a_tensor_that_is_computed_anew_is_ignored():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        name = "model.layers.0.self_attn.rotary_emb.inv_freq"
        load(checkpoint() | {name: np.ones(2, np.float32)})


DANGEROUS = [
    "model.layers.0.mlp.down_proj.weight_scale",
    "model.layers.0.mlp.down_proj.scales",
    "model.layers.1.self_attn.q_proj.qzeros",
    "model.layers.1.self_attn.q_proj.weight_zero_point",
    "model.layers.1.self_attn.q_proj.g_idx",
    "model.layers.2.self_attn.k_proj.bias",
    "model.layers.2.mlp.gate_proj.bias",
    "model.layers.0.self_attn.q_norm.weight",
    "model.layers.0.pre_feedforward_layernorm.weight",
    "lm_head.bias",
]


@pytest.mark.parametrize("name", DANGEROUS)
def test_a_tensor_that_would_change_the_result_and_has_no_place_is_refused(name):
    with pytest.raises(ModelLoadError, match=f"^{name}: the architecture must have a parameter"):
        load(checkpoint() | {name: np.ones(3, np.float32)})


MISSING = {
    "model.layers.1.self_attn.k_proj.weight": "missing are 1, among them {name}$",
    "model.layers.2.mlp.gate_proj.weight": "missing are 1, among them {name}$",
    "model.layers.0.input_layernorm.weight": "missing are 1, among them {name}$",
    "model.embed_tokens.weight": "missing are 1, among them {name}$",
    "lm_head.weight": "missing are 1, among them {name}$",
}


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_tensor_is_named_as_the_checkpoint_would(name):
    tensors = checkpoint()
    del tensors[name]
    with pytest.raises(ModelLoadError, match=MISSING[name].format(name=name)):
        load(tensors)


def test_of_many_missing_tensors_four_are_named():
    with pytest.raises(ModelLoadError, match="missing are 30, among them [^,]*(, [^,]*){3}$"):
        load({})


@pytest.mark.parametrize("name", sorted(checkpoint(has_bias=True)))
def test_a_tensor_of_the_wrong_shape_is_named(name):
    tensors = checkpoint(has_bias=True)
    tensors[name] = np.zeros((7, *tensors[name].shape[1:]), np.float32)
    stem = name.rsplit(".", 2)[0]  # a fused weight is named by the part that came last
    with pytest.raises(ModelLoadError, match=f"^{stem}.*: its shape must fit the config"):
        load(tensors, tiny_config(attention_bias=True, mlp_bias=True))


@pytest.mark.parametrize("dtype", ["int32", "uint8", "float64", "float8_e4m3fn", "bool"])
def test_a_tensor_of_a_type_that_needs_scales_or_is_no_weight_is_refused(dtype):
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors = checkpoint()
    tensors[name] = tensors[name].astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    with pytest.raises(ModelLoadError, match=f"^{name}: must hold float16, .*; got {dtype}$"):
        load(tensors)


def test_types_may_be_mixed():
    kinds = (np.float16, ml_dtypes.bfloat16, np.float32)
    tensors = {
        name: np.full_like(tensor, index).astype(kinds[index % 3])
        for index, (name, tensor) in enumerate(checkpoint().items())
    }
    names = list(tensors)
    got = load(tensors)
    assert (got("embed_tokens.weight") == names.index("model.embed_tokens.weight")).all()
    assert (got("norm.weight") == names.index("model.norm.weight")).all()


@pytest.mark.parametrize("part", ["q_proj", "k_proj", "o_proj"])
def test_a_transposed_weight_is_refused_though_it_has_as_many_values(part):
    name = f"model.layers.1.self_attn.{part}.weight"
    tensors = checkpoint()
    tensors[name] = np.ascontiguousarray(tensors[name].T)
    with pytest.raises(ModelLoadError, match="its shape must fit the config"):
        load(tensors)


@pytest.mark.parametrize("shape", [(), (1,), (2, 2, 2), (1, 1, 1, 1)])
def test_a_tensor_of_any_other_rank_is_refused(shape):
    names = [name for name in checkpoint() if ".layers." not in name or ".layers.0." in name]
    for name in names:
        tensors = checkpoint() | {name: np.ones(shape, np.float32)}
        with pytest.raises(ModelLoadError, match="its shape must fit the config"):
            load(tensors)


def test_errors_begin_with_the_place_of_the_checkpoint():
    config = tiny_config()
    loader = CheckpointLoader(config, WeightStore(make_layout(config), one_device()), "/m")
    with pytest.raises(ModelLoadError, match="^/m: the checkpoint must hold every tensor"):
        loader.load([])


def test_a_parameter_under_two_names_is_refused():
    tensors = checkpoint() | {"norm.weight": np.ones(D, np.float32)}
    with pytest.raises(ModelLoadError, match="^norm.weight: its parameter must be given once"):
        load(tensors)


def test_of_many_unknown_tensors_twenty_are_listed():
    more = {f"vision.{number}.w": np.ones(3, np.float32) for number in range(25)}
    with pytest.warns(UserWarning, match=r"'vision.19.w'\] and 5 more$"):
        load(checkpoint() | more)


def tied(head: np.ndarray | None, head_first: bool = False) -> dict[str, np.ndarray]:
    tensors = checkpoint()
    del tensors["lm_head.weight"]
    if head is None:
        return tensors
    extra = {"lm_head.weight": head}
    return extra | tensors if head_first else tensors | extra


TIED = dict(tie_word_embeddings=True)


def test_tied_embeddings_need_no_head():
    embedding = load(tied(None), tiny_config(**TIED))("embed_tokens.weight")
    np.testing.assert_array_equal(embedding, checkpoint()["model.embed_tokens.weight"])


@pytest.mark.parametrize("head_first", [True, False])
def test_a_tied_head_that_equals_the_embedding_is_accepted(head_first):
    head = checkpoint()["model.embed_tokens.weight"].copy()
    load(tied(head, head_first), tiny_config(**TIED))


@pytest.mark.parametrize("head_first", [True, False])
def test_a_tied_head_that_differs_from_the_embedding_is_refused(head_first):
    head = checkpoint()["model.embed_tokens.weight"].copy()
    head[5, 5] += 1
    with pytest.raises(ModelLoadError, match="^lm_head.weight: must equal .*tie_word_embeddings"):
        load(tied(head, head_first), tiny_config(**TIED))


def test_host_memory_holds_at_most_one_layer_of_a_checkpoint():
    config = tiny_config(hidden_size=256, intermediate_size=512, num_hidden_layers=8)
    alive: dict[str, tuple[weakref.ref, int]] = {}
    peak = 0

    def count() -> int:
        return sum(size for reference, size in alive.values() if reference() is not None)

    def read(name: str) -> np.ndarray:
        nonlocal peak
        tensor = np.ones(shapes[name], np.float32)
        alive[name] = weakref.ref(tensor), tensor.nbytes
        peak = max(peak, count())
        return tensor

    def tensors() -> Iterator[tuple[str, StoredTensor]]:
        for name, shape in shapes.items():
            yield name, StoredTensor(shape, np.dtype(np.float32), functools.partial(read, name))

    shapes = checkpoint_shapes(config)
    of_layer = sum(int(np.prod(s)) * 4 for name, s in shapes.items() if ".layers.0." in name)
    for stack in ("none", "all"):
        store = WeightStore(make_layout(config, stack), one_device())
        CheckpointLoader(config, store).load(tensors())
        assert store.missing == ()
        assert count() == 0
    assert len(alive) == len(shapes)
    assert max(int(np.prod(shape)) * 4 for shape in shapes.values()) < peak <= of_layer


def checkpoint_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    D, F, H = config.hidden_size, config.intermediate_size, config.head_dim
    N, K, V = config.num_attention_heads, config.num_key_value_heads, config.vocab_size
    of_layer = {
        "input_layernorm": (D,),
        "self_attn.q_proj": (N * H, D),
        "self_attn.k_proj": (K * H, D),
        "self_attn.v_proj": (K * H, D),
        "self_attn.o_proj": (D, N * H),
        "post_attention_layernorm": (D,),
        "mlp.gate_proj": (F, D),
        "mlp.up_proj": (F, D),
        "mlp.down_proj": (D, F),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, D)}
    for layer in range(config.num_hidden_layers):
        for name, shape in of_layer.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    return shapes | {"model.norm.weight": (D,), "lm_head.weight": (V, D)}
