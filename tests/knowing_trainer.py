"""A trainer that knows what its weights were trained on, with a real bank, and the ways in which it dies.

``KnowingTrainer`` calls the bank, tells ``plain_model`` what was acknowledged, and checks what the bank says. After a
death inside a call it keeps every model of what may have happened, until the bank's answers leave one.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pyarrow.parquet as pq
from hypothesis import note
from machine import in_memory
from plain_model import Fate, Group, Mode, PlainModel, Trained, Weights

from arrowbank import HistoryGoneError, RolloutBank, scan
from arrowbank.types import RolloutGroup, TokenRollout

__all__ = ["KillSwitch", "KnowingTrainer", "drop"]

COLUMNS = [
    "group_uid", "member_index", "outcome", "consumed_iteration", "consumed_draw", "consumed_position", "span",
    "evict_reason",
]  # fmt: skip


class Death(BaseException):
    """The process ends here."""


class KillSwitch:
    """Lets some writing calls to the system pass, of any or one name; then each raises, in any thread, as if dead."""

    CALLS: ClassVar = (
        "fdatasync", "fsync", "link", "mkdir", "pwrite", "pwritev", "remove", "rename", "replace", "rmdir", "symlink",
        "unlink", "write",
    )  # fmt: skip

    def __init__(self, after: int, only: str = "") -> None:
        self.fired = False
        self._left, self._only = after, only
        self._lock = threading.Lock()
        self._calls = {name: getattr(os, name) for name in self.CALLS}

    def __enter__(self) -> KillSwitch:
        for name, call in self._calls.items():
            setattr(os, name, self._guarded(name, call))
        return self

    def __str__(self) -> str:
        return f"dying after {self._left} calls of {self._only or 'anything'}"

    def __exit__(self, *_: object) -> None:
        for name, call in self._calls.items():
            setattr(os, name, call)

    def _guarded(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **options: Any) -> Any:
            with self._lock:
                self._left -= self._only in ("", name)
                self.fired = self.fired or self._left < 0
            if self.fired:
                raise Death(name)
            return call(*args, **options)

        return guarded


def drop(bank: RolloutBank) -> None:
    """Let go of a handle as a dead process does, when its compactor has ended; nothing is written."""
    compactor, journal, appender = bank._compactor, bank._journal, bank._appender
    if compactor._running is not None:
        compactor._running.exception()
    if compactor._executor is not None:
        compactor._executor.shutdown()
    streams = [stream for _, stream in appender._streams.values()]
    for stream in (*streams, journal._stream):
        if stream is not None and stream._descriptor >= 0:
            os.close(stream._descriptor)
            stream._descriptor = -1
    bank._claim.forget()
    bank._closed = True


class KnowingTrainer:
    """A trainer, its model checkpoints, and its bank."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="histories-", dir=in_memory()))
        self.path = self.root / "bank"
        self.worlds = [PlainModel()]
        """What may have happened: after a death inside a call it was made, or was not."""
        self.numbers = itertools.count()
        self.names: dict[str, str] = {}
        self.parquet: dict[str, list[tuple[Any, ...]]] = {}
        """Rows by file name: names never recur."""
        self.saved: dict[int, Weights] = {0: Weights()}
        self.calls = 0
        """Of the bank, since it was restored."""
        self.death: KillSwitch | None = None
        """What ends the next call of the bank."""
        self.bank: RolloutBank
        self.open(2)

    # -- the bank's handle

    @property
    def model(self) -> PlainModel:
        return self.worlds[0]

    def open(self, keep: int) -> None:
        note(f"open(keep_checkpoints={keep})")
        self.bank = RolloutBank.open(self.path, takeover="force", keep_checkpoints=keep)
        self.restored = False
        self.may_train = not any(world.groups for world in self.worlds)
        self.must_restore = all(world.groups for world in self.worlds)
        self.step, self.history, self.finalizers = 0, list[Trained](), list[int]()

    def call(self, text: str, call: Callable[[], Any], *changes: Callable[[PlainModel], object]) -> bool:
        """Call the bank. When it dies inside, any of the changes may have been made, or none; else the last one was.

        Return whether the call returned to a living process.
        """
        note(text if self.death is None else f"{text}, {self.death}")
        self.calls += 1
        if self.death is None:
            call()
            self._change(changes[-1])
            return True
        with self.death as switch:
            returned = False
            try:
                call()
                returned = True
            except BaseException:
                if not switch.fired:
                    raise
            if switch.fired:
                drop(self.bank)
        self.death = None
        if returned:
            self._change(changes[-1])
        else:
            copies = [(change, world.copy()) for change in changes for world in self.worlds]
            for change, world in copies:
                change(world)
            self.worlds += [world for _, world in copies]
        if switch.fired:
            note("… died" if returned else "… died inside")
            self.open(2)
        return not switch.fired

    def _change(self, change: Callable[[PlainModel], object]) -> None:
        for world in self.worlds:
            change(world)

    def agreed(self, question: Callable[[PlainModel], Any]) -> Any:
        """What all worlds answer; None when they differ."""
        first, *others = [question(world) for world in self.worlds]
        return first if all(other == first for other in others) else None

    def ready(self) -> bool:
        return self.restored or self.may_train

    def has_worked(self) -> bool:
        """Whether there is something new to lose; now and then, also when there is not."""
        return not self.restored or self.calls > 2 or self.calls == len(self.names) % 4

    def short(self, uids: Iterable[str]) -> str:
        return "[" + ",".join(self.names.get(uid, uid) for uid in uids) + "]"

    def end(self, how: str) -> None:
        """Let go of the handle: "kill", "close", or "final"."""
        note(how)
        drop(self.bank) if how == "kill" else self.bank.close(final=how == "final")
        if how == "final" and self.restored:
            self.check_archive(complete=True)

    def clear(self) -> None:
        drop(self.bank)
        shutil.rmtree(self.root, ignore_errors=True)

    # -- what it does

    def append(self, count: int, rng: random.Random, *, split: str, evicted: str | None, many: bool) -> bool:
        """Append groups one by one, or with one sync; return whether it lives."""
        source = rng.choice([None, rng.randrange(1000)])
        made = [self._group(rng, split, source) for _ in range(count)]
        return all(self._append(part, evicted) for part in ([made] if many else [[one] for one in made]))

    def _append(self, made: list[tuple[RolloutGroup, Group]], evicted: str | None) -> bool:
        groups, told = zip(*made, strict=True)
        options = {"split": told[0].split, "evicted": evicted, "source_index": told[0].source}

        def add(world: PlainModel, count: int) -> None:
            for group, one in made[:count]:
                world.append(replace(one, uid=str(group.uid)), evicted)

        def call() -> None:
            if len(groups) == 1:
                self.bank.append(groups[0], **options)
            else:
                self.bank.append_many(groups, **options)

        lives = self.call(
            f"append({[one.number for one in told]}, split={told[0].split!r}, evicted={evicted!r})",
            call,
            *(lambda world, count=count: add(world, count) for count in range(1, len(made) + 1)),
        )
        self.names |= {str(group.uid): f"g{one.number}" for group, one in made}
        return lives

    def _group(self, rng: random.Random, split: str, source: int | None) -> tuple[RolloutGroup, Group]:
        number, env, members = next(self.numbers), rng.choice("ab"), rng.randint(1, 2)
        rollouts = [TokenRollout(trajectory=turns, env_id=env, reward=0.5) for turns in _tokens(number, members)]
        return RolloutGroup(rollouts=rollouts), Group("", number, env, split, members, source)

    def begin(self, at: int) -> bool:
        session, begin = self.bank.session, self.bank.begin_iteration
        return self.call(f"begin_iteration({at})", lambda: begin(at), lambda one: one.begin(session, at))

    def drawable(self) -> list[str]:
        planned = [uid for draw in self.model.plan(self.bank.session) for uid in draw.uids]
        return planned + [uid for queue in self.model.pending(self.bank.session).values() for uid in queue]

    def floor(self) -> int:
        """The first iteration that the trainer may draw at."""
        session = self.bank.session
        return max(self.step, self.model.last_drawn(session), self.model.last_checkpoint(session))

    def mark(self, at: int, uids: tuple[str, ...], span: int, state: bytes | None) -> bool:
        """Draw, if this is a draw to be made; return whether it was."""
        session, evicted = self.bank.session, self.model.evicted
        is_new = True
        for draw in self.model.line(session):
            live = tuple(uid for uid in draw.uids if uid not in evicted)
            if draw.how == "planned" and live == uids and draw.iteration <= at:
                state = draw.state  # repeated, or gone on with: the trainer's state is the one it was given
                span = draw.span if draw.iteration == at else span
                is_new = draw.iteration >= self.model.resumed_at(session)
        if at < self.step or self.agreed(lambda world: world.judge_draw(session, at, uids, span)) != "new":
            return False
        lives = self.call(
            f"mark_consumed({self.short(uids)}, {at}, span={span}, state={state!r})",
            lambda: self.bank.mark_consumed(uids, at, span=span, state=state),
            lambda world: world.draw(session, at, uids, span, state),
        )
        if lives and is_new:
            self.history.append(Trained(at, span, uids))
        return lives

    def save(self) -> None:
        """Save the model: what it was trained on, and by which session."""
        note(f"save_model({self.step}) in session {self.bank.session}")
        made = tuple(one for one in self.history if one.iteration < self.step)
        if self.step:
            self.saved[self.step] = Weights(self.step, self.bank.session, made)
            self.finalizers.append(self.step)

    def tell(self, at: int, *, wait: bool) -> None:
        """Record a model checkpoint."""
        session = self.bank.session
        if at > self.model.latest_checkpoint(session) and not self.begin(at - 1):
            return  # killed there
        lives = self.call(
            f"checkpoint({at}, wait={wait})",
            lambda: self.bank.checkpoint(at, wait=wait),
            lambda world: world.checkpoint(session, at),
        )
        if wait and lives:
            self.check_archive()

    def resume(self, weights: Weights, mode: Mode, named: int | None) -> None:
        """Load a model checkpoint, and restore what it stands for. ``named``, unless another line would be taken."""
        if not all(self._fits(world, weights, named) for world in self.worlds):
            named = weights.session
            for world in self.worlds:
                assert self._fits(world, weights, named), "the session that made the weights has another history"
        at, before = weights.iteration, self.bank.session
        found: list[Any] = []

        def call() -> None:
            options: dict[str, Any] = {} if named is None else {"session": named}
            try:
                found.append(self.bank.restore(at, mode=mode, **options))
            except HistoryGoneError:
                found.append(None)

        def change(world: PlainModel) -> None:
            """Take in a restore whose session is the newest that was claimed."""
            newest = max(map(int, os.listdir(self.path / "sessions")))
            if found[-1:] != [None] and newest not in world.kept() and world.keeps(at, named):
                world.restore(newest, at, mode, named)

        if not self.call(f"restore({at}, mode={mode!r}, session={named})", call, change):
            return
        if found == [None]:
            assert self.bank.session == before
            self.worlds = [world for world in self.worlds if not world.keeps(at, named)]
            assert self.worlds, "HistoryGoneError, although a line with this history is kept"
            return
        self.worlds = [world for world in self.worlds if world.keeps(at, named)]
        assert self.worlds, "restored, although no line is kept for it"
        note(f"… as session {self.bank.session}")
        if self.bank.session == before:  # begun anew: what it is said to have saved before, no bank has ever heard of
            self.saved = {one: held for one, held in self.saved.items() if one in (0, at) or held.session != before}
        self.restored, self.calls = True, 0
        self.step, self.finalizers = at, []
        self.check_restored(found[0], weights)
        self.check_archive()
        self.check_scan()

    @staticmethod
    def _fits(world: PlainModel, weights: Weights, named: int | None) -> bool:
        """Whether the line that a restore takes holds what these weights were trained on, or is gone."""
        if not world.keeps(weights.iteration, named):
            return True
        trial, session = world.copy(), 10**6
        trial.restore(session, weights.iteration, "replay", named)
        evicted = trial.evicted.keys()
        held = trial.settled(session, weights.iteration)
        cut = {(draw.iteration, draw.uids) for draw in trial.plan(session) if draw.offset and draw.uids}
        known = {(one.iteration, tuple(uid for uid in one.uids if uid not in evicted)) for one in weights.cut}
        known = {one for one in known if not held.issuperset(one[1])}  # others: cut short by a restore
        short = {uid for one in weights.cut for uid in one.uids}
        return cut == known and weights.held - held <= evicted and held - weights.held <= evicted | short

    # -- what must be true

    def check_restored(self, restored: Any, weights: Weights) -> None:
        """I4, by the model; then I3, by what the weights were trained on."""
        session = self.bank.session
        assert self.bank.iteration == restored.iteration == weights.iteration
        seen = self._seen(restored)
        expected = [self._expected(world, session) for world in self.worlds]
        matching = [world for world, one in zip(self.worlds, expected, strict=True) if one == seen]
        assert matching, f"\nhanded back {seen}\nexpected    {' or '.join(map(str, expected))}"
        self.worlds = matching

        groups = [group for draw in restored.draws for group in draw.groups]
        queued = list(itertools.chain.from_iterable(restored.pending.values()))
        back = [str(group.uid) for group in (*groups, *queued)]
        assert len(back) == len(set(back))
        evicted = self.model.evicted
        train = {uid for uid, group in self.model.groups.items() if group.split == "train"}
        settled = self.model.settled(session, weights.iteration)
        cut = [one for one in weights.cut if not settled.issuperset(one.uids)]  # others: cut short by a restore
        short = [one for one in weights.cut if one not in cut]
        self.history = [
            replace(one, span=weights.iteration - one.iteration) if one in short else one for one in weights.history
        ]
        held = weights.held.union(*(one.uids for one in short))
        assert not held & set(back), "trained on, and handed back"
        assert train - held - evicted.keys() == set(back) - held, "not trained on, and lost"
        for one in cut:
            uids = tuple(uid for uid in one.uids if uid not in evicted)
            planned = [(draw.iteration, tuple(group.uid for group in draw.groups)) for draw in restored.draws]
            assert not uids or (one.iteration, uids) in planned, "half trained on, and lost"
        for group in (*groups[:1], *groups[-1:], *queued[:1], *queued[-1:]):
            told = self.model.groups[str(group.uid)]
            tokens = [[turn.tolist() for turn in one.trajectory] for one in group.rollouts]
            assert tokens == _tokens(told.number, told.members), "another group's content"

    def _seen(self, restored: Any) -> tuple[Any, ...]:
        draws = [
            (one.iteration, one.index, one.span, one.offset, self._uids(one.groups), one.state, self.short(one.lost))
            for one in restored.draws
        ]
        pending = {env: self._uids(queue) for env, queue in restored.pending.items() if queue}
        return draws, pending, sorted(restored.source_indices)

    def _uids(self, groups: Iterable[RolloutGroup]) -> str:
        return self.short(str(group.uid) for group in groups)

    def _expected(self, world: PlainModel, session: int) -> tuple[Any, ...]:
        plan, pending, groups = world.plan(session), world.pending(session), world.groups
        draws = [
            (one.iteration, one.index, one.span, one.offset, self.short(one.uids), one.state, self.short(one.lost))
            for one in plan
        ]
        back = itertools.chain(*(one.uids for one in plan), *pending.values())
        sources = {source for uid in back if (source := groups[uid].source) is not None}
        return draws, {env: self.short(queue) for env, queue in pending.items()}, sorted(sources)

    def _archived(self, files: Iterable[Path]) -> Iterator[tuple[Any, ...]]:
        for file in files:
            if file.name not in self.parquet:
                columns = pq.read_table(file, columns=COLUMNS).to_pydict().values()
                self.parquet[file.name] = list(zip(*columns, strict=True))
            yield from self.parquet[file.name]

    def check_archive(self, *, complete: bool = False) -> None:
        """Each archived rollout is there once, with the fate that the line gives it."""
        rows = list(self._archived((self.path / "archive").glob("*.parquet")))
        places = [row[:2] for row in rows]
        assert len(places) == len(set(places)), "a rollout is twice in the archive"
        problems = [self._wrong_in(world, rows, complete) for world in self.worlds]
        assert None in problems, problems

    def _wrong_in(self, world: PlainModel, rows: list[tuple[Any, ...]], complete: bool) -> str | None:
        session = self.bank.session
        by, groups = world.last_checkpoint(session), world.groups
        archived = {row[0] for row in rows}
        if not archived <= groups.keys() or len(rows) != sum(groups[uid].members for uid in archived):
            return "a group is not whole, or was never appended"
        for uid, _, *told in rows:
            fate = world.fate(session, uid, by)
            never_drawn = groups[uid].split != "train" and fate == Fate()
            if Fate(*told) != fate or (fate == Fate() and not never_drawn):
                return f"the archive says of {self.names[uid]} {Fate(*told)}, the model {fate}"
        left = world.over(session) - archived if complete else set()
        return f"not archived: {self.short(left)}" if left else None

    def check_scan(self) -> None:
        """A scan shows every rollout once, and no outcome for what is planned or pending."""
        view = scan(self.path)
        live = zip(*(view.live[name].to_pylist() for name in COLUMNS), strict=True)
        archived = list(self._archived(view.files))
        assert sorted(map(str, archived)) == sorted(map(str, self._archived((self.path / "archive").glob("*.parquet"))))
        shown = [*archived, *live]
        rows = {row[:2]: row[2] for row in shown}
        assert len(rows) == len(shown), "a rollout is twice in a scan"
        session = self.bank.session

        def expected(world: PlainModel) -> dict[tuple[str, int], str | None]:
            by = world.last_checkpoint(session)
            return {
                (uid, at): world.fate(session, uid, by).outcome
                for uid, group in world.groups.items() for at in range(group.members)
            }  # fmt: skip

        matching = [world for world in self.worlds if expected(world) == rows]
        assert matching, f"scan shows {rows}, expected {expected(self.model)}; {self.names}"
        self.worlds = matching


def _tokens(number: int, members: int) -> list[list[list[int]]]:
    """Turns of tokens for each member, which no other group has."""
    return [[[number, member, 7 * number + 3]] for member in range(members)]
