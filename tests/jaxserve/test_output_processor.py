"""Tests of jaxserve/processing/output_processor.py and jaxserve/processing/sequence_output.py.

The tokenizer has one character a token, so that each test says which token completes what.
"""

import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE

from jaxserve.errors import InvalidRequestError
from jaxserve.outputs import Logprob, RequestOutput
from jaxserve.processing.output_processor import OutputProcessor
from jaxserve.request import FinishReason, Request
from jaxserve.sampling_params import RequestOutputKind, SamplingParams
from jaxserve.step import SequenceUpdate, StopAbort, TokenLogprobs
from jaxserve.text.tokenizer import Tokenizer

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind
POISON, HALF = -1, 0xC3


def make_tokenizer() -> Tokenizer:
    """Token i is the byte i; "$" is special, and 0xC3 begins a character of two bytes."""
    backend = Backend(BPE({chr(byte): byte for byte in [*range(0x21, 0x7F), HALF]}, []))
    backend.decoder = ByteLevel()
    backend.add_special_tokens(["$"])
    return Tokenizer(backend, special_tokens={})


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_processor(clock: Clock | None = None) -> OutputProcessor:
    return OutputProcessor(make_tokenizer(), clock or Clock())


def make_request(request_id: str = "r", **fields: Any) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=(65, 66),
        sampling_params=SamplingParams(**fields),
        arrival_seconds=99.0,
    )


def make_update(text: str, index: int = 0, request_id: str = "r", **fields: Any) -> SequenceUpdate:
    return SequenceUpdate(
        request_id=request_id, index=index, new_token_ids=tuple(map(ord, text)), **fields
    )


def run(processor: OutputProcessor, *updates: SequenceUpdate) -> list[RequestOutput]:
    """Give the updates one step each."""
    return [output for update in updates for output in processor.process([update]).outputs]


def test_cumulative_outputs_hold_all_so_far():
    processor = make_processor()
    processor.add(make_request(), "prompt")
    outputs = run(
        processor,
        make_update("ab"),
        make_update(
            "c", finish_reason=FinishReason.LENGTH, num_cached_tokens=2, scheduled_seconds=99.5
        ),
    )
    assert [output.outputs[0].text for output in outputs] == ["ab", "abc"]
    assert [output.finished for output in outputs] == [False, True]
    last = outputs[-1]
    assert (last.request_id, last.prompt, last.prompt_token_ids) == ("r", "prompt", [65, 66])
    assert last.outputs[0].token_ids == list(map(ord, "abc"))
    assert (last.outputs[0].finish_reason, last.outputs[0].stop_reason) == ("length", None)
    assert last.num_cached_tokens == 2
    assert processor.num_unfinished_requests == 0


def test_delta_outputs_hold_only_what_is_new():
    processor = make_processor()
    processor.add(make_request(output_kind=DELTA, logprobs=0))
    first, second, last = run(
        processor,
        make_update("ab", logprobs=(TokenLogprobs(-1.0, 1, (), ()),) * 2),
        make_update("c", logprobs=(TokenLogprobs(-0.5, 1, (), ()),)),
        make_update("", finish_reason=FinishReason.ABORT),
    )
    assert (first.outputs[0].text, second.outputs[0].text, last.outputs[0].text) == ("ab", "c", "")
    assert second.outputs[0].token_ids == [ord("c")]
    assert second.outputs[0].logprobs == [{ord("c"): Logprob(-0.5, 1, "c")}]
    assert second.outputs[0].cumulative_logprob == -2.5
    assert (last.outputs[0].finish_reason, last.outputs[0].token_ids) == ("abort", [])


def test_final_only_gives_one_output_when_every_sequence_is_finished():
    processor = make_processor()
    processor.add(make_request(n=2, output_kind=FINAL_ONLY))
    end = FinishReason.LENGTH
    outputs = run(processor, make_update("x", 1, finish_reason=end), make_update("a"))
    assert outputs == []
    (output,) = run(processor, make_update("b", finish_reason=end))
    assert [completion.text for completion in output.outputs] == ["ab", "x"]
    assert output.finished


def test_sequences_of_one_request_share_an_output_a_step():
    processor = make_processor()
    processor.add(make_request(n=3, output_kind=DELTA))
    step = processor.process([make_update("x", 2), make_update("a", 0)])
    (output,) = step.outputs
    assert [(part.index, part.text) for part in output.outputs] == [(0, "a"), (2, "x")]


