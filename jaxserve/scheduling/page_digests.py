"""Digests that name a full page by its tokens and all that stands before them."""

from array import array
from collections import OrderedDict
from hashlib import sha256


def root_digest(cache_salt: str | None) -> bytes:
    """What the first page's digest is chained to; sequences of different salts share nothing."""
    return sha256(b"" if cache_salt is None else b"salt" + cache_salt.encode()).digest()


PageName = tuple[bytes, bytes]
"""The digest of a page, and its tokens as bytes, which must be equal, too."""


class NameMemory:
    """Names of sequences seen lately, for others that begin with the same tokens.

    A hash of each page of each prompt is most of what a shared prompt costs the host. Comparing
    tokens is far cheaper, and as exact. One sequence is kept for each first page.
    """

    def __init__(self, *, capacity: int = 64, max_pages: int = 1 << 16):
        """Remember nothing.

        Args:
          capacity: how many sequences are remembered, those used last.
          max_pages: how many pages they have at most, unless the last one alone has more.
        """
        self._capacity, self._max_pages = capacity, max_pages
        self._num_pages = 0
        self._entries: OrderedDict[PageName, tuple[bytes, list[PageName]]] = OrderedDict()

    def recall(self, first: PageName, content: bytes) -> list[PageName]:
        """Names of the leading pages that a remembered sequence shares; a new list.

        Args:
          first: the name of the first page.
          content: the tokens of all full pages.
        """
        entry = self._entries.get(first)
        if entry is None:
            return [first]
        self._entries.move_to_end(first)
        known, names = entry
        size = len(first[1])
        low, high = 1, min(len(known), len(content)) // size
        while low < high:
            middle = (low + high + 1) // 2
            if known[low * size : middle * size] == content[low * size : middle * size]:
                low = middle
            else:
                high = middle - 1
        return names[:low]

    def note(self, content: bytes, names: list[PageName]) -> None:
        """Remember a sequence in place of one with the same first page.

        Args:
          content: the tokens of all its full pages.
          names: of these pages; the caller may extend the list later.
        """
        _, replaced = self._entries.pop(names[0], (b"", []))
        self._entries[names[0]] = content, names[:]
        self._num_pages += len(names) - len(replaced)
        while len(self._entries) > 1 and (
            len(self._entries) > self._capacity or self._num_pages > self._max_pages
        ):
            _, (_, dropped) = self._entries.popitem(last=False)
            self._num_pages -= len(dropped)


class PageDigests:
    """The names of one sequence's pages of one size, made when they are asked for.

    A digest is that of the page before, or the root, and of the page's tokens.

    Source: vLLM's automatic prefix caching, which chains hashes of blocks in the same way.
    """

    def __init__(
        self, root: bytes, token_ids: list[int], page_size: int, memory: NameMemory | None = None
    ):
        """Start without names.

        Args:
          root: of `root_digest`.
          token_ids: the sequence's own list, which only grows, or is cut at the end of its life.
          page_size: tokens in a page.
          memory: names that may be known already.
        """
        self._root, self._token_ids, self._page_size = root, token_ids, page_size
        self._names: list[PageName] = []
        self._memory = memory

    def up_to(self, num_pages: int) -> list[PageName]:
        """Names of the first pages, or of more; all their tokens are known."""
        names, size = self._names, self._page_size
        if len(names) < num_pages:
            tokens = array("i", self._token_ids[len(names) * size : num_pages * size])
            content, num_bytes = tokens.tobytes(), size * tokens.itemsize
            if names or self._memory is None or num_pages < _WORTH_REMEMBERING:
                _extend(names, self._root, content, num_bytes)
            else:
                self._recall(self._memory, content, num_bytes)
        return names

    def _recall(self, memory: NameMemory, content: bytes, num_bytes: int) -> None:
        """Name the first pages, with what another sequence has named; remember what is much."""
        names = self._names
        _extend(names, self._root, content[:num_bytes], num_bytes)
        names[:] = memory.recall(names[0], content)
        num_known = len(names)
        _extend(names, self._root, content[num_known * num_bytes :], num_bytes)
        if len(names) - num_known >= _WORTH_REMEMBERING:
            memory.note(content, names)


_WORTH_REMEMBERING = 8
"""Pages. A sequence with fewer of its own than this, besides its first, is not remembered."""


def _extend(names: list[PageName], root: bytes, content: bytes, num_bytes: int) -> None:
    """Append the names of the pages in `content`, each of so many bytes."""
    digest = names[-1][0] if names else root
    for start in range(0, len(content), num_bytes):
        page = content[start : start + num_bytes]
        digest = sha256(digest + page).digest()
        names.append((digest, page))
