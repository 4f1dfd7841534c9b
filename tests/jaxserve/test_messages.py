"""Frames between the processes: what is encoded comes back, and nothing else is taken."""

import random

import msgspec
import pytest

from jaxserve.distributed.messages import (
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    AbortRequest,
    AddRequest,
    BadFrameError,
    EngineStats,
    MemoryChanged,
    PrefixCacheReset,
    ReleaseCache,
    ResetPrefixCache,
    Shutdown,
    Sleep,
    StartProgressed,
    StepNews,
    WakeUp,
    decode_from_engine,
    decode_to_engine,
    encode_frame,
    frame_length,
)
from jaxserve.request import FinishReason, Request
from jaxserve.sampling_params import RequestOutputKind, SamplingParams
from jaxserve.step import SequenceUpdate, StopAbort, TokenLogprobs


def body_of(frame: bytes) -> bytes:
    assert frame_length(frame[:HEADER_BYTES]) == len(frame) - HEADER_BYTES
    return frame[HEADER_BYTES:]


def test_a_request_comes_back_as_it_was():
    request = Request(
        request_id="é",
        prompt_token_ids=(0, 151_935, 2**31 - 1),
        sampling_params=SamplingParams(
            n=3,
            temperature=0.7,
            seed=-5,
            stop=["a", "b"],
            stop_token_ids=[7],
            max_tokens=9,
            logprobs=2,
            output_kind=RequestOutputKind.DELTA,
        ),
        eos_token_ids=(2, 3),
        arrival_seconds=12.5,
        priority=-1,
        cache_salt="tenant é",
        timeout_seconds=2.5,
        ttft_goal_seconds=0.25,
        tpot_goal_seconds=0.01,
    )
    assert all(getattr(request, name) for name in request.__struct_fields__)
    message = decode_to_engine(body_of(encode_frame(AddRequest.of(request))))
    assert isinstance(message, AddRequest)
    assert message.request() == request


@pytest.mark.parametrize(
    "message",
    [
        AbortRequest("x"),
        Shutdown(),
        ResetPrefixCache(),
        Sleep(2, "keep"),
        WakeUp(("weights",)),
        ReleaseCache(),
        StopAbort(request_id="x", index=1, num_output_tokens=4, stop=None),
    ],
)
def test_other_messages_to_the_engine_come_back(message):
    assert decode_to_engine(body_of(encode_frame(message))) == message


def test_news_of_a_step_come_back_with_log_probabilities():
    logprobs = (TokenLogprobs(-0.5, 1, (4, 5), (-0.5, -1.25)),)
    updates = [
        SequenceUpdate(request_id="a", index=0, new_token_ids=(4,), logprobs=logprobs),
        SequenceUpdate(
            request_id="a",
            index=1,
            new_token_ids=(1, 2),
            finish_reason=FinishReason.STOP,
            stop_reason="end",
            num_preemptions=2,
        ),
        SequenceUpdate(request_id="b", index=0, finish_reason=FinishReason.ERROR, error="NaN"),
    ]
    news = StepNews(updates, EngineStats(num_running=2, kv_cache_usage=0.25))
    assert decode_from_engine(body_of(encode_frame(news))) == news


def test_answers_to_commands_come_back():
    for news in (PrefixCacheReset(), MemoryChanged(EngineStats(sleep_level=2), "full", True)):
        assert decode_from_engine(body_of(encode_frame(news))) == news


def test_a_message_of_the_other_direction_is_none():
    with pytest.raises(BadFrameError):
        decode_to_engine(body_of(encode_frame(StartProgressed("load", 0, 1))))


def test_a_length_that_no_message_has_is_refused():
    with pytest.raises(BadFrameError, match=f"at most {MAX_FRAME_BYTES}"):
        frame_length((MAX_FRAME_BYTES + 1).to_bytes(4, "little"))


def test_ten_thousand_random_and_damaged_bodies_give_one_kind_of_error():
    rng = random.Random(5)
    request = Request(request_id="a", prompt_token_ids=(1,), sampling_params=SamplingParams())
    good = body_of(encode_frame(AddRequest.of(request)))
    num_refused = 0
    for i in range(10_000):
        body = bytearray(rng.randbytes(rng.randrange(60)) if i % 2 else good)
        for _ in range(rng.randrange(1, 4)):
            if body:
                body[rng.randrange(len(body))] = rng.randrange(256)
        try:
            decode_to_engine(bytes(body))
        except BadFrameError:
            num_refused += 1
    assert num_refused > 5_000


def test_a_pickle_is_no_message():
    import pickle

    with pytest.raises(BadFrameError):
        decode_to_engine(pickle.dumps({"type": "Shutdown"}))


def test_parameters_that_break_a_rule_are_refused_when_they_are_decoded():
    request = Request(request_id="a", prompt_token_ids=(1,), sampling_params=SamplingParams())
    fields = msgspec.msgpack.decode(body_of(encode_frame(AddRequest.of(request))))
    fields["sampling_params"]["temperature"] = -1.0
    with pytest.raises(BadFrameError, match="temperature"):
        decode_to_engine(msgspec.msgpack.encode(fields))
