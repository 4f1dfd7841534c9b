"""PageCache: which pages of a group hold which tokens, and which of them may be given up."""

from collections.abc import Iterable

from jaxserve.scheduling.page_digests import PageName
from jaxserve.scheduling.partial_pages import PartialPages


class PageCache:
    """Pages by their content; those that no sequence holds wait, idle, to be used again.

    A full page is taken as it is. Of a partial one others take a copy; it may become full later.

    The idle page that was given back first is evicted first. Sequences give their pages back from
    the last to the first, so a page is never evicted before one that continues it.

    Attributes:
      partials: pages by their first tokens; some are full, and known as such, too.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._pages: dict[bytes, int] = {}
        self._names: dict[int, PageName] = {}
        self._idle: dict[int, None] = {}  # in the order of eviction
        self.partials = PartialPages()
        self._last_found: list[int] = []
        self._last_name: PageName = (b"", b"")

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
        return page in self._names or page in self.partials

    def is_idle(self, page: int) -> bool:
        """Whether no sequence holds this cached page."""
        return page in self._idle

    def count_idle(self, pages: Iterable[int]) -> int:
        """Count the idle ones of some pages."""
        return sum(map(self._idle.__contains__, pages))

    def find(self, name: PageName) -> int | None:
        """The page of that digest, if its tokens are indeed these."""
        page = self._pages.get(name[0])
        return page if page is not None and self._names[page][1] == name[1] else None

    def find_first(self, names: list[PageName]) -> list[int]:
        """The pages of the names up to the first that no page has; a new list.

        What was found last is not looked up again, since many prompts begin alike: a digest is
        that of all pages before, too.
        """
        found = self._last_found if self._is_last_found_in(names) else []
        pages, find = found[:], self.find
        for index in range(len(pages), len(names)):
            page = find(names[index])
            if page is None:
                break
            pages.append(page)
        if pages and len(pages) != len(found):
            self._last_found, self._last_name = pages[:], names[len(pages) - 1]
        return pages

    def _is_last_found_in(self, names: list[PageName]) -> bool:
        count = len(self._last_found)
        return 0 < count <= len(names) and names[count - 1] == self._last_name

    def add(self, page: int, name: PageName) -> None:
        """Remember what a held page holds; a page with an equal digest, or known, stays as it is.

        Args:
          page: all of its tokens are computed.
          name: of the page.
        """
        if name[0] not in self._pages and page not in self._names:
            self._pages[name[0]] = page
            self._names[page] = name
            if page in self.partials:
                self.partials.extend(page, name[1])

    def add_partial(self, page: int, parent: bytes, content: bytes) -> int | None:
        """Remember what a held page begins with.

        Args:
          page: the slots of these tokens will not change.
          parent: digest of all that stands before it.
          content: its first tokens; all are taken where it is known to be full.

        Returns:
          An idle page that is not cached any more: it was forgotten for this one.
        """
        if page in self._names:
            content = self._names[page][1]
        dropped = self.partials.add(page, parent, content)
        if dropped is None or dropped in self._names or dropped not in self._idle:
            return None
        del self._idle[dropped]
        return dropped

    def retire(self, pages: list[int]) -> list[int]:
        """No sequence holds these pages any more; returns those that are not cached."""
        names, partials, idle = self._names, self.partials, self._idle
        if not names and not partials:
            return pages
        blank = []
        for page in pages:
            if page in names or page in partials:
                idle[page] = None
            else:
                blank.append(page)
        return blank

    def revive(self, page: int) -> None:
        """A sequence takes this idle page."""
        del self._idle[page]

    def evict(self) -> tuple[int, PageName | None]:
        """Forget the idle page that was given back first; returns it and its name, if full."""
        page = next(iter(self._idle))
        del self._idle[page]
        self.partials.drop(page)
        name = self._names.pop(page, None)
        if name is not None:
            del self._pages[name[0]]
            self._last_found = []
        return page, name

    def clear(self) -> list[int]:
        """Forget everything; returns the pages that were idle."""
        idle = list(self._idle)
        self._last_found = []
        self._idle.clear()
        self._pages.clear()
        self._names.clear()
        self.partials.clear()
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
        self.partials.check_invariants()
        strange = [page for page in self._idle if page not in self]
        if strange:
            raise RuntimeError(f"idle pages must be cached; got {strange}")
