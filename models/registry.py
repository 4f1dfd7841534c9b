"""Architecture name -> model class."""

from models.decoder import Decoder
from models.errors import ModelLoadError
from models.families.gemma2 import Gemma2ForCausalLM
from models.families.llama import LlamaForCausalLM
from models.families.mistral import MistralForCausalLM
from models.families.phi3 import Phi3ForCausalLM
from models.families.qwen2 import Qwen2ForCausalLM
from models.families.qwen3 import Qwen3ForCausalLM

_MODEL_CLASSES: dict[str, type[Decoder]] = {
    "Gemma2ForCausalLM": Gemma2ForCausalLM,
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": MistralForCausalLM,
    "Phi3ForCausalLM": Phi3ForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
}


def model_class(architecture: str) -> type[Decoder]:
    """The class of an architecture.

    Raises:
      ModelLoadError: it is not known; names those that are.
    """
    if architecture not in _MODEL_CLASSES:
        known = ", ".join(sorted(_MODEL_CLASSES))
        raise ModelLoadError(f"architectures must name one of {known}; got {architecture!r}")
    return _MODEL_CLASSES[architecture]
