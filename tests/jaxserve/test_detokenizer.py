"""Deltas joined are the full text; nothing is taken back, no U+FFFD too many."""

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from jaxserve.text.detokenizer import Detokenizer
from jaxserve.text.stop_strings import StopStrings
from jaxserve.text.text_stream import TextStream
from jaxserve.text.tokenizer import Tokenizer
from models.errors import ModelLoadError
from tests.jaxserve import small_tokenizers

KINDS = pytest.mark.parametrize("kind", small_tokenizers.ALL)


@functools.cache
def tokenizer_of(kind: str) -> Tokenizer:
    return small_tokenizers.ALL[kind]()


def deltas(detokenizer: Detokenizer, token_ids: list[int], cuts: list[int]) -> list[str]:
    """Feed in pieces that end at the cuts, then flush."""
    borders = sorted({0, len(token_ids), *(cut % (len(token_ids) + 1) for cut in cuts)})
    pieces = [token_ids[a:b] for a, b in zip(borders, borders[1:], strict=False)]
    return [detokenizer.feed(piece) for piece in pieces] + [detokenizer.flush()]


token_lists = st.lists(st.integers(0, 290), max_size=30)


@KINDS
@settings(max_examples=150, deadline=None)
@given(token_ids=token_lists, cuts=st.lists(st.integers(0, 30), max_size=6), skips=st.booleans())
def test_joined_deltas_are_the_full_decode(kind, token_ids, cuts, skips):
    tokenizer = tokenizer_of(kind)
    made = deltas(Detokenizer(tokenizer, skip_special_tokens=skips), token_ids, cuts)
    assert "".join(made) == tokenizer.decode(token_ids, skip_special_tokens=skips)


@settings(max_examples=300, deadline=None)
@given(prompt=token_lists, output=token_lists, skips=st.booleans())
def test_after_a_prompt_the_deltas_are_what_the_output_adds_to_it(prompt, output, skips):
    """Of the prompt only an unfinished character at its end is given out."""
    tokenizer = tokenizer_of("byte level")
    made = "".join(deltas(Detokenizer(tokenizer, prompt, skip_special_tokens=skips), output, []))
    full = tokenizer.decode(prompt + output, skip_special_tokens=skips)
    of_prompt = tokenizer.decode(prompt, skip_special_tokens=skips)
    assert full.endswith(made)
    given_before = full[: len(full) - len(made)]
    assert of_prompt in (given_before, given_before + "\ufffd")


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
@pytest.mark.parametrize("character", "éß€あ漢😀👩𝄞")
@pytest.mark.bugbank
def test_a_prompt_that_ends_inside_a_character_gives_that_character_once(kind, character):
    tokenizer = tokenizer_of(kind)
    token_ids = tokenizer.encode(f"b a{character}ab")
    for cut in range(1, len(token_ids)):
        made = Detokenizer(tokenizer, token_ids[:cut])
        text = made.feed(token_ids[cut:]) + made.flush()
        assert "\ufffd" not in text
        assert f"b a{character}ab".endswith(text)
        if text.startswith(character):
            assert text == f"{character}ab"


@pytest.mark.bugbank
@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=20), kind=st.sampled_from(["byte level", "byte fallback"]))
def test_valid_text_never_shows_a_replacement_character(text, kind):
    tokenizer = tokenizer_of(kind)
    detokenizer = Detokenizer(tokenizer, (), skip_special_tokens=False)
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special_tokens=False)
    made = [detokenizer.feed([token_id]) for token_id in ids] + [detokenizer.flush()]
    assert "".join(made) == text
    assert "\ufffd" in text or not any("\ufffd" in delta for delta in made)


@pytest.mark.bugbank
def test_a_partial_character_before_a_space_becomes_one_replacement_character():
    tokenizer = tokenizer_of("byte level")
    euro = tokenizer.encode("€")
    space_a = tokenizer.encode(" a")
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.feed(euro[:2]) == ""
    assert detokenizer.feed(space_a) == "\ufffd a"
    assert detokenizer.feed(euro) == "€"
    assert detokenizer.feed(euro[:1]) == "" and detokenizer.flush() == "\ufffd"


def test_a_bad_byte_spoils_its_whole_run_as_in_the_library():
    tokenizer = tokenizer_of("byte fallback")
    run = [3 + byte for byte in "€".encode()] + [3 + 0xFF]
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.feed([token_id]) for token_id in run] == [""] * 4
    assert detokenizer.flush() == "\ufffd" * 4 == tokenizer.decode(run)


def test_the_space_before_the_first_output_word_is_kept_after_a_prompt():
    tokenizer = tokenizer_of("byte fallback")
    word = small_tokenizers.token_id(tokenizer, "▁ab")
    assert Detokenizer(tokenizer, [word]).feed([word]) == " ab"
    assert Detokenizer(tokenizer).feed([word]) == "ab"
    assert Detokenizer(tokenizer, [1]).feed([word]) == "ab"  # BOS is no text


def test_a_long_prompt_is_not_decoded():
    tokenizer = tokenizer_of("byte level")

    class CountingTokenizer(Tokenizer):
        calls = 0

        def vocabulary_token(self, token_id):
            CountingTokenizer.calls += 1
            return super().vocabulary_token(token_id)

    counting = CountingTokenizer(tokenizer.backend, special_tokens={})
    Detokenizer(counting, tokenizer.encode("ab" * 5000))
    assert 0 < CountingTokenizer.calls < 20


