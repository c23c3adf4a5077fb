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
import logging
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

STEPS = 20
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

    @rule(steps=st.sampled_from([1, 1, 1, 2, 0]), ahead=st.sampled_from([None, 0, 0, 1]), saves=st.booleans())
    @when(KnowingTrainer.ready)
    def train(self, steps: int, ahead: int | None, saves: bool) -> None:
        """Begin an iteration, or not; run its step, leave one out, or do nothing; save the model, or not."""
        if ahead is not None:
            self.begin(max(self.step, self.bank.iteration) + ahead)
        self.step += steps
        if saves:
            self.save()

    @rule(which=st.sampled_from([0, 0, 0, 1, 2]), wait=st.booleans())
    @when(lambda trainer: trainer.ready() and trainer.finalizers)
    def checkpoint(self, which: int, wait: bool) -> None:
        """Tell of a model checkpoint; late, or out of order, or again."""
        self.tell(self.finalizers[-1 - which % len(self.finalizers)], wait=wait)

    @rule(seed=Seeds, iterations=st.sampled_from([1, 1, 2, 3]), tells=st.booleans())
    @when(KnowingTrainer.ready)
    def iterate(self, seed: int, iterations: int, tells: bool) -> None:
        """Iterations as trainers run them: one draw or two, of the plan while it lasts, then of what there is."""
        rng = random.Random(seed)
        session = self.bank.session
        for _ in range(iterations):
            if self.step >= self.bank.iteration:
                self.begin(self.step)
            self.append(rng.randint(1, 3), rng, split="train", evicted=None, many=True)
            for _ in range(rng.choice([1, 1, 2])):
                planned = [one.uids for one in self.model.plan(session) if one.iteration == self.step and one.uids]
                if self.floor() == self.step:
                    uids = planned[0] if planned else tuple(self.drawable()[-rng.randint(1, 3) :])
                    self.mark(self.step, uids, rng.choice([1, 1, 2, 3]), b"%d" % seed)
            self.step += 1
            if rng.random() < 0.7:
                self.save()
                if tells:
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

    # -- calls that change nothing

    @rule(seed=Seeds, what=st.sampled_from(["repeated draw", "draw", "other"]))
    def change_nothing(self, seed: int, what: str) -> None:
        """Repeat a draw; or try what no trainer could have done, which raises."""
        if what == "draw":
            self._refused_draw(seed)
        elif what == "other":
            self._refused_otherwise(seed)
        elif self.ready():
            self._draw_again(seed)

    def _draw_again(self, seed: int) -> None:
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

    def _all_refused(self, judged: Callable[[], object]) -> bool:
        """Whether a call must be refused, whatever has happened; all are, before restore on a bank with groups."""
        if self.ready():
            return judged() == "refused"
        return self.must_restore

    def _refused_draw(self, seed: int) -> None:
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

    def _refused_otherwise(self, seed: int) -> None:
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

    @rule(how=st.sampled_from(["", "kill", "close", "final"]), keep=st.sampled_from([1, 2]), seed=Seeds)
    @when(KnowingTrainer.has_worked)
    def go_on(self, how: str, keep: int, seed: int) -> None:
        """Resume, mostly in a new process."""
        if how:
            self.end(how)
            self.open(keep)
        if not how or seed % 8:
            self._restore(seed)

    def _restore(self, seed: int) -> None:
        """Restore the latest model checkpoint or an older one."""
        rng = random.Random(seed)
        ages = sorted(self.saved, reverse=True)
        weights = self.saved[ages[min(rng.choice([0, 0, 1, 1, 2, 3, 99]), len(ages) - 1)]]
        modes: list[Mode] = ["replay", "replay", "replay", "replay", "requeue", "discard"]
        later = [one for one in self.model.kept() if self.model.resumed_at(one) >= weights.iteration]
        named = rng.choice([None, None, weights.session, weights.session, *later])
        self.resume(weights, rng.choice(modes), named)

    @rule(
        what=st.sampled_from(["checkpoint", "restore", "final"] * 2 + ["open", "draw", "append", "evict"]),
        after=st.integers(0, 40),
        only=st.sampled_from(["", "rename", "unlink"]),
        seed=Seeds,
    )
    @when(lambda trainer: trainer.has_worked() and len(trainer.worlds) < 4)
    def die_inside(self, what: str, after: int, only: str, seed: int) -> None:
        """Die inside a call, and resume."""
        calls: dict[str, Callable[[], object]] = {
            "restore": lambda: self._restore(seed),
            "append": lambda: self.append_groups(seed),
            "final": lambda: self.call("close(final)", lambda: self.bank.close(final=True), lambda _: None),
        }
        if self.ready():
            calls |= {"draw": lambda: self.draw(seed), "evict": lambda: self.evict(seed)}
            if self.finalizers:
                calls["checkpoint"] = lambda: self.tell(self.finalizers[-1], wait=True)
        bank = self.bank
        if what == "open":
            self._die_in_open(KillSwitch(after % 12, only))
        elif what in calls:
            is_long = what in ("checkpoint", "restore", "final") and not only
            self.death = KillSwitch(after if is_long else after % 8, only)
            calls[what]()
            self.death = None
        if bank is self.bank and what == "final":
            self.open(1)
        if not self.restored and seed % 8:
            self._restore(seed)

    def _die_in_open(self, death: KillSwitch) -> None:
        drop(self.bank)
        note(f"open(), {death}")
        with death as switch:
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
                self._restore(0)
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
    logging.disable()  # skips, rollbacks and checkpoints that nobody reached are tried on purpose
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
