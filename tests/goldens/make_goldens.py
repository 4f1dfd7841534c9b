"""Make the tiny random checkpoints of tests/goldens with transformers, and what they must answer.

Needs torch, which nothing else here needs, so it runs in an environment of its own and never in
CI; the checkpoints and goldens are committed:

    python -m venv /tmp/goldens_env
    /tmp/goldens_env/bin/pip install torch==2.13.0 transformers==5.24.0 safetensors numpy
    /tmp/goldens_env/bin/python tests/goldens/make_goldens.py

Each folder then holds config.json, the weights as safetensors and goldens.npz (float32, eager
attention, one thread, no KV cache, every prompt alone):

    logits_prompt_<i>  int32[T], i in 0..2, and logits_<i> float32[T, V]: logits of all positions
    alone_prompt       int32[T], one prompt with alone_tokens int32[64] and alone_margins
    mixed_lengths      int32[17], lengths of the prompts in mixed_prompts int32[sum of lengths]
    mixed_tokens       int32[17, 64] greedy tokens, mixed_margins float32[17, 64]

A margin is the best logit less the second best at that step. Prompts with a margin of
MIN_MARGIN or less anywhere were drawn anew, so no greedy choice is a near tie. End-of-sequence
ids are ignored: every greedy row has 64 tokens.
"""

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    set_seed,
)

LOGIT_LENGTHS = (1, 9, 40)
ALONE_LENGTH = 23
MIXED_LENGTHS = (1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 33, 47, 64, 65, 100, 127, 150)
NUM_GREEDY_TOKENS = 64
MIN_MARGIN = 2e-3

SHARED = dict(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    max_position_embeddings=512,
    initializer_range=0.2,
    rms_norm_eps=1e-5,
    attn_implementation="eager",
)
SMALL = SHARED | dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=None,
)
LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)


@dataclass(frozen=True)
class Recipe:
    """One checkpoint: its class, its config, and how its files are written."""

    name: str
    model_class: type[PreTrainedModel]
    config: PreTrainedConfig
    seed: int
    is_sharded: bool = False
    has_old_config: bool = False
    """Write rope_theta, rope_scaling and torch_dtype as transformers 4 did, which is how nearly
    all published checkpoints have them, instead of transformers 5's rope_parameters."""


def recipes() -> list[Recipe]:
    """All checkpoints: four Llamas, two Qwen3s, and the other families."""
    gqa = dict(num_attention_heads=4, num_key_value_heads=2)
    return [
        Recipe(
            "llama_gqa",
            LlamaForCausalLM,
            LlamaConfig(**SHARED, **gqa, tie_word_embeddings=False),
            seed=1,
        ),
        Recipe(
            "llama_llama3_rope_tied",
            LlamaForCausalLM,
            LlamaConfig(**SHARED, **gqa, tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE),
            seed=2,
            has_old_config=True,
        ),
        Recipe(
            "llama_linear_rope",
            LlamaForCausalLM,
            LlamaConfig(
                **SHARED,
                **gqa,
                tie_word_embeddings=False,
                rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=4.0),
            ),
            seed=3,
        ),
        Recipe(
            "llama_mha_head_dim_80",
            LlamaForCausalLM,
            LlamaConfig(
                **SHARED,
                num_attention_heads=4,
                num_key_value_heads=4,
                head_dim=80,
                attention_bias=False,
                tie_word_embeddings=False,
            ),
            seed=4,
        ),
        Recipe(
            "qwen3_tied",
            Qwen3ForCausalLM,
            Qwen3Config(**SHARED, **gqa, head_dim=32, tie_word_embeddings=True),
            seed=5,
        ),
        Recipe(
            "qwen3_sharded",
            Qwen3ForCausalLM,
            Qwen3Config(**SHARED, **gqa, head_dim=16, tie_word_embeddings=False),
            seed=6,
            is_sharded=True,
            has_old_config=True,
        ),
        *small_recipes(),
    ]


def small_recipes() -> list[Recipe]:
    """Families that differ from Llama by windows, fused weights, norms or caps."""
    num_frequencies = 3  # of the 6 dimensions in 8 that Phi3's recipe rotates
    longrope = dict(
        rope_type="longrope",
        rope_theta=10000.0,
        short_factor=[1.1, 1.7, 3.0],
        long_factor=[9.0] * num_frequencies,
        attention_factor=1.2,
        partial_rotary_factor=0.75,
    )
    return [
        Recipe(
            "qwen2_windows",
            Qwen2ForCausalLM,
            Qwen2Config(
                **SMALL,
                use_sliding_window=True,
                sliding_window=24,
                max_window_layers=1,
                tie_word_embeddings=True,
            ),
            seed=7,
        ),
        Recipe(
            "mistral_window",
            MistralForCausalLM,
            MistralConfig(**SMALL, head_dim=16, sliding_window=16, tie_word_embeddings=False),
            seed=8,
            has_old_config=True,
        ),
        Recipe(
            "phi3_longrope",
            Phi3ForCausalLM,
            Phi3Config(
                **SMALL,
                sliding_window=33,
                tie_word_embeddings=False,
                original_max_position_embeddings=512,  # no sequence is longer
                rope_parameters=longrope,
            ),
            seed=9,
        ),
        Recipe(
            "gemma2",
            Gemma2ForCausalLM,
            Gemma2Config(
                **SMALL,
                head_dim=16,
                sliding_window=16,
                query_pre_attn_scalar=24,
                attn_logit_softcapping=5.0,
                final_logit_softcapping=10.0,
            ),
            seed=10,
        ),
    ]