def test_a_stop_string_ends_the_sequence_and_tells_the_engine():
    processor = make_processor()
    processor.add(make_request(stop=["END"]))
    (first,) = run(processor, make_update("abE"))
    step = processor.process([make_update("NDzz")])
    assert first.outputs[0].text == "ab"
    (output,) = step.outputs
    completion = output.outputs[0]
    assert (completion.text, completion.finish_reason) == ("ab", "stop")
    assert completion.stop_reason == "END"
    assert completion.token_ids == list(map(ord, "abEND"))
    assert step.aborts == [StopAbort(request_id="r", index=0, num_output_tokens=5, stop="END")]
    assert output.metrics is not None and output.metrics.num_generation_tokens == 5


def test_updates_after_a_stop_string_are_ignored():
    processor = make_processor()
    processor.add(make_request(n=2, stop=["."]))
    run(processor, make_update("a."))
    late = processor.process(
        [make_update("late"), make_update("", finish_reason=FinishReason.ABORT)]
    )
    assert (late.outputs, late.aborts) == ([], [])
    (output,) = run(processor, make_update("b", 1, finish_reason=FinishReason.LENGTH))
    assert [part.text for part in output.outputs] == ["a", "b"]
    assert output.finished
    assert run(processor, make_update("later", 1)) == []


def test_a_stop_string_in_the_engines_last_update_wins_and_needs_no_abort():
    processor = make_processor()
    processor.add(make_request(stop=["."]))
    step = processor.process([make_update("a.b", finish_reason=FinishReason.LENGTH)])
    completion = step.outputs[0].outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("a", "stop", ".")
    assert step.aborts == []


def test_held_back_text_comes_out_when_the_engine_ends_the_sequence():
    processor = make_processor()
    processor.add(make_request(stop=["END"], output_kind=DELTA))
    outputs = run(
        processor, make_update("abEN"), make_update("", finish_reason=FinishReason.LENGTH)
    )
    assert [output.outputs[0].text for output in outputs] == ["ab", "EN"]


def test_a_stop_string_that_only_the_end_completes_is_still_a_stop():
    processor = make_processor()
    processor.add(make_request(stop=["b\ufffd"]))
    step = processor.process([make_update("ab\xc3", finish_reason=FinishReason.LENGTH)])
    completion = step.outputs[0].outputs[0]
    assert (completion.text, completion.finish_reason) == ("a", "stop")
    assert completion.stop_reason == "b\ufffd"
    assert len(completion.token_ids) == 3
    assert step.aborts == []


def test_stop_strings_are_not_looked_for_in_the_first_min_tokens():
    processor = make_processor()
    processor.add(make_request(stop=["."], min_tokens=2))
    (output,) = run(processor, make_update("..a."))
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("..a", ".")


@pytest.mark.parametrize(("is_skipped", "text"), [(True, "ab"), (False, "a$b")])
def test_special_tokens_are_shown_only_when_asked_for(is_skipped, text):
    processor = make_processor()
    processor.add(make_request(skip_special_tokens=is_skipped, logprobs=0))
    entries = tuple(TokenLogprobs(-1.0, 1, (), ()) for _ in "a$b")
    (output,) = run(processor, make_update("a$b", logprobs=entries))
    completion = output.outputs[0]
    assert completion.text == text
    assert completion.logprobs is not None
    assert [entry.decoded_token for d in completion.logprobs for entry in d.values()] == list("a$b")


@pytest.mark.parametrize(("is_kept", "text"), [(False, "a"), (True, "a!")])
def test_the_stop_tokens_text_is_shown_only_when_asked_for(is_kept, text):
    processor = make_processor()
    processor.add(make_request(include_stop_str_in_output=is_kept))
    (output,) = run(
        processor, make_update("a!", finish_reason=FinishReason.STOP, stop_reason=ord("!"))
    )
    completion = output.outputs[0]
    assert (completion.text, completion.stop_reason) == (text, ord("!"))
    assert completion.token_ids == list(map(ord, "a!"))


