"""Models with sliding windows on pools that hold them only because pages come back."""

import functools

import pytest

from jaxserve.engine_builder import BuiltEngine
from jaxserve.errors import RequestTooLongError
from jaxserve.execution.programs import ProgramTable
from tests.engine_runs import add_request, generate, greedy, make_engine, with_scheduler
from tests.goldens_loader import load_golden


@functools.cache
def built_engine(name: str) -> BuiltEngine:
    return make_engine(load_golden(name).folder)


# A row of 16 tokens and a window of 16 (or 24) touch 3 (or 4) pages at most; the longest case has
# 214 tokens, which is 14 pages. The last of `num_pages` is the window group's.
@pytest.mark.parametrize(
    ("name", "num_pages", "max_steps_in_flight"),
    [
        ("mistral_window", (4,), 2),
        ("mistral_window", (9,), 3),
        ("qwen2_windows", (257, 5), 2),
        ("qwen2_windows", (20, 5), 1),
        ("qwen2_windows", (40, 18), 2),
    ],
)
def test_greedy_tokens_are_equal_on_pages_for_a_window(
    name: str, num_pages: tuple[int, ...], max_steps_in_flight: int
) -> None:
    golden = load_golden(name)
    engine = with_scheduler(
        built_engine(name),
        num_pages=num_pages,
        max_steps_in_flight=max_steps_in_flight,
        long_prefill_token_threshold=16,
    )
    outputs = generate(engine, [case.prompt for case in golden.mixed], greedy())
    assert outputs == [case.tokens for case in golden.mixed]
    scheduler = engine.scheduler
    assert scheduler.num_window_pages_freed > 50 and scheduler.num_preemptions > 0
    assert scheduler.kv_cache_usage == 0


def test_a_pool_that_is_too_small_for_a_window_refuses_long_requests_only() -> None:
    engine = with_scheduler(
        built_engine("mistral_window"), num_pages=3, long_prefill_token_threshold=16
    )
    with pytest.raises(RequestTooLongError, match="must fit the KV cache of 32 tokens"):
        add_request(engine, "long", [5] * 30, greedy(3))
    case = load_golden("mistral_window").mixed[0]
    assert generate(engine, [case.prompt], greedy(31)) == [case.tokens[:31]]


def test_a_start_gives_windows_no_more_pages_than_they_can_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ProgramTable, "compile_all", lambda *_, **__: None)
    built = make_engine(
        load_golden("qwen2_windows").folder,
        num_gpu_blocks_override=None,
        kv_cache_memory_bytes=8 << 20,
    )
    full, window = built.bill.num_pages
    # 64 tokens of a row and 23 before it: 87 in a run, in 7 pages; 8 sequences and the null page.
    assert window == 8 * 7 + 1 < full and built.bill.windows == (None, 24)
    assert built.bill.num_tokens == (full - 1) * 16
    groups = built.engine.runner._cache.groups
    assert [group.num_pages for group in groups] == [full, window]
    pools = built.engine.scheduler._roster.page_pools
    assert [(p.num_pages, p.sliding_window) for p in pools] == [(full, None), (window, 24)]
    num_bytes = sum(group.k_pages.nbytes + group.v_pages.nbytes for group in groups)
    assert built.bill.page_bytes == num_bytes <= 8 << 20
