"""Lean rows to whole rows and back, in memory and through Parquet."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders import (
    COMPLETED_AT_US,
    EVERY,
    NAN_64,
    build,
    chain_rollout,
    lean_table,
    text_group,
    text_rollout,
    token_group,
    token_rollout,
)
from drawn_groups import groups
from hypothesis import given, settings

from arrowbank.archive.compaction import write_parquet
from arrowbank.archive.rows import narrow, widen
from arrowbank.arrays import same_bits
from arrowbank.codec import decode_group
from arrowbank.schema import ARCHIVE_SCHEMA, ROW_SCHEMA, SEGMENT_SCHEMA
from arrowbank.types import Rollout, RolloutGroup, TokenRollout


def decoded(lean: pa.Table) -> list[list[Any]]:
    """Each group's rollouts."""
    found, start = [], 0
    for _, run in groupby(lean["group_uid"].to_pylist()):
        count = len(list(run))
        found.append(decode_group(lean.slice(start, count).combine_chunks().to_batches()[0]))
        start += count
    return found


def rows_of(*rollouts: Rollout | TokenRollout, **options: Any) -> pa.Table:
    return widen(lean_table([RolloutGroup(rollouts=list(rollouts))], **options), "run")


def archived(wide: pa.Table, path: Path) -> pa.Table:
    """Write rows to Parquet as compaction does, and read them back."""
    others = [pa.nulls(wide.num_rows, field.type) for field in list(ARCHIVE_SCHEMA)[len(ROW_SCHEMA) :]]
    table = pa.Table.from_arrays([*wide.columns, *others], schema=ARCHIVE_SCHEMA)
    assert write_parquet(path, [table]) == wide.num_rows
    return pq.read_table(path, page_checksum_verification=True)


def assert_same(found: list[list[Any]], made: Sequence[RolloutGroup]) -> None:
    assert same_bits(found, [list(group.rollouts) for group in made])


@pytest.mark.parametrize("name", EVERY)
def test_narrowing_gives_every_group_back_bit_for_bit(name: str) -> None:
    made = [build(name, 1), build(name, 2)]
    wide = widen(lean_table(made), "run")
    wide.validate(full=True)
    lean = narrow(wide)
    lean.validate(full=True)
    assert lean.schema.equals(SEGMENT_SCHEMA, check_metadata=True)
    assert_same(decoded(lean), made)


def test_groups_of_all_kinds_may_stand_in_one_table() -> None:
    made = [build(name) for name in EVERY]
    wide = widen(lean_table(made), "run")
    assert wide.schema.equals(ROW_SCHEMA, check_metadata=True)
    assert_same(decoded(narrow(wide)), made)
    assert_same(decoded(narrow(wide.slice(5))), made_after(made, 5))


def made_after(made: list[RolloutGroup], rows: int) -> list[RolloutGroup]:
    """What is left of groups after so many rows."""
    for index, group in enumerate(made):
        size = max(len(group), 1)
        if rows < size:
            return [RolloutGroup(rollouts=group.rollouts[rows:]), *made[index + 1 :]]
        rows -= size
    return []


def test_parquet_gives_every_group_back_bit_for_bit(tmp_path: Path) -> None:
    made = [build(name) for name in EVERY]
    table = archived(widen(lean_table(made), "run"), tmp_path / "rows.parquet")
    assert table.schema.equals(ARCHIVE_SCHEMA)
    assert_same(decoded(narrow(table)), made)


@pytest.mark.parametrize("name", EVERY)
def test_each_kind_alone_survives_parquet(name: str, tmp_path: Path) -> None:
    table = archived(widen(lean_table([build(name)]), "run"), tmp_path / "rows.parquet")
    assert_same(decoded(narrow(table)), [build(name)])


@settings(deadline=None, max_examples=40)
@given(groups)
def test_any_group_survives_widening(group: RolloutGroup) -> None:
    assert_same(decoded(narrow(widen(lean_table([group]), "run"))), [group])


def test_no_rows_are_rows_too() -> None:
    wide = widen(SEGMENT_SCHEMA.empty_table(), "run")
    assert wide.schema.equals(ROW_SCHEMA) and wide.num_rows == 0
    assert narrow(wide).schema.equals(SEGMENT_SCHEMA)
    assert narrow(ROW_SCHEMA.empty_table()).num_rows == 0


def test_lean_rows_come_back_but_for_the_order_of_their_details() -> None:
    lean = lean_table([build(name) for name in EVERY])
    again = narrow(widen(lean, "run"))
    for name in SEGMENT_SCHEMA.names:
        if name not in ("details", "reward", "logprobs"):  # NaNs are not equal to themselves
            assert again[name].equals(lean[name]), name


# -- what the columns say