def test_logprobs_hold_one_entry_more_when_the_chosen_token_is_not_among_the_top():
    processor = make_processor()
    processor.add(make_request(logprobs=2))
    top = ((ord("a"), ord("b"), ord("c")), (-0.1, -3.0, -4.0))
    entries = (TokenLogprobs(-0.1, 1, *top), TokenLogprobs(-9.0, 40, *top))
    (output,) = run(processor, make_update("az", logprobs=entries))
    completion = output.outputs[0]
    a, b = Logprob(-0.1, 1, "a"), Logprob(-3.0, 2, "b")
    assert completion.logprobs == [
        {ord("a"): a, ord("b"): b},
        {ord("z"): Logprob(-9.0, 40, "z"), ord("a"): a, ord("b"): b},
    ]
    assert completion.cumulative_logprob == pytest.approx(-9.1)


def test_logprobs_of_tokens_after_a_stop_string_are_dropped():
    processor = make_processor()
    processor.add(make_request(logprobs=0, stop="."))
    entries = tuple(TokenLogprobs(-1.0, 1, (), ()) for _ in "a.b")
    (output,) = run(processor, make_update("a.b", logprobs=entries))
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None and len(logprobs) == len(output.outputs[0].token_ids) == 2
    assert output.outputs[0].cumulative_logprob == -2.0


def test_without_logprobs_there_are_none():
    processor = make_processor()
    processor.add(make_request())
    (output,) = run(processor, make_update("a"))
    assert output.outputs[0].logprobs is None
    assert output.outputs[0].cumulative_logprob is None


@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_text_stays_empty_when_it_is_not_wanted_or_cannot_be_made(has_tokenizer):
    processor = OutputProcessor(make_tokenizer() if has_tokenizer else None)
    processor.add(make_request(detokenize=not has_tokenizer, logprobs=0))
    (output,) = run(
        processor,
        make_update(
            "a", logprobs=(TokenLogprobs(-1.0, 1, (), ()),), finish_reason=FinishReason.STOP
        ),
    )
    completion = output.outputs[0]
    assert (completion.text, completion.token_ids) == ("", [ord("a")])
    assert completion.logprobs == [{ord("a"): Logprob(-1.0, 1, None)}]


def test_stop_strings_need_a_tokenizer():
    with pytest.raises(InvalidRequestError, match="stop must be empty when .* no tokenizer"):
        OutputProcessor(None).add(make_request(stop="."))


def test_an_error_of_the_row_is_told_to_the_client_with_the_text_so_far():
    processor = make_processor()
    processor.add(make_request())
    (output,) = run(
        processor, make_update("a", finish_reason=FinishReason.ERROR, error="logits held NaN")
    )
    completion = output.outputs[0]
    assert (completion.text, completion.finish_reason) == ("a", "error")
    assert completion.error == "logits held NaN"
    assert output.finished


def test_a_sequence_whose_text_cannot_be_made_fails_alone(caplog):
    processor = make_processor()
    for request_id in ("bad", "good"):
        processor.add(make_request(request_id))
    with caplog.at_level(logging.ERROR):
        step = processor.process(
            [
                SequenceUpdate(request_id="bad", index=0, new_token_ids=(POISON,)),
                make_update("a", request_id="good"),
            ]
        )
    bad, good = step.outputs
    assert bad.outputs[0].finish_reason == "error"
    assert bad.outputs[0].error == "the output could not be decoded: OverflowError"
    assert (good.outputs[0].text, good.finished) == ("a", False)
    assert step.aborts == [StopAbort(request_id="bad", index=0, num_output_tokens=0, stop=None)]
    assert "bad" in caplog.text


def test_missing_logprobs_are_an_error_and_not_silence(caplog):
    processor = make_processor()
    processor.add(make_request(logprobs=1))
    (output,) = run(processor, make_update("a"))
    assert output.outputs[0].finish_reason == "error"
    assert "no text for request r" in caplog.text


def test_an_id_in_use_is_refused():
    processor = make_processor()
    processor.add(make_request())
    with pytest.raises(InvalidRequestError, match="request_id must differ"):
        processor.add(make_request())
    run(processor, make_update("a", finish_reason=FinishReason.LENGTH))
    processor.add(make_request())
    assert processor.num_unfinished_requests == 1


def test_a_dropped_request_gives_nothing_more():
    processor = make_processor()
    processor.add(make_request())
    assert processor.drop("r") is True
    assert processor.drop("r") is False
    assert run(processor, make_update("a")) == []


