"""Names of pages: what is recalled from other sequences is what hashing it anew would give."""

from collections.abc import Iterator
from hashlib import sha256
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.scheduling import page_digests
from jaxserve.scheduling.page_digests import NameMemory, PageDigests, PageName, root_digest

ROOT = root_digest(None)


@pytest.fixture
def hashes() -> Iterator[mock.Mock]:
    """Counts the pages that are hashed."""
    with mock.patch.object(page_digests, "sha256", mock.Mock(side_effect=sha256)) as counted:
        yield counted


def names_of(
    token_ids: list[int], memory: NameMemory | None, *, size: int = 4, root: bytes = ROOT
) -> list[PageName]:
    return PageDigests(root, token_ids, size, memory).up_to(len(token_ids) // size)


def tokens(num_pages: int, *, first: int = 0, size: int = 4) -> list[int]:
    return [first + position for position in range(num_pages * size)]


def test_a_page_is_hashed_once_for_all_prompts_that_begin_with_it(hashes) -> None:
    memory, prompt = NameMemory(), tokens(20)
    other = [*prompt[:49], 999, *prompt[50:]]  # differs in its 13th page
    wanted = [names_of(ids, None) for ids in (prompt, other, prompt[:42])]
    hashes.reset_mock()
    assert names_of(prompt, memory) == wanted[0] and hashes.call_count == 20
    assert names_of(other, memory) == wanted[1] and hashes.call_count == 20 + 1 + 8
    assert wanted[0][:12] == wanted[1][:12] and wanted[0][12:] != wanted[1][12:]
    assert names_of(prompt[:42], memory) == wanted[2] and hashes.call_count == 29 + 1


@given(
    size=st.integers(1, 3),
    prompts=st.lists(
        st.tuples(
            st.sampled_from([None, "a"]),
            st.integers(0, 1),  # the first token
            st.integers(1, 60),  # where a prompt parts from the others
            st.integers(1, 60),
        ),
        min_size=2,
        max_size=12,
    ),
)
def test_names_are_those_of_hashing_anew_whoever_came_before(size, prompts) -> None:
    memory = NameMemory(capacity=2)
    for number, (salt, first, parting, length) in enumerate(prompts):
        own = range(100 * (number + 1), 100 * (number + 1) + 60)
        ids = [first, *range(2, 2 + parting), *own][:length]
        root = root_digest(salt)
        assert names_of(ids, memory, size=size, root=root) == names_of(
            ids, None, size=size, root=root
        )
        assert len(memory._entries) <= 2


def test_other_salts_first_pages_and_page_sizes_have_memories_of_their_own(hashes) -> None:
    memory, prompt = NameMemory(), tokens(20)
    names_of(prompt, memory)
    for root, ids, size in (
        (root_digest("salt"), prompt, 4),
        (ROOT, [7, *prompt[1:]], 4),
        (ROOT, prompt, 8),
    ):
        hashes.reset_mock()
        names = names_of(ids, memory, size=size, root=root)
        assert hashes.call_count == len(names) == len(prompt) // size
        hashes.reset_mock()
        assert names_of(ids, memory, size=size, root=root) == names and hashes.call_count == 1
    assert len(memory._entries) == 4


def test_what_was_used_last_is_remembered(hashes) -> None:
    memory = NameMemory(capacity=2)
    first, second, third = (tokens(10, first=start) for start in (0, 1000, 2000))
    names_of(first, memory)
    names_of(second, memory)
    names_of(first, memory)  # so the second is the oldest now
    names_of(third, memory)
    counts = []
    for ids in (first, third, second):
        hashes.reset_mock()
        names_of(ids, memory)
        counts.append(hashes.call_count)
    assert counts == [1, 1, 10]


def test_few_pages_are_not_remembered_and_leave_what_is_known_in_place() -> None:
    memory, prompt = NameMemory(), tokens(30)
    names_of(prompt[:28], memory)
    assert not memory._entries
    names_of(prompt, memory)
    names_of([*prompt[:60], *tokens(7, first=500)], memory)  # 7 pages of its own
    ((content, names),) = memory._entries.values()
    assert len(content) == 4 * len(prompt) and len(names) == 30


def test_names_that_are_added_later_are_not_taken_for_remembered_ones() -> None:
    memory, prompt = NameMemory(), tokens(10)
    digests = PageDigests(ROOT, prompt, 4, memory)
    digests.up_to(10)
    prompt += tokens(10, first=700)
    assert len(digests.up_to(20)) == 20
    ((_, names),) = memory._entries.values()
    assert len(names) == 10
    assert names_of(prompt, memory) == names_of(prompt, None)


def test_long_sequences_are_dropped_for_newer_ones_by_their_pages() -> None:
    memory = NameMemory(max_pages=25)
    for start in (0, 1000, 2000):
        names_of(tokens(10, first=start), memory)
    assert len(memory._entries) == 2 and memory._num_pages == 20
    names_of(tokens(20, first=2000), memory)  # in place of the one that it continues
    assert len(memory._entries) == 1 and memory._num_pages == 20
    names_of(tokens(40, first=3000), memory)
    assert len(memory._entries) == 1 and memory._num_pages == 40
