"""read_quantity: integers as people write them, such as 16k or 20GiB; no JAX."""

import re
from decimal import Decimal

_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_UNITS |= {f"{letter}iB": _UNITS[letter] for letter in "KMGT"}
_INTEGER = re.compile(r"-?[0-9]{1,24}")
_WITH_UNIT = re.compile(rf"([0-9]{{1,24}}(?:\.[0-9]{{1,24}})?)({'|'.join(_UNITS)})")

QUANTITY_RULE = "must be an integer, or one like 8k (8000), 8K or 8KiB (8192)"


def read_quantity(text: str) -> int:
    """An integer, or vLLM's short forms of one: k, m, g, t are decimal, K, M, G, T binary.

    KiB, MiB, GiB and TiB are K, M, G and T. GB is not taken: people mean either by it.

    Raises:
      ValueError: the text is neither; it holds `QUANTITY_RULE`.
    """
    if _INTEGER.fullmatch(text):
        return int(text)
    match = _WITH_UNIT.fullmatch(text)
    if match is None:
        raise ValueError(QUANTITY_RULE)
    return int(Decimal(match[1]) * _UNITS[match[2]])
