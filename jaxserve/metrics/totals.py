"""Totals: an engine's own counts, followed from outside so that none of them ever falls."""

import operator

from jaxserve.distributed.messages import EngineStats

STAGES = ("schedule", "build", "dispatch", "collect", "commit")
"""Where a step takes the host's time; `EngineStats` has the seconds of each."""
FOLLOWED = (
    "num_preemptions",
    "num_bad_frames",
    "num_steps",
    "num_tokens",
    "num_padded_tokens",
    "num_generation_tokens",
    "num_compilations",
    "num_prefix_queries",
    "num_prefix_hits",
    "num_host_prefix_hits",
    "num_copied_pages",
    "num_offloaded_bytes",
    "num_fetched_bytes",
    *(f"{stage}_seconds" for stage in STAGES),
)
"""The fields of `EngineStats` that count since the engine's start."""


_read = operator.attrgetter(*FOLLOWED)


class Totals:
    """The newest totals by the name of their field in `EngineStats`.

    One that falls, which no engine of ours does, stays where it was and goes on from there: to
    Prometheus a counter that falls is one that began anew.
    """

    def __init__(self):
        """Begin with an engine that has done nothing."""
        self._seen: tuple[float, ...] = (0,) * len(FOLLOWED)
        self._lost: list[float] = [0] * len(FOLLOWED)

    def __getitem__(self, name: str) -> float:
        """The total of a field; an int but for seconds."""
        index = FOLLOWED.index(name)
        return self._seen[index] + self._lost[index]

    def follow(self, stats: EngineStats) -> int:
        """Take the new totals, once a step; returns how many of them have fallen."""
        totals, seen = _read(stats), self._seen
        self._seen = totals
        if not any(map(operator.lt, totals, seen)):
            return 0
        falls = [max(0, before - now) for before, now in zip(seen, totals, strict=True)]
        self._lost = list(map(operator.add, self._lost, falls))
        return sum(fall > 0 for fall in falls)
