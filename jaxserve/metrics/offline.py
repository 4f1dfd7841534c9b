"""WatchedProcessor: counts for LLM.get_metrics what an engine in this process brings."""

from typing import TYPE_CHECKING

from jaxserve.async_llm_engine import EngineState
from jaxserve.config import EngineConfig
from jaxserve.distributed.engine_facts import StatsTaker, engine_info
from jaxserve.distributed.messages import EngineInfo, EngineStats
from jaxserve.metrics.engine_metrics import EngineMetrics
from jaxserve.processing.output_processor import OutputProcessor, ProcessedStep
from jaxserve.request import Request
from jaxserve.step import SequenceUpdate
from jaxserve.v1.metrics.reader import Metric, read_metrics

if TYPE_CHECKING:
    from jaxserve.engine_builder import BuiltEngine


class WatchedProcessor:
    """An OutputProcessor that tells EngineMetrics what passes through it.

    Attributes:
      config, state, info, stats: what EngineMetrics reads of an engine.
    """

    def __init__(self, processor: OutputProcessor, config: EngineConfig, built: "BuiltEngine"):
        self._processor, self._taker = processor, StatsTaker(built.engine)
        self._requests: dict[str, Request] = {}
        self.config, self.state = config, EngineState.READY
        self.info: EngineInfo | None = engine_info(built, config.block_size)
        self.stats = EngineStats()
        self._metrics = EngineMetrics(self)

    @property
    def seconds_since_news(self) -> float:
        """0: the engine works only while its caller waits for it."""
        return 0.0

    def add(self, request: Request, prompt_text: str | None = None) -> None:
        """See OutputProcessor."""
        self._processor.add(request, prompt_text)
        self._requests[request.request_id] = request
        self._metrics.added(request)

    def drop(self, request_id: str) -> bool:
        """See OutputProcessor."""
        was_unfinished = self._processor.drop(request_id)
        if was_unfinished:
            self._metrics.aborted(self._requests.pop(request_id))
        return was_unfinished

    def process(self, updates: list[SequenceUpdate]) -> ProcessedStep:
        """See OutputProcessor."""
        step = self._processor.process(updates)
        for output in step.outputs:
            request = self._requests[output.request_id]
            if output.finished:
                del self._requests[output.request_id]
            self._metrics.gave(request, output)
        self._taker.take_in(updates)
        self._count_step()
        return step

    def metrics(self) -> list[Metric]:
        """What was counted since the start, and the gauges of this moment."""
        self._count_step()  # steps in flight may have been waited for since the last outputs
        return read_metrics(self._metrics.collect())

    def _count_step(self) -> None:
        self.stats = self._taker.stats()
        self._metrics.stepped(self.stats)
