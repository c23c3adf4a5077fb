"""I2: a group comes back bit for bit, or is refused with the field's name."""

from __future__ import annotations

import copy
import pickle
from datetime import datetime
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders import batch_of, conversation, groups, lean_table, message_of, round_trip, token_group, token_rollout
from pydantic import BaseModel

from arrowbank import codec
from arrowbank.archive.rows import narrow, widen
from arrowbank.arrays import same_bits
from arrowbank.codec import StoredGroup, decode_group
from arrowbank.durable.message import read_head
from arrowbank.errors import UnrepresentableError
from arrowbank.schema import ROW_SCHEMA, SEGMENT_SCHEMA
from arrowbank.turns import fold
from arrowbank.types import Rollout, RolloutGroup, TokenRollout

GROUPS = groups()


@pytest.mark.parametrize("name", GROUPS)
def test_a_group_comes_back_bit_for_bit_through_a_record(name: str) -> None:
    group = GROUPS[name]
    back = round_trip(group)
    assert back == group
    for before, after in zip(group, back, strict=True):
        assert type(after) is type(before)
        assert same_bits(before.model_dump(), after.model_dump())


@pytest.mark.parametrize("name", GROUPS)
def test_a_group_comes_back_bit_for_bit_through_parquet(name: str, tmp_path: Any) -> None:
    wide = widen(lean_table([GROUPS[name]]), "bank")
    assert wide.schema.equals(ROW_SCHEMA)
    pq.write_table(wide, tmp_path / "rows.parquet")
    lean = narrow(pq.read_table(tmp_path / "rows.parquet", schema=ROW_SCHEMA))
    back = GROUPS[name].model_copy(update={"rollouts": decode_group(lean.combine_chunks().to_batches()[0])})
    assert back == GROUPS[name]


def test_equality_tells_bits_apart() -> None:
    assert GROUPS["odd floats"] == copy.deepcopy(GROUPS["odd floats"])
    assert token_rollout(reward=0.0) != token_rollout(reward=-0.0)
    changed = token_rollout()
    assert changed.logprobs is not None
    changed.logprobs[0][3] = np.nextafter(changed.logprobs[0][3], 0, dtype=np.float32)
    assert changed != token_rollout()


def test_turns_of_a_conversation_are_stored_once() -> None:
    rollout = conversation(10)
    folded = fold(rollout.trajectory, rollout.generation_mask, rollout.logprobs)
    assert folded.irregular == []
    one = RolloutGroup(rollouts=[token_rollout(tokens=len(rollout.trajectory[-1]))])
    assert len(message_of(RolloutGroup(rollouts=[rollout]))) < len(message_of(one)) + 700


def test_regular_rows_are_aligned_and_nulls_say_where_no_logprob_was_given() -> None:
    rows = pl.from_arrow(widen(lean_table(list(GROUPS.values())), "bank"))
    assert isinstance(rows, pl.DataFrame)
    regular = rows.filter(pl.col("irregular_turns").is_null() & pl.col("tokens").is_not_null())
    assert regular.height >= 20
    for row in regular.to_dicts():
        assert len(row["tokens"]) == row["num_tokens"]
        assert row["generation_mask"] is None or len(row["generation_mask"]) == row["num_tokens"]
        assert row["logprobs"] is None or len(row["logprobs"]) == row["num_tokens"]
    plain = rows.filter(pl.col("group_uid") == "u0").to_dicts()[0]
    assert [value is not None for value in plain["logprobs"]] == plain["generation_mask"]
    assert plain["num_generated"] == 24 and plain["num_turns"] == 1


def test_prompts_that_are_equal_have_equal_hashes() -> None:
    same = [TokenRollout(trajectory=[[1, 2, 3, end]], generation_mask=[[0, 0, 0, 1]]) for end in (4, 5)]
    other = TokenRollout(trajectory=[[1, 2, 9, 4]], generation_mask=[[0, 0, 0, 1]])
    hashes = widen(lean_table([RolloutGroup(rollouts=[*same, other])]), "bank")["prompt_hash"].to_pylist()
    assert hashes[0] == hashes[1] != hashes[2]


def test_readers_of_arrow_streams_read_a_record() -> None:
    message = bytes(message_of(token_group()))
    stream = SEGMENT_SCHEMA.serialize().to_pybytes() + message + bytes(8)
    assert pa.ipc.open_stream(stream).read_all().num_rows == 4
    assert pl.read_ipc_stream(stream)["reward"].to_list() == [0.0, 1.0, 2.0, 3.0]


