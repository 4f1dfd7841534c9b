"""LoadingConfig: which model an engine loads, from where, and under which names; no JAX."""

from dataclasses import dataclass
from typing import Any

from jaxserve.config_fields import flag

LOAD_FORMATS = ("auto", "gguf", "safetensors", "dummy")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingConfig:
    """The part of EngineConfig that names files and repositories. Names are vLLM's.

    `use_modelscope` is what vLLM reads from VLLM_USE_MODELSCOPE; `jaxserve/environment.py` reads
    that variable where a user comes in.
    """

    model: str | None = flag(
        None,
        "folder with config.json, .gguf file, hub id, or owner/name:file.gguf; the embedded "
        "SmolLM2 if not given",
        "model",
    )
    tokenizer: str | None = flag(
        None, "folder, tokenizer.json, .gguf file or hub id, if not the model's", "model"
    )
    revision: str | None = flag(None, "branch, tag or commit of the model's repository", "model")
    tokenizer_revision: str | None = flag(
        None, "branch, tag or commit of the tokenizer's repository", "model"
    )
    download_dir: str | None = flag(
        None, "where downloads are kept, instead of the hub library's cache", "model"
    )
    hf_token: str | None = flag(
        None,
        "of the Hugging Face Hub; the library's own (HF_TOKEN, hf auth login) if not given",
        "model",
        is_secret=True,
    )
    use_modelscope: bool = flag(
        False, "fetch hub ids from ModelScope; also VLLM_USE_MODELSCOPE=true", "model"
    )
    trust_remote_code: bool = flag(
        False, "taken for vLLM's sake: code of a model is never run", "model"
    )
    served_model_name: tuple[str, ...] | None = flag(
        None, "names in the API, the first is shown in answers; the model if not given", "model"
    )
    load_format: str = flag("auto", f"one of {', '.join(LOAD_FORMATS)}", "model")
    hf_overrides: dict[str, Any] | None = flag(None, "values that replace config.json's", "model")
    generation_config: str = flag(
        "auto",
        "default sampling: the model's generation_config.json, another folder's, or vllm: none",
        "model",
    )
    override_generation_config: dict[str, Any] | None = flag(
        None, "values that replace generation_config.json's", "model"
    )
