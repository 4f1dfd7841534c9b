"""Tests of jaxserve/llm.py and of what it is made of, on a tiny checkpoint with 256 words."""

import functools
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxserve
from jaxserve.config import EngineConfig
from jaxserve.errors import (
    EngineConfigError,
    InvalidRequestError,
    ModelLoadError,
    RequestTooLongError,
)
from jaxserve.llm import LLM
from jaxserve.sampling_params import RequestOutputKind, SamplingParams
from jaxserve.scheduling.policies import PriorityFirst
from jaxserve.step import SequenceUpdate
from tests.jaxserve.scheduler_builders import make_scheduler
from tests.tiny_llm import CHAT_TEMPLATE, GOLDEN, MODEL, SETTINGS, to_text, write_tokenizer

PROMPTS = [list(case.prompt) for case in GOLDEN.mixed if len(case.prompt) <= 60][:6]
TOKENS = [list(case.tokens) for case in GOLDEN.mixed if len(case.prompt) <= 60][:6]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("words"))


@pytest.fixture(scope="module")
def llm(tokenizer: Path) -> LLM:
    return LLM(MODEL, tokenizer=tokenizer, **SETTINGS)


@pytest.fixture(autouse=True)
def everything_is_freed(request: pytest.FixtureRequest):
    yield
    if "llm" in request.fixturenames:
        llm = request.getfixturevalue("llm")
        assert not llm.engine.has_unfinished
        assert llm.engine.scheduler.kv_cache_usage == 0
        assert ids(llm.generate(PROMPTS[0], greedy(8), use_tqdm=False)) == [TOKENS[0][:8]]


def greedy(max_tokens: int = 20, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **fields)


