"""Integers as people write them."""

import pytest

from jaxserve.quantities import read_quantity


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12", 12),
        ("-1", -1),
        ("8k", 8000),
        ("8K", 8192),
        ("8KiB", 8192),
        ("1.5M", 3 * 2**19),
        ("1.5MiB", 3 * 2**19),
        ("2g", 2 * 10**9),
        ("2G", 2**31),
        ("1t", 10**12),
        ("0.5TiB", 2**39),
        ("4.35k", 4350),  # not what binary fractions make of it
    ],
)
def test_lower_case_is_decimal_and_upper_case_binary(text: str, expected: int) -> None:
    assert read_quantity(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "x", "1.5", "k", "1kk", "1e3", "-1k", "20GB", "8kib", "8 k", "1\n", "٣", "9" * 5000],
)
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="^must be an integer, or one like 8k"):
        read_quantity(text)
