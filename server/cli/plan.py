"""`jaxserve plan`: the memory bill of an engine and what fits into it; loads no weights."""

import argparse
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from server.cli.arguments import (
    add_config_arguments,
    add_engine_arguments,
    add_model_argument,
    engine_config,
    one_model,
    option,
    read_config,
)
from server.cli.unsupported import add_unsupported_flags

if TYPE_CHECKING:
    from jaxserve.plan_report import PlanReport

USAGE = "[MODEL] [OPTION ...]"
COMMON = (
    "model_tag",
    "device_memory",
    "request_tokens",
    "json",
    "dtype",
    "max_model_len",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "max_num_seqs",
    "max_num_batched_tokens",
    "tensor_parallel_size",
    "config",
)


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Flags of this command."""

    device_memory: int | None = option(
        None,
        "bytes of a GPU that need not be there, as 80GiB: temporaries are then estimated; this "
        "machine's own devices if not given",
        "plan",
    )
    request_tokens: tuple[int, ...] | None = option(
        None, "lengths to count requests of, as 1k,4K (default: usual ones)", "plan"
    )
    json: bool = option(False, "one JSON object on stdout", "plan")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_model_argument(parser)
    add_config_arguments(parser, PlanOptions)
    add_engine_arguments(parser)
    add_unsupported_flags(parser, of_server=False)


def run(arguments: argparse.Namespace) -> int:
    """Plan and print."""
    arguments.model = one_model(arguments)
    config, options = engine_config(arguments), read_config(arguments, PlanOptions)
    if options.device_memory is not None:
        # Only shapes are made: a GPU that is there shall not be waited for, nor reserved.
        os.environ["JAX_PLATFORMS"] = "cpu"
    from jaxserve.plan_report import report_plan  # imports JAX, which takes seconds

    report = report_plan(
        config, device_memory=options.device_memory, request_tokens=options.request_tokens
    )
    values = plan_values(report)
    print(json.dumps(values) if options.json else plan_text(values))
    return 0


def plan_values(report: "PlanReport") -> dict[str, Any]:
    """The report as JSON shows it; bytes are those of one device, null is what is not known."""
    setup, limits, buckets, bill = (
        report.setup, report.plan.limits, report.plan.buckets, report.plan.bill
    )  # fmt: skip
    return {
        "model": str(report.path),
        "architecture": setup.model.architecture,
        "device": {
            "kind": report.device_kind,
            "is_present": report.device_kind is not None,
            "asked_bytes": report.device_memory,
            "count": setup.config.tensor_parallel_size,
        },
        "memory": {
            "device_bytes": bill.device_bytes or None,
            "weight_bytes": bill.weight_bytes,
            "page_bytes": bill.page_bytes,
            "temporary_bytes": bill.temporary_bytes,
            "temporaries": report.temporaries,
            "temporaries_are": report.temporaries_are,
            "reserved_bytes": bill.reserved_bytes,
            "left_bytes": bill.left_bytes,
            "host_page_bytes": bill.host_page_bytes,
        },
        "pages": {
            "block_size": setup.config.block_size,
            "num_pages": list(bill.num_pages),
            "windows": list(bill.windows),
            "num_tokens": bill.num_tokens,
            "num_host_pages": bill.num_host_pages,
        },
        "largest_max_model_len": report.longest,
        "requests": [
            {
                "num_tokens": fit.num_tokens,
                "num_in_pages": fit.num_in_pages,
                "num_running": fit.num_running,
            }
            for fit in report.requests
        ],
        "chosen": {
            "max_model_len": limits.max_model_len,
            "max_num_seqs": limits.max_num_seqs,
            "max_num_batched_tokens": limits.max_num_batched_tokens,
            "dtype": setup.dtype,
            "attention_backend": setup.backend if report.device_kind else None,
            "batch_invariant": setup.config.batch_invariant,
            "row_buckets": list(buckets.row_buckets),
            "token_buckets": list(buckets.token_buckets),
            "sampler_rows": list(buckets.sampler_sizes(is_greedy=True)),
        },
    }


def plan_text(values: dict[str, Any]) -> str:
    """The same for people."""
    memory, pages, chosen = values["memory"], values["pages"], values["chosen"]
    lines = [
        f"model   {values['model']} ({values['architecture']})",
        f"device  {_device(values['device'])}",
        "",
        "memory of each device, GiB" if values["device"]["count"] > 1 else "memory, GiB",
        *_bill_lines(memory),
        f"  (temporaries {memory['temporaries']}: {memory['temporaries_are']})",
        "",
        f"{_pages(pages)}: {pages['num_tokens']:,} tokens",
        *_host_lines(memory, pages),
        f"the largest max_model_len that fits: {values['largest_max_model_len']:,}",
        "",
        "requests at the same time",
        f"{'tokens of each':>16}{'pages hold':>14}{'run':>8}",
        *(
            f"{fit['num_tokens']:>16,}{fit['num_in_pages']:>14,}{fit['num_running']:>8,}"
            for fit in values["requests"]
        ),
        "",
        "chosen",
        *(f"  {name:<24}{_plain(value)}" for name, value in chosen.items() if value is not None),
    ]
    return "\n".join(lines)


def _device(device: dict[str, Any]) -> str:
    count = f"{device['count']} x " if device["count"] > 1 else ""
    absent = f"GPU of {(device['asked_bytes'] or 0) / 2**30:.2f} GiB, as asked for"
    return f"{count}{device['kind'] or absent}"


def _bill_lines(memory: dict[str, Any]) -> list[str]:
    parts = {
        "weights": memory["weight_bytes"],
        "pages": memory["page_bytes"],
        "temporaries": memory["temporary_bytes"],
        "reserve": memory["reserved_bytes"],
        "left": memory["left_bytes"],
        "for this process": memory["device_bytes"],
    }
    known = {name: size for name, size in parts.items() if size is not None}
    return [f"  {name:<18}{size / 2**30:>9.2f}" for name, size in known.items()]


def _pages(pages: dict[str, Any]) -> str:
    names = ["" if window is None else f" of window {window:,}" for window in pages["windows"]]
    counts = zip(pages["num_pages"], names, strict=True)
    shown = " + ".join(f"{count:,} pages{name}" for count, name in counts)
    return f"{shown}, {pages['block_size']} tokens each"


def _host_lines(memory: dict[str, Any], pages: dict[str, Any]) -> list[str]:
    if not pages["num_host_pages"]:
        return []
    size = memory["host_page_bytes"] / 2**30
    return [f"{pages['num_host_pages']:,} more pages in the host's memory, {size:.2f} GiB"]


def _plain(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
