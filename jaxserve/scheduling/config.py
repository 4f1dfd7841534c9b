"""SchedulerConfig: the limits that the scheduler keeps."""

from dataclasses import dataclass

from jaxserve.errors import EngineConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of the scheduler; checked when made.

    Attributes:
      max_num_seqs: sequences that own a slot at the same time.
      max_num_batched_tokens: tokens of one step.
      max_model_len: tokens of one sequence, prompt and output.
      token_buckets: padded token counts of steps that hold prompt tokens, ascending; the last
        takes a full step.
      row_buckets: padded row counts, ascending; the last takes `max_num_seqs`.
      max_steps_in_flight: steps that may be scheduled and not yet committed.
      long_prefill_token_threshold: prompt tokens that one sequence gets in a step at most; 0 sets
        no limit.
      max_decode_row_tokens: tokens that a decode row computes and samples in one step at most; the
        W of the step's results. More than 1 only in steps that `StepBuilder` says.
      max_multi_token_rows: most rows of a step whose rows take several tokens.
      prefill_first: decode rows are left out of steps that prompts fill, so that more sequences
        decode together: more tokens a second, and longer gaps between those of a sequence.
      watermark: share of the pages, in [0, 1), that an admission leaves free while other
        sequences run.
      max_queue_seconds: a sequence that has not been scheduled so long after its arrival ends; None
        sets no limit.
      enable_prefix_caching: sequences take pages that others have computed for the same tokens.
      num_host_pages: slots of each cache group in the host's memory; 0 = there is no host tier.

    Raises:
      EngineConfigError: a value breaks its rule.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    token_buckets: tuple[int, ...]
    row_buckets: tuple[int, ...]
    max_steps_in_flight: int = 2
    long_prefill_token_threshold: int = 0
    max_decode_row_tokens: int = 1
    max_multi_token_rows: int = 8
    prefill_first: bool = False
    watermark: float = 0.0
    max_queue_seconds: float | None = None
    enable_prefix_caching: bool = False
    num_host_pages: int = 0

    @property
    def max_row_tokens(self) -> int:
        """Tokens between the first that a row may still compute and the end of its pages."""
        chunk = self.long_prefill_token_threshold or self.max_num_batched_tokens
        chunk = max(min(chunk, self.max_num_batched_tokens), self.max_decode_row_tokens)
        return chunk + self.max_uncertain_tokens

    @property
    def max_uncertain_tokens(self) -> int:
        """Tokens of a sequence that steps in flight may turn out not to have computed.

        A decode row computes at least one of its tokens, and the step that is being scheduled
        is not in flight yet.
        """
        return (self.max_steps_in_flight - 1) * (self.max_decode_row_tokens - 1)

    def __post_init__(self) -> None:
        """Check the values."""
        self._check_at_least("max_num_seqs", 1)
        self._check_at_least("max_model_len", 2)
        self._check_at_least("max_steps_in_flight", 1)
        self._check_at_least("long_prefill_token_threshold", 0)
        self._check_at_least("max_decode_row_tokens", 1)
        self._check_at_least("num_host_pages", 0)
        self._check_at_least("max_multi_token_rows", 0)
        self._check_at_least("max_num_batched_tokens", self.max_num_seqs)
        self._check_buckets("token_buckets", self.max_num_batched_tokens)
        self._check_buckets("row_buckets", self.max_num_seqs)
        if self.max_queue_seconds is not None and not self.max_queue_seconds > 0:
            raise EngineConfigError(
                f"max_queue_seconds must be more than 0; got {self.max_queue_seconds}"
            )
        if not 0 <= self.watermark < 1:
            raise EngineConfigError(f"watermark must be in [0, 1); got {self.watermark}")

    def _check_at_least(self, name: str, lowest: int) -> None:
        value = getattr(self, name)
        if value < lowest:
            raise EngineConfigError(f"{name} must be at least {lowest}; got {value}")

    def _check_buckets(self, name: str, largest: int) -> None:
        buckets = getattr(self, name)
        if not buckets or buckets[0] < 1 or list(buckets) != sorted(set(buckets)):
            raise EngineConfigError(f"{name} must be ascending and positive; got {buckets}")
        if buckets[-1] < largest:
            raise EngineConfigError(f"{name} must end with at least {largest}; got {buckets}")
