"""ProgramStore: programs come back whole, for the same user and the same everything else only."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.stages import Compiled

from jaxserve.config import EngineConfig
from jaxserve.execution import program_store
from jaxserve.execution.device_setup import XLA_FOLDER
from jaxserve.execution.model_setup import ModelSetup
from jaxserve.execution.program_store import (
    NUM_KEPT_FOLDERS,
    LateProgramStore,
    ProgramStore,
    describe_environment,
    open_program_store,
)

READ_IN_ANOTHER_PROCESS = """
import sys, pathlib, jax
from jaxserve.execution.program_store import ProgramStore
store = ProgramStore(pathlib.Path(sys.argv[1]), jax.devices()[:1], "model")
print(store.read("add")({"x": jax.numpy.ones(3)}, jax.numpy.ones(3)).tolist())
"""


KEEP_AT_THE_EXIT = """
import sys, pathlib, jax
from jaxserve.execution.program_store import LateProgramStore
store = LateProgramStore(pathlib.Path(sys.argv[1]), jax.devices()[:1], "model")
program = jax.jit(lambda tree, y: tree["x"] + y).lower({"x": jax.numpy.ones(3)}, jax.numpy.ones(3))
with store.without_xla_cache():
    store.write("add", program.compile())
if len(sys.argv) > 2:
    raise KeyboardInterrupt
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """({"x": float32[3]}, donated float32[3]) -> their sum."""
    function = jax.jit(lambda tree, y: tree["x"] + y, donate_argnums=1)
    lowered = function.lower({"x": jnp.ones(3)}, jnp.ones(3))
    with open_store(tmp_path_factory.mktemp("unused")).without_xla_cache():
        return lowered.compile()


def open_store(folder: Path, *key_parts: object) -> ProgramStore:
    return ProgramStore(folder, jax.devices()[:1], *key_parts)


def test_a_program_comes_back_with_its_trees_and_its_donation(tmp_path: Path, program: Compiled):
    open_store(tmp_path / "made", "model").write("add", program)
    found = open_store(tmp_path / "made", "model").read("add")
    assert found is not None
    given = jnp.full(3, 2.0)
    assert found({"x": jnp.ones(3)}, given).tolist() == [3.0, 3.0, 3.0]
    assert given.is_deleted()


