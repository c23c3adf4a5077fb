"""A plain model of what killed trainers were promised, held against what is found in their bank.

``Model`` takes in the report of ``kill_child``. What a restore gives back, what plain Parquet readers see and what
``scan`` shows are each held against it; a ``Violation`` is a broken promise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import polars as pl
from kill_child import EVAL, digest, fate_of, make_group, serial_of

import arrowbank


class Violation(AssertionError):
    """A promise that was not kept."""


@cache
def expected_digest(serial: int) -> str:
    return digest(make_group(serial))


# -- what was acknowledged


@dataclass(frozen=True)
class DrawMade:
    iteration: int
    uids: tuple[str, ...]
    state: str


@dataclass
class Found:
    """What one restore gave back, as the trainer told it."""

    checkpoint: int
    plan: list[DrawMade] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    pending: list[str] = field(default_factory=list)
    groups: dict[str, tuple[int, str]] = field(default_factory=dict)
    """uid → serial and digest of each group, planned or pending."""
    repeated: list[str] = field(default_factory=list)
    damage: str = ""


@dataclass
class Model:
    """What the bank acknowledged, over all trainers. ``maybe_…``: called when the trainer was killed."""

    serials: dict[str, int] = field(default_factory=dict)
    """Group → its serial number: of acknowledged groups, and of others that a restore gave back."""
    evicted: dict[str, str] = field(default_factory=dict)
    draws: dict[int, DrawMade] = field(default_factory=dict)
    """The line: one draw an iteration."""
    checkpoint: int = 0
    acknowledged: int = 0
    maybe_draw: DrawMade | None = None
    maybe_evicted: dict[str, str] = field(default_factory=dict)
    maybe_checkpoint: int | None = None
    maybe_batches: list[list[int]] = field(default_factory=list)
    """Serial numbers given to append_many calls that did not return."""

    def take(self, kind: str, words: list[str]) -> None:
        """Take in one line of a trainer's report."""
        match kind:
            case "A":
                self._acknowledge(words[0], int(words[1]))
            case "M":
                self.maybe_batches.append([int(serial) for serial in _split(words)])
            case "D":
                self.maybe_draw = DrawMade(int(words[0]), tuple(words[2].split(",")), words[1])
            case "d":
                assert self.maybe_draw is not None
                self.draws[self.maybe_draw.iteration], self.maybe_draw = self.maybe_draw, None
            case "E":
                self.maybe_evicted = dict.fromkeys(words[1].split(","), words[0])
            case "e":
                self.evicted |= self.maybe_evicted
                self.maybe_evicted = {}
            case "C":
                self.maybe_checkpoint = int(words[0])
            case "c":
                assert self.maybe_checkpoint is not None
                self.checkpoint, self.maybe_checkpoint = self.maybe_checkpoint, None

    def _acknowledge(self, uid: str, serial: int) -> None:
        if uid in self.serials:
            raise Violation(f"uid {uid} was given twice")
        self.acknowledged += 1
        self._add(uid, serial)
        self.maybe_batches = [batch for batch in self.maybe_batches if serial not in batch]

    def _add(self, uid: str, serial: int) -> None:
        self.serials[uid] = serial
        if fate_of(serial) not in ("train", EVAL):
            self.evicted[uid] = fate_of(serial)

    def checkpoints(self) -> list[int]:
        """Where the next trainer may restore: at the last checkpoint, or one whose record may be missing."""
        return sorted({self.checkpoint, self.maybe_checkpoint or self.checkpoint})

    # -- held against it

    def check_restored(self, found: Found) -> None:
        """Check what a restore gave back, and take it for what is true from now on."""
        if found.damage:
            raise Violation(f"a kill is no damage, but the report names: {found.damage}")
        self._check_contents(found)
        plan = [draw for iteration, draw in sorted(self.draws.items()) if iteration >= found.checkpoint]
        last = self.maybe_draw
        if found.plan != plan:
            if last is None or found.plan != [*plan, last]:
                raise Violation(f"restore({found.checkpoint}) plans {found.plan} where {plan} were drawn, then {last}")
            self.draws[last.iteration] = last
        self.maybe_draw = None
        self.checkpoint, self.maybe_checkpoint = found.checkpoint, None
        self._check_pending(found)

    def _check_contents(self, found: Found) -> None:
        if found.lost:
            raise Violation(f"acknowledged groups lost from planned draws: {found.lost}")
        if found.repeated:
            raise Violation(f"groups given back twice: {found.repeated}")
        for uid, (serial, content) in found.groups.items():
            if self.serials.get(uid, serial) != serial or content != expected_digest(serial):
                raise Violation(f"group {uid} changed: serial {self.serials.get(uid)}, came back as {serial}")

    def _check_pending(self, found: Found) -> None:
        """Check that each group that is neither drawn nor evicted is there, and no other but unacknowledged ones."""
        pending = set(found.pending)
        self.evicted |= {uid: reason for uid, reason in self.maybe_evicted.items() if uid not in pending}
        self.maybe_evicted = {}
        drawn = {uid for draw in self.draws.values() for uid in draw.uids}
        over = drawn | self.evicted.keys()
        expected = {uid for uid, serial in self.serials.items() if fate_of(serial) != EVAL} - over
        if expected - pending:
            raise Violation(f"{len(expected - pending)} acknowledged groups lost: {sorted(expected - pending)[:4]}")
        if pending & over:
            raise Violation(f"groups pending that were drawn or evicted: {sorted(pending & over)[:4]}")
        self._take_unacknowledged({uid: found.groups[uid][0] for uid in pending - expected})

    def _take_unacknowledged(self, more: dict[str, int]) -> None:
        if len({*more.values(), *self.serials.values()}) < len(more) + len(self.serials):
            raise Violation(f"a group is there under two uids: {more}")
        for batch in self.maybe_batches:
            came = [serial for serial in batch if serial in more.values()]
            if came != batch[: len(came)]:
                raise Violation(f"of append_many({batch}) came back {came}: a later group without an earlier one")
        self.maybe_batches = []
        for uid, serial in more.items():
            self._add(uid, serial)

    def check_rows(self, rows: pl.DataFrame) -> None:
        """Check that ``scan``'s rows are the model: each group once, with its outcome, and none that nobody made."""
        check_each_rollout_once(rows)
        firsts = rows.filter(pl.col("member_index") == 0)
        seen = dict(zip(firsts["group_uid"], firsts.iter_rows(named=True), strict=True))
        missing = self.serials.keys() - seen.keys()
        if missing:
            raise Violation(f"{len(missing)} acknowledged groups lost from scan: {sorted(missing)[:4]}")
        if len({row["problem_id"] for row in seen.values()}) < len(seen):
            raise Violation("a group is in scan under two uids")
        place = {uid: (draw, at) for draw in self.draws.values() for at, uid in enumerate(draw.uids)}
        for uid, serial in self.serials.items():
            row = seen[uid]
            if row["problem_id"] != str(serial):
                raise Violation(f"group {uid} changed: serial {serial}, in scan as {row['problem_id']}")
            if not self._outcome_is_right(uid, row, place.get(uid)):
                raise Violation(f"scan has {row}; drawn {place.get(uid)}, evicted {self.evicted.get(uid)}")

    def _outcome_is_right(self, uid: str, row: dict[str, object], place: tuple[DrawMade, int] | None) -> bool:
        outcome, drawn = row["outcome"], (row["consumed_iteration"], row["consumed_position"], row["draw_size"])
        if uid in self.evicted:
            return outcome == "evicted" and row["evict_reason"] == self.evicted[uid]
        if place is None:
            if self.maybe_evicted.get(uid) == row["evict_reason"] is not None:
                return outcome == "evicted"
            if self.maybe_draw is not None and uid in self.maybe_draw.uids:
                return outcome is None
            return outcome is None and drawn == (None, None, None)
        draw, at = place
        low, high = min(self.checkpoints()), max(self.checkpoints())
        allowed = {"consumed"} if draw.iteration < low else {None} if draw.iteration >= high else {"consumed", None}
        return outcome in allowed and drawn == (draw.iteration, at, len(draw.uids))


