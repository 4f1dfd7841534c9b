"""StepProgram: a step's function with its abstract arguments, lowered here or carried over."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.export import Exported, deserialize, export
from jax.stages import Traced


@dataclass(frozen=True, kw_only=True)
class StepProgram:
    """What one program is lowered from, here or in a process that has no GPU.

    Attributes:
      name: of the function, as profiles show it.
      function: pure; gives new arrays, and then what becomes of the donated arguments.
      arguments: trees of abstract arrays with shardings.
      donated: positions of arguments, ascending.
      new_shardings: of the new arrays.
    """

    name: str
    function: Callable[..., tuple[Any, ...]]
    arguments: tuple[Any, ...]
    donated: tuple[int, ...]
    new_shardings: tuple[jax.sharding.Sharding, ...]

    def trace(self) -> Traced:
        """Trace for this process's devices; with lowering it takes a second, under the GIL."""
        return self._trace(self.function)

    def export(self, platform: str) -> bytes:
        """Trace and lower for a platform that need not be here, "cpu" or "cuda", for one device.

        Arguments and results are flat, so no tree has to be known where they are read; and they
        have no shardings, which would come back as operations on the whole cache.

        Raises:
          ValueError: it holds what cannot be carried over.
        """
        leaves, tree = jax.tree.flatten(self.arguments)

        def run(*leaves: jax.Array) -> tuple[jax.Array, ...]:
            return tuple(jax.tree.leaves(self.function(*tree.unflatten(leaves))))

        plain = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
        return bytes(export(jax.jit(run), platforms=(platform,))(*plain).serialize())

    def trace_exported(self, program: bytes) -> Traced:
        """What stands for `trace`, of what `export` gave; takes a fiftieth of the time.

        Raises:
          ValueError: that was another program.
        """
        exported = deserialize(bytearray(program))
        self._check(exported)
        outputs = jax.tree.structure((*self.new_shardings, *self._donated_arguments))

        def run(*arguments: Any) -> tuple[Any, ...]:
            return outputs.unflatten(exported.call(*jax.tree.leaves(arguments)))

        run.__name__ = run.__qualname__ = self.name
        return self._trace(run)

    @property
    def _donated_arguments(self) -> tuple[Any, ...]:
        return tuple(self.arguments[index] for index in self.donated)

    def _trace(self, function: Callable[..., tuple[Any, ...]]) -> Traced:
        carried = jax.tree.map(lambda leaf: leaf.sharding, self._donated_arguments)
        shardings = (*self.new_shardings, *carried)
        jitted = jax.jit(function, donate_argnums=self.donated, out_shardings=shardings)
        return jitted.trace(*self.arguments)

    def _check(self, exported: Exported) -> None:
        """Else the mistake would be a donation without effect, or a wrong result."""
        outputs = exported.out_avals[len(self.new_shardings) :]
        pairs = ((self.arguments, exported.in_avals), (self._donated_arguments, outputs))
        for trees, found in pairs:
            expected = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(trees)]
            got = [(leaf.shape, leaf.dtype) for leaf in found]
            if expected != got:
                raise ValueError(f"an exported program must have the arrays {expected}; got {got}")
