"""What the models take, what they refuse, and when two of them are equal."""

from __future__ import annotations

import array
import copy
import json
import pickle
import struct
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import ml_dtypes
import numpy as np
import pandas as pd
import pytest
from builders import EVERY, NAN_32, NAN_64, build, text_rollout, token_rollout
from pydantic import BaseModel, ValidationError

from arrowbank.arrays import dtype_name, named_dtype, same_bits
from arrowbank.errors import UnrepresentableError
from arrowbank.types import Rollout, RolloutGroup, TokenRollout, VersionSpan


class Tensor:
    """Has ``__array__`` and nothing else, as tensors of other libraries do."""

    def __init__(self, values: Any, error: Exception | None = None) -> None:
        self.values = values
        self.error = error

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if self.error:
            raise self.error
        return np.asarray(self.values, dtype)


# -- conversion


@pytest.mark.parametrize(
    "given",
    [
        [1, 2, 3], (1, 2, 3), range(1, 4), [np.int64(1), np.uint8(2), 3], np.array([1, 2, 3]),
        np.array([1, 2, 3], np.uint64), np.array([1, 2, 3], ">i4"),
        np.array([3, 2, 1], np.int32)[::-1], array.array("q", [1, 2, 3]), Tensor([1, 2, 3]),
    ],
    ids=lambda given: type(given).__name__,
)  # fmt: skip
def test_token_ids_of_any_integer_sequence_become_int32(given: Any) -> None:
    turn = TokenRollout(trajectory=[given]).trajectory[0]
    assert type(turn) is np.ndarray and turn.dtype == np.int32 and turn.tolist() == [1, 2, 3]


@pytest.mark.parametrize("empty", [[], (), np.array([]), Tensor([]), np.zeros(0, np.int32)], ids=repr)
def test_an_empty_turn_may_be_of_any_kind(empty: Any) -> None:
    rollout = TokenRollout(trajectory=[empty], generation_mask=[empty], logprobs=[empty])
    assert rollout.generation_mask is not None and rollout.logprobs is not None
    found = (rollout.trajectory[0], rollout.generation_mask[0], rollout.logprobs[0])
    assert [part.dtype for part in found] == [np.int32, np.bool_, np.float32]
    assert all(part.shape == (0,) for part in found)


@pytest.mark.parametrize(
    "mask",
    [[True, False], [1, 0], (True, 0), [np.True_, np.False_], np.array([1, 0]), np.array([1, 0], np.uint8),
     Tensor([1, 0])],
    ids=repr,
)  # fmt: skip
def test_masks_of_ones_and_zeros_become_bools(mask: Any) -> None:
    found = TokenRollout(trajectory=[[1, 2]], generation_mask=[mask]).generation_mask
    assert found is not None and found[0].dtype == np.bool_ and found[0].tolist() == [True, False]


@pytest.mark.parametrize(
    "values",
    [[-0.5, -0.25], (-0.5, -0.25), np.array([-0.5, -0.25]), np.array([-0.5, -0.25], ">f4"), [np.float32(-0.5), -0.25],
     np.array([-0.5, -0.25], np.float16), np.array([-0.5, -0.25], ml_dtypes.bfloat16), Tensor([-0.5, -0.25])],
    ids=repr,
)  # fmt: skip
def test_logprobs_become_float32(values: Any) -> None:
    found = TokenRollout(trajectory=[[1, 2]], logprobs=[values]).logprobs
    assert found is not None and found[0].dtype == np.float32 and found[0].tolist() == [-0.5, -0.25]


def test_float32_logprobs_keep_their_bits() -> None:
    found = TokenRollout(trajectory=[[1, 2, 3]], logprobs=[NAN_32]).logprobs
    assert found is not None and found[0].tobytes() == NAN_32.tobytes()


def test_python_floats_are_rounded_to_float32_where_it_can_be_seen() -> None:
    rollout = TokenRollout(trajectory=[[1, 2]], logprobs=[[0.1, float("-inf")]])
    assert rollout.logprobs is not None
    assert rollout.logprobs[0].tolist() == [float(np.float32(0.1)), float("-inf")]


def test_a_single_prompt_length_is_the_first_turns() -> None:
    lengths = [3, np.int64(3), [3], np.array([3]), np.array(3)]
    assert [token_rollout(prompt_length=length).prompt_length for length in lengths] == [[3]] * 5


def test_version_spans_may_be_given_as_tuples() -> None:
    spans = token_rollout(policy_versions=[(0, 2, 7)]).policy_versions
    assert spans == [VersionSpan(0, 2, 7)] and type(spans[0]) is VersionSpan


