"""Groups through sealed records: every one comes back bit for bit, and other readers read them."""

from __future__ import annotations

import io
import math
from typing import Any

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from builders import COMPLETED_AT_US, EVERY, NAN_32, build, chain_rollout, parse, round_trip, sealed, stream
from drawn_groups import groups
from hypothesis import given, settings
from pydantic import Field

from arrowbank import codec
from arrowbank.arrays import same_bits
from arrowbank.durable.message import read_head
from arrowbank.errors import UnrepresentableError
from arrowbank.schema import SEGMENT_SCHEMA
from arrowbank.types import Rollout, RolloutGroup, TokenRollout


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("name", EVERY)
def test_every_kind_of_group_comes_back_bit_for_bit(name: str, seed: int) -> None:
    group = build(name, seed)
    restored = round_trip(group)
    assert restored == group and group == restored
    assert [type(rollout) for rollout in restored] == [type(rollout) for rollout in group]


@pytest.mark.parametrize("name", EVERY)
def test_a_restored_group_encodes_to_the_same_bytes(name: str) -> None:
    group = build(name)
    assert sealed(round_trip(group)) == sealed(group)


@pytest.mark.parametrize("name", EVERY)
def test_encoding_changes_nothing(name: str) -> None:
    group = build(name)
    sealed(group)
    assert group == build(name)


def test_none_and_empty_lists_are_told_apart() -> None:
    lists: list[Any] = [None, []]
    members = [
        TokenRollout(trajectory=[], generation_mask=mask, logprobs=logprobs, completion_ids=ids, finish_reasons=ids,
                     prompt_length=ids, policy_versions=ids, kv_versions=ids, reward=ids)
        for mask in lists for logprobs in lists for ids in lists
    ]  # fmt: skip
    restored = round_trip(RolloutGroup(rollouts=members))
    for found, given_ in zip(restored, members, strict=True):
        assert found.model_dump() == given_.model_dump()


def test_arrays_keep_dtype_shape_and_bits_whatever_their_order() -> None:
    group = build("arrays")
    for found, given_ in zip(round_trip(group), group, strict=True):
        assert list(found.arrays) == list(given_.arrays)
        for name, array in given_.arrays.items():
            assert same_bits(found.arrays[name], array), name


def test_extra_fields_come_back_with_their_types() -> None:
    restored = round_trip(build("extras"))
    nested = restored[0].nested  # type: ignore[union-attr]
    assert [type(value) for value in nested["a"]] == [int, float, bool, type(None), str]
    assert math.copysign(1, nested["b"][""]) == -1 and nested["big"] == 2**80
    assert restored.wave == [1] and restored.kept == {"k": 1.5}  # type: ignore[attr-defined]


def test_token_turns_are_read_only_views_of_the_record() -> None:
    message = sealed(RolloutGroup(rollouts=[chain_rollout(turns=3)]))
    turns = codec.decode_group(parse(message))[0].trajectory
    assert all(isinstance(turn, np.ndarray) and not turn.flags.owndata and not turn.flags.writeable for turn in turns)


class Graded(Rollout):
    grade: int
    rubric: dict[str, float] = Field(default_factory=dict)


class Routed(TokenRollout):
    completion_tags: list[str] = Field(default_factory=list)


class Wave(RolloutGroup):
    number: int = 0


def test_fields_that_subclasses_declare_come_back_as_extra_ones() -> None:
    rollouts = [Graded(trajectory=["a"], grade=3, note="x"), Routed(trajectory=[[1]], completion_tags=["t"])]
    group = Wave(rollouts=rollouts, number=4)
    restored = round_trip(group)
    assert restored.number == 4 and restored[0].grade == 3 and restored[1].completion_tags == ["t"]  # type: ignore
    assert restored == group and group == restored
    assert [type(rollout) for rollout in restored] == [Rollout, TokenRollout]


def test_a_subclasss_field_that_json_would_change_is_refused() -> None:
    class Paired(Rollout):
        pair: tuple[int, int]

    with pytest.raises(UnrepresentableError, match=r"^rollouts\[0\]\.pair: .*tuple"):
        sealed(RolloutGroup(rollouts=[Paired(trajectory=["a"], pair=(1, 2))]))


def test_a_text_subclass_may_name_its_fields_as_token_rollouts_do() -> None:
    class Sampled(Rollout):
        completion_ids: list[int]

    group = RolloutGroup(rollouts=[Sampled(trajectory=["a"], completion_ids=[1])])
    assert round_trip(group) == group


def test_the_head_says_what_sorting_needs() -> None:
    message = sealed(build("fields"), uid="u9", split="eval", evicted="stale", source_index=5, iteration=8)
    assert read_head(memoryview(message)) == {
        "uid": "u9", "iteration": 8, "env": "maze", "split": "eval", "size": 5, "problem": None, "batch_id": 7,
        "index_in_batch": 3, "source_index": 5, "evicted": "stale", "at": COMPLETED_AT_US,
    }  # fmt: skip


@settings(deadline=None, max_examples=60)  # a busy machine is no falsifying example
@given(groups)
def test_any_group_comes_back_bit_for_bit(group: RolloutGroup) -> None:
    assert round_trip(group) == group


# -- other readers


def test_plain_readers_read_the_stream() -> None:
    data = stream([build(name) for name in EVERY])
    expected = sum(max(len(build(name)), 1) for name in EVERY)
    table = pa.ipc.open_stream(data).read_all()
    table.validate(full=True)
    assert table.schema.equals(SEGMENT_SCHEMA) and table.num_rows == expected
    frame = pl.read_ipc_stream(io.BytesIO(data))
    assert frame["tokens"].list.sum().sum() == sum(map(sum, filter(None, table["tokens"].to_pylist())))
    assert frame.height == expected and frame["details"].to_list() == table["details"].to_pylist()
    reader = pa.ipc.open_stream(data)  # noqa: F841  # DuckDB finds it by its name
    rows = duckdb.sql("select count(*), count(tokens), count(distinct group_uid) from reader").fetchall()
    assert rows == [(expected, expected - table["tokens"].null_count, len(EVERY))]


def test_null_logprobs_stand_exactly_where_none_was_given() -> None:
    rollout = TokenRollout(trajectory=[[5, 6, 7, 8]], generation_mask=[[0, 1, 1, 1]], logprobs=[NAN_32])
    row = parse(sealed(RolloutGroup(rollouts=[rollout])))
    assert row.column("logprobs")[0].values.is_null().to_pylist() == [True, False, False, False]
    short = rollout.model_copy(update={"logprobs": [NAN_32[:2]]})
    row = parse(sealed(RolloutGroup(rollouts=[short])))
    assert row.column("logprobs")[0].values.is_null().to_pylist() == [True, False, False, True]
