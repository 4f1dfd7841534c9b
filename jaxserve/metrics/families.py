"""FamilyMaker: what an exposition is made of, all of it with the labels of one engine."""

from collections.abc import Mapping

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)

from jaxserve.metrics.histograms import Histogram

LABELS = ("model_name", "engine")


class FamilyMaker:
    """Makes families of one set of labels, or of one more label each.

    Args:
      model_name, engine: the labels of all.
    """

    def __init__(self, model_name: str, engine: str):
        self._labels = (model_name, engine)

    def gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        """A number of this moment."""
        family = GaugeMetricFamily(name, text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def gauges(
        self, name: str, text: str, label: str, values: Mapping[str, float]
    ) -> GaugeMetricFamily:
        """Numbers of this moment, by the values of one more label."""
        family = GaugeMetricFamily(name, text, labels=(*LABELS, label))
        for kind, value in values.items():
            family.add_metric((*self._labels, kind), value)
        return family

    def info(self, name: str, text: str, facts: Mapping[str, object]) -> GaugeMetricFamily:
        """A gauge of 1 whose labels tell facts."""
        family = GaugeMetricFamily(name, text, labels=(*LABELS, *facts))
        family.add_metric((*self._labels, *map(str, facts.values())), 1)
        return family

    def counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        """A number that never falls; the exposition puts "_total" behind its name."""
        family = CounterMetricFamily(name, text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def counters(
        self, name: str, text: str, label: str, values: Mapping[str, float]
    ) -> CounterMetricFamily:
        """Numbers that never fall, by the values of one more label."""
        family = CounterMetricFamily(name, text, labels=(*LABELS, label))
        for kind, value in values.items():
            family.add_metric((*self._labels, kind), value)
        return family

    def histogram(self, name: str, text: str, histogram: Histogram) -> HistogramMetricFamily:
        """How often values were observed, by size."""
        family = HistogramMetricFamily(name, text, labels=LABELS)
        histogram.add_to(family, self._labels)
        return family
