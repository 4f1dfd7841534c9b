"""Counter, Gauge, Histogram and Vector: the metrics of `LLM.get_metrics`, in vLLM's form."""

from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client.core import Metric as Family

PREFIXES = ("vllm:", "jaxserve:")
"""Of the names that are read; `jaxserve:` is what vLLM does not count."""
_POSITION = "position"
"""The label by which the counters of a vector are told apart."""


class PositionValues(list[int]):
    """Counts by position; to scripts that take them for a dict, a dict of the positions."""

    def keys(self) -> range:
        """The positions."""
        return range(len(self))


class BucketBound(str):
    """An upper bound as its text, such as "0.5" or "+Inf", that also equals the number.

    Scripts ask for the last bucket by `bound == float("inf")`. The hash is the text's, so a dict
    finds a bound by its text alone.
    """

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        """Compare with a number as a number, with all else as text."""
        if isinstance(other, int | float):
            return float(self) == other
        return str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        """Not `==`; text has its own."""
        return not self == other


@dataclass
class Metric:
    """One metric.

    Attributes:
      name: with its prefix; a counter's has no "_total".
      labels: of the engine and, where there are some, of the kind that was counted.
    """

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A number that never falls; an int, but for seconds."""

    value: int | float


@dataclass
class Vector(Metric):
    """Counters by position, such as that of a drafted token."""

    values: PositionValues


@dataclass
class Gauge(Metric):
    """A number of this moment."""

    value: float


@dataclass
class Histogram(Metric):
    """How often values were observed, by size.

    Attributes:
      count: of all observations.
      sum: of all observed values.
      buckets: for each upper bound, as text, how many values were not above it; "+Inf" is last.
    """

    count: int
    sum: float
    buckets: dict[str, int]


def read_metrics(families: Iterable[Family]) -> list[Metric]:
    """The engine's metrics among families of an exposition."""
    metrics: list[Metric] = []
    for family in families:
        if not family.name.startswith(PREFIXES):
            continue
        if family.type == "histogram":
            metrics.append(_read_histogram(family))
        elif family.type == "gauge":
            metrics += [Gauge(family.name, dict(s.labels), float(s.value)) for s in family.samples]
        elif _POSITION in family.samples[0].labels:
            metrics.append(_read_vector(family))
        else:
            metrics += [
                Counter(family.name, dict(s.labels), _exact(s.value)) for s in family.samples
            ]
    return metrics


def _exact(value: float) -> int | float:
    return int(value) if value == int(value) else value


def _read_vector(family: Family) -> Vector:
    """Counters of one set of labels, in the order of their positions."""
    counts = {int(sample.labels[_POSITION]): int(sample.value) for sample in family.samples}
    values = PositionValues(counts.get(position, 0) for position in range(max(counts) + 1))
    return Vector(family.name, _without(family, _POSITION), values)


def _read_histogram(family: Family) -> Histogram:
    """A histogram of one set of labels."""
    buckets, count, total = {}, 0, 0.0
    for sample in family.samples:
        if sample.name.endswith("_bucket"):
            buckets[BucketBound(sample.labels["le"])] = int(sample.value)
        elif sample.name.endswith("_count"):
            count = int(sample.value)
        elif sample.name.endswith("_sum"):
            total = float(sample.value)
    return Histogram(family.name, _without(family, "le"), count, total, buckets)


def _without(family: Family, label: str) -> dict[str, str]:
    """The labels of a family's samples but for one."""
    return {name: text for name, text in family.samples[0].labels.items() if name != label}
