"""The engine process's loop and socket, around a real tiny engine in this process."""

import random
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from jaxserve.distributed.engine_process import EngineLoop, EngineSocket
from jaxserve.distributed.messages import (
    HEADER_BYTES,
    AbortRequest,
    AddRequest,
    FromEngine,
    PrefixCacheReset,
    RequestRefused,
    ResetPrefixCache,
    Shutdown,
    StepNews,
    ToEngine,
    decode_from_engine,
    encode_frame,
    frame_length,
)
from jaxserve.engine import Engine
from jaxserve.request import FinishReason, Request, SequenceStatus
from jaxserve.step import StopAbort
from tests.engine_runs import assert_idle_and_sane, greedy, shared_engine, with_scheduler
from tests.goldens_loader import load_golden

GOLDEN = load_golden("llama_gqa")
LONG, SHORT = GOLDEN.mixed[15], GOLDEN.mixed[4]


class Peer:
    """The other process: it sends, lets the engine turn, and keeps what comes."""

    def __init__(self, engine: Engine):
        self.socket, self._theirs = socket.socketpair()
        self.socket.settimeout(20)
        self.connection = EngineSocket(self._theirs, when_gone=lambda: None)
        self.connection.start()
        self.engine, self.loop = engine, EngineLoop(engine, self.connection)
        self.stream = self.socket.makefile("rb")
        self.news: list[FromEngine] = []

    def close(self) -> None:
        self.stream.close()
        self.socket.close()
        self.connection.join()
        self._theirs.close()

    def send(self, *messages: ToEngine) -> None:
        """Send, and wait until all have reached the engine's queue."""
        for message in messages:
            self.socket.sendall(encode_frame(message))
        while self.connection.inbox.qsize() < len(messages):
            threading.Event().wait(0.001)

    def receive(self) -> FromEngine:
        body = self.stream.read(frame_length(self.stream.read(HEADER_BYTES)))
        self.news.append(decode_from_engine(body))
        return self.news[-1]

    def turn(self) -> StepNews:
        """One turn of the engine, which has work, and its news."""
        self.loop.turn()
        news = self.receive()
        while not isinstance(news, StepNews):
            news = self.receive()
        return news

    def turn_until_idle(self) -> None:
        while self.engine.has_unfinished or self.connection.inbox.qsize():
            self.turn()
            self.engine.scheduler.check_invariants()

    def tokens_of(self, request_id: str) -> list[int]:
        return [token for update in self.updates_of(request_id) for token in update.new_token_ids]

    def updates_of(self, request_id: str):
        steps = [news for news in self.news if isinstance(news, StepNews)]
        updates = [update for step in steps for update in step.updates]
        return [update for update in updates if update.request_id == request_id]


def add(request_id: str, prompt, max_tokens: int = 30, **fields) -> AddRequest:
    params = greedy(max_tokens, **fields)
    prompt_token_ids = tuple(map(int, prompt))
    return AddRequest.of(
        Request(request_id=request_id, prompt_token_ids=prompt_token_ids, sampling_params=params)
    )


@pytest.fixture
def make_peer() -> Iterator[Callable[..., Peer]]:
    """Makes peers of an engine with other limits, and closes their sockets."""
    peers: list[Peer] = []

    def make(**limits) -> Peer:
        peers.append(Peer(with_scheduler(shared_engine(), **limits)))
        return peers[-1]

    yield make
    for peer in peers:
        peer.close()


@pytest.fixture
def peer(make_peer) -> Peer:
    return make_peer()


def test_tokens_come_in_one_frame_a_step_and_are_those_of_the_golden(peer):
    peer.send(add("a", LONG.prompt, 20), add("b", SHORT.prompt, 20))
    peer.turn_until_idle()
    assert peer.tokens_of("a") == list(LONG.tokens[:20])
    assert peer.tokens_of("b") == list(SHORT.tokens[:20])
    assert len(peer.news) == peer.engine.times.num_steps
    assert peer.news[-1].stats.num_running == 0 and peer.news[-1].stats.kv_cache_usage == 0
    assert_idle_and_sane(peer.engine)