REFUSED: dict[str, tuple[Any, str]] = {
    "int key": (lambda: token_rollout(extra_a={1: 2}), r"extra_a: .*int key"),
    "tuple": (lambda: token_rollout(extra_a=[(1, 2)]), r"extra_a\[0\]"),
    "NumPy scalar": (lambda: token_rollout(extra_a={"x": np.float64(1)}), r"extra_a\.x: .*float64"),
    "datetime": (lambda: token_rollout(extra_a=datetime(2026, 1, 1)), "extra_a"),
    "bytes": (lambda: token_rollout(extra_a=b"x"), "extra_a"),
    "NaN": (lambda: token_rollout(extra_a=float("nan")), "extra_a: JSON has no nan"),
    "surrogate in an extra": (lambda: token_rollout(extra_a="\ud800"), "extra_a"),
    "surrogate in problem_id": (lambda: token_rollout(problem_id="\ud800"), "problem_id|problem"),
    "surrogate in a turn": (lambda: Rollout(trajectory=["a", "\udfff"]), r"trajectory\[1\]"),
    "surrogate in a metric": (lambda: token_rollout(metrics={"\ud800": 1.0}), "metrics"),
    "ragged mask": (lambda: TokenRollout(trajectory=[[1, 2]], generation_mask=[[1]]), r"generation_mask\[0\]"),
    "ragged logprobs": (lambda: TokenRollout(trajectory=[[1, 2, 3]], logprobs=[[0.5]]), r"logprobs\[0\]"),
    "masks for fewer turns": (lambda: TokenRollout(trajectory=[[1], [1, 2]], generation_mask=[[1]]), "generation_mask"),
    "a count beyond 64 bits": (lambda: token_rollout(generation_cap=2**70), "generation_cap"),
    "objects in an array": (lambda: token_rollout(arrays={"a": np.array([object()])}), r"arrays\['a'\]"),
    "token 2^31": (lambda: TokenRollout(trajectory=[[1, 2**31]]), r"trajectory\[0\]"),
    "token −1": (lambda: TokenRollout(trajectory=[np.array([-1])]), r"trajectory\[0\]"),
    "a fraction of a token": (lambda: TokenRollout(trajectory=[[1.5]]), r"trajectory\[0\]"),
    "a logprob beyond float32": (lambda: TokenRollout(trajectory=[[1]], logprobs=[[1e39]]), r"logprobs\[0\]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept_is_refused_with_the_fields_name(name: str) -> None:
    make, field = REFUSED[name]
    with pytest.raises(UnrepresentableError, match=field):
        message_of(RolloutGroup(rollouts=[token_rollout(), make()]))


def test_values_changed_behind_pydantics_back_are_refused_or_converted_never_kept_wrong() -> None:
    negative = token_rollout()
    negative.trajectory[0] = negative.trajectory[0].copy()
    negative.trajectory[0][2] = -5
    with pytest.raises(UnrepresentableError, match=r"rollouts\[0\]\.trajectory\[0\]: token id -5"):
        message_of(RolloutGroup(rollouts=[negative]))
    flat = token_rollout()
    flat.trajectory[0] = flat.trajectory[0].reshape(2, -1)
    with pytest.raises(UnrepresentableError, match=r"one dimension"):
        message_of(RolloutGroup(rollouts=[flat]))


def test_one_group_of_two_environments_is_refused() -> None:
    with pytest.raises(UnrepresentableError, match="env_id"):
        message_of(RolloutGroup(rollouts=[token_rollout(env_id="a"), token_rollout(env_id="b")]))


def test_a_group_over_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_GROUP_BYTES", 100)
    with pytest.raises(UnrepresentableError, match="rollouts"):
        message_of(token_group())


def test_a_subclass_keeps_its_own_fields_as_extras() -> None:
    class Graded(TokenRollout):
        grade: str = "A"

    back = round_trip(RolloutGroup(rollouts=[Graded(trajectory=[[1]], grade="B")]))
    assert back[0].model_extra == {"grade": "B"}


class Holder(BaseModel):
    groups: list[RolloutGroup]


def stored(group: RolloutGroup) -> tuple[StoredGroup, list[int]]:
    message = message_of(group)
    touched: list[int] = []

    def load() -> Any:
        touched.append(1)
        return decode_group(batch_of(message))

    return StoredGroup.of(read_head(memoryview(message)), load), touched


def test_a_stored_group_is_decoded_once_and_only_when_touched() -> None:
    group, touched = stored(GROUPS["plain"])
    group.batch_id, group.index_in_batch = 9, 8
    assert (group.uid, touched) == ("u", [])
    assert len(group) == 4 and len(group.rollouts) == 4
    assert (group.batch_id, group.index_in_batch, touched) == (9, 8, [1])


@pytest.mark.parametrize(
    "look",
    [
        lambda group: group == group.plain(),
        lambda group: len(group.model_dump()["rollouts"]) == 4,
        lambda group: "trajectory" in group.model_dump_json(),
        lambda group: "TokenRollout" in repr(group),
        lambda group: type(copy.copy(group)) is RolloutGroup and copy.copy(group) == group,
        lambda group: type(copy.deepcopy(group)) is RolloutGroup,
        lambda group: group.model_copy(deep=True) == group,
        lambda group: pickle.loads(pickle.dumps(group)) == group,
        lambda group: len(Holder(groups=[group]).model_dump()["groups"][0]["rollouts"]) == 4,
    ],
)
def test_looking_at_a_stored_group_decodes_it_first(look: Any) -> None:
    group, touched = stored(GROUPS["plain"])
    assert look(group)
    assert touched == [1]
