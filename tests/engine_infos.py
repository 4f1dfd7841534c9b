"""What scripted engines tell of themselves."""

from typing import Any

from jaxserve.distributed.messages import EngineInfo


def make_info(**changes: Any) -> EngineInfo:
    """The info of a small engine that no device runs."""
    info: dict[str, Any] = {
        "max_model_len": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "page_size": 16,
        "num_pages": (9,),
        "max_tokens_per_sequence": 128,
        "device_kind": "script",
        "memory_bill": "",
        "seconds": {},
    }
    return EngineInfo(**(info | changes))
