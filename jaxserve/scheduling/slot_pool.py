"""SlotPool: which rows of the device state are free."""

from jaxserve.errors import EngineConfigError


class SlotPool:
    """The rows `[0, max_num_seqs)` of the device state, each free or owned by one sequence."""

    def __init__(self, max_num_seqs: int):
        """Make a pool whose slots are all free.

        Raises:
          EngineConfigError: `max_num_seqs` is less than 1.
        """
        if max_num_seqs < 1:
            raise EngineConfigError(f"max_num_seqs must be at least 1; got {max_num_seqs}")
        self.max_num_seqs = max_num_seqs
        self._free = list(range(max_num_seqs - 1, -1, -1))
        self._is_free = [True] * max_num_seqs

    @property
    def num_free(self) -> int:
        """Slots that no sequence owns."""
        return len(self._free)

    def allocate(self) -> int | None:
        """Give out a slot, or None when all are owned."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._is_free[slot] = False
        return slot

    def free(self, slot: int) -> None:
        """Take a slot back.

        Raises:
          ValueError: the slot is free already, or does not exist.
        """
        if not 0 <= slot < self.max_num_seqs or self._is_free[slot]:
            raise ValueError(f"slot must be one that the pool gave out and not free; got {slot}")
        self._is_free[slot] = True
        self._free.append(slot)

    def check_invariants(self) -> None:
        """Check that the list of free slots and the marks agree.

        Raises:
          RuntimeError: they do not.
        """
        marked = [slot for slot, is_free in enumerate(self._is_free) if is_free]
        if sorted(self._free) != marked:
            raise RuntimeError(f"free slots must be {marked}; got {sorted(self._free)}")
