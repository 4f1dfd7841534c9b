"""FrontEnd: what turns a user's words into requests of one model; read before the engine starts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from jaxserve.config import EngineConfig
from jaxserve.errors import EngineConfigError, InvalidRequestError
from jaxserve.execution.slot_record import MAX_STOP_IDS
from jaxserve.processing.default_sampling import GenerationDefaults, read_generation_defaults
from jaxserve.processing.model_files import load_configured_tokenizer, open_configured_model
from jaxserve.processing.output_processor import OutputProcessor
from jaxserve.processing.request_maker import RequestMaker
from jaxserve.processing.sampling_limits import SamplingLimits
from jaxserve.sampling_params import SamplingParams
from jaxserve.text.chat_template import check_chat_template
from jaxserve.text.tokenizer import Tokenizer
from models.config import ModelConfig
from models.errors import ModelLoadError
from models.loading.source import OpenedModel


@dataclass(frozen=True, kw_only=True)
class FrontEnd:
    """The text side of one model; imports no JAX, so the HTTP process holds one too.

    Attributes:
      opened: the model's files.
      model_config: its numbers.
      tokenizer: None where only ids are taken.
      defaults: what generation_config.json says.
      chat_template: text of a template that replaces the tokenizer's.
      max_logprobs: largest number of log-probabilities of a token.
      scheduling_policy: of the engine.
    """

    opened: OpenedModel
    model_config: ModelConfig
    tokenizer: Tokenizer | None
    defaults: GenerationDefaults
    chat_template: str | None
    max_logprobs: int
    scheduling_policy: str

    @classmethod
    def open(cls, config: EngineConfig) -> Self:
        """Read what is small, so that mistakes are told before minutes of loading.

        Raises:
          ModelLoadError: a file is missing or refused.
          EngineConfigError: a setting does not fit.
        """
        opened = open_configured_model(config)
        defaults = read_generation_defaults(config, opened.path)
        front_end = cls(
            opened=opened,
            model_config=opened.model_config(config.hf_overrides),
            tokenizer=(
                None if config.skip_tokenizer_init else load_configured_tokenizer(config, opened)
            ),
            defaults=defaults,
            chat_template=_read_chat_template(config.chat_template),
            max_logprobs=config.max_logprobs,
            scheduling_policy=config.scheduling_policy,
        )
        num_ends = len(front_end.eos_token_ids)
        if num_ends > MAX_STOP_IDS:
            raise ModelLoadError(
                f"{opened.path}: eos_token_id must name at most {MAX_STOP_IDS} tokens; "
                f"got {num_ends}"
            )
        return front_end

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a sequence: the model's, the tokenizer's and the generation config's."""
        of_tokenizer = self.tokenizer.eos_token_ids if self.tokenizer is not None else ()
        ids = (*self.model_config.eos_token_ids, *of_tokenizer, *self.defaults.eos_token_ids)
        return tuple(dict.fromkeys(ids))

    @property
    def default_params(self) -> SamplingParams:
        """Sampling parameters of requests that come without any."""
        return self.defaults.params

    def request_maker(self, max_model_len: int) -> RequestMaker:
        """What checks requests for an engine that takes so many tokens."""
        eos_token_ids = self.eos_token_ids
        limits = SamplingLimits(
            max_num_stop_token_ids=MAX_STOP_IDS - len(eos_token_ids),
            vocab_size=self.model_config.vocab_size,
            max_model_len=max_model_len,
            max_logprobs=self.max_logprobs,
        )
        return RequestMaker(
            tokenizer=self.tokenizer,
            limits=limits,
            eos_token_ids=eos_token_ids,
            default_params=self.default_params,
            chat_template=self.chat_template,
            scheduling_policy=self.scheduling_policy,
        )

    def output_processor(self) -> OutputProcessor:
        """What makes text of an engine's tokens."""
        return OutputProcessor(self.tokenizer)


def require_tokenizer(tokenizer: Tokenizer | None) -> Tokenizer:
    """The tokenizer of an engine, for those who ask it for one.

    Raises:
      InvalidRequestError: the engine was made with `skip_tokenizer_init`.
    """
    if tokenizer is None:
        raise InvalidRequestError("get_tokenizer must have a tokenizer; it was not loaded")
    return tokenizer


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
