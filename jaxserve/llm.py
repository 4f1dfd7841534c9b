"""LLM: the offline door, for notebooks and scripts."""

import functools
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from jaxserve.beam_search import BeamSearchOutput
from jaxserve.config import EngineConfig
from jaxserve.engine_client import InProcessClient
from jaxserve.environment import environment_settings
from jaxserve.errors import EngineConfigError, InvalidRequestError, describe_value
from jaxserve.field_checks import refuse_given
from jaxserve.outputs import RequestOutput
from jaxserve.processing.beam_runs import make_searches, run_searches
from jaxserve.processing.front_end import FrontEnd, require_tokenizer
from jaxserve.processing.output_processor import OutputProcessor
from jaxserve.processing.prompts import Message, Prompt
from jaxserve.processing.request_loop import RequestLoop, Submission
from jaxserve.processing.request_maker import Params, RequestMaker
from jaxserve.processing.request_options import Priority, RequestOptions
from jaxserve.processing.request_preparer import check_pool_length
from jaxserve.progress import PromptProgress, StartProgress
from jaxserve.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from jaxserve.sleep_options import check_sleep, check_wake_tags
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.watchdog import Watchdog

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from jaxserve.engine import Engine
    from jaxserve.engine_builder import BuiltEngine
    from jaxserve.metrics.offline import WatchedProcessor
    from jaxserve.prefix_snapshots import PrefixSnapshots
    from jaxserve.v1.metrics.reader import Metric


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
        disable_log_stats: bool = True,
        **engine_arguments: Any,
    ):
        """Load a model, plan the memory and compile the steps.

        Args:
          model: folder with config.json, .gguf file, hub id, or owner/name:file.gguf; the embedded
            SmolLM2 if not given.
          tokenizer: folder, tokenizer.json, .gguf file or hub id, if it is not the model's own.
          skip_tokenizer_init: take and give token ids only.
          dtype: "auto", "float32", "float16" or "bfloat16".
          seed: of dummy weights and of requests without a seed.
          tensor_parallel_size: devices that share each layer.
          gpu_memory_utilization: share of the GPU's memory.
          disable_log_stats: False counts what `get_metrics` shows.
          engine_arguments: any other field of EngineConfig, under vLLM's names.

        Raises:
          ModelLoadError: files are missing or refused.
          EngineConfigError: an argument is not supported, or does not fit model or device.
        """
        config = EngineConfig.from_keywords(
            model=model,
            tokenizer=tokenizer,
            skip_tokenizer_init=skip_tokenizer_init,
            dtype=dtype,
            seed=seed,
            tensor_parallel_size=tensor_parallel_size,
            gpu_memory_utilization=gpu_memory_utilization,
            **(environment_settings() | engine_arguments),
        )
        self._start(config, disable_log_stats=disable_log_stats)

    @classmethod
    def from_config(cls, config: EngineConfig, *, disable_log_stats: bool = True) -> Self:
        """An LLM from a ready EngineConfig; raises as the constructor does."""
        if not isinstance(config, EngineConfig):
            raise EngineConfigError(f"config must be an EngineConfig; got {describe_value(config)}")
        llm = cls.__new__(cls)
        llm._start(config, disable_log_stats=disable_log_stats)
        return llm

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> Self:
        """`from_config` under vLLM's name; EngineArgs is EngineConfig here."""
        return cls.from_config(engine_args)

    def _start(self, config: EngineConfig, *, disable_log_stats: bool) -> None:
        """Read what is small first, so that mistakes are told before minutes of compilation."""
        if not isinstance(disable_log_stats, bool):
            got = describe_value(disable_log_stats)
            raise EngineConfigError(f"disable_log_stats must be True or False; got {got}")
        front_end = FrontEnd.open(config)
        from jaxserve.engine_builder import build_engine  # imports JAX, which takes seconds

        with StartProgress() as progress:
            self._built: BuiltEngine = build_engine(
                config, progress, opened=front_end.opened, is_offline=True
            )
        self.config, self.model_config = config, self._built.model_config
        self._tokenizer, self._default_params = front_end.tokenizer, front_end.default_params
        self._maker = front_end.request_maker(self._built.limits.max_model_len)
        processor = front_end.output_processor()
        self._watched = None if disable_log_stats else _watch(processor, config, self._built)
        client = InProcessClient(self._built.engine, self._make_watchdog())
        part_tokens = self.engine.scheduler.lookahead_tokens
        self._loop = RequestLoop(client, self._watched or processor, part_tokens=part_tokens)

    def _make_watchdog(self) -> Watchdog | None:
        """Logs where a step hangs. Only that: the values of a notebook live in this process."""
        if self._built.step_timeout is None:
            return None
        watchdog = Watchdog(self._built.step_timeout, _advise_restart)
        weakref.finalize(self, watchdog.stop)
        return watchdog

    @property
    def engine(self) -> "Engine":
        """The engine, for those who want to take it apart."""
        return self._built.engine

    @property
    def built(self) -> "BuiltEngine":
        """What the start chose: limits, memory bill, seconds of each stage."""
        return self._built

    @property
    def request_maker(self) -> RequestMaker:
        """Makes the requests of this model that `run` takes."""
        return self._maker

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
        priority: Priority = None,
        timeout: float | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts.

        Args:
          prompts: text, token ids, {"prompt": ...}, {"prompt_token_ids": ...}, or a list of them;
            a dict may also hold cache_salt, timeout, ttft_goal_ms and tpot_goal_ms.
          sampling_params: one for all, or one a prompt; the model's defaults if not given.
          use_tqdm: show progress; or what to call instead of tqdm.
          lora_request: not supported in this release.
          priority: one for all prompts, or one a prompt; lower runs earlier. Only 0 is taken unless
            the engine has `scheduling_policy="priority"`, and no goals unless it has "slo".
          timeout: seconds until each request ends with what it has, under the finish reason
            "timeout"; that of a prompt goes before it.
          tokenization_kwargs: not supported in this release.
          mm_processor_kwargs: not supported in this release.

        Returns:
          One finished output a prompt, in the prompts' order.

        Raises:
          InvalidRequestError: a prompt or parameter breaks a rule; nothing was generated.
        """
        refuse_given(
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
        )
        submissions = self._maker.of_prompts(
            prompts,
            sampling_params,
            RequestOutputKind.FINAL_ONLY,
            request_options=RequestOptions.from_fields(timeout=timeout),
            priority=priority,
        )
        return self.run(submissions, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Any = None,
        priority: Priority = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them.

        Args:
          messages: {"role": ..., "content": ...}, or lists of them.
          sampling_params: as in `generate`.
          use_tqdm: as in `generate`.
          lora_request: not supported in this release.
          priority: as in `generate`.
          chat_template: text of a Jinja template, instead of the model's.
          chat_template_content_format: "auto" and "string" give templates the content as text;
            "openai" (as parts) is not supported in this release.
          add_generation_prompt: end the prompt where the assistant's answer begins.
          continue_final_message: continue the last message instead.
          tools: descriptions of functions, for templates that show them.
          chat_template_kwargs: further variables of the template.
          timeout: as in `generate`.
          tokenization_kwargs: not supported in this release.
          mm_processor_kwargs: not supported in this release.

        Raises:
          InvalidRequestError: as `generate`; or the template refuses the messages, or is missing.
        """
        refuse_given(
            lora_request=lora_request,
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
            request_options=RequestOptions.from_fields(timeout=timeout),
            priority=priority,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self.run(submissions, use_tqdm=use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: Any = None,
        use_tqdm: bool | Callable[..., Any] = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Find the most likely continuations of prompts.

        Args:
          prompts: as in `generate`.
          params: of all prompts.
          lora_request: not supported in this release.
          use_tqdm: as in `generate`.
          concurrency_limit: prompts that are searched at the same time; all if not given.

        Returns:
          The best beams of each prompt, in the prompts' order.

        Raises:
          InvalidRequestError: a prompt or parameter breaks a rule; nothing was generated.
        """
        refuse_given(lora_request=lora_request)
        searches = make_searches(
            self._maker,
            prompts,
            params,
            max_logprobs=self.config.max_logprobs,
            max_tokens_per_sequence=self.engine.scheduler.max_tokens_per_sequence,
        )
        with PromptProgress(use_tqdm, len(searches)) as progress:
            run_searches(searches, self._loop, concurrency_limit, progress)
        return [search.beam_output(self._tokenizer) for search in searches]

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
        return require_tokenizer(self._tokenizer)

    def get_default_sampling_params(self) -> SamplingParams:
        """What a request without parameters gets: the model's generation config over defaults."""
        return self._default_params.clone()

    def get_metrics(self) -> "list[Metric]":
        """What was counted so far, as objects of `jaxserve.v1.metrics.reader`.

        Raises:
          EngineConfigError: the LLM was not made with `disable_log_stats=False`.
        """
        if self._watched is None:
            raise EngineConfigError("disable_log_stats must be False for get_metrics; got True")
        return self._watched.metrics()

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget all computed prefixes; what streams still run keep their pages.

        Args:
          reset_running_requests: not supported in this release.
          reset_connector: not supported in this release.

        Returns:
          True: it was reset.

        Raises:
          InvalidRequestError: an argument asks for more.
        """
        refuse_given(reset_running_requests=reset_running_requests, reset_connector=reset_connector)
        self._built.engine.scheduler.reset_prefix_cache()
        return True

    def save_prefix(
        self,
        name: str,
        prompt: Prompt,
        *,
        folder: str | os.PathLike[str] | None = None,
        cache_salt: str | None = None,
    ) -> int:
        """Write a prompt's full pages of keys and values to `<folder>/<name>.safetensors`.

        Args:
          name: of the snapshot; one of that name is replaced.
          prompt: one, as in `generate`; it is computed if it is not cached.
          folder: "prefixes" beside the compilation cache if not given.
          cache_salt: of the requests that may use it; the prompt's own goes before it.

        Returns:
          Tokens in the snapshot; what fills no page is left out.

        Raises:
          InvalidRequestError: name or prompt breaks a rule, or a stream is unfinished.
          EngineConfigError: the prefix cache is off.
          OSError: the file cannot be written.
        """
        params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        options = RequestOptions.from_fields(cache_salt=cache_salt)
        submissions = self._maker.of_prompts(
            prompt, params, RequestOutputKind.FINAL_ONLY, request_options=options
        )
        (request, _), *more = submissions
        if more:
            raise InvalidRequestError.for_field("prompt", "must be one", len(submissions))
        compute = functools.partial(self.run, submissions, use_tqdm=False)
        return self._snapshots(folder).save(name, request, compute)

    def load_prefix(
        self,
        name: str,
        *,
        folder: str | os.PathLike[str] | None = None,
        cache_salt: str | None = None,
    ) -> int:
        """Put a saved prefix into the KV cache; later requests that begin with it find it there.

        Args:
          name: of the snapshot.
          folder: as in `save_prefix`.
          cache_salt: under which it was saved.

        Returns:
          Tokens in the snapshot.

        Raises:
          InvalidRequestError: the file is missing or damaged, was saved by another model or for
            another cache or salt, finds too few free pages, or a stream is unfinished.
          EngineConfigError: the prefix cache is off.
        """
        RequestOptions.from_fields(cache_salt=cache_salt)  # refuses what is no salt
        return self._snapshots(folder).load(name, cache_salt)

    def _snapshots(self, folder: str | os.PathLike[str] | None) -> "PrefixSnapshots":
        from jaxserve.prefix_snapshots import PrefixSnapshots  # imports JAX

        return PrefixSnapshots(self._built, folder)

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Free the device's memory; requests are refused until `wake_up`.

        Args:
          level: 1 keeps the weights in the host's memory; 2 drops them, and `wake_up` reads the
            model's files again.
          mode: what becomes of open streams: "abort" ends them, "wait" runs them to their ends,
            "keep" freezes them.

        Raises:
          InvalidRequestError: the level or the mode is none of these.
          EngineNotReadyError: the host has no memory for the weights; the engine is awake.
        """
        check_sleep(level, mode)
        if mode == "wait":
            self._loop.drain()
        self.engine.sleep(level, keeps_requests=mode != "abort")
        self._loop.drain()

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Bring back "weights", "kv_cache" or, without tags, both; nothing is compiled.

        Raises:
          InvalidRequestError: a tag is none of these.
          EngineNotReadyError: the device has no memory for it; it can be tried again.
          ModelLoadError: the model's files are missing or refused.
        """
        self.engine.wake_up(check_wake_tags(tags))

    def release_kv_cache_memory(self) -> None:
        """Free the memory of the KV cache; the next request or `wake_up` takes it again.

        Raises:
          InvalidRequestError: a stream is unfinished.
        """
        self.engine.release_cache()

    def get_world_size(self, include_dp: bool = True) -> int:
        """Devices that run the model; there is no data parallelism to leave out yet."""
        return self.config.tensor_parallel_size

    def run(
        self, submissions: Sequence[Submission], *, use_tqdm: bool | Callable[..., Any] = True
    ) -> list[RequestOutput]:
        """Run requests of `request_maker` together, to their ends; outputs in their order.

        Args:
          submissions: requests of `FINAL_ONLY` outputs.
          use_tqdm: as in `generate`.

        Raises:
          RequestTooLongError: one can never fit the KV cache; nothing was generated.
        """
        max_tokens = self.engine.scheduler.max_tokens_per_sequence
        for request, _ in submissions:
            check_pool_length(request, max_tokens)
        with PromptProgress(use_tqdm, len(submissions)) as progress:
            return self._loop.run(submissions, progress)

    def _stream(self, submissions: list[Submission]) -> Iterator[RequestOutput]:
        if len(submissions) != 1:
            raise InvalidRequestError.for_field(
                "prompt", "must be one, since its outputs are streamed", len(submissions)
            )
        return self._loop.stream(submissions[0])


def _advise_restart(message: str) -> None:
    logger.error("%s; if it never does, restart this process, or the notebook's kernel", message)


def _watch(
    processor: OutputProcessor, config: EngineConfig, built: "BuiltEngine"
) -> "WatchedProcessor":
    """Count what passes the processor; the metrics' library is loaded for those who want it."""
    from jaxserve.metrics.offline import WatchedProcessor

    return WatchedProcessor(processor, config, built)