def test_columns_say_what_the_group_and_the_writer_said() -> None:
    group = build("fields")
    wide = widen(lean_table([group], source_index=9, split="eval", session=4, writer="rank-3", iteration=6), "run-1")
    row = wide.to_pylist()[0]
    assert {name: row[name] for name in list(ROW_SCHEMA.names)[:17] if name != "prompt_hash"} == {
        "group_uid": "u0", "env_id": "maze", "problem_id": "p1", "split": "eval", "kind": "token", "run_id": "run-1",
        "writer": "rank-3", "member_index": 0, "group_size": 5, "session": 4, "batch_id": 7, "index_in_batch": 3,
        "collected_iteration": 6, "source_index": 9,
        "started_at": datetime(2026, 8, 1, 12, 0, 0, 123456, tzinfo=UTC),
        "completed_at": datetime.fromtimestamp(COMPLETED_AT_US / 1e6, UTC),
    }  # fmt: skip
    assert wide["kind"].to_pylist() == ["token", "text", "token", "text", "text"]
    assert wide["member_index"].to_pylist() == [0, 1, 2, 3, 4]


def test_columns_say_what_the_rollout_said() -> None:
    token, text, empty, *_ = widen(lean_table([build("fields")]), "run").to_pylist()
    for row in (token, text):
        assert (row["reward"], row["reward_is_derived"], row["turn_rewards"]) == (-0.25, True, [0.25, -0.5])
        assert (row["advantage_override"], row["is_truncated"], row["finish_reasons"]) == (-1.25, False, ["stop", None])
        assert (row["rollout_status"], row["failure_reason"], row["prompt_length"]) == ("graded", "", [3, 9])
        assert row["metrics"] == [{"key": "format", "value": 1.0}, {"key": "", "value": 0.5}]
        assert (row["oldest_policy_version"], row["newest_policy_version"]) == (1, 2)
        assert row["policy_versions"][1] == {"turn": 1, "start": 4, "version": 2}
        assert row["kv_versions"] == [{"turn": 0, "start": 0, "version": 2**63 - 1}]
        assert row["num_turns"] == 2
    assert (token["completion_ids"], token["generation_cap"]) == (["a", "b"], 2**63 - 1)
    assert (text["completion_ids"], text["generation_cap"]) == (None, None)
    assert (empty["completion_ids"], empty["generation_cap"], empty["turn_rewards"]) == ([], 0, [])
    assert (empty["reward"], empty["reward_is_derived"], empty["policy_versions"]) == (0.0, True, [])
    assert (empty["oldest_policy_version"], empty["newest_policy_version"]) == (None, None)


def test_a_scalar_reward_is_not_derived() -> None:
    rows = rows_of(token_rollout(reward=0.5), token_rollout(reward=None), token_rollout(reward=NAN_64))
    assert rows["reward_is_derived"].to_pylist() == [False] * 3
    assert rows["reward"].to_pylist()[:2] == [0.5, None] and rows["reward"].is_valid()[2].as_py()
    assert rows["turn_rewards"].null_count == 3


@pytest.mark.parametrize("name", EVERY)
def test_masks_and_logprobs_are_as_long_as_the_tokens(name: str) -> None:
    for row in widen(lean_table([build(name)]), "run").to_pylist():
        for column in ("tokens", "generation_mask", "logprobs"):
            if row[column] is not None:
                assert len(row[column]) == row["num_tokens"]
        assert (row["kind"] == "token") == (row["num_tokens"] is not None)
        if row["kind"] == "token" and row["num_turns"]:
            assert row["tokens"] is not None and row["text"] is None


@pytest.mark.parametrize("logprobs", ["sampled", "short", "full", "cumulative"])
def test_logprobs_are_null_exactly_where_none_was_given(logprobs: str) -> None:
    rollout = chain_rollout(turns=3, step=2, logprobs=logprobs)
    row = rows_of(rollout).to_pylist()[0]
    sampled = np.array(row["generation_mask"])
    assert sampled.sum() == row["num_generated"] == 6 and row["num_turns"] == 3 and row["irregular_turns"] is None
    missing = [] if logprobs == "full" else np.flatnonzero(~sampled).tolist()
    if logprobs == "short":
        missing = sorted([*missing, *(np.cumsum([4, 4, 4]) - 1).tolist()])
    assert [index for index, value in enumerate(row["logprobs"]) if value is None] == missing


def test_turns_tell_how_they_are_cut() -> None:
    row = rows_of(chain_rollout(turns=2, step=3)).to_pylist()[0]
    assert row["turns"] == [
        {"source": 0, "end": 6, "mask_from": 3, "logprobs": "sampled", "num_logprobs": 3},
        {"source": 0, "end": 12, "mask_from": 9, "logprobs": "sampled", "num_logprobs": 3},
    ]
    text = rows_of(text_rollout(turns=2)).to_pylist()[0]
    assert [turn["end"] for turn in text["turns"]][1] == len(text["text"]) and text["turns"][0]["logprobs"] is None


