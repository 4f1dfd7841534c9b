"""jax_triton's `triton_call`, by Triton's interpreter: kernels on numpy arrays, without a GPU.

The environment must hold TRITON_INTERPRET=1 before triton is imported, and the callers must run
under `jax.disable_jit`.
"""

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int32": "i32"}


class HostTensor:
    """A numpy array with the few methods of a torch tensor that the interpreter calls."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.dtype = NAMES[array.dtype.name]

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> "HostTensor":
        return self

    def cpu(self) -> "HostTensor":
        return self

    def copy_(self, other: "HostTensor") -> None:
        assert other.array is self.array  # the kernel wrote in place

    def new_empty(self, size: int, device: str) -> "HostTensor":
        return self

    def set_(self, storage: "HostTensor", *shape: Any) -> None:
        assert storage.array is self.array

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return self.array.strides


def triton_call(*args, kernel, out_shape, grid, input_output_aliases=None, **options):
    """As `jax_triton.triton_call`; an output that nobody writes is NaN."""
    tensors = [x if isinstance(x, int) else HostTensor(np.array(x)) for x in args]
    flat, tree = jax.tree.flatten(out_shape)
    outputs = [HostTensor(np.full(x.shape, np.nan).astype(x.dtype)) for x in flat]
    for source, target in (input_output_aliases or {}).items():
        outputs[target] = tensors[source]
    metaparams = {name: value for name, value in options.items() if not name.startswith("num_")}
    kernel[grid](*tensors, *outputs, **metaparams)
    return jax.tree.unflatten(tree, [jnp.asarray(x.array) for x in outputs])


def install() -> None:
    """Let `import jax_triton` find this instead."""
    sys.modules["jax_triton"] = SimpleNamespace(triton_call=triton_call)  # pyright: ignore[reportArgumentType]
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    patch = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor, scope):
        """Triton 3.6 calls int() on arrays of one element, which numpy no longer takes."""
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_lang_tensor
