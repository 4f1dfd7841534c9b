"""Tests of jaxserve/errors.py."""

import inspect
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve import errors

LEAVES = {
    "InvalidRequestError",
    "RequestTooLongError",
    "RequestTooLargeError",
    "AuthenticationError",
    "ModelNotFoundError",
    "QueueFullError",
    "QueueTimeoutError",
    "RowError",
    "EngineConfigError",
    "ModelLoadError",
    "EngineDeadError",
    "EngineNotReadyError",
}


def test_the_tree_holds_every_error_and_each_is_a_jaxserve_error():
    classes = {
        name: value
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, Exception)
    }
    assert set(classes) == LEAVES | {"JaxServeError", "VLLMValidationError"}
    assert all(issubclass(value, errors.JaxServeError) for value in classes.values())


def test_the_picture_of_the_tree_names_every_error():
    assert errors.__doc__ is not None
    assert all(name in errors.__doc__ for name in LEAVES)


def test_a_client_error_is_a_value_error_and_an_engine_error_is_not():
    assert issubclass(errors.InvalidRequestError, ValueError)
    assert issubclass(errors.RequestTooLongError, errors.InvalidRequestError)
    assert not issubclass(errors.EngineDeadError, ValueError)


def test_an_invalid_request_names_its_field_rule_value_and_what_to_do():
    error = errors.InvalidRequestError.for_field("n", "must be 1", 3, advice="lower it")
    assert str(error) == "n must be 1; got 3; lower it"
    assert (error.parameter, error.value) == ("n", 3)


def test_for_field_makes_the_subclass_it_is_called_on():
    error = errors.RequestTooLongError.for_field("prompt", "must fit", 9)
    assert type(error) is errors.RequestTooLongError


def test_a_script_for_vllm_catches_it_by_vllms_name():
    with pytest.raises(errors.VLLMValidationError) as caught:
        raise errors.InvalidRequestError("no", parameter="top_p", value=2)
    assert caught.value.parameter == "top_p"


def test_an_invalid_request_survives_pickling():
    error = pickle.loads(pickle.dumps(errors.InvalidRequestError("no", parameter="n", value=0)))
    assert (str(error), error.parameter, error.value) == ("no", "n", 0)


def test_an_integer_too_long_to_print_is_shown_by_its_size():
    assert errors.describe_value(1 << 20_000) == "an integer of 20001 bits"


def test_a_value_whose_repr_raises_is_still_described():
    class Hostile:
        def __repr__(self):
            raise RuntimeError("no")

    assert len(errors.describe_value(Hostile())) <= 200
    assert "Hostile" in errors.describe_value(Hostile())


@given(
    st.recursive(
        st.none() | st.integers() | st.floats() | st.text(max_size=2000) | st.binary(max_size=999),
        lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text(), inner, max_size=9),
        max_leaves=40,
    )
)
def test_no_value_is_described_in_more_than_200_characters(value):
    assert 0 < len(errors.describe_value(value)) <= 200
