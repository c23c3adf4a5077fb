"""SIGKILL from outside, again and again: nothing that was acknowledged is lost, changed or handed out twice.

``KillLoop`` has trainers forked (see ``kill_child``), kills each at a seeded random moment after it entered a chosen
phase, and keeps a plain ``Model`` of what was acknowledged. What the next trainer is given back, what plain Parquet
readers see and what ``scan`` shows are each held against that model. A ``Violation`` is a broken promise; each check
here is proven red by a planted fault in ``test_planted_faults``.

The seed is in every failure; ``ARROWBANK_KILL_SEED`` sets it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

import polars as pl
from kill_child import EVAL, Job, digest, fate_of, make_group, serial_of

import arrowbank
from arrowbank import RolloutBank

CHILD = Path(__file__).with_name("kill_child.py")
CYCLES = 48
MOST_CYCLES = 120
"""Cycles go on, up to so many, until each phase was hit."""
COMPACTION = ("execute", "publish", "manifest", "unlink")
BUSY = ("in flight", "draw", "drawn", "evict", "checkpoint", *COMPACTION)
"""Where to kill a trainer that has appends in flight all the time."""
ALONE = ("append", "open", "restore", "draw", "drawn", "checkpoint", *COMPACTION)
"""Where to kill one that waits for each append."""


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
                raise Violation(f"scan has {row}; drawn {place.get(uid)}, evicted {self.evicted.get(uid)}, {self}")

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


def _split(words: list[str]) -> list[str]:
    return words[0].split(",") if words else []


# -- what plain readers see

_COLUMNS = [
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


# -- killing


@dataclass
class Kill:
    """What a trainer was doing when it died."""

    phases: tuple[str, ...]
    in_flight: int
    acknowledged: int
    """Groups, by this trainer."""


class KillLoop:
    """Starts trainers on one bank and kills them."""

    def __init__(self, directory: Path, seed: int, *, fault: str | None = None, longest_wait_s: float = 0.0007) -> None:
        self.bank = directory / "bank"
        self.model = Model()
        self.kills: list[Kill] = []
        self._random = random.Random(seed)
        self._longest_wait_s = longest_wait_s
        self._reports, write_end = os.pipe()
        command = [sys.executable, str(CHILD), str(write_end), *([fault] if fault else [])]
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[write_end], text=True)
        os.close(write_end)
        self._unread = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.kill()
        self._server.communicate()
        os.close(self._reports)

    def cycle(self, target: str | None, *, in_flight: bool, seconds: float = 1.5) -> Kill:
        """Start a trainer, kill it soon after it entered the phase ``target``, and check what was left.

        It is killed after so many ``seconds`` anyway.
        """
        job = Job(
            path=str(self.bank),
            seed=self._random.getrandbits(32),
            cycle=len(self.kills) + 1,
            restore=self._random.choice(self.model.checkpoints()),
            in_flight=in_flight,
            longest_wait_s=self._longest_wait_s,
        )
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(asdict(job)) + "\n")
        self._server.stdin.flush()
        kill = self._run(target, seconds)
        self.kills.append(kill)
        self.check_left_over()
        return kill

    def _run(self, target: str | None, seconds: float) -> Kill:
        """Follow a trainer's report to its end."""
        trainer = _Followed(self.model)
        nth = 1 if target in ("open", "restore") else self._random.randint(1, 3)
        enough = time.monotonic() + seconds
        for line in self._lines(until=lambda: enough if trainer.pid and not trainer.killed else None):
            if line is not None:
                trainer.take(line)
            if trainer.gone:
                break
            due = time.monotonic() > enough or (target is not None and trainer.entered[target] >= nth)
            if due and trainer.pid and not trainer.killed:
                time.sleep(self._random.choice([0, 0.0005, 0.002]) * self._random.random())
                trainer.kill()
        return Kill(tuple(trainer.phases), trainer.in_flight, trainer.acknowledged)

    def _lines(self, until: Callable[[], float | None]) -> Iterator[str | None]:
        """Yield lines of the report; None each time that ``until`` has come without one."""
        while True:
            *lines, self._unread = self._unread.split(b"\n")
            yield from (line.decode() for line in lines)
            deadline = until()
            wait = 60.0 if deadline is None else max(deadline - time.monotonic(), 0)
            if not select.select([self._reports], [], [], wait)[0]:
                if deadline is None:
                    raise AssertionError("no word from the trainers for a minute")
                yield None
                continue
            data = os.read(self._reports, 1 << 16)
            if not data:
                raise AssertionError("the server ended")
            self._unread += data

    def check_left_over(self) -> None:
        """Check a bank that nobody has open. A kill before it was made leaves none."""
        if not (self.bank / "MANIFEST.json").exists():
            if self.model.serials:
                raise Violation("the manifest is gone")
            return
        check_archive_once(self.bank)
        view = arrowbank.scan(self.bank)
        self.model.check_rows(view.to_polars().select(_COLUMNS).collect())


