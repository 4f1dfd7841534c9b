"""Counter, Gauge, Histogram and Vector: the metrics of `LLM.get_metrics`, in vLLM's form."""

from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client.core import Metric as Family


@dataclass
class Metric:
    """One metric.

    Attributes:
      name: with the prefix "vllm:"; a counter's has no "_total".
      labels: of the engine and, where there are some, of the kind that was counted.
    """

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A number that never falls."""

    value: int


@dataclass
class Vector(Metric):
    """Counters by position; no metric of this release has more than one position."""

    values: list[int]


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
    """The metrics under vLLM's names among families of an exposition."""
    metrics: list[Metric] = []
    for family in families:
        if not family.name.startswith("vllm:"):
            continue
        if family.type == "histogram":
            metrics.append(_read_histogram(family))
            continue
        for sample in family.samples:
            labels = dict(sample.labels)
            if family.type == "counter":
                metrics.append(Counter(family.name, labels, int(sample.value)))
            else:
                metrics.append(Gauge(family.name, labels, float(sample.value)))
    return metrics


def _read_histogram(family: Family) -> Histogram:
    """A histogram of one set of labels."""
    buckets, count, total = {}, 0, 0.0
    for sample in family.samples:
        if sample.name.endswith("_bucket"):
            buckets[sample.labels["le"]] = int(sample.value)
        elif sample.name.endswith("_count"):
            count = int(sample.value)
        elif sample.name.endswith("_sum"):
            total = float(sample.value)
    labels = {name: text for name, text in family.samples[0].labels.items() if name != "le"}
    return Histogram(family.name, labels, count, total, buckets)
