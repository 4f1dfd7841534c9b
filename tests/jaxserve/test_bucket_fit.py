"""Where the last prompt chunk of a step is cut."""

import pytest

from jaxserve.scheduling.bucket_fit import find_surplus

BUCKETS = (256, 512, 1024, 2048)


@pytest.mark.parametrize(
    ("num_tokens", "num_decodes", "last_chunk", "has_more", "surplus"),
    [
        pytest.param(1500, 0, 1500, True, 476, id="cut to the bucket while more waits"),
        pytest.param(1024, 0, 1024, True, 0, id="exactly a bucket"),
        pytest.param(200, 0, 200, True, 0, id="below the smallest bucket"),
        pytest.param(1500, 0, 476, True, 0, id="never cut to nothing"),
        pytest.param(1500, 0, 477, True, 476, id="cut to one token"),
        pytest.param(1100, 0, 1100, False, 76, id="two steps are cheaper than one half empty"),
        pytest.param(1600, 0, 1600, False, 0, id="two steps cost as much as one"),
        pytest.param(1500, 100, 1400, False, 476, id="decode rows make the second step anyway"),
        pytest.param(1500, 1000, 500, False, 0, id="the second step would be as large"),
        pytest.param(300, 0, 300, False, 0, id="a second small step is not worth it"),
        pytest.param(300, 200, 100, False, 44, id="a second small step comes anyway"),
    ],
)
def test_the_last_chunk_is_cut_where_the_step_fills_its_bucket(
    num_tokens, num_decodes, last_chunk, has_more, surplus
):
    found = find_surplus(
        num_tokens, num_decodes, last_chunk=last_chunk, buckets=BUCKETS, has_more=has_more
    )
    assert found == surplus


def test_a_small_step_is_not_split_since_reading_the_weights_takes_as_long_each_time():
    buckets = (16, 32, 64, 128)
    assert find_surplus(70, 0, last_chunk=70, buckets=buckets, has_more=False) == 0
    assert find_surplus(70, 0, last_chunk=70, buckets=buckets, has_more=True) == 6
