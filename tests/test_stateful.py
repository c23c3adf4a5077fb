"""Whole histories of a run on a real bank, against ``plain_model`` and a trainer that knows what it trained on.

Proved, for every history tried: I3 and I4 of each restore, that the archive and ``scan`` show each rollout once with
the right fate, that refused calls change nothing, and all of this after a death between any two calls or inside one
(at any call to the system that writes). Not proved: power loss (nothing here forgets what was not synced), damage,
several writers, two threads of a trainer at once, groups of every kind, remote archives, retention.

``python tests/test_stateful.py --histories 20000 --seed 1`` tries more of them.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import random
import sys
import time
import traceback
from collections.abc import Callable
from typing import TypeVar, cast

import hypothesis
import pytest
from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from knowing_trainer import KillSwitch, KnowingTrainer, drop
from plain_model import Mode

from arrowbank import InvalidDrawError, RolloutBank

STEPS = 30
Seeds = st.integers(0, 9999)
"""Of whatever a rule chooses among what is there."""


Steps = TypeVar("Steps", bound=Callable[..., None])


def when(holds: Callable[[KnowingTrainer], object]) -> Callable[[Steps], Steps]:
    """Leave a step out unless something holds. Not hypothesis' own ``precondition``, which must not depend on how far
    another thread had got when a process died."""

    def decorate(step: Steps) -> Steps:
        @functools.wraps(step)
        def guarded(self: KnowingTrainer, *args: object, **options: object) -> None:
            if holds(self):
                step(self, *args, **options)

        return cast(Steps, guarded)

    return decorate


class Histories(KnowingTrainer, RuleBasedStateMachine):
    """What may happen to a trainer and its bank."""

    # -- collecting

    @rule(seed=Seeds)
    def append_groups(self, seed: int) -> None:
        rng = random.Random(seed)
        split = rng.choice(["train"] * 5 + ["eval"])
        evicted = rng.choice([None] * 5 + ["rejected"])
        self.append(rng.randint(1, 3), rng, split=split, evicted=evicted, many=rng.random() < 0.4)

    @rule(skip=st.sampled_from([0, 0, 1, 2]))
    @when(KnowingTrainer.ready)
    def begin_iteration(self, skip: int) -> None:
        self.begin(max(self.bank.iteration, self.step) + skip)

    # -- training

    @rule(count=st.sampled_from([1, 1, 2, 3]), seed=Seeds)
    @when(KnowingTrainer.ready)
    def replay(self, count: int, seed: int) -> None:
        """Draw what comes next in the plan, exactly."""
        rng = random.Random(seed)
        for _ in range(count):
            floor = self.floor()
            plan = [draw for draw in self.model.plan(self.bank.session) if draw.uids]
            draw = next((one for one in plan if one.offset or one.iteration >= floor), None)
            if draw is None:
                return
            at = max(draw.iteration, floor) + (draw.offset > 0 and rng.random() < 0.3)
            left = draw.span - draw.offset if rng.random() < 0.5 else draw.span
            if not self.mark(at, draw.uids, left if draw.offset else draw.span, draw.state):
                return

    @rule(seed=Seeds)
    @when(KnowingTrainer.ready)
    def draw(self, seed: int) -> None:
        """Draw whatever may be drawn, in any order."""
        rng = random.Random(seed)
        pool = self.drawable()
        uids = tuple(rng.sample(pool, min(len(pool), rng.randint(1, 3))))
        at = self.floor() + rng.choice([0, 0, 0, 0, 1, 1, 2])
        self.mark(at, uids, rng.choice([1, 1, 1, 2, 3]), rng.choice([None, b"%d" % seed, b""]))

    @rule(seed=Seeds)
    @when(KnowingTrainer.ready)
    def draw_again(self, seed: int) -> None:
        """Repeating a draw exactly is no draw, as long as no checkpoint settles it."""
        session = self.bank.session
        resumed, last = self.model.resumed_at(session), self.model.last_checkpoint(session)
        own = [draw for draw in self.model.line(session) if draw.how == "own" and draw.end > last]
        if own:
            draw = random.Random(seed).choice(own)
            at = draw.iteration if draw.iteration >= resumed else resumed + seed % (draw.end - resumed)
            if self.agreed(lambda world: world.judge_draw(session, at, draw.uids, draw.span)) == "same":
                note(f"again: mark_consumed({self.short(draw.uids)}, {at}, span={draw.span})")
                self.bank.mark_consumed(draw.uids, at, span=draw.span, state=draw.state)

    @rule(skip=st.sampled_from([0, 0, 0, 0, 1]), begin=st.booleans())
    @when(KnowingTrainer.ready)
    def train(self, skip: int, begin: bool) -> None:
        """Run a step, and maybe leave one out."""
        if begin and self.step >= self.bank.iteration:
            self.begin(self.step)
        self.step += 1 + skip

    @rule()
    @when(KnowingTrainer.ready)
    def save_model(self) -> None:
        self.save()

    @rule(which=st.sampled_from([0, 0, 0, 1, 2]), wait=st.booleans())
    @when(lambda trainer: trainer.ready() and trainer.finalizers)
    def checkpoint(self, which: int, wait: bool) -> None:
        """Tell of a model checkpoint; late, or out of order, or again."""
        self.tell(self.finalizers[-1 - which % len(self.finalizers)], wait=wait)

    @rule(seed=Seeds, tell=st.sampled_from([True, True, False]))
    @when(KnowingTrainer.ready)
    def iterate(self, seed: int, tell: bool) -> None:
        """One iteration as trainers run it."""
        rng = random.Random(seed)
        if self.step >= self.bank.iteration:
            self.begin(self.step)
        self.append(2, rng, split="train", evicted=None, many=True)
        planned = [draw for draw in self.model.plan(self.bank.session) if draw.iteration == self.step]
        if self.floor() == self.step:
            for uids in [draw.uids for draw in planned if draw.uids] or [tuple(self.drawable()[-3:])]:
                self.mark(self.step, uids, rng.choice([1, 1, 2]), b"%d" % seed)
        self.step += 1
        self.save()
        if tell:
            self.tell(self.step, wait=rng.random() < 0.5)

    @rule(seed=Seeds)
    @when(KnowingTrainer.ready)
    def evict(self, seed: int) -> None:
        rng = random.Random(seed)
        session, pool, reason = self.bank.session, self.drawable(), f"reason {seed}"
        uids = tuple(rng.sample(pool, min(len(pool), rng.randint(1, 2))))
        if uids and self.agreed(lambda world: world.judge_evict(session, uids)) == "new":
            self.call(
                f"evict({self.short(uids)})",
                lambda: self.bank.evict(uids, reason),
                lambda world: world.evict(uids, reason),
            )

    # -- refusals

    def _all_refused(self, judged: Callable[[], object]) -> bool:
        """Whether a call must be refused, whatever has happened; all are, before restore on a bank with groups."""
        if self.ready():
            return judged() == "refused"
        return all(world.groups for world in self.worlds)

    @rule(seed=Seeds)
    def refused_draw(self, seed: int) -> None:
        """What no trainer could have drawn raises, and changes nothing."""
        rng = random.Random(seed)
        session = self.bank.session
        pool = [*self.model.groups, "unknown"]
        at, span = self.step + rng.randint(-3, 1), rng.choice([1, 1, 1, 0])
        uids = tuple(rng.sample(pool, min(len(pool), rng.randint(0, 3))))
        uids += uids[:1] if rng.random() < 0.1 else ()
        if self._all_refused(lambda: self.agreed(lambda world: world.judge_draw(session, at, uids, span))):
            note(f"refused: mark_consumed({self.short(uids)}, {at}, span={span})")
            with pytest.raises(InvalidDrawError):
                self.bank.mark_consumed(uids, at, span=span)

    @rule(seed=Seeds)
    def refused_otherwise(self, seed: int) -> None:
        rng = random.Random(seed)
        session = self.bank.session
        pool = [*self.model.groups, "unknown"]
        uids = tuple(rng.sample(pool, min(len(pool), rng.randint(1, 2))))
        if self._all_refused(lambda: self.agreed(lambda world: world.judge_evict(session, uids))):
            note(f"refused: evict({self.short(uids)})")
            with pytest.raises(InvalidDrawError):
                self.bank.evict(uids, "never")
        too_high = 1 + rng.randint(0, 2) + max(world.latest_checkpoint(session) for world in self.worlds)
        note(f"refused: checkpoint({too_high})")
        with pytest.raises(InvalidDrawError):
            self.bank.checkpoint(too_high)
        if self.bank.iteration:
            note(f"refused: begin_iteration({self.bank.iteration - 1})")
            with pytest.raises(InvalidDrawError):
                self.bank.begin_iteration(self.bank.iteration - 1)

    # -- the end of a process, and resume

    @rule(seed=Seeds)
    def restore(self, seed: int) -> None:
        """Go on from a model checkpoint, the latest or an older one."""
        rng = random.Random(seed)
        ages = sorted(self.saved, reverse=True)
        weights = self.saved[ages[min(rng.choice([0, 0, 0, 1, 1, 2, 3, 99]), len(ages) - 1)]]
        modes: list[Mode] = ["replay", "replay", "replay", "requeue", "discard"]
        later = [one for one in self.model.kept() if self.model.resumed_at(one) >= weights.iteration]
        named = rng.choice([None, None, weights.session, weights.session, *later])
        self.resume(weights, rng.choice(modes), named)

    @rule(how=st.sampled_from(["kill", "kill", "close", "final"]), keep=st.sampled_from([1, 2]), seed=Seeds)
    def restart(self, how: str, keep: int, seed: int) -> None:
        self.end(how)
        self.open(keep)
        if seed % 8:
            self.restore(seed)

    @rule(
        what=st.sampled_from(["checkpoint", "restore", "final"] * 2 + ["open", "draw", "append", "evict"]),
        after=st.integers(0, 40),
        seed=Seeds,
    )
    @when(lambda trainer: len(trainer.worlds) < 4)
    def die_inside(self, what: str, after: int, seed: int) -> None:
        """Die inside a call, and resume."""
        calls: dict[str, Callable[[], object]] = {
            "restore": lambda: self.restore(seed),
            "append": lambda: self.append_groups(seed),
            "final": lambda: self.call("close(final)", lambda: self.bank.close(final=True), lambda _: None),
        }
        if self.ready():
            calls |= {"draw": lambda: self.draw(seed), "evict": lambda: self.evict(seed)}
            if self.finalizers:
                calls["checkpoint"] = lambda: self.tell(self.finalizers[-1], wait=True)
        bank = self.bank
        if what == "open":
            self._die_in_open(after)
        elif what in calls:
            self.dies_after = after
            calls[what]()
            self.dies_after = None
        if bank is self.bank and what == "final":
            self.open(1)
        if not self.restored and seed % 8:
            self.restore(seed)

    def _die_in_open(self, after: int) -> None:
        drop(self.bank)
        note(f"open(), dying after {after} calls to the system")
        with KillSwitch(after) as switch:
            try:
                drop(RolloutBank.open(self.path, takeover="force"))
            except BaseException:
                if not switch.fired:
                    raise
        self.open(1)

    def teardown(self) -> None:
        """A history that went well ends with its run: close, look, and resume once more."""
        try:
            if sys.exception() is None:
                note("the end")
                self.end("final")
                self.open(1)
                self.restore(0)
        finally:
            self.clear()


def run(histories: int, seed: int | None = None) -> None:
    """Try histories. Raises the first failure, with the shortest history that shows it."""
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    given = settings(
        max_examples=histories, stateful_step_count=STEPS, deadline=None, database=None, print_blob=True,
        report_multiple_bugs=False,
        suppress_health_check=checks,
    )  # fmt: skip
    machine = type("Histories", (Histories,), {})
    if seed is not None:
        machine = hypothesis.seed(seed)(machine)
    run_state_machine_as_test(machine, settings=given)


def merge_often(set_value: Callable[[object, str, int], None]) -> None:
    """Make the archive's files be merged from two on."""
    with contextlib.suppress(ImportError):
        set_value(importlib.import_module("arrowbank.archive.merging"), "FAN_IN", 2)


def test_every_history_hands_back_what_the_weights_were_not_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    merge_often(monkeypatch.setattr)
    run(300)


def main() -> int:
    parser = argparse.ArgumentParser(description="Try histories until one goes wrong.")
    parser.add_argument("--histories", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    given = parser.parse_args()
    merge_often(setattr)
    print(f"seed {given.seed}", flush=True)
    started = time.monotonic()
    for done in range(0, given.histories, 1000):
        size = min(1000, given.histories - done)
        try:
            run(size, seed=given.seed + done)
        except BaseException as failure:
            traceback.print_exception(failure)
            print(f"seed {given.seed + done}: wrong within histories {done} to {done + size}")
            return 1
        rate = (done + size) / (time.monotonic() - started)
        print(f"{done + size} histories, {rate:.1f} a second", flush=True)
    print(f"{given.histories} histories, 0 wrong")
    return 0


if __name__ == "__main__":
    sys.exit(main())