def test_each_step_tells_how_many_output_tokens_were_given_out_so_far(peer):
    peer.send(add("a", LONG.prompt, 20), add("b", SHORT.prompt, 8))
    peer.turn_until_idle()
    steps = [news for news in peer.news if isinstance(news, StepNews)]
    num_tokens = 0
    for step in steps:
        num_tokens += sum(len(update.new_token_ids) for update in step.updates)
        assert step.stats.num_generation_tokens == num_tokens
    assert num_tokens == 28


def test_a_reset_is_answered_and_what_comes_after_it_finds_nothing(make_peer):
    peer = make_peer(enable_prefix_caching=True)
    for name, num_cached in (("a", 0), ("b", len(LONG.prompt) - 1)):
        peer.send(add(name, LONG.prompt, 20))
        peer.turn_until_idle()
        assert {update.num_cached_tokens for update in peer.updates_of(name)} == {num_cached}
    assert num_cached > 0
    peer.send(add("running", LONG.prompt, 20))
    peer.turn()
    peer.send(ResetPrefixCache(), add("c", LONG.prompt, 20))
    peer.turn_until_idle()
    assert peer.news.count(PrefixCacheReset()) == 1
    assert {update.num_cached_tokens for update in peer.updates_of("c")} == {0}
    assert all(peer.tokens_of(name) == list(LONG.tokens[:20]) for name in ("a", "b", "c"))
    assert peer.tokens_of("running") == list(LONG.tokens[:20])
    peer.send(ResetPrefixCache())  # an idle engine answers, too
    peer.loop.turn()
    assert peer.receive() == PrefixCacheReset()
    assert_idle_and_sane(peer.engine)


def abort_and_drain(peer: Peer, *names: str) -> None:
    """Abort, and see that each ends once by it, and that the engine is idle and sane."""
    peer.send(*(AbortRequest(name) for name in names for _ in range(2)))
    peer.turn_until_idle()
    for name in names:
        ends = [u.finish_reason for u in peer.updates_of(name) if u.finish_reason is not None]
        assert ends == [FinishReason.ABORT]
    assert_idle_and_sane(peer.engine)


def status_of(peer: Peer, name: str) -> SequenceStatus:
    (sequence,) = peer.engine.scheduler._roster.find(name, None)
    return sequence.status


def test_an_abort_that_comes_with_its_request_ends_it_before_any_step(peer):
    peer.send(add("a", LONG.prompt))
    abort_and_drain(peer, "a")
    assert peer.tokens_of("a") == []


def test_an_abort_ends_a_waiting_request(peer):
    peer.send(*(add(str(i), SHORT.prompt) for i in range(9)))
    peer.turn()
    assert status_of(peer, "8") is SequenceStatus.WAITING
    abort_and_drain(peer, "8")
    assert peer.tokens_of("8") == [] and len(peer.tokens_of("0")) == 30


@pytest.mark.parametrize("num_turns", [1, 2, 3])
def test_an_abort_ends_a_request_in_each_chunk_of_its_prompt(make_peer, num_turns):
    peer = make_peer(long_prefill_token_threshold=16)
    prompt = GOLDEN.mixed[16].prompt
    peer.send(add("a", prompt), add("b", SHORT.prompt))
    for _ in range(num_turns):
        peer.turn()
    (sequence,) = peer.engine.scheduler._roster.find("a", None)
    assert 0 < sequence.num_computed_tokens < len(prompt)
    abort_and_drain(peer, "a")
    assert peer.tokens_of("b") == list(SHORT.tokens[:30])


def test_an_abort_ends_a_request_that_decodes(peer):
    peer.send(add("a", LONG.prompt, 60), add("b", SHORT.prompt))
    while len(peer.tokens_of("a")) < 5:
        peer.turn()
    abort_and_drain(peer, "a")
    assert 5 <= len(peer.tokens_of("a")) < 60
    assert peer.tokens_of("b") == list(SHORT.tokens[:30])


