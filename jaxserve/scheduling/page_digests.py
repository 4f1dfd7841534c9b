"""Digests that name a full page by its tokens and all that stands before them."""

from array import array
from hashlib import sha256


def root_digest(cache_salt: str | None) -> bytes:
    """What the first page's digest is chained to; sequences of different salts share nothing."""
    return sha256(b"" if cache_salt is None else b"salt" + cache_salt.encode()).digest()


PageName = tuple[bytes, bytes]
"""The digest of a page, and its tokens as bytes, which must be equal, too."""


class PageDigests:
    """The names of one sequence's pages of one size, made when they are asked for.

    A digest is that of the page before, or the root, and of the page's tokens.

    Source: vLLM's automatic prefix caching, which chains hashes of blocks in the same way.
    """

    def __init__(self, root: bytes, token_ids: list[int], page_size: int):
        """Start without names.

        Args:
          root: of `root_digest`.
          token_ids: the sequence's own list, which only grows, or is cut at the end of its life.
          page_size: tokens in a page.
        """
        self._root, self._token_ids, self._page_size = root, token_ids, page_size
        self._names: list[PageName] = []

    def up_to(self, num_pages: int) -> list[PageName]:
        """Names of the first pages, or of more; all their tokens are known."""
        names, size = self._names, self._page_size
        if len(names) < num_pages:
            first = len(names) * size
            tokens = array("i", self._token_ids[first : num_pages * size])
            content, num_bytes = tokens.tobytes(), size * tokens.itemsize
            digest = names[-1][0] if names else self._root
            for start in range(0, len(content), num_bytes):
                page = content[start : start + num_bytes]
                digest = sha256(digest + page).digest()
                names.append((digest, page))
        return names
