"""Pages that are not full: siblings and chats compute what is new, and get the same tokens."""

import functools
import random

import pytest

from jaxserve.engine import Engine
from jaxserve.engine_builder import BuiltEngine
from tests.engine_runs import (
    add_request,
    drain,
    final_of,
    generate,
    greedy,
    make_engine,
    sampled,
    shared_engine,
    tokens_of,
    with_scheduler,
)
from tests.goldens_loader import GOLDENS_FOLDER

PAGE_SIZE = 16


@functools.cache
def built_with_windows() -> BuiltEngine:
    """Full attention and a window of 24 tokens."""
    return make_engine(GOLDENS_FOLDER / "qwen2_windows")


def make_prompt(num_tokens: int, seed: int = 0) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(3, 120) for _ in range(num_tokens))


def answers_alone(
    built: BuiltEngine, prompt: tuple[int, ...], n: int, max_tokens: int
) -> list[tuple[int, ...]]:
    """What `n` siblings must give: each as a request of its own, without a cache."""
    engine = with_scheduler(built, enable_prefix_caching=False)
    answers = []
    for index in range(n):
        answers += generate(engine, [prompt], sampled(5 + index, max_tokens=max_tokens))
    assert engine.scheduler.num_copied_pages == 0
    return answers


def run_siblings(
    engine: Engine, prompt: tuple[int, ...], n: int, max_tokens: int
) -> tuple[list[tuple[int, ...]], int, list[int]]:
    """The answers of siblings, the tokens that were computed, and what each found cached."""
    before = engine.times.num_tokens
    add_request(engine, "r", prompt, sampled(n=n, max_tokens=max_tokens))
    updates = drain(engine)
    answers = [tokens_of(updates["r", index]) for index in range(n)]
    cached = [final_of(updates["r", index]).num_cached_tokens for index in range(n)]
    return answers, engine.times.num_tokens - before, cached


@pytest.mark.parametrize("num_tokens", [18, 31, 32, 33, 100])
def test_each_sibling_computes_the_last_token_of_the_prompt_alone(num_tokens: int) -> None:
    engine, prompt = with_scheduler(shared_engine()), make_prompt(num_tokens)
    answers, num_computed, cached = run_siblings(engine, prompt, n=4, max_tokens=6)
    assert answers == answers_alone(shared_engine(), prompt, 4, 6) and len({*answers}) == 4
    assert num_computed == num_tokens + 3 + 4 * 5
    assert cached == [0, *[num_tokens - 1] * 3]
    # Of 33 tokens two pages hold all but the last.
    assert engine.scheduler.num_copied_pages == (0 if num_tokens == 33 else 3)


def test_siblings_that_find_a_slot_late_copy_what_is_left_of_the_prompt() -> None:
    engine, prompt = with_scheduler(shared_engine(), max_num_seqs=2), make_prompt(40)
    answers, num_computed, cached = run_siblings(engine, prompt, n=8, max_tokens=20)
    assert answers == answers_alone(shared_engine(), prompt, 8, 20)
    assert num_computed == 40 + 7 + 8 * 19 and cached == [0, *[39] * 7]


def test_siblings_of_a_prompt_of_less_than_a_page_do_not_wait_for_each_other() -> None:
    prompt = make_prompt(9)
    expected = answers_alone(shared_engine(), prompt, 4, 6)
    engine = with_scheduler(shared_engine())
    answers, num_computed, _ = run_siblings(engine, prompt, n=4, max_tokens=6)
    assert answers == expected and num_computed == 4 * 9 + 4 * 5
    answers, num_computed, cached = run_siblings(engine, prompt, n=4, max_tokens=6)
    assert answers == expected
    assert num_computed == 4 * 1 + 4 * 5 and cached == [8] * 4


def test_without_a_prefix_cache_siblings_share_nothing() -> None:
    engine, prompt = with_scheduler(shared_engine(), enable_prefix_caching=False), make_prompt(40)
    answers, num_computed, cached = run_siblings(engine, prompt, n=3, max_tokens=4)
    assert answers == answers_alone(shared_engine(), prompt, 3, 4)
    assert num_computed == 3 * 40 + 3 * 3 and cached == [0] * 3


