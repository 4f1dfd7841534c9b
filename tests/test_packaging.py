"""The distribution: four packages that are jaxserve's alone, and light modules that stay light."""

import ast
import importlib.metadata
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
PACKAGES = ("jaxserve", "models", "pallas_kernels", "server")
HEAVY = (
    "jaxserve.engine", "jaxserve.engine_builder", "jaxserve.execution", "jaxserve.plan_report",
    "jaxserve.prefix_snapshots", "jaxserve.step_recovery",
)  # fmt: skip
"""Modules of the upper floors that own, or lead to, arrays."""
LIGHT_MODELS = (
    "models.config",
    "models.errors",
    "models.loading.safetensors",
    "models.loading.strict_json",
)


def files_of(package: str) -> set[str]:
    """All files of a package, as paths from the root of the repository."""
    paths = (path for path in (REPOSITORY / package).rglob("*") if path.is_file())
    return {
        path.relative_to(REPOSITORY).as_posix() for path in paths if "__pycache__" not in path.parts
    }


def modules_of(package: str) -> list[str]:
    names = (name.removesuffix(".py") for name in files_of(package) if name.endswith(".py"))
    return sorted(name.removesuffix("/__init__").replace("/", ".") for name in names)


def is_heavy(module: str) -> bool:
    return any(module == heavy or module.startswith(f"{heavy}.") for heavy in HEAVY)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The files of a wheel that is built from a copy of the repository."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    ignore = shutil.ignore_patterns("__pycache__", "goldens")
    for name in (*PACKAGES, "tests"):
        shutil.copytree(REPOSITORY / name, source / name, ignore=ignore)
    subprocess.run(
        [sys.executable, "-c", "import sys, setuptools.build_meta as b; b.build_wheel(sys.argv[1])"]
        + [str(out)],
        cwd=source,
        check=True,
        capture_output=True,
    )
    with zipfile.ZipFile(next(out.glob("*.whl"))) as file:
        return set(file.namelist())


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_belongs_to_jaxserve_alone(package):
    owners = importlib.metadata.packages_distributions().get(package, [])
    assert set(owners) == {"jaxserve"}, "another distribution, or none: make setup"


def test_the_wheel_holds_the_four_packages_whole_and_nothing_else(wheel):
    shipped = {name for name in wheel if ".dist-info/" not in name}
    assert shipped == set().union(*(files_of(package) for package in PACKAGES))


def test_the_wheel_holds_the_license_and_the_command(wheel):
    ends = {name.partition(".dist-info/")[2] for name in wheel if ".dist-info/" in name}
    assert {"licenses/LICENSE", "entry_points.txt"} <= ends


def test_the_command_is_the_one_that_the_server_defines():
    (command,) = importlib.metadata.entry_points(group="console_scripts", name="jaxserve")
    assert command.value == "server.cli.main:main"
    assert callable(command.load())


def test_no_light_module_loads_jax():
    """One process imports them one after the other and says which one brought jax in."""
    modules = [*modules_of("server"), *modules_of("jaxserve"), *LIGHT_MODELS]
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    if 'jax' in sys.modules: sys.exit(f'{name} loads jax')\n"
    )
    light = [module for module in modules if not is_heavy(module)]
    run = subprocess.run(
        [sys.executable, "-c", program, *light], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


def test_only_execution_and_the_engine_builder_import_jax():
    def imported(path: Path) -> set[str]:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = [
            alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names
        ]
        names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        return {name.partition(".")[0] for name in names}

    files = [name for package in ("server", "jaxserve") for name in files_of(package)]
    arrays = ("jaxserve/execution/", "jaxserve/engine_builder.py", "jaxserve/plan_report.py")
    upper = [f for f in files if f.endswith(".py") and not f.startswith(arrays)]
    assert [name for name in upper if imported(REPOSITORY / name) & {"jax", "flax"}] == []


def test_imports_only_go_down_the_four_floors():
    run = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout
    assert "Contracts: 1 kept, 0 broken" in run.stdout


def test_constraints_hold_versions_and_hashes_only():
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("    --hash=sha256:")]
    assert all("==" in pin and "://" not in pin and not pin.startswith("-") for pin in pins)


def test_every_direct_dependency_is_pinned():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + sum(project["optional-dependencies"].values(), [])
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pinned = {line.partition("==")[0] for line in lines if "==" in line}
    names = {name.partition(">")[0].partition("[")[0].replace("_", "-") for name in wanted}
    assert names - pinned == set()
