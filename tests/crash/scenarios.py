"""Short runs of a real bank, and what they tell of it: each call before it is made, and what it acknowledged.

A fact is a JSON list, written to the file ``facts`` beside the bank in one write:

    ["open", session]                         the bank is open
    ["try", number, kind, what]               a call is made: kind is append, draw, evict, checkpoint, restore
    ["did", number, uids or null]             it returned: acknowledged
    ["raised", number]                        it raised: not acknowledged
    ["sync failed", descriptor]               a sync of that file was made to fail

Groups are those of ``kill_child``: their content follows from a serial number, and so does whether they are evicted
or held out at append.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kill_child import EVAL, fate_of, make_group
from knowing_trainer import drop

from arrowbank import BankWriter, RolloutBank
from arrowbank.appending import Appends
from arrowbank.restored import Restored
from arrowbank.types import RolloutGroup

__all__ = ["SCENARIOS", "Player", "options_of"]


def options_of(serial: int) -> dict[str, Any]:
    """What is said of a group at append."""
    fate = fate_of(serial)
    is_drawn = fate in ("train", EVAL)
    return {"split": EVAL if fate == EVAL else "train", "evicted": None if is_drawn else fate}


class Player:
    """Makes the calls of a run, and tells."""

    def __init__(self, root: Path, *, sound: bool = True) -> None:
        """sound: nothing is planted in the bank that would have a call return which must raise."""
        self.path = root / "bank"
        self.sound = sound
        self._facts = os.open(root / "facts", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._calls = 0
        self.uids: dict[int, str] = {}
        self.bank: RolloutBank
        self.restored: Restored

    def tell(self, *event: Any) -> None:
        os.write(self._facts, json.dumps(event).encode() + b"\n")

    @contextmanager
    def telling(self, kind: str, **what: Any) -> Iterator[list[str]]:
        """Tell of a call; the block adds the uids that it returned."""
        self._calls += 1
        number = self._calls
        self.tell("try", number, kind, what)
        uids: list[str] = []
        try:
            yield uids
        except BaseException:
            self.tell("raised", number)
            raise
        self.tell("did", number, uids)

    # -- the bank's calls

    def open(self, *, keep: int = 1) -> None:
        self.bank = RolloutBank.open(self.path, keep_checkpoints=keep)
        self.tell("open", self.bank.session)

    def die(self) -> None:
        """Let go of the handle as a dead process does."""
        drop(self.bank)

    def restore(self, iteration: int, mode: Any = "replay", session: int | None = None) -> None:
        next_session = self.bank.session + self.bank._ledger.is_used
        what = {"session": next_session, "iteration": iteration, "mode": mode, "named": session}
        with self.telling("restore", **what):
            self.restored = self.bank.restore(iteration, mode=mode, session=session)
            assert self.bank.session == next_session

    def append(self, *serials: int, to: Appends | None = None) -> None:
        for serial in serials:
            with self.telling("append", serials=[serial], **options_of(serial)) as uids:
                uids.append((to or self.bank).append(make_group(serial), **options_of(serial)))
            self.uids[serial] = uids[0]

    def append_many(self, *serials: int, to: Appends | None = None) -> None:
        with self.telling("append", serials=serials, split="train", evicted=None) as uids:
            uids += (to or self.bank).append_many([make_group(serial) for serial in serials])
        self.uids |= dict(zip(serials, uids, strict=True))

    def append_together(self, *serials: int) -> None:
        """With ``append_async``: several in flight, one sync."""

        async def one(serial: int) -> None:
            with self.telling("append", serials=[serial], **options_of(serial)) as uids:
                uids.append(await self.bank.append_async(make_group(serial), **options_of(serial)))
            self.uids[serial] = uids[0]

        async def every() -> None:
            await asyncio.gather(*map(one, serials))

        asyncio.run(every())

    def draw(self, iteration: int, *serials: int, span: int = 1) -> None:
        uids, state = [self.uids[serial] for serial in serials], f"state of {iteration}"
        with self.telling("draw", session=self.bank.session, iteration=iteration, uids=uids, span=span, state=state):
            self.bank.mark_consumed(uids, iteration, span=span, state=state.encode())

    def replay(self, count: int | None = None) -> None:
        """Draw again what the restore planned."""
        for draw in self.restored.draws[:count]:
            uids = [str(group.uid) for group in draw.groups]
            state = (draw.state or b"").decode()
            what = {"session": self.bank.session, "iteration": draw.iteration, "uids": uids, "span": draw.span}
            with self.telling("draw", **what, state=state):
                self.bank.mark_consumed(uids, draw.iteration, span=draw.span, state=draw.state)

    def evict(self, *serials: int) -> None:
        uids = [self.uids[serial] for serial in serials]
        with self.telling("evict", uids=uids, reason="planted"):
            self.bank.evict(uids, "planted")

    def checkpoint(self, iteration: int) -> None:
        with self.telling("checkpoint", session=self.bank.session, iteration=iteration):
            self.bank.checkpoint(iteration, wait=True)

    def close(self, *, final: bool = False) -> None:
        self.bank.close(final=final)

    def iteration(self, at: int, *, checkpoint: bool = True) -> None:
        """A whole iteration: two groups drawn, one left; then a checkpoint, by which its segment is finished."""
        first = 100 * at + 100
        self.bank.begin_iteration(at)
        self.append(first)
        self.append_many(first + 1, first + 3)
        self.draw(at, first, first + 3)
        self.bank.begin_iteration(at + 1)
        if checkpoint:
            self.checkpoint(at + 1)

    def refused(self, call: Callable[[], object]) -> bool:
        """Make a call that must raise OSError; return whether it did."""
        try:
            call()
        except OSError:
            return True
        assert not self.sound, "a call was made to fail, and did not raise"
        return False

    @contextmanager
    def failing(self, name: str, *, count: int = 1, skip: int = 0) -> Iterator[None]:
        """Have calls of one kind to the system fail with EIO, the first ``skip`` excepted."""
        call, left = getattr(os, name), [skip, count]

        def fails(*args: Any, **options: Any) -> Any:
            if left[0]:
                left[0] -= 1
            elif left[1]:
                left[1] -= 1
                if name in ("fsync", "fdatasync"):
                    self.tell("sync failed", args[0])
                raise OSError(errno.EIO, "planted")
            return call(*args, **options)

        setattr(os, name, fails)
        try:
            yield
        finally:
            setattr(os, name, call)


# -- the runs


def appends(run: Player) -> None:
    """Single groups, several with one sync, several in flight; the next iteration's segment; a draw, an eviction."""
    run.open()
    run.restore(0)
    run.append(1, 2)
    run.append_many(10, 14, 15)
    run.append_together(21, 22, 23)
    run.bank.begin_iteration(1)
    run.append(30, 5, 7)
    run.draw(1, 2, 21)
    run.evict(1)
    run.append(31)
    run.close()