def test_times_come_out_in_utc() -> None:
    east = datetime(2026, 1, 1, 2, tzinfo=timezone(timedelta(hours=2)))
    found = token_rollout(started_at=east).started_at
    assert found == east and found is not None and found.tzinfo is UTC
    stamp = pd.Timestamp("2026-01-01T00:00:00.000001", tz="UTC")
    assert type(token_rollout(started_at=stamp).started_at) is datetime


def test_rewards_become_python_floats() -> None:
    assert [type(token_rollout(reward=reward).reward) for reward in (1, np.float64(1), np.float32(1))] == [float] * 3
    assert token_rollout(reward=[1, np.float32(0.5)]).reward == [1.0, 0.5]


def test_arrays_keep_dtype_and_shape() -> None:
    found = token_rollout(arrays={"a": np.zeros((2, 0, 3), ">i2"), "b": Tensor([[1.5]]), "c": [1, 2]}).arrays
    assert {name: (part.dtype.str, part.shape) for name, part in found.items()} == {
        "a": (">i2", (2, 0, 3)),
        "b": ("<f8", (1, 1)),
        "c": ("<i8", (2,)),
    }


def test_dicts_become_the_kind_of_rollout_that_fits() -> None:
    group = RolloutGroup(rollouts=[{"trajectory": ["a"]}, {"trajectory": [[1, 2]]}])
    assert [type(rollout) for rollout in group] == [Rollout, TokenRollout]


def test_a_group_is_a_sequence_of_its_rollouts() -> None:
    rollouts = [text_rollout(), token_rollout(env_id="math")]
    group = RolloutGroup(rollouts=rollouts)
    assert len(group) == 2 and list(group) == rollouts and group[1] is rollouts[1] and group.env_id == "math"
    assert RolloutGroup(rollouts=[]).env_id == ""


def test_a_placeholder_has_no_turns() -> None:
    assert Rollout(trajectory=[]).is_placeholder and TokenRollout(trajectory=[]).is_placeholder
    assert not Rollout(trajectory=[""]).is_placeholder and not TokenRollout(trajectory=[[]]).is_placeholder