class _Followed:
    """One trainer, as far as its report was read."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.pid = 0
        self.killed = self.gone = False
        self.entered: Counter[str] = Counter()
        self.phases: list[str] = []
        """Entered and not left."""
        self.in_flight = 0
        self.acknowledged = 0
        self.found: Found | None = None

    def kill(self) -> None:
        self.killed = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def take(self, line: str) -> None:
        kind, *words = line.split(" ")
        match kind:
            case "B":
                self.pid = int(words[0])
            case "X":
                if words != [str(int(signal.SIGKILL))]:
                    raise AssertionError(f"the trainer ended by itself: wait status {words}")
                self.gone = True
            case "!":
                raise Violation("the trainer failed: " + line.encode().decode("unicode_escape"))
            case ">":
                self.entered[" ".join(words)] += 1
                self.phases.append(" ".join(words))
            case "<":
                self.phases.remove(" ".join(words))
            case "F":
                self.in_flight = int(words[0])
                self.entered["in flight"] += 1
            case "R" | "P" | "G" | "Q" | "r":
                self._take_restored(kind, words)
            case _:
                self.acknowledged += kind == "A"
                self.in_flight -= kind == "A" and self.in_flight > 0
                self.model.take(kind, words)

    def _take_restored(self, kind: str, words: list[str]) -> None:
        if kind == "R":
            self.found = Found(int(words[0]))
        found = self.found
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
            self.model.check_restored(found)
            self.found = None


def a_seed() -> int:
    return int(os.environ.get("ARROWBANK_KILL_SEED") or secrets.randbits(32))


@contextlib.contextmanager
def telling_the_seed(seed: int) -> Iterator[None]:
    """Say how to run it again when something fails."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"ARROWBANK_KILL_SEED={seed} has the same jobs and delays; when they hit is up to the machine")
        raise


# -- the tests


def test_nothing_acknowledged_is_lost_or_changed_by_kills(tmp_path: Path) -> None:
    seed = a_seed()
    began = time.monotonic()
    with telling_the_seed(seed), KillLoop(tmp_path, seed) as loop:
        hits: Counter[str] = Counter()
        while len(loop.kills) < CYCLES or not hits.keys() >= {*BUSY, *ALONE}:
            assert len(loop.kills) < MOST_CYCLES, f"never hit: {sorted({*BUSY, *ALONE} - hits.keys())}"
            pair, is_busy = divmod(len(loop.kills), 2)
            targets = BUSY if is_busy else ALONE
            if len(loop.kills) >= CYCLES:
                targets = tuple(phase for phase in targets if phase not in hits) or targets
            kill = loop.cycle(targets[pair % len(targets)], in_flight=bool(is_busy))
            hits.update({*kill.phases, *(["in flight"] if kill.in_flight else [])})
        groups = check_contents(loop.bank)
        finish(loop)
        seconds = time.monotonic() - began
        print(f"seed {seed}: {len(loop.kills)} kills, {loop.model.acknowledged} groups, {dict(hits)}, {seconds:.1f} s")
        assert groups >= loop.model.acknowledged > 500
        assert len(loop.model.draws) > 60
        assert loop.model.checkpoint > 40
        assert hits["in flight"] >= CYCLES // 3
        assert sum(hits[phase] for phase in COMPACTION) >= CYCLES // 6
        for kills in (loop.kills[::2], loop.kills[1::2]):  # trainers that append alone, and busy ones
            assert sum(kill.acknowledged > 0 for kill in kills) >= len(kills) // 3


def finish(loop: KillLoop) -> None:
    """Resume a last time, here, archive what can be, and check the whole once more."""
    with RolloutBank.open(loop.bank) as bank:
        restored = bank.restore(loop.model.checkpoint)
        assert restored.report.lost_records == 0
        bank.close(final=True)
    loop.check_left_over()
    assert check_archive_once(loop.bank) > 500