def checkpoints(run: Player) -> None:
    """Checkpoints that archive, and merge what they archived; the end of a run."""
    run.open()
    run.restore(0)
    for at in range(4):
        run.iteration(at)
    run.evict(101)
    run.close(final=True)


def two_kept(run: Player) -> None:
    """Draws of several iterations, with a span, archived one checkpoint late."""
    run.open(keep=2)
    run.restore(0)
    run.append_many(1, 2, 3, 4, 6)
    run.draw(0, 1, 2)
    run.draw(0, 3, span=2)
    run.bank.begin_iteration(1)
    run.checkpoint(1)
    run.draw(1, 4)
    run.bank.begin_iteration(2)
    run.checkpoint(2)
    run.append(8)
    run.draw(2, 6)
    run.bank.begin_iteration(3)
    run.checkpoint(3)
    run.close()


def going_back(run: Player) -> None:
    """Restores of older checkpoints, some below what is archived, on the same handle."""
    run.open()
    run.restore(0)
    for at in range(3):
        run.iteration(at)
    run.restore(1)
    run.replay(1)
    run.append(50)
    run.restore(0, "requeue")
    run.draw(0, 101)
    run.bank.begin_iteration(1)
    run.checkpoint(1)
    run.close()


def discarding(run: Player) -> None:
    """A run that rolls back and discards, then goes on."""
    run.open()
    run.restore(0)
    run.iteration(0)
    run.iteration(1, checkpoint=False)
    run.restore(1, "discard")
    run.iteration(2)
    run.close(final=True)


def failed_appends(run: Player) -> None:
    """Writes and syncs that fail: what raised is given up or made again."""
    run.open()
    run.restore(0)
    run.append(1)
    for name in ("fdatasync", "pwritev"):
        with run.failing(name):
            run.refused(lambda: run.append_many(10, 14))
        run.append(2 if name == "fdatasync" else 3)
    with run.failing("fsync"):  # of the next segment, whose creation fails
        run.bank.begin_iteration(1)
        run.refused(lambda: run.append(20))
    run.append(21)
    group = make_group(22)
    with run.failing("fdatasync"):
        raised = run.refused(lambda: _append_group(run, 22, group))
    if raised:
        _append_group(run, 22, group)  # once more
    with run.failing("fdatasync"):
        run.refused(lambda: run.draw(1, 1, 22))
    run.draw(1, 1, 22)
    with run.failing("pwritev", skip=1):
        run.refused(lambda: run.evict(2))
    run.append(23)
    run.bank.begin_iteration(2)
    run.checkpoint(2)
    run.close()


def _append_group(run: Player, serial: int, group: RolloutGroup) -> None:
    with run.telling("append", serials=[serial], **options_of(serial)) as uids:
        uids.append(run.bank.append(group))
    run.uids[serial] = uids[0]


def takeovers(run: Player) -> None:
    """Sessions that die, and others that take over what they left."""
    run.open()
    run.restore(0)
    run.append(1, 2, 3)
    run.draw(0, 1)
    run.die()
    run.open()
    run.restore(0)
    run.replay()
    run.append(4)
    run.bank.begin_iteration(1)
    run.checkpoint(1)
    run.append_many(6, 8)
    run.draw(1, 2, 6)
    run.die()
    run.open()
    run.restore(1)
    run.replay()
    run.append(9)
    run.bank.begin_iteration(2)
    run.checkpoint(2)
    run.die()
    run.open()
    run.close()


def writers(run: Player) -> None:
    """Writers beside the coordinator, with segments of their own."""
    run.open()
    run.restore(0)
    token = run.bank.writer_token()
    one, two = BankWriter.open(token, "one"), BankWriter.open(token, "two")
    run.append(1)
    run.append(2, 3, to=one)
    run.append_many(4, 6, to=two)
    run.draw(0, 1, 2, 4)
    one.begin_iteration(1)
    run.bank.begin_iteration(1)
    with run.failing("fdatasync"):
        run.refused(lambda: run.append(8, to=two))
    run.append(9, to=two)
    run.append(10, to=one)
    two.close()
    run.checkpoint(1)
    one.close()
    run.append(11)
    run.close()


SCENARIOS: dict[str, Callable[[Player], None]] = {
    run.__name__: run
    for run in (
        appends, checkpoints, going_back, failed_appends, takeovers, writers, two_kept, discarding
    )
}  # fmt: skip
