"""EngineConfig: what an engine is asked to be; no JAX."""

import difflib
import math
import os
from dataclasses import dataclass, fields
from typing import Any

from jaxserve.config_fields import (
    KIND_NAMES,
    check_choice,
    check_json,
    check_range,
    check_types,
    field_error,
    flag,
)
from jaxserve.errors import EngineConfigError, describe_value
from jaxserve.loading_config import LOAD_FORMATS, LoadingConfig
from jaxserve.processing.request_options import MIN_GOAL_MS
from jaxserve.quantities import read_quantity

DTYPES = ("auto", "float32", "float16", "bfloat16", "half", "float")
BACKENDS = ("mosaic", "triton", "xla")
SCHEDULING_POLICIES = ("fcfs", "priority", "shortest-first", "slo")
"""The names in `scheduling.policies.POLICIES`, which takes numpy to load."""
PREEMPTION_MODES = ("swap", "recompute", "auto")
MAX_SCHEDULER_STEPS = 16
"""A page has at least as many tokens, so a row gets at most one page in a step."""
MAX_OFFLOADING_GIB = 1 << 20
"""More than any host has: bytes given for GiB shall not pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(LoadingConfig):
    """Settings of one engine; never changed after it was made. Names are vLLM's.

    None means "chosen from the model and the device", and the start log says what was chosen.

    Raises:
      EngineConfigError: a value breaks its rule.
    """

    skip_tokenizer_init: bool = flag(False, "take and give token ids only", "model")
    dtype: str = flag("auto", "type of weights and computation", "model")
    chat_template: str | None = flag(None, "path or text of a Jinja chat template", "model")
    seed: int = flag(0, "of dummy weights and of requests without a seed", "model")
    max_model_len: int | str | None = flag(
        None,
        "tokens of prompt and output together, as 16k (16000) or 16K (16384); auto or -1: the "
        "most that model and memory take",
        "memory",
    )
    gpu_memory_utilization: float = flag(0.92, "share of the GPU's memory to use", "memory")
    kv_cache_memory_bytes: int | None = flag(
        None, "bytes of keys and values, as 20G or 20GiB (binary), or 20g (decimal)", "memory"
    )
    num_gpu_blocks_override: int | None = flag(None, "number of pages", "memory")
    block_size: int = flag(16, "tokens in a page", "memory")
    stored_head_dim: int | None = flag(None, "head dim in memory: 64, 128 or 256", "memory")
    enable_prefix_caching: bool = flag(
        True, "take pages that were computed for the same tokens", "memory"
    )
    kv_offloading_size: float | None = flag(
        None, "GiB of the host's memory for pages that the device has no room for", "memory"
    )
    max_num_seqs: int | None = flag(None, "sequences that run at the same time", "scheduler")
    max_num_batched_tokens: int | None = flag(None, "tokens of one step", "scheduler")
    preemption_mode: str = flag(
        "auto",
        f"how evicted pages come back, one of {', '.join(PREEMPTION_MODES)}: from the host's "
        "memory, by computing, or by what costs less",
        "scheduler",
    )
    long_prefill_token_threshold: int = flag(
        0, "prompt tokens that one sequence gets in a step at most; 0 = no limit", "scheduler"
    )
    max_steps_in_flight: int = flag(2, "steps dispatched before the first is read", "scheduler")
    num_scheduler_steps: int | None = flag(
        None,
        "decode steps that the device runs by itself while few sequences run and none waits; "
        "chosen by the model's size if not given",
        "scheduler",
    )
    prefill_first: bool | None = flag(
        None,
        "prompts that fill a step hold decoding back; in LLM unless slo orders, if not given",
        "scheduler",
    )
    scheduling_policy: str = flag(
        "fcfs", f"who comes first, one of {', '.join(SCHEDULING_POLICIES)}", "scheduler"
    )
    ttft_goal_ms: float | None = flag(
        None,
        "milliseconds to the first token, of requests without the goal, for slo; 1000 if not given",
        "scheduler",
    )
    tpot_goal_ms: float | None = flag(
        None, "milliseconds of each further token, the same; 50 if not given", "scheduler"
    )
    max_queue_time: float | None = flag(
        None,
        "seconds that a request may wait for its first step; no limit if not given",
        "scheduler",
    )
    row_buckets: tuple[int, ...] | None = flag(None, "padded rows of decode steps", "execution")
    token_buckets: tuple[int, ...] | None = flag(
        None, "padded tokens of steps with prompt tokens", "execution"
    )
    attention_backend: str | None = flag(None, f"one of {', '.join(BACKENDS)}", "execution")
    tensor_parallel_size: int = flag(1, "devices that share each layer", "execution")
    compilation_cache_dir: str | None = flag(
        None, "where compiled programs are kept; ~/.cache/jaxserve if not given", "execution"
    )
    stacked_weights: str | None = flag(
        None, "weights kept as one array for all layers: none, vectors or all", "execution"
    )
    step_timeout: float | None = flag(
        None,
        "seconds after which a step that has not come back counts as hung, and a server's engine "
        "ends; 0 = no limit; 300 on GPUs and no limit elsewhere if not given",
        "execution",
    )
    debug_poison_pages: bool = flag(
        False, "overwrite free pages with NaN, so that a wrong read is found out", "execution"
    )
    batch_invariant: bool = flag(
        False,
        "results that do not depend, in any bit, on who shares the batch, on one Hopper GPU; also "
        "VLLM_BATCH_INVARIANT=1",
        "execution",
    )
    max_logprobs: int = flag(20, "largest number of log-probabilities of a token", "model")

    def __post_init__(self) -> None:
        """Check the values; lists and dicts become immutable or private, quantities integers."""
        for name in _QUANTITIES:
            object.__setattr__(self, name, self._as_quantity(name, getattr(self, name)))
        for name in ("row_buckets", "token_buckets"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, self._checked_sizes(name, value))
        if self.served_model_name is not None:
            names = self._checked_names("served_model_name", self.served_model_name)
            object.__setattr__(self, "served_model_name", names)
        check_types(self, _KIND_NAMES)
        for name in ("hf_overrides", "override_generation_config"):
            check_json(self, name)
        check_choice(self, "load_format", LOAD_FORMATS)
        check_choice(self, "dtype", DTYPES)
        check_choice(self, "stacked_weights", (None, "none", "vectors", "all"))
        check_choice(self, "attention_backend", (None, *BACKENDS))
        check_choice(self, "preemption_mode", PREEMPTION_MODES)
        self._check_host_tier()
        self._check_batch_invariant()
        for name in _POSITIVE:
            if getattr(self, name) != "auto":
                check_range(self, name, 1)
        check_range(self, "long_prefill_token_threshold", 0)
        check_range(self, "num_scheduler_steps", 1, MAX_SCHEDULER_STEPS)
        check_range(self, "step_timeout", 0)
        check_choice(self, "scheduling_policy", SCHEDULING_POLICIES)
        for name in ("ttft_goal_ms", "tpot_goal_ms"):
            check_range(self, name, MIN_GOAL_MS)
            if self.scheduling_policy != "slo" and getattr(self, name) is not None:
                raise field_error(self, name, "must be given only with scheduling_policy='slo'")
        if self.scheduling_policy == "slo" and self.prefill_first:
            raise field_error(
                self, "prefill_first", "must not be given with slo, whose goals it breaks"
            )
        check_range(self, "max_queue_time", 0.001)
        check_range(self, "kv_offloading_size", 0, MAX_OFFLOADING_GIB)
        check_range(self, "seed", -(2**63), 2**63 - 1)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise field_error(self, "gpu_memory_utilization", "must be in (0, 1]")
        if self.block_size & (self.block_size - 1) or not 16 <= self.block_size <= 128:
            raise field_error(self, "block_size", "must be 16, 32, 64 or 128")
        if self.stored_head_dim not in (None, 64, 128, 256):
            raise field_error(self, "stored_head_dim", "must be 64, 128 or 256")
        if not 0 <= self.max_logprobs <= 20:
            raise field_error(self, "max_logprobs", "must be in [0, 20]")

    @property
    def fixed_model_len(self) -> int | None:
        """`max_model_len` where it is a number, not left to model and memory."""
        return None if isinstance(self.max_model_len, str) else self.max_model_len

    @property
    def kv_offloading_bytes(self) -> int:
        """`kv_offloading_size` in bytes, of all devices together; 0 = there is no host tier."""
        return math.ceil((self.kv_offloading_size or 0) * 2**30)

    def _check_host_tier(self) -> None:
        if self.kv_offloading_size and not self.enable_prefix_caching:
            raise field_error(self, "kv_offloading_size", "must be 0 without enable_prefix_caching")
        if self.kv_offloading_size and self.preemption_mode == "recompute":
            rule = "must be 0 with preemption_mode='recompute'"
            raise field_error(self, "kv_offloading_size", rule)
        if self.preemption_mode == "swap" and not self.kv_offloading_size:
            rule = "must be given with preemption_mode='swap'"
            raise field_error(self, "kv_offloading_size", rule)

    def _check_batch_invariant(self) -> None:
        if self.batch_invariant and self.tensor_parallel_size != 1:
            rule = "must be off with tensor_parallel_size above 1"
            raise field_error(self, "batch_invariant", rule)
        if self.batch_invariant and self.attention_backend not in (None, "mosaic"):
            rule = f"must be off with attention_backend {self.attention_backend}"
            raise field_error(self, "batch_invariant", rule)

    @classmethod
    def from_keywords(cls, **keywords: Any) -> "EngineConfig":
        """Make a config of vLLM's engine arguments.

        Raises:
          EngineConfigError: one is not supported, or not known.
        """
        known = {f.name for f in fields(cls)}
        for name, value in keywords.items():
            if name in known:
                continue
            if name not in NEUTRAL_VALUES:
                close = difflib.get_close_matches(name, sorted(known), n=1)
                advice = f"; did you mean {close[0]}?" if close else ""
                raise EngineConfigError(f"keywords must be engine arguments; got {name}{advice}")
            is_plain = isinstance(value, str | int | float | list | tuple | dict | None)
            if not is_plain or value not in NEUTRAL_VALUES[name]:
                raise EngineConfigError(
                    f"{name} is not supported in this release; got {describe_value(value)}"
                )
        given = {name: value for name, value in keywords.items() if name in known}
        paths = {n: os.fspath(v) for n, v in given.items() if isinstance(v, os.PathLike)}
        return cls(**given | paths)

    def _as_quantity(self, name: str, value: Any) -> Any:
        """The number that a text means; of a length also "auto", which vLLM's -1 becomes."""
        takes_auto = name == "max_model_len"
        if isinstance(value, str) and not (takes_auto and value == "auto"):
            try:
                value = read_quantity(value)
            except ValueError as error:
                rule = f"{error}, or auto" if takes_auto else str(error)
                raise field_error(self, name, rule) from error
        return "auto" if takes_auto and type(value) is int and value == -1 else value

    def _checked_sizes(self, name: str, value: Any) -> tuple[int, ...]:
        is_list = isinstance(value, list | tuple) and len(value) > 0
        if not is_list or any(type(size) is not int or size < 1 for size in value):
            raise field_error(self, name, "must be a list of positive integers")
        return tuple(sorted(set(value)))

    def _checked_names(self, name: str, value: Any) -> tuple[str, ...]:
        names = (value,) if isinstance(value, str) else value
        is_list = isinstance(names, list | tuple) and len(names) > 0
        if not is_list or not all(isinstance(text, str) and text for text in names):
            raise field_error(self, name, "must be a name or a list of names")
        return tuple(dict.fromkeys(names))


