"""Serve the same traces under every scheduling policy, on a virtual clock; needs no device.

    python benchmarks/simulate_policies.py [TRACE ...] [--requests N] [--load X] [--plot FILE]

Prints a line for each trace, policy and kind of request: median and 99th percentile of the time to
the first token (TTFT) and of the mean time of the others (TPOT), and the share that met its goals.
The rates of the traces are in policy_traces.py, the device in policy_simulation.py.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks.policy_simulation import Served, simulate
from benchmarks.policy_traces import TRACES
from jaxserve.scheduling.policies import POLICIES

Figures = dict[tuple[str, str, str], dict[str, float]]
"""By trace, policy and kind of request."""

HEADER = "| trace | policy | requests | TTFT p50, s | p99 | TPOT p50, ms | p99 | met goals |"


def summarize(served: list[Served]) -> dict[str, float]:
    """The figures of some requests."""
    ttft = np.percentile([one.ttft_seconds for one in served], [50, 99])
    tpot = np.percentile([one.tpot_seconds for one in served], [50, 99]) * 1e3
    return {
        "TTFT p50, s": ttft[0],
        "TTFT p99, s": ttft[1],
        "TPOT p50, ms": tpot[0],
        "TPOT p99, ms": tpot[1],
        "met": float(np.mean([one.has_met_goals for one in served])),
    }


def run(traces: list[str], num_requests: int, load: float) -> Figures:
    """Simulate, and print a table."""
    figures: Figures = {}
    print(HEADER, "---".join("|" * 9), sep="\n")
    for trace_name in traces:
        make, rate = TRACES[trace_name]
        trace = make(num_requests, rate * load)
        for policy_name, policy in POLICIES.items():
            served = simulate(trace, policy())
            for kind in sorted({one.kind for one in trace}):
                got = summarize([one for one in served if one.request.kind == kind])
                figures[trace_name, policy_name, kind] = got
                print(
                    f"| {trace_name} | {policy_name} | {kind} | {got['TTFT p50, s']:.3f} "
                    f"| {got['TTFT p99, s']:.3f} | {got['TPOT p50, ms']:.1f} "
                    f"| {got['TPOT p99, ms']:.1f} | {got['met']:.1%} |",
                    flush=True,
                )
    return figures


def plot(figures: Figures, path: Path) -> None:
    """Draw the figures of chats as bars: p50 in front, p99 behind."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    traces = list(dict.fromkeys(trace for trace, _, _ in figures))
    panels, axes = plt.subplots(1, 2, figsize=(9, 3.2))
    for axis, name, unit in zip(axes, ("TTFT", "TPOT"), ("s", "ms"), strict=True):
        for index, policy in enumerate(POLICIES):
            places = np.arange(len(traces)) + (index - 1.5) * 0.2
            for percent, alpha in (("p99", 0.45), ("p50", 1.0)):
                key = f"{name} {percent}, {unit}"
                heights = [figures[trace, policy, "chat"][key] for trace in traces]
                label = policy if percent == "p50" else None
                axis.bar(places, heights, 0.18, color=f"C{index}", alpha=alpha, label=label)
        axis.set_xticks(range(len(traces)), traces)
        axis.set_yscale("log")
        axis.set_title(f"{name} of chats, {unit}: p50 (dark), p99 (light)", fontsize=9)
    axes[0].legend(fontsize=8)
    panels.tight_layout()
    panels.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    """Read the command line, simulate, print and plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="*", default=list(TRACES), metavar="TRACE")
    parser.add_argument("--requests", type=int, default=4000, help="of each trace")
    parser.add_argument("--load", type=float, default=1.0, help="multiplies the traces' rates")
    parser.add_argument("--plot", type=Path, help="a PNG or SVG file; needs matplotlib")
    arguments = parser.parse_args()
    figures = run(arguments.traces, arguments.requests, arguments.load)
    if arguments.plot is not None:
        plot(figures, arguments.plot)


if __name__ == "__main__":
    main()
