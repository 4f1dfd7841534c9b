"""RequestMaker: from prompts, chats and parameters to the checked requests of one engine."""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxserve.errors import InvalidRequestError
from jaxserve.processing.prompts import (
    Message,
    ParsedPrompt,
    Prompt,
    list_conversations,
    list_params,
    list_prompts,
    parse_prompt,
)
from jaxserve.processing.request_loop import Submission
from jaxserve.processing.request_options import (
    NO_OPTIONS,
    Priority,
    RequestOptions,
    check_policy_fields,
    list_priorities,
)
from jaxserve.processing.sampling_limits import (
    SamplingLimits,
    refuse_stop_strings,
    refuse_unsupported,
    resolve_sampling_params,
)
from jaxserve.request import Request
from jaxserve.sampling_params import RequestOutputKind, SamplingParams
from jaxserve.text.chat_prompt import encode_chat
from jaxserve.text.tokenizer import Tokenizer

type Params = SamplingParams | Sequence[SamplingParams] | None


class RequestMaker:
    """Checks what a user asks, all of it before anything runs.

    Args:
      tokenizer: None where only token ids are taken.
      limits: of the engine.
      eos_token_ids: of the model.
      default_params: of requests that come without any.
      chat_template: text of a template that replaces the tokenizer's.
      scheduling_policy: of the engine; priorities and goals that it does not go by are refused.
    """

    def __init__(
        self,
        *,
        tokenizer: Tokenizer | None,
        limits: SamplingLimits,
        eos_token_ids: tuple[int, ...],
        default_params: SamplingParams,
        chat_template: str | None,
        scheduling_policy: str = "fcfs",
    ):
        self._tokenizer, self._limits = tokenizer, limits
        self._eos_token_ids, self._default_params = eos_token_ids, default_params
        self._chat_template, self._scheduling_policy = chat_template, scheduling_policy
        self._next_id: Callable[[], int] = itertools.count().__next__

    def of_prompts(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params,
        output_kind: RequestOutputKind,
        *,
        request_options: RequestOptions = NO_OPTIONS,
        priority: Priority = None,
    ) -> list[Submission]:
        """The requests of one prompt or many.

        Args:
          prompts: one, or a list of them.
          sampling_params: for all, or one a prompt.
          output_kind: what outputs hold.
          request_options: of all prompts, where a prompt itself says nothing.
          priority: of all, or one a prompt.

        Raises:
          InvalidRequestError: a prompt or parameter breaks a rule.
        """
        vocab_size = self._limits.vocab_size
        parsed = [parse_prompt(p, self._tokenizer, vocab_size) for p in list_prompts(prompts)]
        return self._submissions(parsed, sampling_params, output_kind, request_options, priority)

    def of_chats(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params,
        output_kind: RequestOutputKind,
        *,
        request_options: RequestOptions = NO_OPTIONS,
        priority: Priority = None,
        **options: Any,
    ) -> list[Submission]:
        """The requests of one conversation or many.

        Args:
          messages: one conversation, or a list of them.
          sampling_params: for all, or one a conversation.
          output_kind: what outputs hold.
          request_options: of all conversations.
          priority: of all, or one a conversation.
          options: of encode_chat.

        Raises:
          InvalidRequestError: a message or parameter breaks a rule, or there is no template.
        """
        template = options.pop("chat_template", None)
        if template is not None and (not isinstance(template, str) or "{" not in template):
            rule = "must be the text of a Jinja template"
            raise InvalidRequestError.for_field("chat_template", rule, template)
        options["chat_template"] = template or self._chat_template
        parsed = [self._render(chat, options) for chat in list_conversations(messages)]
        return self._submissions(parsed, sampling_params, output_kind, request_options, priority)

    def _render(self, messages: Sequence[Message], options: dict[str, Any]) -> ParsedPrompt:
        """The prompt of one conversation; BOS is there only if the template writes it."""
        if self._tokenizer is None:
            raise InvalidRequestError("chat must have a tokenizer; it was not loaded")
        prompt = encode_chat(self._tokenizer, messages, **options)
        return parse_prompt(
            {"prompt": prompt.text, "prompt_token_ids": prompt.token_ids},
            self._tokenizer,
            self._limits.vocab_size,
        )

    def _submissions(
        self,
        prompts: Sequence[ParsedPrompt],
        params: Params,
        output_kind: RequestOutputKind,
        options: RequestOptions,
        priority: Priority,
    ) -> list[Submission]:
        if params is None:
            params = self._checked_default_params()
        checked = _CheckedParams(self._limits, output_kind, makes_text=self._tokenizer is not None)
        of_each = zip(
            prompts,
            list_params(params, len(prompts)),
            list_priorities(priority, len(prompts)),
            strict=True,
        )
        made: list[Submission] = []
        for prompt, its_params, its_priority in of_each:
            copy = checked.copy_of(its_params, len(prompt.token_ids))
            its_options = prompt.options.over(options)
            check_policy_fields(its_options, its_priority, self._scheduling_policy)
            request = self._make_request(prompt, copy, its_options, its_priority)
            made.append((request, prompt.text))
        return made

    def _checked_default_params(self) -> SamplingParams:
        try:
            refuse_unsupported(self._default_params)
        except InvalidRequestError as error:
            raise InvalidRequestError(
                f"{error}; it comes from the model's generation_config.json: give sampling_params, "
                f"or generation_config='vllm'",
                parameter=error.parameter,
                value=error.value,
            ) from error
        return self._default_params

    def _make_request(
        self,
        prompt: ParsedPrompt,
        params: SamplingParams,
        options: RequestOptions,
        priority: int,
    ) -> Request:
        return Request(
            request_id=str(self._next_id()),
            prompt_token_ids=prompt.token_ids,
            sampling_params=params,
            eos_token_ids=self._eos_token_ids,
            arrival_seconds=time.monotonic(),
            priority=priority,
            cache_salt=options.cache_salt,
            timeout_seconds=options.timeout_seconds,
            ttft_goal_seconds=options.ttft_goal_seconds,
            tpot_goal_seconds=options.tpot_goal_seconds,
        )


class _CheckedParams:
    """Makes the checked copies of parameters for the requests of one call.

    Equal parameters share a copy, since a request's are never changed and a copy takes 30 us.
    """

    def __init__(self, limits: SamplingLimits, output_kind: RequestOutputKind, *, makes_text: bool):
        self._limits, self._output_kind, self._makes_text = limits, output_kind, makes_text
        self._last: tuple[SamplingParams, int, SamplingParams] | None = None

    def copy_of(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """The copy for a request whose prompt has so many tokens; may be that of the last one."""
        if self._last is not None and params.max_tokens is not None:
            given, longest_prompt, shared = self._last
            if num_prompt_tokens <= longest_prompt and params == given:
                return shared
        copy = resolve_sampling_params(params, self._limits, num_prompt_tokens=num_prompt_tokens)
        if not self._makes_text:
            refuse_stop_strings(copy)
        copy.output_kind = self._output_kind
        self._last = params, num_prompt_tokens, copy
        return copy
