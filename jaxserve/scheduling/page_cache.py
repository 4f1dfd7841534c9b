"""PageCache: which pages of a group hold which tokens, and which of them may be given up."""

from jaxserve.scheduling.page_digests import PageName


class PageCache:
    """Full pages by their content; those that no sequence holds wait, idle, to be used again.

    The idle page that was given back first is evicted first. Sequences give their pages back from
    the last to the first, so a page is never evicted before one that continues it.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._pages: dict[bytes, int] = {}
        self._names: dict[int, PageName] = {}
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
        return page in self._names

    def is_idle(self, page: int) -> bool:
        """Whether no sequence holds this cached page."""
        return page in self._idle

    def find(self, name: PageName) -> int | None:
        """The page of that digest, if its tokens are indeed these."""
        page = self._pages.get(name[0])
        return page if page is not None and self._names[page][1] == name[1] else None

    def add(self, page: int, name: PageName) -> None:
        """Remember what a held page holds; a page with an equal digest, or known, stays as it is.

        Args:
          page: all of its tokens are computed.
          name: of the page.
        """
        if name[0] not in self._pages and page not in self._names:
            self._pages[name[0]] = page
            self._names[page] = name

    def retire(self, page: int) -> None:
        """The last sequence that held this cached page has given it back."""
        self._idle[page] = None

    def revive(self, page: int) -> None:
        """A sequence takes this idle page."""
        del self._idle[page]

    def evict(self) -> tuple[int, PageName]:
        """Forget the idle page that was given back first; returns it and its name."""
        page = next(iter(self._idle))
        del self._idle[page]
        name = self._names.pop(page)
        del self._pages[name[0]]
        return page, name

    def clear(self) -> list[int]:
        """Forget everything; returns the pages that were idle."""
        idle = list(self._idle)
        self._idle.clear()
        self._pages.clear()
        self._names.clear()
        return idle

    def check_invariants(self) -> None:
        """Check that the books agree.

        Raises:
          RuntimeError: they do not.
        """
        by_page = {page: digest for digest, page in self._pages.items()}
        named = {page: digest for page, (digest, _) in self._names.items()}
        if by_page != named or len(by_page) != len(self._pages):
            raise RuntimeError(
                f"cached digests and pages must be one to one; got {len(self._pages)} digests and "
                f"{len(named)} pages"
            )
        strange = [page for page in self._idle if page not in named]
        if strange:
            raise RuntimeError(f"idle pages must be cached; got {strange}")