# -- refusals

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "token 2^31": ({"trajectory": [[1], [1, 2**31]]}, "trajectory[1]"),
    "token 2^31 in an array": ({"trajectory": [np.array([2**31])]}, "trajectory[0]"),
    "token beyond 64 bits": ({"trajectory": [[2**70]]}, "trajectory[0]"),
    "negative token": ({"trajectory": [[1, -1]]}, "trajectory[0]"),
    "negative token in int32": ({"trajectory": [np.array([-1], np.int32)]}, "trajectory[0]"),
    "float token": ({"trajectory": [[1.0]]}, "trajectory[0]"),
    "float tokens": ({"trajectory": [np.array([1.0])]}, "trajectory[0]"),
    "tokens of True": ({"trajectory": [np.array([True])]}, "trajectory[0]"),
    "words": ({"trajectory": ["ab"]}, "trajectory[0]"),
    "None": ({"trajectory": [None]}, "trajectory[0]"),
    "one flat turn": ({"trajectory": [1, 2]}, "trajectory[0]"),
    "two dimensions": ({"trajectory": [np.ones((2, 2), int)]}, "trajectory[0]"),
    "two dimensions of int32": ({"trajectory": [np.ones((2, 2), np.int32)]}, "trajectory[0]"),
    "masked array": ({"trajectory": [np.ma.array([1, 2], mask=[0, 1])]}, "trajectory[0]"),
    "tensor that refuses": ({"trajectory": [Tensor([1], RuntimeError("requires grad"))]}, "trajectory[0]"),
    "mask of 2": ({"trajectory": [[1]], "generation_mask": [[2]]}, "generation_mask[0]"),
    "mask of floats": ({"trajectory": [[1]], "generation_mask": [[1.0]]}, "generation_mask[0]"),
    "mask of −1": ({"trajectory": [[1]], "generation_mask": [np.array([-1])]}, "generation_mask[0]"),
    "mask of two dimensions": ({"trajectory": [[1]], "generation_mask": [np.array([[True]])]}, "generation_mask[0]"),
    "float32 overflow": ({"trajectory": [[1]], "logprobs": [[1e39]]}, "logprobs[0]"),
    "float32 overflow in an array": ({"trajectory": [[1]], "logprobs": [np.array([-1e300])]}, "logprobs[0]"),
    "integer logprob": ({"trajectory": [[1]], "logprobs": [np.array([2**24 + 1])]}, "logprobs[0]"),
    "long integer logprob": ({"trajectory": [[1]], "logprobs": [np.array([2**53 + 1])]}, "logprobs[0]"),
    "complex logprobs": ({"trajectory": [[1]], "logprobs": [np.array([1j])]}, "logprobs[0]"),
    "no logprob": ({"trajectory": [[1]], "logprobs": [[None]]}, "logprobs[0]"),
    "objects": ({"trajectory": [], "arrays": {"a": np.array([{}])}}, "arrays['a']"),
    "records": ({"trajectory": [], "arrays": {"a": np.zeros(1, "i4,f4")}}, "arrays['a']"),
    "voids": ({"trajectory": [], "arrays": {"a": np.zeros(1, "V3")}}, "arrays['a']"),
    "dates": ({"trajectory": [], "arrays": {"a": [datetime(2026, 1, 1)]}}, "arrays['a']"),
    "masked": ({"trajectory": [], "arrays": {"a": np.ma.array([1])}}, "arrays['a']"),
    "ragged": ({"trajectory": [], "arrays": {"a": [[1], [1, 2]]}}, "arrays['a']"),
    "nanoseconds": ({"trajectory": [], "started_at": pd.Timestamp(1, unit="ns", tz="UTC")}, "started_at"),
    "year 10000": (
        {"trajectory": [], "started_at": datetime.max.replace(tzinfo=timezone(timedelta(hours=-1)))}, "started_at",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_exact_form_is_refused_by_the_name_of_its_field(name: str) -> None:
    fields, place = REFUSED[name]
    with pytest.raises(UnrepresentableError) as refusal:
        TokenRollout(**fields)
    assert refusal.value.field == place
    assert str(refusal.value).startswith(f"{place}: ")


@pytest.mark.parametrize("name", sorted(REFUSED.keys() - {"words"}))  # those make a text rollout
def test_a_refusal_inside_a_group_names_the_member(name: str) -> None:
    fields, place = REFUSED[name]
    with pytest.raises(UnrepresentableError) as refusal:
        RolloutGroup(rollouts=[{"trajectory": [[1]]}, fields])
    assert refusal.value.field == f"rollouts[1].{place}"


@pytest.mark.parametrize("name", REFUSED)
def test_an_assignment_is_refused_and_changes_nothing(name: str) -> None:
    fields, place = REFUSED[name]
    rollout = token_rollout()
    field, value = list(fields.items())[-1]
    with pytest.raises(UnrepresentableError) as refusal:
        setattr(rollout, field, value)
    assert refusal.value.field == place
    assert rollout == token_rollout()


def test_a_refusal_survives_pickling() -> None:
    found = pickle.loads(pickle.dumps(UnrepresentableError("logprobs[0]", "why").inside("rollouts[2]")))
    assert (found.field, found.reason) == ("rollouts[2].logprobs[0]", "why")


@pytest.mark.parametrize(
    "fields",
    [{"trajectory": 3}, {"trajectory": "ab"}, {"trajectory": {}}, {"trajectory": [], "arrays": [1]},
     {"trajectory": [], "arrays": {1: [2]}}, {"trajectory": [], "prompt_length": 3.0},
     {"trajectory": [], "prompt_length": -1}, {"trajectory": [], "prompt_length": "3"},
     {"trajectory": [], "completion_ids": [1]}, {"reward": 1.0},
     {"trajectory": [], "started_at": datetime(2026, 1, 1)}, {"trajectory": [], "policy_versions": [(1, 2)]}],
    ids=repr,
)  # fmt: skip
def test_what_is_of_another_kind_is_a_validation_error(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TokenRollout(**fields)


def test_names_from_a_file_never_make_a_dtype_of_objects() -> None:
    for name in ("O", "object", "finfo", "iinfo", "i4,f4", "(3,)i4", "V8", "S0", "", "__name__", "3i4,"):
        with pytest.raises(UnrepresentableError):
            named_dtype(name)


def test_a_dtypes_name_makes_it_again() -> None:
    names = ["?", "i1", "u8", ">i4", "f2", ">f8", "c8", "S3", "<U2", ">U2", "M8[ns]", "m8[us]", "longdouble"]
    kinds = [np.dtype(name) for name in names]
    kinds += [np.dtype(kind) for kind in (ml_dtypes.bfloat16, ml_dtypes.float8_e5m2, ml_dtypes.int4)]
    assert [named_dtype(dtype_name(kind)) for kind in kinds] == kinds


# -- equality


def _nan(bits: int) -> float:
    found: float = struct.unpack("<d", struct.pack("<Q", bits))[0]
    return found


@pytest.mark.parametrize(
    ("left", "right"),
    [(0.0, -0.0), (1, 1.0), (1, True), (_nan(0x7FF8 << 48), _nan(0xFFF8 << 48)), ([1], (1,)), ([1], [1, 2]), ("1", 1),
     ({"a": 1}, {"b": 1}), ({"a": [0.0]}, {"a": [-0.0]}), (np.float64(1), 1.0), (np.float32(0), np.float32(-0.0)),
     (np.zeros(2, np.int32), np.zeros(2, np.int64)), (np.zeros(2), np.zeros((2, 1))), (np.zeros(1), [0.0]),
     (np.array([0.0]), np.array([-0.0])), (None, 0)],
    ids=repr,
)  # fmt: skip
def test_values_that_differ_in_bits_or_type_are_unequal(left: Any, right: Any) -> None:
    assert not same_bits(left, right) and not same_bits(right, left)
    assert same_bits(left, copy.deepcopy(left)) and same_bits(right, copy.deepcopy(right))


def test_a_rollout_with_a_nan_equals_its_copy() -> None:
    rollout = token_rollout(reward=NAN_64, metrics={"a": NAN_64}, arrays={"a": NAN_32})
    assert rollout == copy.deepcopy(rollout)
    assert rollout != token_rollout(reward=float("nan"), metrics={"a": NAN_64}, arrays={"a": NAN_32})


CHANGES: dict[str, Callable[[TokenRollout], object]] = {
    "a token": lambda rollout: setattr(rollout, "trajectory", [rollout.trajectory[0] + 1]),
    "a mask": lambda rollout: setattr(rollout, "generation_mask", None),
    "a logprob's sign": lambda rollout: setattr(rollout, "logprobs", [-part for part in rollout.logprobs or ()]),
    "a reward": lambda rollout: setattr(rollout, "reward", -0.0),
    "an extra field": lambda rollout: setattr(rollout, "note", 1.0),
    "a metric": lambda rollout: rollout.metrics.update(a=1.0),
    "an array": lambda rollout: rollout.arrays.update(a=np.zeros(1)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_anywhere_is_seen(change: str) -> None:
    rollout = token_rollout(reward=0.0, note=1)
    CHANGES[change](rollout)
    assert rollout != token_rollout(reward=0.0, note=1)
    assert RolloutGroup(rollouts=[rollout]) != RolloutGroup(rollouts=[token_rollout(reward=0.0, note=1)])


def test_text_and_tokens_and_groups_are_never_equal() -> None:
    assert Rollout(trajectory=[]) != TokenRollout(trajectory=[])
    assert Rollout(trajectory=[]) != RolloutGroup(rollouts=[])
    assert Rollout(trajectory=[]) != "a rollout"


def test_models_are_not_hashable() -> None:
    with pytest.raises(TypeError):
        hash(token_rollout())


# -- copies and dumps


@pytest.mark.parametrize("name", EVERY)
def test_copies_and_pickles_are_equal(name: str) -> None:
    group = build(name)
    for rollout in group:  # NumPy unpickles arrays in native byte order
        rollout.arrays = {name: part for name, part in rollout.arrays.items() if part.dtype.isnative}
    for same in (
        copy.copy(group),
        copy.deepcopy(group),
        group.model_copy(deep=True),
        pickle.loads(pickle.dumps(group)),
    ):
        assert same == group and type(same) is RolloutGroup


def test_a_deep_copy_shares_no_array() -> None:
    rollout = token_rollout()
    other = copy.deepcopy(rollout)
    other.trajectory[0][0] += 1
    assert rollout == token_rollout() != other


def test_a_dump_holds_every_field_and_makes_an_equal_group() -> None:
    group = build("fields")
    dump = group.model_dump()
    assert RolloutGroup(**dump) == group
    assert dump["rollouts"][0]["trajectory"][0] is group[0].trajectory[0]


def test_json_has_lists_in_place_of_arrays_and_makes_an_equal_group() -> None:
    group = build("fields")
    text = group.model_dump_json()
    rollout = json.loads(text)["rollouts"][0]
    assert rollout["trajectory"] == [turn.tolist() for turn in group[0].trajectory]
    assert rollout["generation_mask"][0][-1] is True
    assert RolloutGroup.model_validate_json(text) == group


def test_json_shows_small_floats_as_numbers() -> None:
    rollout = token_rollout(arrays={"a": np.array([1.5], ml_dtypes.bfloat16), "b": np.array(2)})
    assert json.loads(rollout.model_dump_json())["arrays"] == {"a": [1.5], "b": 2}


def test_extra_fields_are_kept_read_and_assigned() -> None:
    rollout = token_rollout(note={"a": 1})
    rollout.more = [1]
    assert rollout.note == {"a": 1} and rollout.model_dump()["more"] == [1]
    with pytest.raises(AttributeError):
        _ = rollout.nothing


def test_other_models_hold_groups() -> None:
    class Batch(BaseModel):
        groups: list[RolloutGroup]

    batch = Batch(groups=[build("fields")])
    assert Batch(**batch.model_dump()).groups == batch.groups
    assert batch.model_dump(include={"groups": {0: {"batch_id"}}}) == {"groups": [{"batch_id": 7}]}
