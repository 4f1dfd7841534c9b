"""Which pages of a sliding-window group a sequence needs; pure arithmetic.

A query at position p sees the keys in (p - window, p].
"""


def count_dead_pages(next_token: int, *, window: int, page_size: int) -> int:
    """Count the leading pages that no query at `next_token` or later sees a key of.

    The query at `next_token` sees keys from `next_token - window + 1` on, later ones see later
    keys, so page i is dead when its last position, `(i + 1) * page_size - 1`, lies before that.
    """
    return max(0, (next_token - window + 1) // page_size)


def count_pages_of_window(num_row_tokens: int, *, window: int, page_size: int) -> int:
    """Count the pages that a sequence of any length needs while it computes a row.

    Let a row compute the tokens [s, s + n). It writes these and reads keys from `s - window + 1`
    on: n + window - 1 tokens in a run. Such a run touches the most pages when its first token
    stands last in its page: that page, and those of the n + window - 2 tokens behind it, which
    start a page. Some s does stand so, hence no smaller number holds for every s. The dead pages
    of s are exactly the ones before the run, so a sequence that gives them back before it takes
    pages for the row never holds more.
    """
    return 1 - (-(num_row_tokens + window - 2) // page_size)
