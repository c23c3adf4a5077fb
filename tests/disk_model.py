"""A plain model of what a bank acknowledged, held against what a bank, Parquet readers and ``scan`` show.

The events that it takes in are those that ``small_disks.Trainer`` tells.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from builders import token_group

from arrowbank import Restored, RolloutGroup, scan

__all__ = ["Model", "make_group"]

MEMBERS = 3


def make_group(seed: int) -> RolloutGroup:
    return token_group(seed, members=MEMBERS, problem_id=str(seed))


@cache
def _expected(seed: int) -> RolloutGroup:
    return make_group(seed)


def is_what_was_made(group: RolloutGroup, seed: int) -> bool:
    return group.rollouts == _expected(seed).rollouts


@dataclass
class Model:
    """What a bank acknowledged."""

    groups: dict[str, int] = field(default_factory=dict)
    """Group → the seed that it was made from."""
    held_out: set[str] = field(default_factory=set)
    evicted: dict[str, str] = field(default_factory=dict)
    draws: dict[int, tuple[list[str], bytes]] = field(default_factory=dict)
    checkpoint: int = 0
    refused: set[str] = field(default_factory=set)
    """Groups whose append raised and was not made again."""
    maybe: dict[str, int] = field(default_factory=dict)
    """Those of them that may come back, because what would say that they do not count could not be written either."""

    def take(self, event: list[Any]) -> None:
        """Take in one acknowledgement."""
        match event:
            case ["group", uid, seed, split, evicted]:
                assert uid not in self.groups, f"group {uid} was acknowledged twice"
                self.groups[uid] = seed
                if split != "train":
                    self.held_out.add(uid)
                if evicted is not None:
                    self.evicted[uid] = evicted
            case ["evicted", uid, reason]:
                self.evicted[uid] = reason
            case ["draw", iteration, uids, state]:
                self.draws[iteration] = list(uids), state.encode()
            case ["checkpoint", iteration]:
                self.checkpoint = max(self.checkpoint, iteration)
            case ["rolled back", iteration]:
                self.checkpoint = iteration
            case ["refused", uid, seed, may_come_back]:
                self.refused.add(uid)
                if may_come_back:
                    self.maybe[uid] = seed
            case _:
                raise AssertionError(event)

    def check_restored(self, restored: Restored) -> None:
        """Hold what a restore gave back against what was acknowledged."""
        wanted = [(at, *draw) for at, draw in sorted(self.draws.items()) if at >= restored.iteration]
        found = [(draw.iteration, [group.uid for group in draw.groups], draw.state) for draw in restored.draws]
        assert found == wanted, f"planned draws: {found}, drawn were {wanted}"
        drawn = {uid for uids, _ in self.draws.values() for uid in uids}
        pending = [group for queue in restored.pending.values() for group in queue]
        uids = Counter(str(group.uid) for group in pending)
        assert set(uids.values()) <= {1}, "a group is pending twice"
        required = self.groups.keys() - drawn - self.evicted.keys() - self.held_out
        assert required <= uids.keys(), f"lost: {sorted(required - uids.keys())}"
        extra = uids.keys() - required
        assert extra <= self.maybe.keys(), f"not acknowledged, and pending: {sorted(extra - self.maybe.keys())}"
        known = self.groups | self.maybe
        for group in [*pending, *(group for draw in restored.draws for group in draw.groups)]:
            assert is_what_was_made(group, known[str(group.uid)]), f"group {group.uid} is not what was appended"

    def check_archive(self, path: Path) -> None:
        """Hold the Parquet files, as any engine globs them, against it."""
        rows: Counter[tuple[str, int]] = Counter()
        for file in sorted((path / "archive").iterdir()):
            columns = ["group_uid", "member_index", "outcome", "consumed_iteration", "evict_reason"]
            for row in pq.read_table(file, columns=columns).to_pylist():
                uid = row["group_uid"]
                rows[uid, row["member_index"]] += 1
                assert uid in self.groups, f"archived, and not acknowledged: {uid}"
                if row["outcome"] == "consumed":
                    assert uid in self.draws[row["consumed_iteration"]][0], f"archived as drawn: {uid}"
                elif row["outcome"] == "evicted":
                    assert row["evict_reason"] == self.evicted[uid], f"archived as evicted: {uid}"
                else:
                    assert uid in self.held_out, f"archived, and not used up: {uid}"
        assert set(rows.values()) <= {1}, "the archive shows a rollout twice"

    def check_scan(self, path: Path) -> None:
        """Hold ``scan`` against it: every group once, with every bit."""
        view = scan(path)
        seen = Counter(view.to_arrow()["group_uid"].to_pylist())
        assert set(seen.values()) <= {MEMBERS}, f"scan shows rollouts twice, or not all: {seen}"
        assert self.groups.keys() <= seen.keys(), f"scan does not show {sorted(self.groups.keys() - seen.keys())}"
        extra = seen.keys() - self.groups.keys()
        assert extra <= self.maybe.keys(), f"scan shows what was not acknowledged: {sorted(extra)}"
        known = self.groups | self.maybe
        for group in view.groups():
            assert is_what_was_made(group, known[str(group.uid)]), f"scan: group {group.uid} is not what was appended"
