"""Bodies that are no JSON object, or cost far more than their bytes."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.errors import InvalidRequestError, RequestTooLargeError
from server.protocol.json_body import MAX_CONTAINERS, decode_object

MALFORMED = [
    b"",
    b"  \n",
    b"null",
    b"[]",
    b'"x"',
    b"7",
    b"NaN",
    b'{"a": NaN}',
    b'{"a": Infinity}',
    b'{"a": -Infinity}',
    b'{"a": 1e400}',
    b'{: "model": "x"}',
    b'{"a": 1} x',
    b'{"a": 1}{"a": 1}',
    b'{"a": 1,}',
    b'{"a": 01}',
    b"{'a': 1}",
    b'{"a": "\x01"}',
    b'{"a": "\n"}',
    b'{"a": "\\x41"}',
    b'{"a": "\xff"}',
    b'{"a": "\xed\xa0\x80"}',
    b'{"a": "\xc0\x80"}',
    b'{"a": "\\ud800"}',
    b'{"a": "\\udc00\\ud800"}',
    b'{"\\ud800": 1}',
    b'\xef\xbb\xbf{"a": 1}',
    '{"a": 1}'.encode("utf-16"),
    b'{"a": ' + b"9" * 100_000 + b"}",
    b'{"a": "',
    b'{"a": "\\',
    b'{"a": [',
    b"\x00",
]


@pytest.mark.bugbank
@pytest.mark.parametrize("body", MALFORMED, ids=lambda body: repr(body[:24]))
def test_bugbank_R12_a_malformed_body_is_the_clients_fault(body):
    with pytest.raises(InvalidRequestError, match="^body must"):
        decode_object(body)


@pytest.mark.bugbank
@pytest.mark.parametrize(
    "body",
    [b'{"a":1,"a":2}', b'{"a":1,"\\u0061":1}', b'{"b":[[{"a":1,"c":2,"a":{}}]]}'],
)
def test_bugbank_R12_a_key_that_comes_twice_is_named(body):
    with pytest.raises(InvalidRequestError, match="'a' twice") as caught:
        decode_object(body)
    assert caught.value.parameter == "a"


def test_brackets_commas_colons_and_quotes_inside_texts_are_text():
    value = {'a"b': ':,[{"\\' * 50, "c\\": [{"d": "}]"}], "e\\\\": "\\\\"}
    assert decode_object(json.dumps(value).encode(), max_depth=3) == value


def test_nesting_is_counted_before_anything_is_made():
    assert decode_object(b'{"a":' + b"[" * 63 + b"]" * 63 + b"}")
    for depth in (64, 1000, 3_000_000):
        with pytest.raises((InvalidRequestError, RequestTooLargeError)):
            decode_object(b'{"a":' + b"[" * depth + b"]" * depth + b"}")


def test_many_small_values_are_refused_before_they_take_memory():
    for body in (
        b'{"a":[' + b"[]," * (MAX_CONTAINERS + 1) + b"[]]}",
        b'{"a":[' + b"1," * 3_000_000 + b"1]}",
        b'{"a":[' + b'"",' * 300_000 + b'""]}',
    ):
        with pytest.raises(RequestTooLargeError):
            decode_object(body)


def test_the_worst_bodies_of_the_usual_limit_take_less_than_a_second():
    size = 8 << 20
    for unit in (b'"', b"\\", b"[", b"{", b'"\\', b"[],", b"1,", b'{"a":', b'"",', b"\\\\"):
        for head in (b"", b'{"a":"', b'{"a":'):
            start = time.perf_counter()
            with pytest.raises((InvalidRequestError, RequestTooLargeError)):
                decode_object(head + unit * (size // len(unit)))
            assert time.perf_counter() - start < 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text(), JSON), st.booleans())
def test_every_object_comes_out_as_it_went_in(value, is_ascii):
    body = json.dumps(value, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass")
    assert decode_object(body) == value


@settings(deadline=None)
@given(st.binary(max_size=200), st.integers(0, 199))
def test_any_bytes_give_an_object_or_a_named_error(noise, position):
    valid = json.dumps({"messages": [{"role": "user", "content": "héllo \U0001f600"}]}).encode()
    for body in (noise, valid[:position] + noise + valid[position:]):
        try:
            assert isinstance(decode_object(body), dict)
        except (InvalidRequestError, RequestTooLargeError) as error:
            assert str(error)


def test_each_bad_byte_in_a_text_is_refused():
    body = b'{"prompt": "' + "é😀 ascii 漢字 ".encode() * 8 + b'"}'
    decode_object(body)
    for position in range(len(body)):
        for bad in (0xFF, 0x00, 0xC0):
            broken = body[:position] + bytes([bad]) + body[position + 1 :]
            with pytest.raises(InvalidRequestError):
                decode_object(broken)


@pytest.mark.parametrize(
    "text", [r"\ud800", r"\udc00", r"\\\uDBFF x", r"\ud83d\ude00\ude00", r"\ud800\ud800\udc00"]
)
def test_half_a_surrogate_pair_is_told_as_that(text):
    with pytest.raises(InvalidRequestError, match="half of a surrogate pair"):
        decode_object(b'{"a": "%s"}' % text.encode())


@pytest.mark.parametrize("text", [r"\\ud800", r"\ud83d\ude00"])
def test_what_only_looks_like_half_a_pair_is_not_blamed(text):
    assert decode_object(b'{"a": "%s"}' % text.encode())
    with pytest.raises(InvalidRequestError, match="must be JSON"):
        decode_object(b'{"a": "%s", x}' % text.encode())
