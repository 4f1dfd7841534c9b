"""vLLM's flags that this release does not act on: taken where they ask nothing, else refused."""

import argparse
import json
from typing import Any

from jaxserve.config import NEUTRAL_VALUES
from server.config import NOT_YET

SERVER_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "data_parallel_address": (None,),
    "data_parallel_backend": ("mp",),
    "data_parallel_rank": (None,),
    "data_parallel_rpc_port": (None,),
    "data_parallel_size_local": (None, 1),
    "enable_server_load_tracking": (False,),
    "fingerprint_mode": ("full",),
    "log_error_stack": (False,),
    "otlp_traces_endpoint": (None,),
}
"""Flags of `vllm serve` that are no arguments of ServerConfig, with the values that ask nothing."""

ENGINE_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "custom_histogram_buckets": (None,),
    "logprobs_mode": ("raw_logprobs",),
    "master_addr": ("127.0.0.1",),
    "master_port": (29501,),
    "max_num_queued_reqs": (None,),
    "max_num_queued_tokens": (None,),
    "model_impl": ("auto",),
    "nnodes": (1,),
    "node_rank": (0,),
    "optimization_level": (None,),
    "performance_mode": ("balanced",),
    "prefix_caching_hash_algo": ("sha256",),
    "stream_interval": (1,),
    "watermark": (0,),
}
"""Flags of vLLM's engine that are no keywords of `LLM` here."""

_SHORT = {
    "compilation_config": "-cc",
    "data_parallel_size": "-dp",
    "nnodes": "-n",
    "node_rank": "-r",
    "optimization_level": "-O",
    "pipeline_parallel_size": "-pp",
    "quantization": "-q",
    "speculative_config": "-sc",
}


class UnsupportedAction(argparse.Action):
    """Takes a flag that asks nothing, and refuses it otherwise."""

    def __init__(self, option_strings, dest: str, *, neutral: tuple[Any, ...]):
        is_switch = any(isinstance(value, bool) for value in neutral)
        super().__init__(
            option_strings, argparse.SUPPRESS, nargs=0 if is_switch else None,
            help=argparse.SUPPRESS, default=argparse.SUPPRESS,
        )  # fmt: skip
        self._neutral = neutral

    def __call__(self, parser, namespace, values: Any, option_string=None) -> None:
        """See argparse."""
        value = values
        if self.nargs == 0:
            value = not (option_string or "").startswith("--no-")
        try:
            self.check(value)
        except argparse.ArgumentTypeError:
            parser.error(f"{option_string} is not supported in this release")

    def check(self, value: Any) -> None:
        """Refuse a value that asks for something.

        Raises:
          ArgumentTypeError: it does.
        """
        if value not in self._neutral and _read(value) not in self._neutral:
            raise argparse.ArgumentTypeError("is not supported in this release")


def add_unsupported_flags(parser: argparse.ArgumentParser, *, of_server: bool) -> None:
    """Let a parser know vLLM's flags of the engine, and those of its server; taken names stay."""
    tables = [NEUTRAL_VALUES, ENGINE_NEUTRAL_VALUES]
    if of_server:
        tables += [NOT_YET, SERVER_NEUTRAL_VALUES]
    taken = parser._option_string_actions
    for table in tables:
        for name, neutral in table.items():
            flag = "--" + name.replace("_", "-")
            if flag in taken:
                continue
            names = [flag, *([_SHORT[name]] if name in _SHORT else [])]
            if any(isinstance(value, bool) for value in neutral):
                names.append(f"--no-{flag[2:]}")
            names = [name for name in names if name not in taken]
            parser.add_argument(*names, action=UnsupportedAction, neutral=neutral)


def _read(text: Any) -> Any:
    """The value that a word stands for."""
    if not isinstance(text, str):
        return text
    if text.lower() in ("none", "null"):
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text
