"""Digests that name a full page by its tokens and all that stands before them."""

import hashlib
from array import array
from collections.abc import Sequence


def root_digest(cache_salt: str | None) -> bytes:
    """What the first page's digest is chained to; sequences of different salts share nothing."""
    return hashlib.sha256(b"" if cache_salt is None else b"salt" + cache_salt.encode()).digest()


def page_content(token_ids: Sequence[int], page: int, page_size: int) -> bytes:
    """The tokens of a full page, as bytes."""
    return array("i", token_ids[page * page_size : (page + 1) * page_size]).tobytes()


def chain_digest(before: bytes, content: bytes) -> bytes:
    """The digest of a page.

    Args:
      before: the digest of the page before it, or the root.
      content: its tokens.

    Source: vLLM's automatic prefix caching, which chains hashes of blocks in the same way.
    """
    return hashlib.sha256(before + content).digest()


class PageDigests:
    """The digests of one sequence's pages of one size, computed when they are asked for."""

    def __init__(self, root: bytes, token_ids: list[int], page_size: int):
        """Start without digests.

        Args:
          root: of `root_digest`.
          token_ids: the sequence's own list, which only grows, or is cut at the end of its life.
          page_size: tokens in a page.
        """
        self._root, self._token_ids, self._page_size = root, token_ids, page_size
        self._digests: list[bytes] = []

    def of(self, page: int) -> tuple[bytes, bytes]:
        """Digest and content of a page, all of whose tokens are known."""
        while len(self._digests) <= page:
            before = self._digests[-1] if self._digests else self._root
            content = page_content(self._token_ids, len(self._digests), self._page_size)
            self._digests.append(chain_digest(before, content))
        return self._digests[page], page_content(self._token_ids, page, self._page_size)