def test_the_prompts_list_is_made_while_the_device_works_on_the_next_token():
    processor = make_processor()
    processor.add(make_request(output_kind=FINAL_ONLY))
    made = processor._requests["r"].prompt_token_ids
    assert made == []
    assert run(processor, make_update("a")) == []
    assert made == [65, 66]
    (output,) = run(processor, make_update("b", finish_reason=FinishReason.LENGTH))
    assert output.prompt_token_ids is made


def test_times_are_of_the_one_monotonic_clock():
    clock = Clock()
    processor = make_processor(clock=clock)
    processor.add(make_request(n=2))
    clock.now = 103.0
    (first,) = run(processor, make_update("a", num_preemptions=1, scheduled_seconds=102.0))
    clock.now = 107.0
    (second,) = processor.process(
        [
            make_update("b"),
            make_update("c", 1, num_preemptions=2, scheduled_seconds=101.0),
        ]
    ).outputs
    clock.now = 108.0
    end = FinishReason.ABORT
    (last,) = processor.process(
        [make_update("", finish_reason=end), make_update("", 1, finish_reason=end)]
    ).outputs
    assert first.metrics is not None and second.metrics is not None and last.metrics is not None
    assert (first.metrics.arrival_time, first.metrics.queued_ts) == (99.0, 100.0)
    assert (first.metrics.first_token_ts, first.metrics.first_token_latency) == (103.0, 4.0)
    assert (first.metrics.last_token_ts, first.metrics.num_generation_tokens) == (103.0, 1)
    assert (second.metrics.first_token_ts, second.metrics.last_token_ts) == (103.0, 107.0)
    assert (last.metrics.last_token_ts, last.metrics.num_generation_tokens) == (107.0, 3)
    assert last.metrics.num_preemptions == 3
    assert (first.metrics.scheduled_ts, last.metrics.scheduled_ts) == (102.0, 101.0)


def test_an_update_without_tokens_or_end_gives_no_output():
    processor = make_processor()
    processor.add(make_request())
    assert run(processor, make_update("", num_preemptions=1)) == []


def test_stream_interval_gathers_tokens_between_the_first_and_the_last_output():
    processor = make_processor()
    processor.add(make_request(stream_interval=3, output_kind=DELTA))
    updates = [make_update(letter) for letter in "abcdefg"]
    end = make_update("h", finish_reason=FinishReason.LENGTH)
    outputs = run(processor, *updates, end)
    assert [output.outputs[0].text for output in outputs] == ["a", "bcd", "efg", "h"]


def test_outputs_given_earlier_do_not_change_later():
    processor = make_processor()
    processor.add(make_request())
    (first,) = run(processor, make_update("a"))
    run(processor, make_update("b"))
    assert first.outputs[0].token_ids == [ord("a")]
    assert first.metrics is not None and first.metrics.num_generation_tokens == 1


@given(
    pieces=st.lists(
        st.tuples(st.integers(0, 1), st.text("ab.", max_size=4)), min_size=1, max_size=10
    ),
    stop=st.sampled_from([None, ".", "ab", ["a.b", ".."]]),
    interval=st.none() | st.integers(1, 4),
)
def test_all_kinds_of_output_tell_the_same(pieces, stop, interval):
    results = {}
    for kind in RequestOutputKind:
        processor = make_processor()
        processor.add(make_request(n=2, stop=stop, output_kind=kind, stream_interval=interval))
        total = RequestOutput("r", None, [65, 66])
        ends = [make_update("", i, finish_reason=FinishReason.LENGTH) for i in range(2)]
        updates = [make_update(text, index) for index, text in pieces]
        for output in run(processor, *updates, *ends):
            total.add(output, aggregate=kind is DELTA)
        assert total.finished
        assert processor.num_unfinished_requests == 0
        total.metrics = None
        results[kind] = total
    assert results[DELTA] == results[CUMULATIVE] == results[FINAL_ONLY]
    for completion in results[DELTA].outputs:
        whole = "".join(text for index, text in pieces if index == completion.index)
        assert whole.startswith(completion.text)
        assert completion.stop_reason is not None or completion.text == whole


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("end", [FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT])
def test_text_that_is_made_at_the_end_is_that_of_deltas(end: FinishReason, is_kept: bool):
    texts = {}
    for kind in (DELTA, FINAL_ONLY):
        processor = make_processor()
        processor.add(make_request(n=2, include_stop_str_in_output=is_kept, output_kind=kind))
        updates = [make_update("a$"), make_update("x\xc3", 1), make_update("\xc3b")]
        updates += [make_update("c", finish_reason=end, num_preemptions=2)]
        ended = make_update(
            "", 1, finish_reason=FinishReason.ABORT, num_cached_tokens=1, scheduled_seconds=99.5
        )
        updates += [ended]
        total = RequestOutput("r", None, [65, 66])
        *_, last = outputs = run(processor, *updates)
        for output in outputs:
            total.add(output, aggregate=True)
        assert last.num_cached_tokens == 1 and total.metrics is not None
        assert (total.metrics.num_generation_tokens, total.metrics.num_preemptions) == (7, 2)
        texts[kind] = [(part.text, part.token_ids, part.finish_reason) for part in total.outputs]
    assert texts[FINAL_ONLY] == texts[DELTA]
    ends = "" if end is FinishReason.STOP and not is_kept else "c"
    assert texts[DELTA][0][0] == f"a\ufffdb{ends}"


