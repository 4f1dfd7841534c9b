"""A tokenizer of 256 words for the checkpoints in goldens, and settings of one small engine.

All tests of LLM and of the command line use the same settings, so that programs compile once.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from tests.goldens_loader import load_golden

GOLDEN = load_golden("qwen3_tied")
MODEL = str(GOLDEN.folder)
SETTINGS: dict[str, Any] = {
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "row_buckets": (4,),
    "token_buckets": (64,),
    "num_gpu_blocks_override": 24,
}
ROLES = {1: "system", 2: "user", 3: "assistant"}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}w9{% endif %}"
)


def write_tokenizer(folder: Path, *, has_template: bool = True) -> Path:
    """A folder whose tokenizer has the word "w7" for the id 7, and roles for a few others."""
    words = {f"w{i}": i for i in range(256)}
    for token_id, role in ROLES.items():
        del words[f"w{token_id}"]
        words[role] = token_id
    backend = Backend(WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = WhitespaceSplit()
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"chat_template": CHAT_TEMPLATE} if has_template else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def to_text(token_ids: tuple[int, ...] | list[int]) -> str:
    """The text of ids."""
    return " ".join(ROLES.get(token_id, f"w{token_id}") for token_id in token_ids)


def flags(tokenizer: Path | None = None) -> list[str]:
    """SETTINGS as words of a command line."""
    words = ["--model", MODEL, "--log-level", "warning"]
    if tokenizer is not None:
        words += ["--tokenizer", str(tokenizer)]
    for name, value in SETTINGS.items():
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        words += [f"--{name.replace('_', '-')}", text]
    return words
