"""PartialPages: pages of one group by the tokens that they begin with, and what stands before."""

MAX_PAGES_PER_PREFIX = 16
"""More than the beams of a search, of which each is to find the one that it continues."""
_TOKEN_BITS = 32


class PartialPages:
    """Pages that whoever shares their first tokens may copy.

    A page is known by the digest of all that stands before it and by its first tokens. Its owner
    may write behind these; the slots of these tokens do not change while it is held or idle.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._pages: dict[bytes, dict[int, bytes]] = {}
        self._parents: dict[int, bytes] = {}

    def __len__(self) -> int:
        """How many pages are known."""
        return len(self._parents)

    def __contains__(self, page: int) -> bool:
        """Whether the page is known."""
        return page in self._parents

    def has_any(self, parent: bytes) -> bool:
        """Whether any page stands behind that prefix."""
        return parent in self._pages

    def find(self, parent: bytes, wanted: bytes) -> tuple[int, int]:
        """Find the page that begins with the most of some tokens.

        Args:
          parent: digest of all that stands before them.
          wanted: the tokens, int32.

        Returns:
          The page, and how many of the tokens it begins with; zeros if no page does.
        """
        best = (0, 0)
        for page, content in self._pages.get(parent, {}).items():
            num_tokens = _count_common(content, wanted)
            if num_tokens > best[1]:
                best = (page, num_tokens)
        return best

    def add(self, page: int, parent: bytes, content: bytes) -> int | None:
        """Remember what a page begins with, unless another one begins with the same.

        Args:
          page: a known one may have more tokens by now.
          parent: digest of all that stands before it.
          content: its first tokens, int32.

        Returns:
          The page that was forgotten for it: one that has no other tokens, or the oldest of too
          many behind the same prefix.
        """
        pages = self._pages.setdefault(parent, {})
        if page in pages:
            pages[page] = max(pages[page], content, key=len)
            return None
        if any(known.startswith(content) for known in pages.values()):
            return None
        dropped = next((old for old, known in pages.items() if content.startswith(known)), None)
        if dropped is None and len(pages) == MAX_PAGES_PER_PREFIX:
            dropped = next(iter(pages))
        pages[page] = content
        self._parents[page] = parent
        if dropped is not None:
            self.drop(dropped)
        return dropped

    def extend(self, page: int, content: bytes) -> None:
        """A known page has more tokens by now."""
        self._pages[self._parents[page]][page] = content

    def drop(self, page: int) -> None:
        """Forget a page, known or not."""
        parent = self._parents.pop(page, None)
        if parent is not None:
            del self._pages[parent][page]
            if not self._pages[parent]:
                del self._pages[parent]

    def clear(self) -> None:
        """Forget everything."""
        self._pages.clear()
        self._parents.clear()

    def items(self) -> list[tuple[int, bytes, bytes]]:
        """All pages, with the digest of what stands before each and its first tokens."""
        return [
            (page, parent, content)
            for parent, pages in self._pages.items()
            for page, content in pages.items()
        ]

    def check_invariants(self) -> None:
        """Check that the books agree.

        Raises:
          RuntimeError: they do not.
        """
        found = sorted((page, parent) for page, parent, _ in self.items())
        most = max(map(len, self._pages.values()), default=0)
        if found != sorted(self._parents.items()) or most > MAX_PAGES_PER_PREFIX:
            raise RuntimeError(
                f"partial pages must stand once, at most {MAX_PAGES_PER_PREFIX} behind a prefix; "
                f"got {len(found)} of {len(self._parents)} pages, at most {most}"
            )


def _count_common(first: bytes, second: bytes) -> int:
    """Leading tokens, int32 each, that are the same in both."""
    size = min(len(first), len(second))
    # Little-endian, so the lowest bit that differs lies in the first token that does.
    numbers = [int.from_bytes(content[:size], "little") for content in (first, second)]
    differing = numbers[0] ^ numbers[1]
    if not differing:
        return size * 8 // _TOKEN_BITS
    return ((differing & -differing).bit_length() - 1) // _TOKEN_BITS
