"""Check the Mosaic kernels on a Hopper GPU, then time them: one JSON line a case.

Run `python benchmarks/kernels.py [words]` from the repository root; words keep the cases whose
name holds one of them. A failing case is printed and the next one runs; the exit code is then 1.
"""

import importlib
import json
import pkgutil
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax

from benchmarks import kernel_cases


def main() -> int:
    """Run the cases."""
    words = sys.argv[1:]
    device = jax.devices()[0]
    emit({"device": device.device_kind, "jax": jax.__version__, "platform": device.platform})
    cases = {}
    for module in pkgutil.iter_modules(kernel_cases.__path__, kernel_cases.__name__ + "."):
        loaded = importlib.import_module(module.name)
        cases |= loaded.cases() if hasattr(loaded, "cases") else {}
    failures = 0
    start = time.perf_counter()
    for name, case in cases.items():
        if words and not any(word in name for word in words):
            continue
        try:
            result = case()
        except Exception as error:
            result = {"ok": False, "error": f"{type(error).__name__}: {str(error)[:2000]}"}
        failures += not result.get("ok", True)
        emit({"case": name, **result, "elapsed_seconds": round(time.perf_counter() - start, 1)})
    return min(failures, 1)


def emit(line: dict[str, Any]) -> None:
    """Print one JSON line."""
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    sys.exit(main())
