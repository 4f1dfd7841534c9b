"""The program table: complete, closed, in place, and of a size that the pages do not change."""

from collections.abc import Iterable
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxserve.execution.batch_builder import BatchBuilder
from jaxserve.execution.buckets import Bucket, BucketTable
from jaxserve.execution.device_state import DeviceState
from jaxserve.execution.page_functions import HOST_MEMORY, PAGE_CHUNK_SIZES, PageChunk
from jaxserve.execution.program_store import ProgramStore
from jaxserve.execution.programs import (
    CompilationCounter,
    ProgramKey,
    ProgramShapes,
    ProgramTable,
)
from jaxserve.execution.sample_mode import SampleMode
from jaxserve.execution.step_functions import StepFunctions
from models.config import ModelConfig
from models.kernels import model_kernels
from models.kv_cache import abstract_cache, allocate_cache, cache_geometries
from models.loading.source import open_source
from models.registry import model_class
from models.sharding import Sharder, make_mesh
from models.weight_layout import WeightLayout
from tests.goldens_loader import GOLDENS_FOLDER

BUCKETS = BucketTable((1, 2), (16,))
ONE_ROW, DECODE, MIXED = BUCKETS.all()
PAGE_SIZE, MAX_PAGES = 16, 8
NEEDED: tuple[ProgramKey, ...] = (
    ("decode", ONE_ROW, SampleMode.GREEDY),
    ("decode", DECODE, SampleMode.GREEDY),
    ("forward", MIXED, None),
    ("admit", None, None),
)


class SmallTable:
    """A table for llama_gqa in float32 with so many pages, and the arrays for it."""

    def __init__(
        self,
        num_pages: int,
        buckets: BucketTable = BUCKETS,
        *,
        num_host_pages: int = 0,
        takes_copies: bool = False,
    ):
        self.sharder = Sharder(make_mesh())
        raw = open_source(GOLDENS_FOLDER / "llama_gqa", "auto").config_dict()
        config = ModelConfig.from_dict(raw)
        self.weights = WeightLayout.of_model(
            model_class(config.architecture),
            config,
            stack="none",
            dtype="float32",
            kernels=model_kernels("xla", "cpu"),
        )
        self.geometries = cache_geometries(config, page_size=PAGE_SIZE, dtype="float32")
        self.pages = (num_pages,)
        self.builder = BatchBuilder(
            buckets,
            max_num_seqs=2,
            page_size=PAGE_SIZE,
            num_pages=self.pages,
            max_pages_per_seq=MAX_PAGES,
            vocab_size=config.vocab_size,
            num_host_pages=num_host_pages,
            takes_copies=takes_copies,
        )
        self.state = DeviceState.abstract(
            self.sharder, max_num_seqs=2, max_pages=MAX_PAGES, num_groups=1
        )
        shapes = ProgramShapes(
            leaves=self.weights.abstract(self.sharder),
            cache=abstract_cache(self.geometries, self.pages, self.sharder),
            state=self.state,
            hidden_size=config.hidden_size,
            hidden_dtype="float32",
        )
        functions = StepFunctions(self.weights)
        self.table = ProgramTable(functions, shapes, self.sharder, self.builder, buckets)

    def compile(self, keys: Iterable[ProgramKey], monkeypatch: pytest.MonkeyPatch) -> "SmallTable":
        """Compile these programs only."""
        monkeypatch.setattr(self.table, "keys", lambda: tuple(keys))
        self.table.compile_all(num_threads=1)
        return self