def test_spaces_between_added_tokens_are_dropped_on_demand():
    tokenizer = tokenizer_of("words")
    ids = [0, 3, 4, 1]
    with_spaces = Detokenizer(tokenizer, skip_special_tokens=False)
    without = Detokenizer(tokenizer, skip_special_tokens=False, spaces_between_special_tokens=False)
    assert with_spaces.feed(ids) == "a [X] [Y] b"
    assert without.feed(ids) == "a [X][Y] b"


def test_ids_without_a_token_add_no_text():
    tokenizer = tokenizer_of("byte level")
    a = tokenizer.encode("a")
    assert Detokenizer(tokenizer).feed([*a, 5000, *a]) == "aa"


def test_a_decoder_that_cannot_be_streamed_is_refused():
    backend = Backend(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    for decoder in (decoders.WordPiece(), decoders.Sequence([decoders.Strip(" ", 1, 0)])):
        backend.decoder = decoder
        with pytest.raises(ModelLoadError, match="decoder: must be ByteLevel"):
            Tokenizer(backend, special_tokens={})


def letters() -> Tokenizer:
    """One token a letter, and "DEF", "HI": as in the report of the leaking stop string."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "DEF", "HI"]
    backend = Backend(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<eos>")])
    return Tokenizer(backend, special_tokens={})


def stream(stop: list[str], min_tokens: int = 0, include: bool = False) -> TextStream:
    return TextStream(Detokenizer(letters()), StopStrings(stop, include), min_tokens)


def ids_of(*tokens: str) -> list[int]:
    return [small_tokenizers.token_id(letters(), token) for token in tokens]


@pytest.mark.bugbank
def test_a_stop_string_over_several_tokens_does_not_leak():
    made = stream(["DEFGHIJ"])
    deltas = [made.feed([i]) for i in ids_of("C", "DEF", "G", "HI", "J")]
    assert [delta.text for delta in deltas] == ["C", "", "", "", ""]
    assert [delta.stop for delta in deltas] == [None] * 4 + ["DEFGHIJ"]
    assert made.flush().text == ""


def test_kept_tokens_end_with_the_one_that_completed_the_stop_string():
    delta = stream(["FG"]).feed(ids_of("C", "DEF", "G", "HI", "J"))
    assert (delta.text, delta.stop, delta.num_kept_tokens) == ("CDE", "FG", 3)
    delta = stream(["FG"], include=True).feed(ids_of("C", "DEF", "G", "HI"))
    assert (delta.text, delta.stop, delta.num_kept_tokens) == ("CDEFG", "FG", 3)
    delta = stream(["xyz"]).feed(ids_of("C", "DEF"))
    assert (delta.text, delta.stop, delta.num_kept_tokens) == ("CDEF", None, 2)


def test_what_was_held_back_comes_with_the_flush():
    made = stream(["DEFX"])
    assert made.feed(ids_of("C", "DEF")).text == "C"
    assert made.flush().text == "DEF"


def test_stop_strings_are_not_looked_for_in_the_first_min_tokens():
    tokens = ids_of("C", "DEF", "G", "C", "HI")
    delta = stream(["C"], min_tokens=1).feed(tokens)
    assert (delta.text, delta.num_kept_tokens) == ("CDEFG", 4)
    delta = stream(["FG"], min_tokens=2).feed(tokens)  # begins in the second token
    assert (delta.text, delta.stop) == ("CDEFGCHI", None)
    made = stream(["C"], min_tokens=5)
    assert made.feed(tokens).text == "CDEFGCHI" and made.flush().text == ""


@settings(max_examples=100, deadline=None)
@given(
    tokens=st.lists(st.sampled_from(["A", "B", "DEF", "HI", "G"]), max_size=12),
    stop=st.lists(st.text("ABDEFGHI", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 12), max_size=4),
    min_tokens=st.integers(0, 4),
)
def test_the_result_does_not_depend_on_how_many_tokens_a_step_brings(
    tokens, stop, cuts, min_tokens
):
    ids = ids_of(*tokens)

    def run(borders: list[int]) -> tuple[str, str | None, int]:
        made = stream(stop, min_tokens)
        text, num_kept = "", 0
        for start, end in zip(borders, borders[1:], strict=False):
            delta = made.feed(ids[start:end])
            text += delta.text
            num_kept += delta.num_kept_tokens
            if delta.stop is not None:
                return text, delta.stop, num_kept
        delta = made.flush()
        return text + delta.text, delta.stop, num_kept

    borders = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    assert run(borders) == run(list(range(len(ids) + 1)))


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=24))
def test_any_bytes_stream_to_what_the_library_decodes(data):
    tokenizer = tokenizer_of("byte level")
    ids = [small_tokenizers.token_id(tokenizer, byte_letter(byte)) for byte in data]
    detokenizer = Detokenizer(tokenizer)
    made = "".join(detokenizer.feed([token_id]) for token_id in ids) + detokenizer.flush()
    assert made == data.decode("utf-8", "replace") == tokenizer.decode(ids)


def byte_letter(byte: int) -> str:
    """GPT-2's letter of a byte, from the order of the alphabet: first the printable ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = [ord(letter) for letter in alphabet if ord(letter) < 256]
    others = [other for other in range(256) if other not in printable]
    return chr(byte) if byte in printable else chr(256 + others.index(byte))
