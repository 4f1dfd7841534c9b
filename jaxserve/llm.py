"""LLM: the offline door, for notebooks and scripts."""

import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import tqdm

from jaxserve.config import EngineConfig
from jaxserve.engine_client import InProcessClient
from jaxserve.errors import EngineConfigError, InvalidRequestError
from jaxserve.execution.slot_record import MAX_STOP_IDS
from jaxserve.output_processor import OutputProcessor
from jaxserve.outputs import RequestOutput
from jaxserve.prompts import ParsedPrompt, Prompt, check_prompt_ids, list_prompts, parse_prompt
from jaxserve.request import Request
from jaxserve.sampling_limits import SamplingLimits, resolve_sampling_params
from jaxserve.sampling_params import RequestOutputKind, SamplingParams
from jaxserve.text.chat_prompt import encode_chat
from jaxserve.text.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from jaxserve.engine import Engine
    from jaxserve.engine_builder import BuiltEngine

type Message = Mapping[str, Any]
type Params = SamplingParams | Sequence[SamplingParams] | None

_GENERATION_CONFIG_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class LLM:
    """A model in this process: prompts in, finished outputs back, in order.

    Not safe to use from two threads at once.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        tokenizer: str | None = None,
        skip_tokenizer_init: bool = False,
        dtype: str = "auto",
        seed: int = 0,
        tensor_parallel_size: int = 1,
        gpu_memory_utilization: float = 0.92,
        **engine_arguments: Any,
    ):
        """Load a model, plan the memory and compile the steps.

        Args:
          model: folder with config.json, or .gguf file; the embedded SmolLM2 if not given.
          tokenizer: folder or .gguf file, if it is not the model's own.
          skip_tokenizer_init: take and give token ids only.
          dtype: "auto", "float32", "float16" or "bfloat16".
          seed: of dummy weights and of requests without a seed.
          tensor_parallel_size: devices that share each layer.
          gpu_memory_utilization: share of the GPU's memory.
          engine_arguments: any other field of EngineConfig, under vLLM's names.

        Raises:
          ModelLoadError: files are missing or refused.
          EngineConfigError: an argument is not supported, or does not fit model or device.
        """
        config = EngineConfig.from_keywords(
            model=None if model is None else os.fspath(model),
            tokenizer=tokenizer,
            skip_tokenizer_init=skip_tokenizer_init,
            dtype=dtype,
            seed=seed,
            tensor_parallel_size=tensor_parallel_size,
            gpu_memory_utilization=gpu_memory_utilization,
            **engine_arguments,
        )
        self._start(config)

    @classmethod
    def from_config(cls, config: EngineConfig) -> Self:
        """An LLM from a ready EngineConfig; raises as the constructor does."""
        llm = cls.__new__(cls)
        llm._start(config)
        return llm

    def _start(self, config: EngineConfig) -> None:
        from jaxserve.engine_builder import build_engine

        with _StartProgress() as progress:
            self._built: BuiltEngine = build_engine(config, progress)
        self.config, self.model_config = config, self._built.model_config
        self._tokenizer = None if config.skip_tokenizer_init else self._load_tokenizer()
        self._client = InProcessClient(self._built.engine)
        self._processor = OutputProcessor(self._tokenizer)
        self._request_ids = map(str, itertools.count())
        self._arrived: dict[str, list[RequestOutput]] = {}
        self._eos_token_ids = self._find_eos_token_ids()
        self._limits = SamplingLimits(
            max_num_stop_token_ids=MAX_STOP_IDS - len(self._eos_token_ids),
            vocab_size=self.model_config.vocab_size,
            max_model_len=self._built.limits.max_model_len,
            max_logprobs=config.max_logprobs,
        )
        self._chat_template = _read_chat_template(config.chat_template)

    @property
    def engine(self) -> "Engine":
        """The engine, for those who want to take it apart."""
        return self._built.engine

    @property
    def built(self) -> "BuiltEngine":
        """What the start chose: limits, memory bill, seconds of each stage."""
        return self._built

    @property
    def device_name(self) -> str:
        """Kind of the device that runs the model."""
        import jax

        return jax.devices()[0].device_kind

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Any = None,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts.

        Args:
          prompts: text, token ids, {"prompt": ...}, {"prompt_token_ids": ...}, or a list of them.
          sampling_params: one for all, or one a prompt; the model's defaults if not given.
          use_tqdm: show progress; or what to call instead of tqdm.
          lora_request: not supported in this release.
          priority: not supported in this release.
          tokenization_kwargs: not supported in this release.
          mm_processor_kwargs: not supported in this release.

        Returns:
          One finished output a prompt, in the prompts' order.

        Raises:
          InvalidRequestError: a prompt or parameter breaks a rule; nothing was generated.
        """
        _refuse_given(
            lora_request=lora_request,
            priority=priority,
            tokenization_kwargs=tokenization_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
        )
        vocab_size = self._limits.vocab_size
        parsed = [parse_prompt(p, self._tokenizer, vocab_size) for p in list_prompts(prompts)]
        return self._run(self._make_requests(parsed, sampling_params), use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Any = None,
        priority: Sequence[int] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them.

        Args:
          messages: {"role": ..., "content": ...}, or lists of them.
          sampling_params: as in `generate`.
          use_tqdm: as in `generate`.
          lora_request: not supported in this release.
          priority: not supported in this release.
          chat_template: text of a Jinja template, instead of the model's.
          add_generation_prompt: end the prompt where the assistant's answer begins.
          continue_final_message: continue the last message instead.
          tools: descriptions of functions, for templates that show them.
          chat_template_kwargs: further variables of the template.

        Raises:
          InvalidRequestError: as `generate`; or the template refuses the messages, or is missing.
        """
        _refuse_given(lora_request=lora_request, priority=priority)
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        parsed = [
            self._render(
                conversation,  # pyright: ignore[reportArgumentType]
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        return self._run(self._make_requests(parsed, sampling_params), use_tqdm)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Continue one prompt, and give what is new after each step.

        Leaving the loop early ends the request.

        Raises:
          InvalidRequestError: as `generate`.
        """
        parsed = parse_prompt(prompt, self._tokenizer, self._limits.vocab_size)
        return self._stream(parsed, sampling_params)

    def stream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Answer one conversation, and give what is new after each step."""
        return self._stream(self._render(messages), sampling_params)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
          InvalidRequestError: the engine was made with `skip_tokenizer_init`.
        """
        if self._tokenizer is None:
            raise InvalidRequestError("get_tokenizer must have a tokenizer; it was not loaded")
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What a request without parameters gets: the model's generation config over defaults."""
        path = self._built.path / "generation_config.json"
        if self.config.generation_config == "vllm" or not path.is_file():
            return SamplingParams()
        values = json.loads(path.read_text())
        return SamplingParams.from_optional(
            **{name: values.get(name) for name in _GENERATION_CONFIG_FIELDS}, max_tokens=16
        )

    def _render(self, messages: Sequence[Message], **options: Any) -> ParsedPrompt:
        """The prompt of one conversation; BOS is there only if the template writes it."""
        template = options.pop("chat_template", None) or self._chat_template
        prompt = encode_chat(self.get_tokenizer(), messages, chat_template=template, **options)
        return ParsedPrompt(tuple(prompt.token_ids), prompt.text)

    def _load_tokenizer(self) -> Tokenizer:
        path = self.config.tokenizer
        return load_tokenizer(self._built.path if path is None else Path(path).expanduser())

    def _find_eos_token_ids(self) -> tuple[int, ...]:
        of_tokenizer = self._tokenizer.eos_token_ids if self._tokenizer is not None else ()
        return tuple(dict.fromkeys((*self.model_config.eos_token_ids, *of_tokenizer)))

    def _make_requests(
        self, prompts: Sequence[ParsedPrompt], sampling_params: Params
    ) -> list[tuple[Request, str | None]]:
        params = self._params_of_each(prompts, sampling_params)
        return [
            (self._make_request(prompt, p), prompt.text)
            for prompt, p in zip(prompts, params, strict=True)
        ]

    def _params_of_each(
        self, prompts: Sequence[ParsedPrompt], sampling_params: Params
    ) -> list[SamplingParams]:
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        if isinstance(sampling_params, SamplingParams):
            return [sampling_params] * len(prompts)
        if len(sampling_params) != len(prompts):
            rule = f"must be one, or one for each of {len(prompts)} prompts"
            raise InvalidRequestError.for_field("sampling_params", rule, len(sampling_params))
        return list(sampling_params)

    def _make_request(self, prompt: ParsedPrompt, params: SamplingParams) -> Request:
        token_ids = check_prompt_ids(prompt.token_ids, self._limits.vocab_size)
        return Request(
            request_id=next(self._request_ids),
            prompt_token_ids=token_ids,
            sampling_params=resolve_sampling_params(
                params, self._limits, num_prompt_tokens=len(token_ids)
            ),
            eos_token_ids=self._eos_token_ids,
            arrival_seconds=time.monotonic(),
        )

    def _run(
        self, requests: list[tuple[Request, str | None]], use_tqdm: bool | Callable[..., Any]
    ) -> list[RequestOutput]:
        """Run requests to their ends."""
        for request, _ in requests:
            request.sampling_params.output_kind = RequestOutputKind.FINAL_ONLY
        ids = [request.request_id for request, _ in requests]
        bar = _progress_bar(use_tqdm, len(requests))
        try:
            self._submit(requests)
            num_shown = 0
            while (num_finished := sum(bool(self._arrived[i]) for i in ids)) < len(ids):
                if bar is not None:
                    bar.update(num_finished - num_shown)
                num_shown = num_finished
                self._advance()
            if bar is not None:
                bar.update(len(ids) - num_shown)
            return [self._arrived[i][0] for i in ids]
        finally:
            self._leave(ids)
            if bar is not None:
                bar.close()

    def _stream(
        self, prompt: ParsedPrompt, sampling_params: SamplingParams | None
    ) -> Iterator[RequestOutput]:
        requests = self._make_requests([prompt], sampling_params)
        requests[0][0].sampling_params.output_kind = RequestOutputKind.DELTA
        return self._stream_request(requests)

    def _stream_request(
        self, requests: list[tuple[Request, str | None]]
    ) -> Iterator[RequestOutput]:
        request_id = requests[0][0].request_id
        try:
            self._submit(requests)
            while True:
                for output in self._arrived[request_id]:
                    yield output
                    if output.finished:
                        return
                self._arrived[request_id].clear()
                self._advance()
        finally:
            self._leave([request_id])

    def _submit(self, requests: list[tuple[Request, str | None]]) -> None:
        for request, text in requests:
            self._arrived[request.request_id] = []
            self._processor.add(request, text)
            self._client.add(request)

    def _advance(self) -> None:
        """One step; its outputs go to whoever waits for them."""
        step = self._processor.process(self._client.updates())
        for stop in step.aborts:
            self._client.stop(stop)
        for output in step.outputs:
            self._arrived[output.request_id].append(output)

    def _leave(self, request_ids: Sequence[str]) -> None:
        """End what is unfinished, and wait for steps in flight when nobody else needs any."""
        for request_id in request_ids:
            self._arrived.pop(request_id, None)
            if self._processor.drop(request_id):
                self._client.abort(request_id)
        if not self._arrived:
            while self._client.has_unfinished:
                self._client.updates()


class _StartProgress:
    """Shows the compilation of an engine's programs as a bar."""

    def __enter__(self) -> Self:
        self._bar: tqdm.tqdm | None = None
        return self

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage != "compile" or total <= 1:
            return
        if self._bar is None:
            self._bar = tqdm.tqdm(total=total, desc="compiling steps", leave=False)
        self._bar.update(done - self._bar.n)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


def _progress_bar(use_tqdm: bool | Callable[..., Any], total: int) -> Any:
    if not use_tqdm:
        return None
    make = use_tqdm if callable(use_tqdm) else tqdm.tqdm
    return make(total=total, desc="Processed prompts", dynamic_ncols=True)


def _read_chat_template(template: str | None) -> str | None:
    """A template given as text, or as the path of a file."""
    if template is None or "{" in template:
        return template
    try:
        return Path(template).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise EngineConfigError(
            f"chat_template must be a Jinja template or its file; got {template!r}"
        ) from error


def _refuse_given(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise InvalidRequestError.for_field(name, "is not supported in this release", value)