@pytest.mark.parametrize("num_tokens", [20, 47, 61])
def test_pages_of_windows_are_copied_with_those_of_full_attention(num_tokens: int) -> None:
    engine, prompt = with_scheduler(built_with_windows()), make_prompt(num_tokens)
    answers, num_computed, _ = run_siblings(engine, prompt, n=3, max_tokens=30)
    assert answers == answers_alone(built_with_windows(), prompt, 3, 30)
    assert num_computed == num_tokens + 2 + 3 * 29
    assert engine.scheduler.num_copied_pages == 2 * 2
    assert engine.scheduler.num_window_pages_freed > 0


@pytest.mark.parametrize("build", [shared_engine, built_with_windows])
def test_a_chat_of_twenty_turns_computes_what_is_new_and_one_token(build) -> None:
    engine, draw = with_scheduler(build()), random.Random(6)
    chat, turns = (), []
    for turn in range(20):
        new = tuple(draw.randrange(3, 120) for _ in range(draw.randrange(2, 9)))
        before = engine.times.num_tokens
        (answer,) = generate(engine, [chat + new], sampled(max_tokens=5))
        # The last token of an answer is sampled and never computed: here it is, and in the next
        # turn it is not.
        num_new = len(new) + len(answer) - 1
        assert engine.times.num_tokens - before == num_new + (turn > 0)
        turns.append((chat + new, answer))
        chat += new + answer
    plain = with_scheduler(build(), enable_prefix_caching=False)
    for prompt, answer in turns:
        assert generate(plain, [prompt], sampled(max_tokens=5)) == [answer]
    assert len(chat) > 180 and engine.scheduler.num_copied_pages > 10


def test_an_answer_that_was_cut_by_a_stop_string_goes_on_where_it_was_cut() -> None:
    engine, prompt = with_scheduler(shared_engine()), make_prompt(20)
    add_request(engine, "r", prompt, greedy(30))
    tokens: list[int] = []
    while len(tokens) < 20:
        tokens += [token for update in engine.step() for token in update.new_token_ids]
    engine.abort("r", 0, num_output_tokens=6)  # of a page that is full by now
    drain(engine)
    chat = (*prompt, *tokens[:6], 7, 8, 9)
    before = engine.times.num_tokens
    answers = generate(engine, [chat], greedy(4))
    assert engine.times.num_tokens - before == 3 + 3
    plain = with_scheduler(shared_engine(), enable_prefix_caching=False)
    assert answers == generate(plain, [chat], greedy(4))


def test_a_prompt_that_differs_in_the_middle_of_a_page_copies_what_is_the_same() -> None:
    engine, first = with_scheduler(shared_engine()), make_prompt(30)
    second = (*first[:23], 2, *first[24:])
    generate(engine, [first], greedy(1))
    before = engine.times.num_tokens
    answers = generate(engine, [second], greedy(4))
    assert engine.times.num_tokens - before == 30 - 23 + 3
    plain = with_scheduler(shared_engine(), enable_prefix_caching=False)
    assert answers == generate(plain, [second], greedy(4))


def test_copies_keep_to_salts_and_to_requests_that_read_nothing() -> None:
    engine, prompt = with_scheduler(shared_engine()), make_prompt(10)
    for salt in ("a", "b", None):
        add_request(engine, "r", prompt, greedy(2), cache_salt=salt)
        drain(engine)
    add_request(engine, "r", prompt, greedy(2, skip_reading_prefix_cache=True))
    drain(engine)
    assert engine.scheduler.num_copied_pages == engine.scheduler.num_prefix_hits == 0
    add_request(engine, "r", prompt, greedy(2), cache_salt="a")
    drain(engine)
    assert (engine.scheduler.num_copied_pages, engine.scheduler.num_prefix_hits) == (1, 9)
    engine.scheduler.reset_prefix_cache()
    add_request(engine, "r", prompt, greedy(2), cache_salt="a")
    drain(engine)
    assert engine.scheduler.num_copied_pages == 1


def test_copied_pages_hold_nothing_of_the_poison_of_blank_pages() -> None:
    built = make_engine(
        GOLDENS_FOLDER / "llama_gqa", num_gpu_blocks_override=40, debug_poison_pages=True
    )
    prompts = [make_prompt(length, seed) for seed, length in enumerate((40, 24, 45))]
    for _ in range(3):
        for prompt in prompts:
            answers, _, _ = run_siblings(built.engine, prompt, n=4, max_tokens=12)
            assert answers == answers_alone(shared_engine(), prompt, 4, 12)
    assert built.engine.scheduler.num_copied_pages > 20
