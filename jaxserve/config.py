"""EngineConfig: what an engine is asked to be; no JAX."""

import difflib
import math
import os
import types
from dataclasses import dataclass, fields
from typing import Any, get_args, get_origin

from jaxserve.errors import EngineConfigError, describe_value
from jaxserve.loading_config import LOAD_FORMATS, LoadingConfig
from jaxserve.loading_config import flag as _flag

DTYPES = ("auto", "float32", "float16", "bfloat16", "half", "float")
BACKENDS = ("mosaic", "xla")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(LoadingConfig):
    """Settings of one engine; never changed after it was made. Names are vLLM's.

    None means "chosen from the model and the device", and the start log says what was chosen.

    Raises:
      EngineConfigError: a value breaks its rule.
    """

    skip_tokenizer_init: bool = _flag(False, "take and give token ids only", "model")
    dtype: str = _flag("auto", "type of weights and computation", "model")
    chat_template: str | None = _flag(None, "path or text of a Jinja chat template", "model")
    seed: int = _flag(0, "of dummy weights and of requests without a seed", "model")
    max_model_len: int | None = _flag(None, "tokens of prompt and output together", "memory")
    gpu_memory_utilization: float = _flag(0.92, "share of the GPU's memory to use", "memory")
    kv_cache_memory_bytes: int | None = _flag(None, "bytes of keys and values", "memory")
    num_gpu_blocks_override: int | None = _flag(None, "number of pages", "memory")
    block_size: int = _flag(16, "tokens in a page", "memory")
    stored_head_dim: int | None = _flag(None, "head dim in memory: 64, 128 or 256", "memory")
    max_num_seqs: int | None = _flag(None, "sequences that run at the same time", "scheduler")
    max_num_batched_tokens: int | None = _flag(None, "tokens of one step", "scheduler")
    long_prefill_token_threshold: int = _flag(
        0, "prompt tokens that one sequence gets in a step at most; 0 = no limit", "scheduler"
    )
    max_steps_in_flight: int = _flag(2, "steps dispatched before the first is read", "scheduler")
    row_buckets: tuple[int, ...] | None = _flag(None, "padded rows of decode steps", "execution")
    token_buckets: tuple[int, ...] | None = _flag(
        None, "padded tokens of steps with prompt tokens", "execution"
    )
    attention_backend: str | None = _flag(None, f"one of {', '.join(BACKENDS)}", "execution")
    tensor_parallel_size: int = _flag(1, "devices that share each layer", "execution")
    compilation_cache_dir: str | None = _flag(
        None, "where compiled programs are kept; ~/.cache/jaxserve if not given", "execution"
    )
    stacked_weights: str | None = _flag(
        None, "weights kept as one array for all layers: none, vectors or all", "execution"
    )
    max_logprobs: int = _flag(20, "largest number of log-probabilities of a token", "model")

    def __post_init__(self) -> None:
        """Check the values; list and dict arguments become immutable or private."""
        for name in ("row_buckets", "token_buckets"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, self._checked_sizes(name, value))
        if self.served_model_name is not None:
            names = self._checked_names("served_model_name", self.served_model_name)
            object.__setattr__(self, "served_model_name", names)
        for item in fields(self):
            self._check_type(item.name, item.type)
        self._check_choice("load_format", LOAD_FORMATS)
        self._check_choice("dtype", DTYPES)
        self._check_choice("stacked_weights", (None, "none", "vectors", "all"))
        self._check_choice("attention_backend", (None, *BACKENDS))
        for name in _POSITIVE:
            self._check_int(name, 1)
        self._check_int("long_prefill_token_threshold", 0)
        self._check_int("seed", -(2**63), 2**63 - 1)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise self._error("gpu_memory_utilization", "must be in (0, 1]")
        if self.block_size & (self.block_size - 1) or not 16 <= self.block_size <= 128:
            raise self._error("block_size", "must be 16, 32, 64 or 128")
        if self.stored_head_dim not in (None, 64, 128, 256):
            raise self._error("stored_head_dim", "must be 64, 128 or 256")
        if not 0 <= self.max_logprobs <= 20:
            raise self._error("max_logprobs", "must be in [0, 20]")

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

    def _checked_sizes(self, name: str, value: Any) -> tuple[int, ...]:
        is_list = isinstance(value, list | tuple) and len(value) > 0
        if not is_list or any(type(size) is not int or size < 1 for size in value):
            raise self._error(name, "must be a list of positive integers")
        return tuple(sorted(set(value)))

    def _checked_names(self, name: str, value: Any) -> tuple[str, ...]:
        names = (value,) if isinstance(value, str) else value
        is_list = isinstance(names, list | tuple) and len(names) > 0
        if not is_list or not all(isinstance(text, str) and text for text in names):
            raise self._error(name, "must be a name or a list of names")
        return tuple(dict.fromkeys(names))

    def _check_type(self, name: str, annotation: Any) -> None:
        """Check the kind of a value against the field's annotation."""
        value, kinds = getattr(self, name), (annotation,)
        if isinstance(annotation, types.UnionType):
            kinds = get_args(annotation)
        plain = tuple(get_origin(kind) or kind for kind in kinds)
        if float in plain:
            plain += (int,)
        if isinstance(value, plain) and not (isinstance(value, bool) and bool not in plain):
            return
        raise self._error(name, f"must be {_NAME_OF_KIND[plain[0]]}")

    def _check_choice(self, name: str, choices: tuple[str | None, ...]) -> None:
        if getattr(self, name) not in choices:
            raise self._error(name, f"must be one of {', '.join(filter(None, choices))}")

    def _check_int(self, name: str, low: int, high: float = math.inf) -> None:
        value = getattr(self, name)
        if value is not None and value < low:
            raise self._error(name, f"must be at least {low}")
        if value is not None and value > high:
            raise self._error(name, f"must be at most {high}")

    def _error(self, name: str, rule: str) -> EngineConfigError:
        value = getattr(self, name)
        shown = f"a {type(value).__name__}" if name == "hf_token" else describe_value(value)
        return EngineConfigError(f"{name} {rule}; got {shown}")


_NAME_OF_KIND = {
    str: "text (objects are not supported in this release)",
    bool: "True or False",
    int: "an integer",
    float: "a number",
    dict: "a dict (functions are not supported in this release)",
    tuple: "a list of positive integers",
}


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
    "enable_prefix_caching": (False, None),
    "enable_chunked_prefill": (True, None),
    "async_scheduling": (True, None),
    "scheduling_policy": ("fcfs",),
    "enable_lora": (False,),
    "max_loras": (1,),
    "max_lora_rank": (16,),
    "max_cpu_loras": (None,),
    "kv_cache_dtype": ("auto",),
    "disable_log_stats": (True, None),
    "kv_offloading_size": (None, 0),
}
"""vLLM's arguments that this release does not act on, with the values that ask nothing of it."""