def test_a_program_comes_back_in_another_process(tmp_path: Path, program: Compiled):
    open_store(tmp_path, "model").write("add", program)
    command = [sys.executable, "-c", READ_IN_ANOTHER_PROCESS, str(tmp_path)]
    root = Path(program_store.__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert done.stdout == "[2.0, 2.0, 2.0]\n", done.stderr


@dataclass
class Engine:
    """As far as a store looks at it."""

    has_unfinished: bool = False


def late_store(folder: Path, programs: dict[str, Compiled]) -> LateProgramStore:
    store = LateProgramStore(folder, jax.devices()[:1], "model")
    for description, program in programs.items():
        store.write(description, program)
    return store


def test_a_late_store_writes_only_while_its_engine_is_idle(
    tmp_path: Path, program: Compiled, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(program_store, "CHECK_SECONDS", 0.005)
    engine, reader = Engine(has_unfinished=True), open_store(tmp_path, "model")
    late_store(tmp_path, {"add": program, "plus": program}).write_while_idle(engine)
    time.sleep(0.1)
    assert reader.read("add") is None
    engine.has_unfinished = False
    for description in ("add", "plus"):
        assert until(lambda description=description: reader.read(description) is not None)


def test_a_late_store_needs_no_engine_any_more(
    tmp_path: Path, program: Compiled, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(program_store, "CHECK_SECONDS", 0.005)
    engine = Engine(has_unfinished=True)
    late_store(tmp_path, {"add": program}).write_while_idle(engine)
    del engine
    assert until(lambda: open_store(tmp_path, "model").read("add") is not None)


def test_a_late_store_writes_all_when_it_is_asked_to_finish(tmp_path: Path, program: Compiled):
    reader = open_store(tmp_path, "model")
    store = late_store(tmp_path, {"add": program, "plus": program})
    assert store.read("add") is None
    store.finish()
    assert None not in (reader.read("add"), reader.read("plus"))


def test_a_late_store_writes_nothing_that_it_shall_forget(tmp_path: Path, program: Compiled):
    store = late_store(tmp_path, {"add": program})
    store.forget()
    program_store.write_all()
    assert open_store(tmp_path, "model").read("add") is None
    assert store not in program_store._UNWRITTEN


def test_what_another_store_has_not_written_is_written_before_programs_are_looked_for(
    tmp_path: Path, program: Compiled
):
    stores = [late_store(tmp_path / name, {"add": program}) for name in ("one", "two")]
    program_store.write_all()
    assert all(open_store(tmp_path / name, "model").read("add") for name in ("one", "two"))
    assert program_store._UNWRITTEN.isdisjoint(stores)


@pytest.mark.parametrize("interrupt", [[], ["interrupt"]])
def test_a_late_store_finishes_when_its_process_ends(tmp_path: Path, interrupt: list[str]):
    root = Path(program_store.__file__).parents[2]
    command = [sys.executable, "-c", KEEP_AT_THE_EXIT, str(tmp_path), *interrupt]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert done.returncode == (0 if not interrupt else -signal.SIGINT), done.stderr
    assert open_store(tmp_path, "model").read("add") is not None


def until(is_so: Callable[[], bool]) -> bool:
    """Wait for it, at most 10 s."""
    end = time.monotonic() + 10
    while not is_so() and time.monotonic() < end:
        time.sleep(0.01)
    return is_so()


def test_another_description_model_or_setting_finds_nothing(
    tmp_path: Path, program: Compiled, monkeypatch: pytest.MonkeyPatch
):
    open_store(tmp_path, "model").write("add", program)
    assert open_store(tmp_path, "model").read("add of 4") is None
    assert open_store(tmp_path, "another model").read("add") is None
    monkeypatch.setenv("XLA_FLAGS", "--xla_of_another_start=1")
    assert open_store(tmp_path, "model").read("add") is None


def test_caches_and_the_share_of_memory_do_not_matter(monkeypatch: pytest.MonkeyPatch):
    before = describe_environment(jax.devices()[:1])
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/elsewhere")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "80")
    assert describe_environment(jax.devices()[:1]) == before
    with jax.default_matmul_precision("highest"):
        pass  # a setting of a thread is no setting of the process
    assert describe_environment(jax.devices()[:1]) == before


@pytest.mark.parametrize("damage", ["cut", "changed", "no pickle"])
def test_a_damaged_file_is_a_miss_with_a_warning(
    tmp_path: Path, program: Compiled, damage: str, caplog: pytest.LogCaptureFixture
):
    store = open_store(tmp_path)
    store.write("add", program)
    (path,) = tmp_path.glob("*/*")
    content = bytearray(path.read_bytes())
    if damage == "changed":
        content[1000] ^= 1
    path.write_bytes({"cut": content[:-9], "changed": content, "no pickle": b"x"}[damage])
    with caplog.at_level(logging.WARNING):
        assert store.read("add") is None
    assert "cannot be read and is compiled anew" in caplog.text


def test_a_program_that_cannot_be_kept_costs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    store = open_store(tmp_path)
    with caplog.at_level(logging.WARNING):
        store.write("add", cast(Compiled, object()))
    assert "cannot be kept" in caplog.text and not list(tmp_path.glob("*/*"))


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path):
    tmp_path.chmod(0o770)
    with pytest.raises(PermissionError, match="must be writable by this user alone"):
        open_store(tmp_path)


def test_folders_are_made_for_this_user_alone_under_any_umask(tmp_path: Path):
    before = os.umask(0o002)  # many systems give it to users who have a group of their own
    try:
        open_store(tmp_path / "cache" / "programs")
        open_store(tmp_path / "cache" / "programs")
    finally:
        os.umask(before)
    (folder,) = (tmp_path / "cache" / "programs").iterdir()
    assert [path.stat().st_mode & 0o777 for path in (folder.parent, folder)] == [0o700, 0o700]


def test_a_cpu_of_other_instructions_finds_nothing(monkeypatch: pytest.MonkeyPatch):
    cpus = jax.devices("cpu")[:1]
    before = describe_environment(cpus)
    assert describe_environment(cpus) == before
    monkeypatch.setattr(program_store, "_instruction_set", lambda devices: "older")
    assert describe_environment(cpus) != before


def test_a_folder_that_another_start_deletes_meanwhile_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "gone").mkdir()
    entries = [entry for entry in os.scandir(tmp_path) if entry.name == "gone"]
    (tmp_path / "gone").rmdir()
    monkeypatch.setattr(program_store.os, "scandir", lambda folder: entries)
    open_store(tmp_path, "new")


def test_only_the_folders_that_were_opened_last_are_kept(tmp_path: Path):
    for number in range(NUM_KEPT_FOLDERS + 2):
        open_store(tmp_path, number)
        for age, folder in enumerate(sorted(tmp_path.iterdir(), key=lambda f: f.stat().st_mtime)):
            os.utime(folder, (1000 + age, 1000 + age))
    open_store(tmp_path, NUM_KEPT_FOLDERS + 1)
    assert len(list(tmp_path.iterdir())) == NUM_KEPT_FOLDERS


def test_only_the_programs_of_a_folder_that_were_used_last_are_kept(
    tmp_path: Path, program: Compiled, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(program_store, "NUM_KEPT_PROGRAMS", 2)
    store = open_store(tmp_path)
    for number in range(3):
        store.write(f"add {number}", program)
    for path in tmp_path.glob("*/*"):
        os.utime(path, (1000, 1000))
    assert store.read("add 0") is not None and store.read("add 2") is not None
    open_store(tmp_path)
    assert [store.read(f"add {number}") is None for number in range(3)] == [False, True, False]


@pytest.fixture
def cache_dir(tmp_path: Path) -> Iterator[Path]:
    """A folder of caches that this project has set up."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / XLA_FOLDER))
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)


class _Setup:
    """A ModelSetup as far as a store asks it."""

    def __init__(self, *, batch_invariant: bool = False) -> None:
        self.model = self.shared_model = self
        self.architecture = "LlamaForCausalLM"
        self.sharder = self.mesh = self
        self.devices = np.array(jax.devices()[:1])
        self.geometries: tuple[Any, ...] = ()
        self.dtype, self.backend, self.stack = "float32", "xla", "none"
        self.config = EngineConfig(batch_invariant=batch_invariant)

    def __repr__(self) -> str:
        return "setup"


def test_programs_of_a_model_from_elsewhere_are_not_kept(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    setup = cast(ModelSetup, _Setup())
    assert open_program_store(setup, cache_dir) is not None
    foreign = type("Foreign", (), {"__module__": "somewhere.else"})
    monkeypatch.setattr(program_store, "model_class", lambda architecture: foreign)
    assert open_program_store(setup, cache_dir) is None


def test_the_batch_invariant_mode_has_programs_of_its_own(cache_dir: Path):
    setups = [_Setup(batch_invariant=is_on) for is_on in (False, True, False)]
    for setup in setups:
        assert open_program_store(cast(ModelSetup, setup), cache_dir) is not None
    assert len(list((cache_dir / "programs").iterdir())) == 2


def test_a_folder_that_cannot_be_used_leaves_the_start_without_a_store(
    cache_dir: Path, caplog: pytest.LogCaptureFixture
):
    (cache_dir / "programs").write_text("a file")
    with caplog.at_level(logging.WARNING):
        assert open_program_store(cast(ModelSetup, _Setup()), cache_dir) is None
    assert "programs are not kept" in caplog.text


def test_jaxs_cache_is_off_only_while_programs_are_made_to_be_kept(tmp_path: Path):
    store = open_store(tmp_path)
    before = jax.config.jax_enable_compilation_cache
    with pytest.raises(KeyError), store.without_xla_cache():
        assert not jax.config.jax_enable_compilation_cache
        raise KeyError
    assert jax.config.jax_enable_compilation_cache == before


def test_a_cache_of_the_users_own_is_the_only_one(tmp_path: Path):
    assert open_program_store(cast(ModelSetup, _Setup()), tmp_path) is None