def ids(outputs: list[jaxserve.RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


class Bar:
    """Stands for tqdm, and notes its calls."""

    def __init__(self, **options: Any):
        self.options, self.updates, self.is_closed = options, [], False

    def update(self, count: int) -> None:
        self.updates.append(count)

    def close(self) -> None:
        self.is_closed = True


def test_outputs_stand_in_the_order_of_the_prompts_whichever_ends_first(llm: LLM):
    lengths = [20, 1, 13, 2, 7, 3]
    outputs = llm.generate(PROMPTS, [greedy(length) for length in lengths], use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == PROMPTS
    assert ids(outputs) == [t[:length] for t, length in zip(TOKENS, lengths, strict=True)]
    assert all(
        output.finished and output.outputs[0].finish_reason == "length" for output in outputs
    )


@pytest.mark.parametrize(
    "form",
    [
        lambda prompt: prompt,
        tuple,
        np.array,
        lambda prompt: [prompt],
        lambda prompt: {"prompt_token_ids": prompt},
        lambda prompt: [{"prompt_token_ids": np.array(prompt), "multi_modal_data": None}],
    ],
    ids=["list", "tuple", "array", "list of lists", "dict", "list of dicts"],
)
def test_a_prompt_of_ids_has_many_forms(llm: LLM, form):
    (output,) = llm.generate(form(PROMPTS[1]), greedy(), use_tqdm=False)
    assert (output.prompt, output.prompt_token_ids) == (None, PROMPTS[1])
    assert output.outputs[0].token_ids == TOKENS[1][:20]


def test_prompts_of_text_have_text_in_their_outputs(llm: LLM):
    texts = [to_text([5, 6, 7]), {"prompt": to_text([8, 9])}]
    outputs = llm.generate(texts, greedy(4), use_tqdm=False)
    assert [output.prompt for output in outputs] == ["w5 w6 w7", "w8 w9"]
    assert [output.prompt_token_ids for output in outputs] == [[5, 6, 7], [8, 9]]
    for output in outputs:
        completion = output.outputs[0]
        decoded = llm.get_tokenizer().decode(completion.token_ids)
        assert completion.text.strip() == decoded


def test_no_prompts_give_no_outputs(llm: LLM):
    assert llm.generate([], greedy(), use_tqdm=False) == []


def test_several_sequences_of_a_prompt_differ_and_stand_by_index(llm: LLM):
    params = SamplingParams(n=6, max_tokens=8, seed=1)
    (output,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
    assert [completion.index for completion in output.outputs] == list(range(6))
    assert len({tuple(completion.token_ids) for completion in output.outputs}) > 1
    (again,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
    assert [c.token_ids for c in again.outputs] == [c.token_ids for c in output.outputs]


def test_the_users_params_are_not_changed(llm: LLM):
    params = greedy(3, output_kind=RequestOutputKind.DELTA)
    llm.generate(PROMPTS[:2], params, use_tqdm=False)
    assert params == greedy(3, output_kind=RequestOutputKind.DELTA)


def test_the_bar_counts_finished_prompts_up_to_all(llm: LLM):
    bars: list[Bar] = []

    def make(**options: Any) -> Bar:
        bars.append(Bar(**options))
        return bars[0]

    llm.generate(PROMPTS, [greedy(3 + 4 * i) for i in range(6)], use_tqdm=make)
    (bar,) = bars
    assert bar.options["total"] == sum(bar.updates) == 6
    assert len(bar.updates) > 2 and 0 not in bar.updates
    assert bar.is_closed


def test_the_default_bar_goes_to_stderr_and_can_be_switched_off(llm: LLM, capsys):
    llm.generate(PROMPTS[0], greedy(2))
    assert "Processed prompts" in capsys.readouterr().err
    llm.generate(PROMPTS[0], greedy(2), use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_an_interrupt_in_the_middle_leaves_the_engine_usable(llm: LLM):
    class Interrupting(Bar):
        def update(self, count: int) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, [greedy(3 + 4 * i) for i in range(6)], use_tqdm=Interrupting)


def test_ctrl_c_inside_a_step_takes_effect_after_it(llm: LLM, monkeypatch):
    """A step whose result was not taken in would leave its rows waiting for ever."""
    runner = llm.engine.runner
    collect, num_collected = runner.collect, 0

    def interrupted_collect(handle):
        nonlocal num_collected
        num_collected += 1
        if num_collected == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return collect(handle)

    monkeypatch.setattr(runner, "collect", interrupted_collect)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, greedy(), use_tqdm=False)
    assert 3 <= num_collected < 3 + 6
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_generation_works_in_another_thread(llm: LLM):
    results = []
    run = threading.Thread(
        target=lambda: results.append(llm.generate(PROMPTS[1], greedy(), use_tqdm=False))
    )
    run.start()
    run.join()
    assert ids(results[0]) == [TOKENS[1][:20]]


def test_streamed_deltas_join_to_the_whole_output(llm: LLM):
    deltas = list(llm.stream(PROMPTS[2], greedy()))
    assert [t for delta in deltas for t in delta.outputs[0].token_ids] == TOKENS[2][:20]
    assert [delta.finished for delta in deltas] == [False] * 19 + [True]
    (whole,) = llm.generate(PROMPTS[2], greedy(), use_tqdm=False)
    assert "".join(delta.outputs[0].text for delta in deltas) == whole.outputs[0].text


def test_generate_between_two_outputs_of_a_stream_disturbs_neither(llm: LLM):
    stream = llm.stream(PROMPTS[3], greedy())
    tokens = list(next(stream).outputs[0].token_ids)
    assert ids(llm.generate(PROMPTS[:3], greedy(5), use_tqdm=False)) == [t[:5] for t in TOKENS[:3]]
    tokens += [t for delta in stream for t in delta.outputs[0].token_ids]
    assert tokens == TOKENS[3][:20]


def test_a_stream_that_is_read_by_the_bar_of_a_generate_disturbs_neither(llm: LLM):
    stream = llm.stream(PROMPTS[3], greedy())
    tokens: list[int] = []

    class Reading(Bar):
        def update(self, count: int) -> None:
            tokens.extend(t for delta in stream for t in delta.outputs[0].token_ids)

    lengths = [1, 9, 5]
    params = [greedy(length) for length in lengths]
    outputs = llm.generate(PROMPTS[:3], params, use_tqdm=Reading)
    assert ids(outputs) == [t[:n] for t, n in zip(TOKENS, lengths, strict=False)]
    assert tokens == TOKENS[3][:20]


def test_a_stream_left_early_ends_its_request(llm: LLM):
    num_steps = llm.engine.times.num_steps
    for _ in llm.stream(PROMPTS[0], greedy(60)):
        break
    assert not llm.engine.has_unfinished
    assert llm.engine.times.num_steps - num_steps < 6


def test_a_stream_that_was_never_read_costs_nothing(llm: LLM):
    stream = llm.stream(PROMPTS[0], greedy())
    assert not llm.engine.has_unfinished
    del stream


def test_a_stream_is_of_one_prompt(llm: LLM):
    with pytest.raises(InvalidRequestError, match="prompt must be one"):
        llm.stream([[1], [2]], greedy())  # pyright: ignore[reportArgumentType]


BAD_PROMPTS: dict[str, tuple[Any, str]] = {
    "negative": ([-1, 2], r"prompt_token_ids must hold integers in \[0, 256\); got -1"),
    "past the vocabulary": ([256], r"prompt_token_ids must hold .*; got 256"),
    "bools": ([True, False], "prompt must be text, a list of token ids, or a dict; got True"),
    "a bool among ids": ([[1, True]], "must hold integers .* got True"),
    "floats": (np.array([[1.5]]), "must hold integers .* got 1.5"),
    "no axis": (np.array(3), "prompts must be text, token ids"),
    "None": (None, "prompts must be text"),
    "empty text": ("", "prompt must give at least one token; got ''"),
    "empty ids": ([[]], "prompt_token_ids must hold at least one id"),
    "half a surrogate pair": ("w1 \ud800", "text must be valid Unicode"),
    "one bad among good": ([[1], [300]], "got 300"),
    "embeddings": ({"prompt_embeds": [1.0]}, "prompt_embeds is not supported in this release"),
    "too long": ([1] * 128, "maximum context length is 128 tokens"),
    "too long with the output": ([1] * 120, "prompt and max_tokens need 140 tokens"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_a_bad_prompt_is_refused_in_one_sentence(llm: LLM, name: str):
    prompt, message = BAD_PROMPTS[name]
    with pytest.raises(InvalidRequestError, match=message) as caught:
        llm.generate(prompt, greedy(), use_tqdm=False)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


BAD_PARAMS: dict[str, tuple[Any, str]] = {
    "too many": ([greedy()] * 2, "sampling_params must be one, or one for each of 1 prompts"),
    "a dict": ({"temperature": 0}, "sampling_params must be a SamplingParams"),
    "None in a list": ([None], "sampling_params must hold only SamplingParams"),
    "a penalty": (SamplingParams(presence_penalty=1), "presence_penalty is not supported"),
    "an id past the vocabulary": (SamplingParams(stop_token_ids=[256]), "inside the vocabulary"),
}


@pytest.mark.parametrize("name", BAD_PARAMS)
def test_bad_parameters_are_refused_in_one_sentence(llm: LLM, name: str):
    params, message = BAD_PARAMS[name]
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate(PROMPTS[0], params, use_tqdm=False)


def test_parameters_broken_after_they_were_made_are_refused(llm: LLM):
    params = greedy()
    params.max_tokens = 0
    with pytest.raises(InvalidRequestError, match="max_tokens must be at least 1; got 0"):
        llm.generate(PROMPTS[0], params, use_tqdm=False)


@pytest.mark.parametrize("name", ["lora_request", "tokenization_kwargs", "mm_processor_kwargs"])
def test_arguments_of_later_releases_are_refused_by_name(llm: LLM, name: str):
    arguments: dict[str, Any] = {name: [1]}
    for call in (llm.generate, llm.chat):
        with pytest.raises(InvalidRequestError, match=f"{name} is not supported in this release"):
            call([{"role": "user", "content": "w5", "prompt": "w5"}], greedy(), **arguments)


def test_chat_renders_one_conversation_or_many(llm: LLM):
    first = [{"role": "user", "content": "w5"}]
    second = [{"role": "system", "content": "w6"}, {"role": "user", "content": "w7"}]
    outputs = llm.chat([first, second], greedy(3), use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [[2, 5, 9], [1, 6, 2, 7, 9]]
    (alone,) = llm.chat(first, greedy(3), use_tqdm=False)
    assert alone.outputs[0].token_ids == outputs[0].outputs[0].token_ids
    streamed = [t for o in llm.stream_chat(first, greedy(3)) for t in o.outputs[0].token_ids]
    assert streamed == alone.outputs[0].token_ids


def test_chat_takes_another_template_and_continues_a_message(llm: LLM):
    messages = [{"role": "user", "content": "w5"}, {"role": "assistant", "content": "w6"}]
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    (output,) = llm.chat(messages, greedy(2), use_tqdm=False, **options)
    assert output.prompt_token_ids == [2, 5, 3, 6]
    template = "{{ messages[0].content }} w200"
    (output,) = llm.chat(messages, greedy(2), use_tqdm=False, chat_template=template)
    assert output.prompt_token_ids == [5, 200]


BAD_CHATS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "text": ("hello", {}, "messages must be a list of messages"),
    "a dict": ({"role": "user"}, {}, "messages must be a list of messages"),
    "no role": ([{"content": "w5"}], {}, r"messages\[0\].role must be a text"),
    "a message among chats": ([[{"role": "user", "content": "w5"}], 3], {}, "messages must be"),
    "an image": (
        [{"role": "user", "content": [{"type": "image_url"}]}],
        {},
        "must be 'text', since this engine reads text only",
    ),
    "a file's name": (
        [{"role": "user", "content": "w5"}],
        {"chat_template": "chat.jinja"},
        "chat_template must be the text of a Jinja template",
    ),
    "parts": (
        [{"role": "user", "content": "w5"}],
        {"chat_template_content_format": "openai"},
        "chat_template_content_format must be 'auto' or 'string'",
    ),
}


@pytest.mark.parametrize("name", BAD_CHATS)
def test_a_bad_chat_is_refused_in_one_sentence(llm: LLM, name: str):
    messages, options, message = BAD_CHATS[name]
    with pytest.raises(InvalidRequestError, match=message):
        llm.chat(messages, greedy(), use_tqdm=False, **options)


def test_the_engine_begins_before_it_has_all_requests_where_that_changes_no_step(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
):
    settings: dict[str, Any] = SETTINGS | {
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
    }
    config = EngineConfig(model=MODEL, **settings)
    early = LLM.from_config(config)
    step, num_waiting = early.engine.step, list[int]()

    def noting_step() -> list[SequenceUpdate]:
        num_waiting.append(early.engine.scheduler.num_waiting)
        return step()

    monkeypatch.setattr(early.engine, "step", noting_step)
    outputs = early.generate(PROMPTS * 9, greedy(6), use_tqdm=False)
    assert ids(outputs) == [tokens[:6] for tokens in TOKENS] * 9
    assert 0 < num_waiting[0] < len(outputs) - SETTINGS["max_num_seqs"]

    assert early.engine.scheduler.lookahead_tokens == 2 * 64
    assert llm.engine.scheduler.lookahead_tokens is None  # it has a prefix cache
    make = functools.partial(make_scheduler, max_num_batched_tokens=64, max_steps_in_flight=2)
    assert make().lookahead_tokens == 2 * 64
    assert make(policy=PriorityFirst()).lookahead_tokens is None
    assert make(long_prefill_token_threshold=8).lookahead_tokens is None


def test_all_requests_are_seen_to_fit_the_pool_before_one_runs(llm: LLM, monkeypatch):
    """The pool of SETTINGS takes all that the model does, so it is called smaller than it is."""
    monkeypatch.setattr(type(llm.engine.scheduler), "max_tokens_per_sequence", 30)
    monkeypatch.setattr(llm.engine, "step", lambda: pytest.fail("a step ran"))
    with pytest.raises(RequestTooLongError, match="must fit the KV cache of 30 tokens; got 5"):
        llm.generate([[5, 6], [5] * 5], [greedy(20), greedy(26)], use_tqdm=False)


def test_a_request_that_cannot_fit_the_pool_leaves_nothing_of_its_call_behind(
    llm: LLM, monkeypatch
):
    """The second of three requests is refused when it is added, after the first one was."""
    add, seen = llm.engine.add, []

    def refusing_add(request: Any) -> None:
        seen.append(request.request_id)
        if len(seen) == 2:
            raise RequestTooLongError("prompt and max_tokens must fit the KV cache; got more")
        add(request)

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "add", refusing_add)
        with pytest.raises(RequestTooLongError):
            llm.generate(PROMPTS[:3], greedy(), use_tqdm=False)
    assert len(seen) == 2


def test_without_a_tokenizer_only_ids_are_taken_and_given():
    llm = LLM.from_engine_args(
        jaxserve.EngineArgs(model=MODEL, skip_tokenizer_init=True, **SETTINGS)
    )
    (output,) = llm.generate(PROMPTS[0], greedy(), use_tqdm=False)
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", TOKENS[0][:20])
    with pytest.raises(InvalidRequestError, match="must be token ids when the engine has no token"):
        llm.generate("w5", greedy())
    with pytest.raises(InvalidRequestError, match="chat must have a tokenizer"):
        llm.chat([{"role": "user", "content": "w5"}], greedy())
    with pytest.raises(InvalidRequestError, match="stop must be empty when .* no tokenizer"):
        llm.generate(PROMPTS[0], greedy(stop="w5"))
    with pytest.raises(InvalidRequestError, match="get_tokenizer must have a tokenizer"):
        llm.get_tokenizer()
    assert llm.get_world_size() == 1


def test_an_llm_that_is_deleted_gives_its_arrays_back():
    llm = LLM(MODEL, skip_tokenizer_init=True, **SETTINGS)
    llm.generate(PROMPTS[0], greedy(2), use_tqdm=False)
    runner = weakref.ref(llm.engine.runner)
    del llm
    gc.collect()
    assert runner() is None


def test_defaults_come_from_the_generation_config(llm: LLM, tmp_path: Path):
    assert llm.get_default_sampling_params() == SamplingParams()
    values = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 3, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    llm = LLM(MODEL, skip_tokenizer_init=True, generation_config=str(tmp_path), **SETTINGS)
    expected = SamplingParams(temperature=0.6, top_k=20, max_tokens=3)
    assert llm.get_default_sampling_params() == expected
    llm.get_default_sampling_params().temperature = 0
    assert llm.get_default_sampling_params() == expected
    (output,) = llm.generate(PROMPTS[0], use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 3


def refuse(error: type[Exception], message: str, **settings: Any) -> None:
    """The LLM is refused before its weights are read."""
    with pytest.raises(error, match=message) as caught:
        LLM(settings.pop("model", MODEL), **settings)
    assert "\n" not in str(caught.value)


def test_mistakes_are_told_before_anything_is_compiled(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("jaxserve.engine_builder.build_engine", None)
    refuse(ModelLoadError, "tokenizer.json: .* missing; name one as tokenizer, or set skip_tok")
    refuse(ModelLoadError, "model must be a path that exists or a hub", model="/no/such")
    refuse(ModelLoadError, "must hold model.safetensors", model=str(tmp_path))
    refuse(EngineConfigError, "tokenizer must be text .*not supported", tokenizer=object())
    refuse(EngineConfigError, "model must be text .*not supported", model=object())
    refuse(EngineConfigError, "quantization is not supported in this release", quantization="awq")
    refuse(
        EngineConfigError, "got max_model_length; did you mean max_model_len", max_model_length=1
    )
    without = {"skip_tokenizer_init": True}
    refuse(EngineConfigError, "chat_template must be a Jinja", chat_template="no.file", **without)
    refuse(EngineConfigError, "rendered safely", chat_template="{% if", **without)
    refuse(EngineConfigError, "generation_config must be", generation_config="no", **without)
    (tmp_path / "generation_config.json").write_text('{"top_p": 7}')
    refuse(ModelLoadError, "top_p must be in", generation_config=str(tmp_path), **without)
    with pytest.raises(EngineConfigError, match="config must be an EngineConfig"):
        LLM.from_config({"model": MODEL})  # pyright: ignore[reportArgumentType]


def test_a_default_that_this_release_lacks_says_where_it_comes_from(llm: LLM, monkeypatch):
    penalty = SamplingParams(repetition_penalty=1.1)
    monkeypatch.setattr(llm._maker, "_default_params", penalty)
    with pytest.raises(InvalidRequestError, match="repetition_penalty .* generation_config.json"):
        llm.generate(PROMPTS[0], use_tqdm=False)
    llm.generate(PROMPTS[0], greedy(2), use_tqdm=False)


def test_a_template_of_the_config_may_stand_in_a_file(tmp_path: Path, llm: LLM):
    from jaxserve.processing.front_end import _read_chat_template

    path = tmp_path / "chat.jinja"
    path.write_text(CHAT_TEMPLATE)
    assert _read_chat_template(str(path)) == _read_chat_template(CHAT_TEMPLATE) == CHAT_TEMPLATE
    path.write_bytes(b"\xff{")
    with pytest.raises(EngineConfigError, match="chat_template must be a Jinja template"):
        _read_chat_template(str(path))


def test_a_process_ends_well_with_a_stream_left_open():
    """Steps in flight are waited for before the interpreter takes JAX down."""
    script = (
        "import atexit\n"
        "from jaxserve import LLM, SamplingParams\n"
        "engines = []\n"
        "atexit.register(lambda: print('unfinished:', engines[0].has_unfinished))\n"
        f"llm = LLM({MODEL!r}, skip_tokenizer_init=True, **{SETTINGS!r})\n"
        "engines.append(llm.engine)\n"
        "stream = llm.stream([1, 2], SamplingParams(temperature=0, max_tokens=99))\n"
        "next(stream)\n"
        "print('unfinished:', engines[0].has_unfinished)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "unfinished: True\nunfinished: False\n", done.stderr
    assert done.returncode == 0
    assert "Traceback" not in done.stderr and "terminate" not in done.stderr


def test_config_is_kept(llm: LLM, tokenizer: Path):
    assert llm.config == EngineConfig(model=MODEL, tokenizer=str(tokenizer), **SETTINGS)
    assert llm.supported_tasks == ("generate",)
