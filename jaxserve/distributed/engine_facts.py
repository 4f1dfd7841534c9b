"""What is told of an engine: its sizes when it is ready, and its state after each step."""

from typing import TYPE_CHECKING

from jaxserve.distributed.messages import EngineInfo, EngineStats
from jaxserve.step import SequenceUpdate

if TYPE_CHECKING:
    from jaxserve.engine import Engine
    from jaxserve.engine_builder import BuiltEngine


def engine_info(built: "BuiltEngine", page_size: int) -> EngineInfo:
    """What the users of an engine must know of it."""
    limits, scheduler = built.limits, built.engine.scheduler
    return EngineInfo(
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        page_size=page_size,
        num_pages=scheduler.num_pages,
        max_tokens_per_sequence=scheduler.max_tokens_per_sequence,
        device_kind=built.device_kind,
        memory_bill=str(built.bill),
        seconds=built.seconds,
    )


class StatsTaker:
    """Takes the state of an engine that is ready, and counts what the engine itself does not."""

    def __init__(self, engine: "Engine"):
        """Begin to count compilations; those of the start are no news."""
        from jaxserve.execution.programs import CompilationCounter  # imports JAX

        self._engine, self._compilations = engine, CompilationCounter()
        self._num_generation_tokens = 0

    def take_in(self, updates: list[SequenceUpdate]) -> None:
        """Count the output tokens of a step's updates."""
        self._num_generation_tokens += sum([len(update.new_token_ids) for update in updates])

    def stats(self, *, num_bad_frames: int = 0) -> EngineStats:
        """The state of the engine now."""
        scheduler, times = self._engine.scheduler, self._engine.times
        mover = self._engine.runner.page_mover
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            kv_cache_usage=scheduler.kv_cache_usage,
            num_preemptions=scheduler.num_preemptions,
            num_steps=times.num_steps,
            num_tokens=times.num_tokens,
            num_bad_frames=num_bad_frames,
            num_generation_tokens=self._num_generation_tokens,
            num_padded_tokens=times.num_padded_tokens,
            num_compilations=self._compilations.count,
            num_prefix_queries=scheduler.num_prefix_queries,
            num_prefix_hits=scheduler.num_prefix_hits,
            num_host_prefix_hits=scheduler.num_host_prefix_hits,
            num_copied_pages=scheduler.num_copied_pages,
            num_offloaded_bytes=mover.num_offloaded_bytes if mover else 0,
            num_fetched_bytes=mover.num_fetched_bytes if mover else 0,
            sleep_level=self._engine.sleep_level,
            schedule_seconds=times.schedule,
            build_seconds=times.build,
            dispatch_seconds=times.dispatch,
            collect_seconds=times.collect,
            commit_seconds=times.commit,
        )
