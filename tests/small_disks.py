"""A run of single calls, each of which a disk may fail, and whose every acknowledged fact is kept in a plain model.

``Trainer`` runs ``SCENARIO``, a list of single calls of the bank, and tells what each acknowledged; ``Model`` takes
that in, and ``find_problem`` holds a bank against it. A call that raised has acknowledged nothing, and may be made
again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disk_model import Model, make_group

from arrowbank import BankClosedError, Restored, RolloutBank, RolloutGroup

__all__ = [
    "BRIEF", "CLOSE", "SCENARIO", "SHORT", "WAYS", "Model", "Step", "Trainer", "call", "find_problem", "insist", "run",
]  # fmt: skip


class Trainer:
    """Makes the calls of a run, one at a time, and tells what was acknowledged. Every call may be made again."""

    def __init__(self, path: Path, tell: Callable[[list[Any]], object]) -> None:
        self.path = path
        self.uids: dict[int, str] = {}
        """Seed → group, of those acknowledged."""
        self.archiving_failed: str | None = None
        """What background compaction met in a checkpoint that was recorded, until a later one has archived."""
        self._tell = tell
        self._bank: RolloutBank | None = None
        self._made: dict[int, RolloutGroup] = {}
        """Groups that are not acknowledged: a retry is made with the same object."""
        self._restored: Restored | None = None
        self._iteration = 0
        self._checkpoint = 0
        """The last that was acknowledged, and not rolled back since."""
        self._dropped: set[int] = set()

    @property
    def bank(self) -> RolloutBank:
        assert self._bank is not None
        return self._bank

    @property
    def restored(self) -> Restored:
        assert self._restored is not None
        return self._restored

    def open(self) -> None:
        self._bank = RolloutBank.open(self.path, keep_checkpoints=1)
        self.archiving_failed = None
        for group in self._made.values():
            group.uid = None  # another handle knows of no append that raised

    def restore(self, iteration: int) -> None:
        try:
            self._restored = self.bank.restore(iteration)
        except BankClosedError:  # a restore that could not begin its session closes the handle
            self.open()
            self._restored = self.bank.restore(iteration)
        self.archiving_failed = None
        self._checkpoint = iteration
        self._tell(["rolled back", iteration])

    def begin(self, iteration: int) -> None:
        self._iteration = iteration
        self.bank.begin_iteration(iteration)

    def append(self, *seeds: int, many: bool = False, evicted: str | None = None, split: str = "train") -> None:
        groups = self._groups(seeds)
        if many:
            uids = self.bank.append_many(groups, split=split, evicted=evicted)
        else:
            uids = [self.bank.append(group, split=split, evicted=evicted) for group in groups]
        for seed, uid in zip(seeds, uids, strict=True):
            self._acknowledged(seed, uid, split, evicted)

    def append_async(self, *seeds: int) -> None:
        async def run(seeds: list[int]) -> list[Any]:
            calls = [self.bank.append_async(group) for group in self._groups(seeds)]
            return await asyncio.gather(*calls, return_exceptions=True)

        left = [seed for seed in seeds if seed not in self.uids]
        outcomes = asyncio.run(run(left))
        for seed, outcome in zip(left, outcomes, strict=True):
            if isinstance(outcome, str):
                self._acknowledged(seed, outcome, "train", None)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    def draw(self, iteration: int, *seeds: int) -> None:
        uids = [self.uids[seed] for seed in seeds if seed not in self._dropped]
        state = f"at {iteration}"
        self.bank.mark_consumed(uids, iteration, state=state.encode())
        self._tell(["draw", iteration, uids, state])

    def replay(self) -> None:
        """Draw all again that the restored checkpoint does not hold."""
        for draw in self.restored.draws:
            self.bank.mark_consumed([str(group.uid) for group in draw.groups], draw.iteration, state=draw.state)

    def evict(self, seed: int) -> None:
        if seed not in self._dropped:
            self.bank.evict([self.uids[seed]], f"why {seed}")
            self._tell(["evicted", self.uids[seed], f"why {seed}"])

    def checkpoint(self, iteration: int) -> None:
        """Record a checkpoint and wait for the archive. Raises what archiving met, too."""
        try:
            self.bank.checkpoint(iteration, wait=True)
        except OSError as error:
            if self.bank.stats().compaction_error == str(error) and self.archiving_failed is None:
                self._recorded(iteration)  # the next one archives
                self.archiving_failed = str(error)
            raise
        self._recorded(iteration)
        self.archiving_failed = None
        assert self.bank.stats().compaction_error is None

    def close(self, *, final: bool = False) -> None:
        self.bank.close(final=final)

    def drop(self, *, may_come_back: bool = False) -> None:
        """Do without the groups whose append raised."""
        for seed, group in self._made.items():
            if group.uid is not None:
                self._dropped.add(seed)
                self._tell(["refused", group.uid, seed, may_come_back])
        self._made.clear()

    def forget_failed(self) -> None:
        """Before another handle is opened: what this one could not append may come back, since it may not have said so;
        it is generated anew."""
        for seed, group in self._made.items():
            if group.uid is not None:
                self._tell(["refused", group.uid, seed, True])
                group.uid = None

    def resume(self) -> None:
        """On another handle, take up the work where the last one left it."""
        self.open()
        self.restore(self._checkpoint)
        self.replay()
        self.begin(max(self._iteration, self._checkpoint))

    def _groups(self, seeds: Any) -> list[RolloutGroup]:
        return [self._made.setdefault(seed, make_group(seed)) for seed in seeds]

    def _acknowledged(self, seed: int, uid: str, split: str, evicted: str | None) -> None:
        assert self._made.pop(seed).uid == uid
        self.uids[seed] = uid
        self._tell(["group", uid, seed, split, evicted])

    def _recorded(self, checkpoint: int) -> None:
        self._checkpoint = max(self._checkpoint, checkpoint)
        self._tell(["checkpoint", checkpoint])


@dataclass(frozen=True)
class Step:
    """One call of a run."""

    name: str
    work: Callable[[Trainer], None]

    @property
    def is_append(self) -> bool:
        return self.name.startswith("append")


def _step(method: str, *values: Any, **options: Any) -> Step:
    def work(trainer: Trainer) -> None:
        getattr(trainer, method)(*values, **options)

    said = ", ".join([*map(str, values), *(f"{name}={value}" for name, value in options.items())])
    return Step(f"{method}({said})", work)


def _iteration(at: int) -> list[Step]:
    first = 100 * (at + 1)
    return [
        _step("begin", at),
        _step("append", first),
        _step("append", first + 1, first + 2, first + 3, many=True),
        _step("append_async", first + 4, first + 5, first + 6),
        _step("draw", at, first, first + 1, first + 4),
        _step("evict", first + 2),
    ]


CLOSE = Step("close", Trainer.close)
WAYS = ("retry", "drop", "close", "leave")
"""What the trainer does about a call that raised: call again; do without the group; close and open again; call again,
and end without closing."""
SCENARIO: list[Step] = [
    _step("open"),
    _step("restore", 0),
    *_iteration(0),
    *_iteration(1),
    _step("checkpoint", 1),
    _step("append", 50, evicted="spoilt"),
    _step("append", 51, split="eval"),
    *_iteration(2),
    _step("checkpoint", 2),
    *_iteration(3),
    _step("checkpoint", 4),
    _step("restore", 2),  # below the archive's horizon
    _step("replay"),
    *_iteration(4),
    _step("checkpoint", 4),
    _step("close"),
    _step("open"),
    _step("restore", 4),
    _step("replay"),
    *_iteration(5),
    _step("checkpoint", 5),
    _step("checkpoint", 6),
    _step("close"),
]
SHORT = SCENARIO[:33]
"""Open, restore, four iterations, three compactions with merges, a restore below the horizon and its replay."""
BRIEF = [
    *SCENARIO[:8],
    _step("begin", 1),
    _step("checkpoint", 1),
    _step("append", 50, evicted="spoilt"),
    *_iteration(1)[1:],
    _step("begin", 2),
    _step("checkpoint", 2),
    _step("restore", 1),
    _step("replay"),
]
"""The same with two iterations."""


def call(trainer: Trainer, step: Step, *, expected: Callable[[OSError], bool]) -> OSError | None:
    """Make one call; return what it raised. An error that is not expected, and not what archiving met, is a fault."""
    try:
        step.work(trainer)
    except OSError as error:
        if expected(error):
            return error
        is_old = trainer.archiving_failed == str(error) and step.name.startswith(("checkpoint", "close"))
        assert is_old, f"{step.name} raised {error!r} without cause"
    return None


def insist(
    trainer: Trainer,
    steps: Iterable[Step],
    way: str,
    *,
    expected: Callable[[OSError], bool],
    tell: Callable[[list[Any]], object],
    lift: Callable[[], object] = lambda: None,
) -> None:
    """Make calls, some of which may fail; each again, or else as ``way`` says, one of WAYS.

    lift: ends a cause that would not end by itself, once a call was in vain for the second time.
    """
    for step in steps:
        for attempt in range(4):  # each thread may meet an error
            error = call(trainer, step, expected=expected)
            if error is None:
                break
            tell(["raised", step.name, error.errno])
            if attempt or way == "drop":
                lift()
            if way == "drop" and step.is_append:
                trainer.drop()
                break
            if step.name.startswith("checkpoint") and trainer.archiving_failed is not None:
                break  # recorded; the next one archives
            if way == "close" and attempt == 0 and step.name != "open()":
                trainer.forget_failed()
                if call(trainer, CLOSE, expected=expected):
                    tell(["raised", "close", 0])
                lift()
                trainer.resume()
        else:
            raise AssertionError(f"{step.name} raised again and again")
    if way != "leave" and call(trainer, CLOSE, expected=expected):
        tell(["raised", "close", 0])


def run(trainer: Trainer, steps: Iterable[Step]) -> None:
    """Make calls of which none may fail."""
    for step in steps:
        assert call(trainer, step, expected=lambda _: False) is None


def find_problem(path: Path, model: Model) -> None:
    """Open the bank anew and hold all that it gives back, at several checkpoints, against the model."""
    model.check_archive(path)
    model.check_scan(path)
    with RolloutBank.open(path, keep_checkpoints=1) as bank:
        for iteration in dict.fromkeys([model.checkpoint, min(model.checkpoint, 1)]):
            model.check_restored(bank.restore(iteration))
            model.check_archive(path)
    model.check_scan(path)
