"""Stop strings end the text where they begin, however the text arrives."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.text.stop_strings import StopStrings


def run(stop: list[str], pieces: list[str], include: bool = False) -> tuple[str, str | None]:
    """The whole text that goes out, and what ended it."""
    strings = StopStrings(stop, include)
    out = ""
    for piece in pieces:
        result = strings.feed(piece)
        out += result.emit
        if result.matched is not None:
            return out, result.matched
    return out + strings.flush(), None


def first_stop(text: str, stop: list[str]) -> tuple[int, str] | None:
    """By definition: go through the text letter by letter until a stop string is complete."""
    for end in range(len(text) + 1):
        complete = [s for s in stop if text[:end].endswith(s)]
        if complete:
            return end, max(complete, key=len)
    return None


texts = st.text("abc", max_size=20)
stops = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4)


@given(text=texts, stop=stops, cuts=st.lists(st.integers(0, 20), max_size=6), include=st.booleans())
def test_the_first_complete_stop_string_ends_the_text_for_every_cut(text, stop, cuts, include):
    borders = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    pieces = [text[a:b] for a, b in zip(borders, borders[1:], strict=False)]
    found = first_stop(text, stop)
    if found is None:
        wanted = (text, None)
    else:
        wanted = (text[: found[0] if include else found[0] - len(found[1])], found[1])
    assert run(stop, pieces, include) == wanted


@given(text=texts, stop=stops)
def test_no_more_is_held_back_than_could_still_become_a_stop_string(text, stop):
    strings, out, seen = StopStrings(stop), "", ""
    for letter in text:
        seen += letter
        result = strings.feed(letter)
        out += result.emit
        if result.matched is not None:
            return
        held = seen[len(out) :]
        assert not held or any(s.startswith(held) for s in stop)


@pytest.mark.bugbank
def test_stop_strings_with_shared_beginnings_do_not_leak():
    assert run(["DEFGHIJ", "DEFK"], ["C", "DEF", "G", "HI", "J"]) == ("C", "DEFGHIJ")
    assert run(["DEFGHIJ", "DEFK"], ["C", "DEF", "K"]) == ("C", "DEFK")
    assert run(["DEFGHIJ", "DEFK"], ["C", "DEF", "G", "X"]) == ("CDEFGX", None)


def test_text_goes_out_at_once_when_the_stop_string_is_part_of_it():
    strings = StopStrings(["END"], include_in_output=True)
    assert strings.feed("xEN").emit == "xEN"
    result = strings.feed("Dy")
    assert (result.emit, result.matched) == ("D", "END")


def test_without_stop_strings_nothing_is_held_back():
    strings = StopStrings([])
    assert strings.feed("anything").emit == "anything" and strings.flush() == ""


def test_text_after_the_stop_is_refused():
    strings = StopStrings(["a"])
    assert strings.feed("a").matched == "a" == strings.matched
    with pytest.raises(ValueError, match="after a stop"):
        strings.feed("b")


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="must not hold an empty string"):
        StopStrings(["a", ""])
