"""What test_page_mover.py runs in a process that has several virtual CPU devices; prints JSON."""

import json

import jax

from jaxserve.execution.programs import CompilationCounter
from tests.jaxserve.page_moves import TWO_GROUPS, MoverRun


def main() -> None:
    """Move pages of a cache whose heads two devices share."""
    run = MoverRun(TWO_GROUPS, (150, 90), 75, num_devices=2)
    counter = CompilationCounter()
    expected = run.run_randomly(25, seed=0)
    num_compilations = counter.count
    leaves = jax.tree.leaves(run.cache)
    found = {
        "shares": [leaf.addressable_shards[0].data.nbytes / leaf.nbytes for leaf in leaves],
        "counted": [run.mover.num_offloaded_bytes, run.mover.num_fetched_bytes],
        "expected": expected,
        "num_compilations": num_compilations,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