@pytest.fixture(scope="module")
def compiled() -> Iterable[dict[int, SmallTable]]:
    """Tables with 64 and 4096 pages."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield {pages: SmallTable(pages).compile(NEEDED, monkeypatch) for pages in (64, 4096)}


def test_temporaries_do_not_depend_on_the_number_of_pages(compiled: dict[int, SmallTable]) -> None:
    programs = {
        # XLA's CPU backend copies the cache around a scatter of one row, and of one row only.
        "decode of one row": lambda table: table.decode(ONE_ROW, SampleMode.GREEDY),
        "decode": lambda table: table.decode(DECODE, SampleMode.GREEDY),
        "forward": lambda table: table.forward(MIXED),
        "admit": lambda table: table.admit(),
    }
    for name, find in programs.items():
        few, many = (find(compiled[pages].table).memory_analysis() for pages in (64, 4096))
        assert few is not None and many is not None
        page_bytes = sum(geometry.bytes_per_page for geometry in compiled[64].geometries)
        if name != "admit":
            grown = many.argument_size_in_bytes - few.argument_size_in_bytes
            assert grown == (4096 - 64) * page_bytes
            assert many.alias_size_in_bytes - few.alias_size_in_bytes == grown
        assert many.temp_size_in_bytes == few.temp_size_in_bytes, name
        new = [x.output_size_in_bytes - x.alias_size_in_bytes for x in (few, many)]
        assert new[0] == new[1] < page_bytes, name


def test_a_step_updates_cache_and_state_in_place(compiled: dict[int, SmallTable]) -> None:
    small = compiled[64]
    cache = allocate_cache(small.geometries, small.pages, small.sharder)
    state = small.sharder.zeros(small.state)
    leaves = small.sharder.zeros(small.weights.abstract(small.sharder))
    places = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((cache, state))]
    packed = small.builder.layout(DECODE).empty(2)
    program = small.table.decode(DECODE, SampleMode.GREEDY)
    _, new_cache, new_state = program(leaves, cache, state, packed)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((cache, state)))
    assert not any(leaf.is_deleted() for leaf in leaves)
    new_leaves = jax.tree.leaves((new_cache, new_state))
    assert [leaf.unsafe_buffer_pointer() for leaf in new_leaves] == places


def test_the_programs_of_an_engine_are_named_before_any_is_compiled() -> None:
    table = SmallTable(64, BucketTable((1, 2), (16, 32))).table
    keys = table.keys()
    decode = [Bucket(1, 1, True), Bucket(2, 2, True)]
    mixed = [Bucket(16, 2, False), Bucket(32, 2, False)]
    expected = {("admit", None, None)}
    expected |= {("forward", bucket, None) for bucket in mixed}
    expected |= {("decode", b, m) for b in decode for m in (SampleMode.GREEDY, SampleMode.SAMPLED)}
    expected |= {("sample", num_rows, mode) for num_rows in (2,) for mode in SampleMode}
    assert len(keys) == len(set(keys)) and set(keys) == expected
    with_host = SmallTable(64, BucketTable((1, 2), (16, 32)), num_host_pages=3).table.keys()
    chunks = [PageChunk(0, size) for size in PAGE_CHUNK_SIZES]
    moves = {(kind, chunk, None) for chunk in chunks for kind in ("offload", "fetch")}
    assert with_host[: len(keys)] == keys and set(with_host[len(keys) :]) == moves
    copying = SmallTable(64, BucketTable((1, 2), (16, 32)), takes_copies=True).table.keys()
    assert copying == (*keys, ("copy_pages", None, None))


def test_a_program_that_was_not_planned_is_an_error_and_no_compilation(
    compiled: dict[int, SmallTable],
) -> None:
    table, counter = compiled[64].table, CompilationCounter()
    with pytest.raises(KeyError):
        table.decode(DECODE, SampleMode.SAMPLED)
    with pytest.raises(KeyError):
        table.forward(DECODE)
    with pytest.raises(KeyError):
        table.sample(2, SampleMode.FULL)
    assert counter.count == 0


def test_compiling_again_does_nothing_and_tells_nothing(compiled: dict[int, SmallTable]) -> None:
    counter, calls = CompilationCounter(), []
    table = compiled[64].table
    program = table.admit()
    table.compile_all(num_threads=1, progress=lambda done, total: calls.append((done, total)))
    assert counter.count == 0 and calls == [] and table.admit() is program


def test_progress_counts_up_to_the_number_of_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    small, calls = SmallTable(64), []
    monkeypatch.setattr(small.table, "keys", lambda: (("admit", None, None),))
    small.table.compile_all(num_threads=2, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(1, 1)]


def test_a_second_start_lowers_and_compiles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = PageChunk(0, PAGE_CHUNK_SIZES[0])
    keys: tuple[ProgramKey, ...] = (
        ("sample", 2, SampleMode.GREEDY),
        ("admit", None, None),
        ("offload", chunk, None),
        ("fetch", chunk, None),
    )
    store = ProgramStore(tmp_path, jax.devices()[:1])

    def start(small: SmallTable) -> int:
        """Compile, and count the compilations."""
        counter, calls = CompilationCounter(), []
        monkeypatch.setattr(small.table, "keys", lambda: keys)
        small.table.compile_all(
            num_threads=2, store=store, progress=lambda done, total: calls.append((done, total))
        )
        assert calls == [(1, 4), (2, 4), (3, 4), (4, 4)]
        return counter.count

    tables = [SmallTable(64, num_host_pages=2), SmallTable(64, num_host_pages=2)]
    assert [start(small) for small in tables] == [4, 0]
    state, packed = tables[1].sharder.zeros(tables[1].state), tables[1].builder.admission_layout
    state = tables[1].table.admit()(state, packed.empty(2))
    assert not state.slots.any()
    cache = allocate_cache(tables[1].geometries, tables[1].pages, tables[1].sharder).groups[0]
    ids = np.zeros(chunk.num_pages, np.int32)
    pages = tables[1].table.offload(chunk)(cache.k_pages, cache.v_pages, ids)
    assert {page.sharding.memory_kind for page in pages} == {HOST_MEMORY}
    ones = [jax.device_put(np.ones(page.shape, page.dtype), page.sharding) for page in pages]
    written = tables[1].table.fetch(chunk)(cache.k_pages, cache.v_pages, ids, *ones)
    assert all(np.asarray(pages[:, 0] == 1).all() and not pages[:, 1:].any() for pages in written)
    infos = [str(small.table.sample(2, SampleMode.GREEDY).args_info) for small in tables]
    assert infos[0] == infos[1]


def test_the_counter_counts_from_when_it_was_made() -> None:
    before = CompilationCounter()
    jax.jit(lambda x: x * 3.25)(np.ones(5))
    after = CompilationCounter()
    assert before.count >= 1 and after.count == 0
    assert before.num_cache_hits <= before.count
