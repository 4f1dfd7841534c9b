"""LLM: the offline door, for notebooks and scripts."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from jaxserve.config import EngineConfig
from jaxserve.default_sampling import read_default_sampling
from jaxserve.engine_client import InProcessClient
from jaxserve.errors import EngineConfigError, InvalidRequestError, describe_value
from jaxserve.execution.slot_record import MAX_STOP_IDS
from jaxserve.output_processor import OutputProcessor
from jaxserve.outputs import RequestOutput
from jaxserve.progress import PromptProgress, StartProgress
from jaxserve.prompts import Message, Prompt
from jaxserve.request_loop import RequestLoop, Submission
from jaxserve.request_maker import Params, RequestMaker
from jaxserve.sampling_limits import SamplingLimits
from jaxserve.sampling_params import RequestOutputKind, SamplingParams
from jaxserve.text.chat_template import check_chat_template
from jaxserve.text.tokenizer import Tokenizer, load_tokenizer
from models.errors import ModelLoadError
from models.loading.source import open_model

if TYPE_CHECKING:
    from jaxserve.engine import Engine
    from jaxserve.engine_builder import BuiltEngine


class LLM:
    """A model in this process: prompts in, finished outputs back, in order.

    Not safe to use from two threads at once.

    Attributes:
      config: as given.
      model_config: the model's numbers.
      supported_tasks: what the model can be asked.
    """

    supported_tasks = ("generate",)

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        tokenizer: str | os.PathLike[str] | None = None,
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
            model=os.fspath(model) if isinstance(model, os.PathLike) else model,
            tokenizer=os.fspath(tokenizer) if isinstance(tokenizer, os.PathLike) else tokenizer,
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
        if not isinstance(config, EngineConfig):
            raise EngineConfigError(f"config must be an EngineConfig; got {describe_value(config)}")
        llm = cls.__new__(cls)
        llm._start(config)
        return llm

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> Self:
        """`from_config` under vLLM's name; EngineArgs is EngineConfig here."""
        return cls.from_config(engine_args)

    def _start(self, config: EngineConfig) -> None:
        """Read what is small first, so that mistakes are told before minutes of compilation."""
        from jaxserve.engine_builder import build_engine

        opened = open_model(config.model, config.load_format)
        opened.source.config_dict()
        path = opened.path
        self._tokenizer = None if config.skip_tokenizer_init else _load_tokenizer(config, path)
        default_params = read_default_sampling(config.generation_config, path)
        chat_template = _read_chat_template(config.chat_template)
        with StartProgress() as progress:
            self._built: BuiltEngine = build_engine(config, progress, opened=opened)
        self.config, self.model_config = config, self._built.model_config
        of_tokenizer = self._tokenizer.eos_token_ids if self._tokenizer is not None else ()
        eos_token_ids = tuple(dict.fromkeys((*self.model_config.eos_token_ids, *of_tokenizer)))
        limits = SamplingLimits(
            max_num_stop_token_ids=MAX_STOP_IDS - len(eos_token_ids),
            vocab_size=self.model_config.vocab_size,
            max_model_len=self._built.limits.max_model_len,
            max_logprobs=config.max_logprobs,
        )
        self._default_params = default_params
        self._maker = RequestMaker(
            tokenizer=self._tokenizer,
            limits=limits,
            eos_token_ids=eos_token_ids,
            default_params=default_params,
            chat_template=chat_template,
        )
        client = InProcessClient(self._built.engine)
        self._loop = RequestLoop(client, OutputProcessor(self._tokenizer))

    @property
    def engine(self) -> "Engine":
        """The engine, for those who want to take it apart."""
        return self._built.engine

    @property
    def built(self) -> "BuiltEngine":
        """What the start chose: limits, memory bill, seconds of each stage."""
        return self._built

    @property
    def output_seconds(self) -> float:
        """Host seconds spent so far on making outputs of tokens."""
        return self._loop.output_seconds

    @property
    def device_name(self) -> str:
        """Kind of the device that runs the model."""
        return self._built.device_kind

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
        submissions = self._maker.of_prompts(prompts, sampling_params, RequestOutputKind.FINAL_ONLY)
        return self._run(submissions, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Any = None,
        priority: Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        *,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them.

        Args:
          messages: {"role": ..., "content": ...}, or lists of them.
          sampling_params: as in `generate`.
          use_tqdm: as in `generate`.
          lora_request: not supported in this release.
          priority: not supported in this release.
          chat_template: text of a Jinja template, instead of the model's.
          chat_template_content_format: "auto" and "string" give templates the content as text;
            "openai" (as parts) is not supported in this release.
          add_generation_prompt: end the prompt where the assistant's answer begins.
          continue_final_message: continue the last message instead.
          tools: descriptions of functions, for templates that show them.
          chat_template_kwargs: further variables of the template.
          tokenization_kwargs: not supported in this release.
          mm_processor_kwargs: not supported in this release.

        Raises:
          InvalidRequestError: as `generate`; or the template refuses the messages, or is missing.
        """
        _refuse_given(
            lora_request=lora_request,
            priority=priority,
            tokenization_kwargs=tokenization_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
        )
        if chat_template_content_format not in ("auto", "string"):
            rule = "must be 'auto' or 'string' in this release"
            raise InvalidRequestError.for_field(
                "chat_template_content_format", rule, chat_template_content_format
            )
        submissions = self._maker.of_chats(
            messages,
            sampling_params,
            RequestOutputKind.FINAL_ONLY,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self._run(submissions, use_tqdm)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Continue one prompt, and give what is new after each step.

        Leaving the loop early ends the request.

        Raises:
          InvalidRequestError: as `generate`, or it is more than one prompt.
        """
        submissions = self._maker.of_prompts(prompt, sampling_params, RequestOutputKind.DELTA)
        return self._stream(submissions)

    def stream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Answer one conversation, and give what is new after each step; raises as `chat`."""
        submissions = self._maker.of_chats(messages, sampling_params, RequestOutputKind.DELTA)
        return self._stream(submissions)

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
        return self._default_params.clone()

    def get_world_size(self, include_dp: bool = True) -> int:
        """Devices that run the model; there is no data parallelism to leave out yet."""
        return self.config.tensor_parallel_size

    def _run(
        self, submissions: list[Submission], use_tqdm: bool | Callable[..., Any]
    ) -> list[RequestOutput]:
        with PromptProgress(use_tqdm, len(submissions)) as progress:
            return self._loop.run(submissions, progress)

    def _stream(self, submissions: list[Submission]) -> Iterator[RequestOutput]:
        if len(submissions) != 1:
            raise InvalidRequestError.for_field(
                "prompt", "must be one, since its outputs are streamed", len(submissions)
            )
        return self._loop.stream(submissions[0])


def _load_tokenizer(config: EngineConfig, model_path: Path) -> Tokenizer:
    if config.tokenizer is not None:
        return load_tokenizer(Path(config.tokenizer).expanduser())
    try:
        return load_tokenizer(model_path)
    except ModelLoadError as error:
        raise ModelLoadError(
            f"{error}; name one as tokenizer, or set skip_tokenizer_init to give token ids only"
        ) from error


def _read_chat_template(template: str | None) -> str | None:
    """A template given as text, or as the path of a file; checked."""
    if template is None:
        return None
    try:
        if "{" not in template:
            template = Path(template).expanduser().read_text(encoding="utf-8")
        check_chat_template(template)
    except (OSError, UnicodeDecodeError) as error:
        raise EngineConfigError(
            f"chat_template must be a Jinja template or its file; got {template!r}"
        ) from error
    except InvalidRequestError as error:
        raise EngineConfigError(str(error)) from error
    return template


def _refuse_given(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise InvalidRequestError.for_field(name, "is not supported in this release", value)
