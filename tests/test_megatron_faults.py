"""Faults that Megatron's own bank had (August 2026), and the adapter has not."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from megatron_calls import Run, content, group_of, kill, text_rollout, through_a_kill, token_group, token_rollout

from arrowbank import BankLockedError, DuplicateGroupError, scan
from arrowbank.integrations.megatron import MegatronBank

pytestmark = pytest.mark.usefixtures("closed_in_the_end")


def test_uids_do_not_collide_after_recovery(path: Path) -> None:
    bank = MegatronBank.open(path)
    bank.recover(0)
    bank.set_collection(5)
    before = [bank.append(token_group(seed)) for seed in range(2)]
    bank = kill(path)
    bank.recover(3)
    bank.set_collection(5)  # again
    after = bank.append(token_group(9))
    assert after not in before
    bank.mark_consumed(after, 6)  # takes only that one
    bank.checkpoint(6)
    assert [group.uid for group in kill(path).recover(6)] == before


def test_a_failed_write_spoils_no_later_group(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bank = MegatronBank.open(path)
    bank.recover(0)
    good, bad, later = token_group(1), token_group(2), token_group(3)
    uids = [bank.append(good)]
    pwritev = os.pwritev

    def full(descriptor: int, views: list[memoryview], offset: int) -> int:
        """Half of it is written; then the disk is full."""
        monkeypatch.setattr(os, "pwritev", pwritev)
        pwritev(descriptor, [views[0][: len(views[0]) // 2]], offset)
        raise OSError(28, "planted")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(OSError, match="planted"):
        bank.append(bad)
    uids += [bank.append(later), bank.append(bad)]
    restored = kill(path).recover(0)
    assert [group.uid for group in restored] == uids
    assert [content(group) for group in restored] == [content(group) for group in (good, later, bad)]


def test_logprobs_are_not_rounded(path: Path) -> None:
    logprobs = np.array([-70000.0, -1e-8, -0.0, -math.inf, -0.1, -12.345678, -3e38, 1e-45], np.float32).tolist()
    given = token_rollout(trajectory=[list(range(9))], generation_mask=[[False] + [True] * 8], logprobs=[logprobs])
    (group,) = through_a_kill(path, group_of(given))
    assert np.array(group[0].logprobs[0]).tobytes() == np.array(logprobs).tobytes()


def test_damage_inside_a_file_costs_one_group_and_is_told(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bank = MegatronBank.open(path)
    bank.recover(0)
    uids = [bank.append(token_group(seed, problem_id=f"marked{seed}")) for seed in range(3)]
    bank.mark_consumed_many(uids, 1)
    bank.close()
    (segment,) = (path / "segments").iterdir()
    data = bytearray(segment.read_bytes())
    data[data.index(b"marked1")] ^= 1
    segment.write_bytes(data)
    caplog.set_level(logging.WARNING, "arrowbank")
    bank = MegatronBank.open(path)
    restored = bank.recover(0)
    assert [group.uid for group in restored] == [uids[0], uids[2]]
    assert bank.report is not None and bank.report.lost_groups == 1 and bank.report.lost_records == 1
    assert segment.name in caplog.text and "lost" in caplog.text
    assert f"the batch of iteration 0 comes back without {uids[1]}" in caplog.text


def test_a_torn_tail_costs_the_group_that_was_being_written(path: Path) -> None:
    bank = MegatronBank.open(path)
    bank.recover(0)
    bank.set_collection(3)
    uids = [bank.append(token_group(seed)) for seed in range(2)]
    bank.close()
    (segment,) = (path / "segments").iterdir()
    os.truncate(segment, segment.stat().st_size - 100)
    bank = MegatronBank.open(path)
    assert [group.uid for group in bank.recover(0)] == uids[:1]
    assert bank.report is not None and bank.report.damage
    assert bank.append(token_group(1)) not in uids


def test_a_second_opener_is_refused(path: Path) -> None:
    bank = MegatronBank.open(path)
    with pytest.raises(BankLockedError, match=str(os.getpid())):
        MegatronBank.open(path)
    bank.recover(0)
    bank.append(token_group())


def test_groups_may_be_appended_right_after_a_checkpoint(path: Path) -> None:
    bank = MegatronBank.open(path)
    unplaced = bank.append(token_group(0))  # nor is set_collection needed before the first
    bank.recover(0)
    bank.set_collection(0)
    drawn = bank.append(token_group(1))
    bank.mark_consumed(drawn, 1)
    bank.checkpoint(1)
    after = bank.append(token_group(2))
    assert [group.uid for group in kill(path).recover(1)] == [unplaced, after]


@pytest.mark.parametrize(
    "group",
    [
        pytest.param(lambda: group_of(token_rollout(1), token_rollout(2, logprobs=None)), id="partial-logprobs"),
        pytest.param(
            lambda: group_of(token_rollout(1, turns=1, generation_mask=None, logprobs=[[-1.0] * 3]), token_rollout(2)),
            id="partial-masks",
        ),
        pytest.param(lambda: group_of(token_rollout(1), text_rollout(2)), id="tokens-and-text"),
        pytest.param(
            lambda: group_of(text_rollout(1), token_rollout(trajectory=[], logprobs=None, generation_mask=None)),
            id="text-and-placeholder",
        ),
    ],
)
def test_mixed_groups_are_taken(path: Path, group: Callable[[], Any]) -> None:
    given = group()
    (restored,) = through_a_kill(path, given)
    assert content(restored) == content(given)
    assert [type(member) for member in restored] == [type(member) for member in given]


def test_a_group_is_banked_once(path: Path) -> None:
    bank = MegatronBank.open(path)
    bank.recover(0)
    group = token_group()
    group.uid = bank.append(group)
    with pytest.raises(DuplicateGroupError):
        bank.append(group)
    (restored,) = bank.recover(0)
    with pytest.raises(DuplicateGroupError):
        bank.append(restored)


def test_the_run_is_read_as_parquet(path: Path) -> None:
    run = Run(path)
    run.start(0)
    run.collect(0, 1)
    run.bank.checkpoint(2)
    run.bank.close(final=True)
    table = scan(path).to_arrow()
    assert table.num_rows == 2 * 3 * 2
    assert pa.compute.sum(table["consumed_iteration"]).as_py() == 6
    assert pa.compute.all(pa.compute.equal(pa.compute.list_value_length(table["completion_ids"]), table["num_turns"]))