def make_model(recipe: Recipe) -> PreTrainedModel:
    """A float32 model with random weights; norms and biases too: one left out is noticed."""
    set_seed(recipe.seed)
    model = recipe.model_class(recipe.config).eval()
    mean = 0 if recipe.name.startswith("gemma") else 1
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data = mean + 0.3 * torch.randn_like(parameter)
        if name.endswith(".bias"):
            parameter.data = 0.3 * torch.randn_like(parameter)
    return model


@torch.inference_mode()
def logits_of(model: PreTrainedModel, token_ids: list[int]) -> np.ndarray:
    """Logits float32[T, V] of all positions."""
    return model(torch.tensor([token_ids]), use_cache=False).logits[0].numpy()


def greedy(model: PreTrainedModel, prompt: list[int]) -> tuple[list[int], list[float]]:
    """64 greedy tokens and their margins; the whole sequence is computed anew each step."""
    token_ids, margins = list(prompt), []
    for _ in range(NUM_GREEDY_TOKENS):
        last = logits_of(model, token_ids)[-1]
        second, best = np.partition(last, -2)[-2:]
        token_ids.append(int(last.argmax()))
        margins.append(float(best - second))
    return token_ids[len(prompt) :], margins


def clear_greedy(
    model: PreTrainedModel, length: int, rng: np.random.Generator
) -> tuple[list[int], list[int], list[float]]:
    """A prompt of this length whose greedy choices are all clear, with tokens and margins."""
    while True:
        prompt = rng.integers(3, 256, length).tolist()
        tokens, margins = greedy(model, prompt)
        if min(margins) > MIN_MARGIN:
            return prompt, tokens, margins


def make_goldens(model: PreTrainedModel, seed: int) -> dict[str, np.ndarray]:
    """Everything that goldens.npz holds."""
    rng = np.random.default_rng(seed)
    goldens = {}
    for index, length in enumerate(LOGIT_LENGTHS):
        prompt = rng.integers(3, 256, length).tolist()
        goldens[f"logits_prompt_{index}"] = np.array(prompt, np.int32)
        goldens[f"logits_{index}"] = logits_of(model, prompt)
    prompt, tokens, margins = clear_greedy(model, ALONE_LENGTH, rng)
    goldens["alone_prompt"] = np.array(prompt, np.int32)
    goldens["alone_tokens"] = np.array(tokens, np.int32)
    goldens["alone_margins"] = np.array(margins, np.float32)
    rows = [clear_greedy(model, n, rng) for n in MIXED_LENGTHS]
    prompts, tokens, margins = zip(*rows, strict=True)
    goldens["mixed_lengths"] = np.array(MIXED_LENGTHS, np.int32)
    goldens["mixed_prompts"] = np.concatenate(prompts).astype(np.int32)
    goldens["mixed_tokens"] = np.array(tokens, np.int32)
    goldens["mixed_margins"] = np.array(margins, np.float32)
    return goldens


def write_old_config(folder: Path) -> None:
    """Rewrite config.json with the keys of transformers 4."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def main() -> None:
    """Write the folders beside this file, and check that transformers reads them back alike.

    Names given as arguments choose among them.
    """
    torch.set_num_threads(1)
    for recipe in recipes():
        if sys.argv[1:] and recipe.name not in sys.argv[1:]:
            continue
        folder = Path(__file__).parent / recipe.name
        shutil.rmtree(folder, ignore_errors=True)
        model = make_model(recipe)
        model.save_pretrained(folder, max_shard_size="200KB" if recipe.is_sharded else "5GB")
        (folder / "generation_config.json").unlink(missing_ok=True)
        if recipe.has_old_config:
            write_old_config(folder)
        goldens = make_goldens(model, recipe.seed)
        np.savez_compressed(folder / "goldens.npz", **goldens)

        again = recipe.model_class.from_pretrained(folder, attn_implementation="eager").eval()
        prompt = goldens["logits_prompt_2"].tolist()
        assert np.array_equal(logits_of(again, prompt), goldens["logits_2"]), recipe.name
        kinds = [len(set(row)) for row in goldens["mixed_tokens"].tolist()]
        margin = min(goldens["alone_margins"].min(), goldens["mixed_margins"].min())
        print(f"{recipe.name}: min margin {margin:.4f}, distinct tokens a row {sorted(kinds)}")


if __name__ == "__main__":
    main()