def test_an_abort_ends_a_preempted_request(make_peer):
    peer = make_peer(num_pages=14)
    peer.send(add("a", LONG.prompt, 60), add("b", GOLDEN.mixed[10].prompt, 60))
    while peer.engine.scheduler.num_preemptions == 0:
        peer.turn()
    abort_and_drain(peer, "b")
    assert peer.engine.scheduler.num_preemptions > 0
    assert peer.tokens_of("a") == list(LONG.tokens[:60])


def test_a_stop_string_ends_one_sequence_and_keeps_the_tokens_that_the_client_saw(peer):
    peer.send(add("a", LONG.prompt, 60))
    while len(peer.tokens_of("a")) < 6:
        peer.turn()
    peer.send(StopAbort(request_id="a", index=0, num_output_tokens=4, stop="x"))
    peer.turn_until_idle()
    final = peer.updates_of("a")[-1]
    assert (final.finish_reason, final.stop_reason) == (FinishReason.STOP, "x")
    assert_idle_and_sane(peer.engine)


def test_the_pages_of_an_aborted_request_are_free_after_the_steps_in_flight(peer):
    peer.send(add("a", LONG.prompt, 60))
    while len(peer.tokens_of("a")) < 3:
        peer.turn()
    peer.send(AbortRequest("a"))
    num_steps = peer.engine.times.num_steps
    peer.turn_until_idle()
    assert peer.engine.times.num_steps == num_steps
    assert peer.news[-1].stats.kv_cache_usage == 0


def test_a_request_that_can_never_fit_the_pages_is_refused_and_the_next_is_served(make_peer):
    peer = make_peer(num_pages=5)
    peer.send(add("a", LONG.prompt, 60), add("b", SHORT.prompt, 20))
    peer.turn_until_idle()
    refused = [news for news in peer.news if isinstance(news, RequestRefused)]
    assert [news.request_id for news in refused] == ["a"]
    assert "KV cache" in refused[0].message
    assert peer.tokens_of("b") == list(SHORT.tokens[:20])


def test_an_id_in_use_is_refused_without_ending_the_first_request(peer):
    peer.send(add("a", SHORT.prompt, 20), add("a", LONG.prompt, 20))
    peer.turn_until_idle()
    assert any(isinstance(news, RequestRefused) for news in peer.news)
    assert peer.tokens_of("a") == list(SHORT.tokens[:20])


def test_random_frames_are_counted_and_dropped_and_the_engine_serves_on(peer):
    rng = random.Random(1)
    for _ in range(10_000):
        body = rng.randbytes(rng.randrange(40))
        peer.socket.sendall(len(body).to_bytes(4, "little") + body)
    peer.send(add("a", SHORT.prompt, 20))
    peer.turn_until_idle()
    assert peer.tokens_of("a") == list(SHORT.tokens[:20])
    assert peer.connection.num_bad_frames == 10_000
    assert peer.news[-1].stats.num_bad_frames == 10_000


def test_shutdown_ends_the_loop(peer):
    peer.send(add("a", LONG.prompt, 60), Shutdown())
    peer.loop.run()
    assert peer.loop.is_leaving


@pytest.mark.parametrize("last_bytes", [b"", b"\xff\xff\xff\xff", b"\x08\x00\x00\x00half"])
def test_the_end_of_the_stream_or_of_its_sense_ends_the_process(last_bytes):
    is_gone = threading.Event()
    ours, theirs = socket.socketpair()
    connection = EngineSocket(theirs, when_gone=is_gone.set)
    connection.start()
    with ours, theirs:
        ours.sendall(last_bytes)
        if not last_bytes.startswith(b"\xff"):
            ours.close()
        assert is_gone.wait(5)
        connection.flush()
        connection.join()