def test_irregular_turns_show_their_tokens_and_texts() -> None:
    rows = widen(lean_table([build("rewritten")]), "run").to_pylist()
    first = build("rewritten")[0]
    assert rows[0]["irregular_turns"][0]["tokens"] == first.trajectory[2].tolist()
    assert rows[0]["irregular_turns"][0]["text"] is None
    assert len(rows[0]["irregular_turns"][0]["logprobs"]) == len(first.trajectory[2])
    assert [turn["text"] for turn in rows[4]["irregular_turns"]] == ["xy", "abc"]


def test_arrays_stand_with_name_dtype_and_shape() -> None:
    row = rows_of(
        token_rollout(arrays={"a": np.arange(6, dtype=">i2").reshape(2, 3), "b": np.zeros((0, 4))})
    ).to_pylist()[0]
    assert row["arrays"] == [
        {"name": "a", "dtype": ">i2", "shape": [2, 3], "data": np.arange(6, dtype=">i2").tobytes()},
        {"name": "b", "dtype": "float64", "shape": [0, 4], "data": b""},
    ]


def test_an_empty_group_is_one_placeholder_row() -> None:
    row = widen(lean_table([build("empty")]), "run").to_pylist()[0]
    assert (row["kind"], row["group_size"], row["member_index"], row["num_turns"]) == ("empty", 0, 0, 0)
    assert row["group_extra"] == '{"note":"nothing came back"}' and row["batch_id"] == 1


def test_a_placeholder_has_a_row_without_turns() -> None:
    rows = widen(lean_table([build("placeholders")]), "run").to_pylist()
    assert {row["num_turns"] for row in rows} == {0} and {row["rollout_status"] for row in rows} == {"placeholder"}
    assert [row["num_tokens"] for row in rows] == [0, 0, 0, None]


# -- prompts


def hashes(*rollouts: Rollout | TokenRollout) -> list[Any]:
    return rows_of(*rollouts)["prompt_hash"].to_pylist()  # type: ignore[no-any-return]


def test_members_with_the_same_prompt_have_the_same_hash() -> None:
    for make in (token_group, partial(text_group, turns=1), text_group):
        one, two = (set(widen(lean_table([make(seed)]), "run")["prompt_hash"].to_pylist()) for seed in (1, 2))
        assert len(one) == len(two) == 1 and one != two and None not in one | two


def test_the_prompt_is_found_in_the_first_turn_however_it_is_stored() -> None:
    question, answer, more = [1, 2, 3], [4, 5], [6, 7]
    mask = [0, 0, 0, 1, 1]
    one = TokenRollout(trajectory=[question + answer], generation_mask=[mask])
    chain = TokenRollout(
        trajectory=[question + answer, question + answer + more], generation_mask=[mask, [0] * 6 + [1]]
    )
    rewritten = TokenRollout(trajectory=[question + answer, [9, 9]], generation_mask=[mask, [0, 1]])
    at_odds = TokenRollout(
        trajectory=[question + answer, question + answer], generation_mask=[mask, [1] * 5], arrays={"a": [1.0]}
    )
    said = TokenRollout(trajectory=[question + answer, [9]], prompt_length=3)
    unsampled = TokenRollout(trajectory=[question + answer], generation_mask=[[0] * 5], prompt_length=3)
    found = hashes(one, chain, rewritten, at_odds, said, unsampled)
    assert found == [found[0]] * 6 and found[0] is not None


def test_a_later_turns_mask_does_not_shorten_the_prompt() -> None:
    late = TokenRollout(trajectory=[[1, 2, 3], [1, 2, 3, 4]], generation_mask=[[0, 0, 1], [0, 1, 1, 1]])
    assert hashes(late) == hashes(TokenRollout(trajectory=[[1, 2, 8]], generation_mask=[[0, 0, 1]]))


def test_a_rewritten_text_keeps_its_prompts_hash() -> None:
    one = Rollout(trajectory=["Frage?Ja"], prompt_length=6)
    two = Rollout(trajectory=["Frage?Nein", "kürzer"], prompt_length=[6, 2])
    found = hashes(one, two)
    assert found[0] == found[1] is not None


def test_a_prompt_whose_end_nobody_told_has_no_hash() -> None:
    unknown = [TokenRollout(trajectory=[[1, 2]]), Rollout(trajectory=["ab"]), TokenRollout(trajectory=[])]
    assert hashes(*unknown, Rollout(trajectory=[], prompt_length=[])) == [None] * 4
