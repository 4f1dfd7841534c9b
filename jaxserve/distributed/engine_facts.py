"""What is told of an engine: its sizes when it is ready, and its state after each step."""

from typing import TYPE_CHECKING

from jaxserve.distributed.messages import EngineInfo, EngineStats

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


def engine_stats(
    engine: "Engine", *, num_generation_tokens: int, num_bad_frames: int = 0
) -> EngineStats:
    """The state of an engine now; it does not know the two counts itself."""
    scheduler, times = engine.scheduler, engine.times
    return EngineStats(
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        kv_cache_usage=scheduler.kv_cache_usage,
        num_preemptions=scheduler.num_preemptions,
        num_steps=times.num_steps,
        num_tokens=times.num_tokens,
        num_bad_frames=num_bad_frames,
        num_generation_tokens=num_generation_tokens,
    )