@dataclass
class LineModel(Model):
    """Also knows which checkpoints its line recorded: of these any may be restored."""

    recorded: set[int] = field(default_factory=set)

    def take(self, kind: str, words: list[str]) -> None:
        super().take(kind, words)
        if kind == "c":
            self.recorded.add(self.checkpoint)

    def check_restored(self, found: Found) -> None:
        super().check_restored(found)
        self.recorded = {at for at in self.recorded if at <= found.checkpoint}


class Restores:
    """Takes in what is told of restores (R, P, G, Q, r), and at the end of each has the model check what came back."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._found: Found | None = None

    def take(self, kind: str, words: list[str]) -> None:
        if kind == "R":
            self._found = Found(int(words[0]))
        found = self._found
        assert found is not None
        if kind == "P":
            found.plan.append(DrawMade(int(words[0]), tuple(words[3].split(",")), words[1]))
            found.lost += [] if words[2] == "-" else words[2].split(",")
        elif kind == "G":
            if words[0] in found.groups:
                found.repeated.append(words[0])
            found.groups[words[0]] = int(words[1]), words[2]
        elif kind == "Q":
            found.pending.append(words[0])
        elif kind == "r":
            found.damage = " ".join(words)
            self._model.check_restored(found)
            self._found = None


def _split(words: list[str]) -> list[str]:
    return words[0].split(",") if words else []


# -- what plain readers see

COLUMNS = [
    "group_uid", "member_index", "group_size", "problem_id", "outcome", "evict_reason", "consumed_iteration",
    "consumed_position", "draw_size",
]  # fmt: skip


def check_each_rollout_once(rows: pl.DataFrame) -> None:
    """Check that each (group_uid, member_index) is there once, and of each group every member."""
    if rows.select("group_uid", "member_index").is_duplicated().any():
        raise Violation("a rollout is there twice")
    sizes = rows.group_by("group_uid").agg(pl.len().alias("rows"), pl.col("group_size").max())
    if (sizes["rows"] != sizes["group_size"]).any():
        raise Violation("a group is there in part")


def check_archive_once(bank: Path) -> int:
    """Check what ``archive/*.parquet`` shows to anybody; return its number of rows."""
    rows = pl.read_parquet(bank / "archive" / "*.parquet", columns=["group_uid", "member_index", "group_size"])
    check_each_rollout_once(rows)
    return rows.height


def check_contents(bank: Path) -> int:
    """Check every group of the bank bit for bit; return how many there are."""
    count = 0
    for group in arrowbank.scan(bank).groups():
        count += 1
        if digest(group) != expected_digest(serial_of(group)):
            raise Violation(f"group {group.uid} changed: it says it is of serial {serial_of(group)}")
    return count
