"""benchmarks/host_time.py runs the real engine without a device, copies of pages included."""

import pytest

from benchmarks.host_time import PAGE_SIZE, HostRun
from server.bench.workloads import Workload

NUM_TOKENS = 2 * PAGE_SIZE + 5
WORKLOAD = Workload(
    name="small",
    kind="throughput",
    prompts=tuple(tuple(range(start, start + NUM_TOKENS)) for start in (0, 1000)),
    output_lens=(3, 4),
    num_warm_up=0,
)


@pytest.mark.parametrize("has_cache", [False, True])
def test_the_same_workload_can_be_run_again_and_again(has_cache: bool) -> None:
    host = HostRun(enable_prefix_caching=has_cache)
    times = [host.run(WORKLOAD) for _ in range(2)]
    assert [run["steps"] for run in times] == [4, 4]
    assert all(0 < run[name] for run in times for name in ("start", "end"))
    # The second run copies the last page of each prompt, which is not full.
    assert host.engine.scheduler.num_copied_pages == 2 * has_cache
    assert host.engine.scheduler.num_prefix_hits == 2 * (NUM_TOKENS - 1) * has_cache
