"""Parameters are read by slice, into memory that JAX takes as it is, after all headers fit."""

import itertools
import math
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from models.config import ModelConfig
from models.errors import ModelLoadError
from models.loading.checkpoint import CheckpointLoader
from models.loading.pieces import ALIGNMENT, ParameterPieces, Piece, whole
from models.loading.placements import decoder_placements
from models.loading.safetensors import SafetensorsFolder
from models.loading.stored_tensor import StoredTensor
from models.loading.tiled_copy import TILE, copy_tiled
from models.sharding import share_kv_heads
from models.weight_layout import WeightStore
from tests.models.stored_tensors import one_piece, plain_parameter
from tests.models.test_checkpoint import TIED, checkpoint, checkpoint_shapes
from tests.models.test_loading_safetensors import mapped_bytes
from tests.models.tiny_models import make_layout, one_device, tiny_config

FLOAT32, BFLOAT16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)


def parts_of_axes(shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """For each axis: its first part, its last, and one from its middle; the other axes whole."""
    for axis, size in enumerate(shape):
        for begin, end in ((0, (size + 1) // 2), (size // 2, size), (size // 3, size // 3 + 1)):
            index = [slice(None)] * len(shape)
            index[axis] = slice(begin, end)
            yield tuple(index)


@pytest.mark.parametrize("devices", [1, 4])
def test_every_slice_of_a_parameter_is_that_slice_of_the_whole(devices):
    config = share_kv_heads(tiny_config(attention_bias=True, mlp_bias=True), devices)
    tensors = checkpoint(has_bias=True)
    count = 0
    for placement in decoder_placements(config):
        parts = [tensors.get(f"model.layers.1.{part}") for part in placement.parts]
        if any(part is None for part in parts):
            continue  # q_norm and k_norm
        want = plain_parameter(config, tensors, f"layers.1.{placement.target}")
        pieces = ParameterPieces(placement.assemble(*parts))
        assert pieces.shape == want.shape
        for index in parts_of_axes(want.shape):
            got = pieces.read(index, FLOAT32)
            np.testing.assert_array_equal(got, want[index], err_msg=f"{placement.target} {index}")
        count += 1
    assert count == 10


def test_a_slice_is_cast_to_the_type_asked_for():
    values = np.linspace(-3, 3, 60, dtype=np.float32).reshape(6, 10)
    got = one_piece(values.T).read((slice(2, 5), slice(None)), BFLOAT16)
    np.testing.assert_array_equal(got, values.T[2:5].astype(BFLOAT16))


def test_pieces_that_leave_a_gap_are_refused():
    pieces = [Piece((0, 0), np.ones((2, 3))), Piece((0, 3), np.ones((1, 3)))]
    with pytest.raises(ValueError, match=r"must fit each other; got \(2, 3\), \(1, 3\)"):
        ParameterPieces(pieces)


SHAPES = [(), (1,), (7,), (3, 1, 5), (TILE + 3, 2 * TILE + 1), (5, 3, 2, TILE + 70), (0, 4)]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_tiled_copy_is_the_plain_copy_for_every_order_of_axes(shape):
    values = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    for axes in itertools.permutations(range(len(shape))):
        source = values.transpose(axes)
        padded = np.full((*source.shape, 2), -1, np.float64)
        for target in (np.empty(source.shape, BFLOAT16), padded[..., 0]):
            copy_tiled(target, source)
            np.testing.assert_array_equal(target, source.astype(target.dtype))
        assert (padded[..., 1] == -1).all()


@pytest.mark.parametrize("shape", [(1,), (33,), (5, 7), (2048, 1024)])
def test_jax_takes_what_is_read_without_a_copy(shape):
    read = one_piece(np.ones(shape, np.float32)).read((slice(None),) * len(shape), BFLOAT16)
    assert read.ctypes.data % ALIGNMENT == 0
    device_array = jax.device_put(read, jax.devices()[0])
    assert device_array.unsafe_buffer_pointer() == read.ctypes.data


def test_a_parameter_is_never_a_view_of_its_file():
    values = np.ones((4, 8), np.float32)
    assert not np.shares_memory(one_piece(values).read((slice(None),) * 2, FLOAT32), values)


BROKEN = {
    "a wrong shape": ("lm_head.weight", np.ones((11, 9), np.float32), "must have shape"),
    "a wrong type": ("lm_head.weight", np.ones((11, 10), np.int32), "must hold float16"),
    "no place": ("model.norm.bias", np.ones(10, np.float32), "must have a parameter for it"),
    "a missing tensor": ("lm_head.weight", None, "missing are 1, among them lm_head.weight"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_fault_of_the_last_header_is_found_before_any_value_is_read(name):
    tensors = dict(checkpoint())
    last, array, message = BROKEN[name]
    tensors.pop(last, None)
    if array is not None:
        tensors[last] = array

    def refuse() -> np.ndarray:
        raise AssertionError("a value was read")

    headers = ((n, StoredTensor(x.shape, x.dtype, refuse)) for n, x in tensors.items())
    config = tiny_config()
    store = WeightStore(make_layout(config), one_device())
    with pytest.raises(ModelLoadError, match=message):
        CheckpointLoader(config, store).load(headers)
    assert len(store.missing) == len(store.layout.parameters)


def test_a_tied_head_that_differs_is_found_before_any_parameter_is_put():
    tensors = checkpoint()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    config = tiny_config(**TIED)
    store = WeightStore(make_layout(config), one_device())
    headers = ((n, StoredTensor(x.shape, x.dtype, lambda x=x: x)) for n, x in tensors.items())
    with pytest.raises(ModelLoadError, match="must equal model.embed_tokens.weight"):
        CheckpointLoader(config, store).load(headers)
    assert len(store.missing) == len(store.layout.parameters)


def test_the_report_ends_with_all_tensors():
    tensors = checkpoint() | {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)
    }
    heard: list[int] = []
    config = tiny_config()
    headers = ((n, StoredTensor(x.shape, x.dtype, lambda x=x: x)) for n, x in tensors.items())
    store = WeightStore(make_layout(config), one_device())
    CheckpointLoader(config, store).load(headers, heard.append)
    assert heard == sorted(set(heard)) and heard[-1] == len(tensors)


def test_reading_half_of_a_tensor_maps_half_of_its_file(tmp_path):
    save_file({"w": np.ones((4096, 4096), np.float32)}, tmp_path / "model.safetensors")
    tensor = dict(SafetensorsFolder(tmp_path).tensors())["w"]
    pieces = ParameterPieces(whole(tensor.array()))
    before = mapped_bytes()
    half = pieces.read((slice(2048, 4096), slice(None)), BFLOAT16)
    mapped = mapped_bytes() - before
    assert half.shape == (2048, 4096) and 30 << 20 < mapped < 34 << 20
    tensor.release()
    assert mapped_bytes() - before < 1 << 20


MEDIUM = dict(vocab_size=1024, hidden_size=512, intermediate_size=768, num_hidden_layers=6)


def write_medium_model(folder: Path, dtype: np.dtype) -> tuple[ModelConfig, int]:
    """A model of small parameters (larger ones are not traced), and the bytes of its file."""
    config = tiny_config(**MEDIUM, head_dim=64, num_attention_heads=8)
    tensors = {name: np.ones(shape, dtype) for name, shape in checkpoint_shapes(config).items()}
    save_file(tensors, folder / "model.safetensors")
    return config, sum(x.nbytes for x in tensors.values())


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [(BFLOAT16, "bfloat16"), (BFLOAT16, "float32"), (FLOAT32, "bfloat16")],
)
def test_the_host_allocates_the_weights_once_and_maps_one_parameter(tmp_path, stored, wanted):
    config, file_bytes = write_medium_model(tmp_path, stored)
    layout = make_layout(config, "none", wanted)
    store, mapped = WeightStore(layout, one_device()), []
    tensors = SafetensorsFolder(tmp_path).tensors()
    before = mapped_bytes()
    tracemalloc.start()
    try:
        CheckpointLoader(config, store).load(
            tensors, lambda _: mapped.append(mapped_bytes() - before)
        )
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert layout.num_bytes <= peak < layout.num_bytes + (1 << 20)
    assert max(mapped) < 4 << 20 < file_bytes // 4  # between parameters all is given back