_KIND_NAMES = {
    **KIND_NAMES,
    str: "text (objects are not supported in this release)",
    dict: "a dict (functions are not supported in this release)",
}

_QUANTITIES = ("max_model_len", "kv_cache_memory_bytes", "max_num_batched_tokens")
"""Fields that take texts such as 16k or 20GiB, too: vLLM reads their flags so."""

_POSITIVE = (
    "max_model_len",
    "kv_cache_memory_bytes",
    "num_gpu_blocks_override",
    "block_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_steps_in_flight",
    "tensor_parallel_size",
)

NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "runner": ("auto", "generate"),
    "convert": ("auto", "none"),
    "tokenizer_mode": ("auto",),
    "allowed_local_media_path": ("",),
    "allowed_media_domains": (None,),
    "quantization": (None,),
    "cpu_offload_gb": (0,),
    "offload_group_size": (0,),
    "offload_num_in_group": (1,),
    "offload_prefetch_step": (1,),
    "offload_params": (None,),
    "enforce_eager": (False,),
    "enable_return_routed_experts": (False,),
    "return_sampling_mask": (False,),
    "disable_custom_all_reduce": (False, True),
    "mm_processor_kwargs": (None,),
    "pooler_config": (None,),
    "structured_outputs_config": (None,),
    "profiler_config": (None,),
    "attention_config": (None,),
    "compilation_config": (None,),
    "quantization_config": (None,),
    "logits_processors": (None, []),
    "spec_method": (None,),
    "spec_model": (None,),
    "spec_tokens": (None,),
    "speculative_config": (None,),
    "pipeline_parallel_size": (1,),
    "data_parallel_size": (1,),
    "enable_expert_parallel": (False,),
    "distributed_executor_backend": (None, "uni"),
    "enable_chunked_prefill": (True, None),
    "async_scheduling": (True, None),
    "enable_sleep_mode": (False, True),
    "enable_lora": (False,),
    "max_loras": (1,),
    "max_lora_rank": (16,),
    "max_cpu_loras": (None,),
    "kv_cache_dtype": ("auto",),
    "kv_offloading_backend": ("native",),
    "disable_log_stats": (True, None),
}
"""vLLM's arguments that this release does not act on, with the values that ask nothing of it."""
