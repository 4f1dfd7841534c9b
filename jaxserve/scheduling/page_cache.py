"""PageCache: which pages of a group hold which tokens, and which of them may be given up."""


class PageCache:
    """Full pages by their content; those that no sequence holds wait, idle, to be used again.

    The idle page that was given back first is evicted first. Sequences give their pages back from
    the last to the first, so a page is never evicted before one that continues it.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._pages: dict[bytes, int] = {}
        self._contents: dict[int, tuple[bytes, bytes]] = {}
        self._idle: dict[int, None] = {}  # in the order of eviction

    @property
    def num_idle(self) -> int:
        """Cached pages that no sequence holds."""
        return len(self._idle)

    @property
    def idle_pages(self) -> tuple[int, ...]:
        """These pages, the next to be evicted first."""
        return tuple(self._idle)

    def __contains__(self, page: int) -> bool:
        """Whether the page is cached."""
        return page in self._contents

    def is_idle(self, page: int) -> bool:
        """Whether no sequence holds this cached page."""
        return page in self._idle

    def find(self, digest: bytes, content: bytes) -> int | None:
        """The page of that digest, if its tokens are indeed these."""
        page = self._pages.get(digest)
        return page if page is not None and self._contents[page][1] == content else None

    def add(self, page: int, digest: bytes, content: bytes) -> None:
        """Remember what a held page holds; a page with an equal digest, or known, stays as it is.

        Args:
          page: all of its tokens are computed.
          digest: of the page.
          content: its tokens.
        """
        if digest not in self._pages and page not in self._contents:
            self._pages[digest] = page
            self._contents[page] = (digest, content)

    def retire(self, page: int) -> None:
        """The last sequence that held this cached page has given it back."""
        self._idle[page] = None

    def revive(self, page: int) -> None:
        """A sequence takes this idle page."""
        del self._idle[page]

    def evict(self) -> int:
        """Forget the idle page that was given back first, and return it."""
        page = next(iter(self._idle))
        del self._idle[page]
        self._forget(page)
        return page

    def clear(self) -> list[int]:
        """Forget everything; returns the pages that were idle."""
        idle = list(self._idle)
        self._idle.clear()
        self._pages.clear()
        self._contents.clear()
        return idle

    def _forget(self, page: int) -> None:
        digest, _ = self._contents.pop(page)
        del self._pages[digest]

    def check_invariants(self) -> None:
        """Check that the books agree.

        Raises:
          RuntimeError: they do not.
        """
        by_page = {page: digest for digest, page in self._pages.items()}
        contents = {page: digest for page, (digest, _) in self._contents.items()}
        if by_page != contents or len(by_page) != len(self._pages):
            raise RuntimeError(
                f"cached digests and pages must be one to one; got {len(self._pages)} digests and "
                f"{len(contents)} pages"
            )
        strange = [page for page in self._idle if page not in contents]
        if strange:
            raise RuntimeError(f"idle pages must be cached; got {strange}")
