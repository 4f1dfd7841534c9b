"""Each device reads its own part of a checkpoint, and holds the bits that whole tensors give."""

import pytest

from tests.goldens_loader import GOLDEN_NAMES
from tests.models.on_four_devices import findings_of

NUM_SPLIT, NUM_WHOLE = 2 + 2 * 4, 1 + 2 * 2
"""Embedding, head and the four products of each of two layers; the norms."""


@pytest.fixture(scope="module")
def on_four_devices() -> dict:
    """The findings of tests/models/sharded_loading.py."""
    return findings_of("tests.models.sharded_loading", timeout=240)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("name", [*GOLDEN_NAMES, "odd"])
def test_parameters_are_bit_for_bit_those_of_whole_tensors(on_four_devices, name, count):
    assert on_four_devices["differing"][f"{name} {count}"] == []


@pytest.mark.parametrize("stack", ["vectors", "all"])
@pytest.mark.parametrize("name", ["odd", "phi3_longrope"])
def test_stacks_of_another_type_hold_the_same(on_four_devices, name, stack):
    assert on_four_devices["stacked"][f"{name} {stack}"] == []


@pytest.mark.parametrize("count", [1, 2, 4])
def test_each_device_reads_its_part_of_every_split_weight_and_no_more(on_four_devices, count):
    found = on_four_devices["reads"][str(count)]
    assert len([path for path, is_split, *_ in found if is_split]) == NUM_SPLIT
    for path, is_split, elements, reads in found:
        if is_split:
            assert [read for _, read in reads] == [elements // count] * count, path
            assert len({index for index, _ in reads}) == count, path


def test_what_every_device_holds_is_read_once(on_four_devices):
    found = [entry for entry in on_four_devices["reads"]["4"] if not entry[1]]
    assert len(found) == NUM_WHOLE
    for path, _, elements, reads in found:
        assert [read for _, read in reads] == [elements], path
