"""HostCache: which slots of the host's memory hold which evicted pages of one group."""

from jaxserve.scheduling.page_digests import PageName


class HostCache:
    """Pages that were evicted from the device, by their content; the longest unused is dropped.

    Attributes:
      num_slots: pages that the host's memory takes.
    """

    def __init__(self, num_slots: int):
        """Start empty."""
        self.num_slots = num_slots
        self._slots: dict[bytes, tuple[int, bytes]] = {}  # in the order of dropping
        self._free = list(range(num_slots - 1, -1, -1))
        self._pinned: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._slots)

    def find(self, name: PageName) -> int | None:
        """The slot that holds the page of that digest, if its tokens are indeed these."""
        slot, content = self._slots.get(name[0], (None, b""))
        return slot if content == name[1] else None

    def pin(self, name: PageName) -> None:
        """The step that is being built reads this slot: it stays until `unpin_all`."""
        self._slots[name[0]] = self._slots.pop(name[0])
        self._pinned.add(name[0])

    def unpin_all(self) -> None:
        """The step is built."""
        self._pinned.clear()

    def put(self, name: PageName) -> int | None:
        """Make room for an evicted page.

        Returns:
          The slot to copy it to; None where it is there already, or all slots are pinned.
        """
        digest, content = name
        if digest in self._slots:
            return None
        slot = self._free.pop() if self._free else self._drop()
        if slot is not None:
            self._slots[digest] = (slot, content)
        return slot

    def clear(self) -> None:
        """Forget everything."""
        self._slots.clear()
        self._pinned.clear()
        self._free = list(range(self.num_slots - 1, -1, -1))

    def check_invariants(self) -> None:
        """Check that each slot is free or holds one page.

        Raises:
          RuntimeError: the books disagree.
        """
        slots = sorted([*self._free, *(slot for slot, _ in self._slots.values())])
        if slots != list(range(self.num_slots)):
            raise RuntimeError(f"host slots must be free or used, once; got {slots}")

    def _drop(self) -> int | None:
        digest = next((d for d in self._slots if d not in self._pinned), None)
        return None if digest is None else self._slots.pop(digest)[0]