@pytest.mark.parametrize("kind", [DELTA, RequestOutputKind.CUMULATIVE, FINAL_ONLY])
@pytest.mark.parametrize("first", [0, 1])
def test_cached_tokens_are_those_that_the_first_sequence_found(kind, first: int):
    """Its siblings find the prompt that it computed; the client's prompt counts once."""
    processor = make_processor()
    processor.add(make_request(n=3, output_kind=kind))
    found = {0: (48, 101.0), 1: (48, 102.0), 2: (0, None)} | {first: (16, 100.5)}
    updates = [
        make_update("x" if seconds else "", index, num_cached_tokens=count,
                    scheduled_seconds=seconds, finish_reason=FinishReason.TIMEOUT)
        for index, (count, seconds) in sorted(found.items(), key=lambda item: item[1][1] or 200)
    ]  # fmt: skip
    outputs = run(processor, *updates)
    assert [output.num_cached_tokens for output in outputs] == [16] * len(outputs)
    assert outputs[-1].finished and outputs[-1].outputs[-1].finish_reason == "timeout"


def test_a_request_that_timed_out_keeps_its_text_and_one_that_never_ran_has_none():
    processor = make_processor()
    for name in ("ran", "waited"):
        processor.add(make_request(name, output_kind=FINAL_ONLY))
    end = FinishReason.TIMEOUT
    ran, waited = run(
        processor,
        make_update("ab", request_id="ran", scheduled_seconds=100.0),
        make_update("", request_id="ran", scheduled_seconds=100.0, finish_reason=end),
        make_update("", request_id="waited", finish_reason=end),
    )
    for output, text, seconds in ((ran, "ab", 100.0), (waited, "", None)):
        assert output.metrics is not None and output.metrics.scheduled_ts == seconds
        assert (output.outputs[0].text, output.outputs[0].finish_reason) == (text, "timeout")


def test_a_final_only_request_with_stop_strings_still_ends_at_once():
    processor = make_processor()
    processor.add(make_request(stop="b", output_kind=FINAL_ONLY))
    assert processor.process([make_update("a")]).aborts == []
    (abort,) = processor.process([make_update("bc")]).aborts
    assert (abort.num_output_tokens, abort.stop) == (2, "b")


def test_text_that_cannot_be_made_at_the_end_fails_its_request_alone(caplog):
    processor = make_processor()
    for request_id in ("bad", "good"):
        processor.add(make_request(request_id, output_kind=FINAL_ONLY))
    poison = SequenceUpdate(request_id="bad", index=0, new_token_ids=(POISON,))
    assert processor.process([poison, make_update("a", request_id="good")]).outputs == []
    end = FinishReason.LENGTH
    ends = [make_update("b", request_id=i, finish_reason=end) for i in ("bad", "good")]
    bad, good = processor.process(ends).outputs
    assert bad.outputs[0].finish_reason == "error"
    assert bad.outputs[0].error == "the output could not be decoded: OverflowError"
    assert (good.outputs[0].text, good.outputs[0].finish_reason) == ("ab", "length")
