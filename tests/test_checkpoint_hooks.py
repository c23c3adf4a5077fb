"""When a model checkpoint is durable: at once, steps later, out of order, after the loop, or never told to the bank.

The recipes are the README's own lines.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import token_group
from runs import archived_rows, kill

from arrowbank import BankClosedError, FencedError, InvalidDrawError, RolloutBank

README = (Path(__file__).parent.parent / "README.md").read_text()
RECIPES = README.split("### Checkpoint hooks")[1].split("```python\n")[1].split("```")[0].split("\n\n")
AT_ONCE, IN_BACKGROUND, AFTER_THE_LOOP = (compile(recipe, "README.md", "exec") for recipe in RECIPES)


class Saver:
    """Saves in the background: a save is durable, and its finalizer runs, when the test says so."""

    def __init__(self) -> None:
        self.durable: list[int] = []
        self._running: dict[int, Callable[[], None]] = {}

    def save_model(self, step: int) -> None:
        self.durable.append(step)

    def save_in_background(self, step: int, finalizer: Callable[[], None]) -> None:
        self._running[step] = finalizer

    def finish(self, step: int) -> None:
        """In a thread of its own, as savers do; what the finalizer raises is raised here."""
        failed: list[Exception] = []

        def run() -> None:
            self.durable.append(step)
            try:
                self._running.pop(step)()
            except Exception as error:
                failed.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if failed:
            raise failed[0]

    def wait_for_saves(self) -> None:
        for step in list(self._running):
            self.finish(step)


class Run:
    """A trainer's loop of one group a step."""

    def __init__(self, path: Path, step: int = 0, session: int | None = None) -> None:
        self.saver = Saver()
        self.bank = kill(path)
        self.restored = self.bank.restore(step, session=session)
        self.uids: list[str] = []

    def train(self, steps: range, recipe: Any = None, *, every: int = 1) -> None:
        for k in steps:
            self.bank.begin_iteration(k)
            self.uids.append(self.bank.append(token_group(k)))
            self.bank.mark_consumed(self.uids[-1:], k)
            if recipe is not None and (k + 1) % every == 0:
                self.do(recipe, k)

    def do(self, recipe: Any, k: int = -1) -> None:
        saver = self.saver
        names = {"save_model": saver.save_model, "save_in_background": saver.save_in_background}
        names |= {"wait_for_saves": saver.wait_for_saves, "functools": functools, "bank": self.bank, "k": k}
        exec(recipe, names)


def found(path: Path, step: int, session: int | None = None) -> tuple[bool, list[int]]:
    """After a kill: whether the checkpoint counts, and the iterations that are replayed."""
    restored = Run(path, step, session).restored
    return restored.report.recorded, [draw.iteration for draw in restored.draws]


def test_a_save_that_is_durable_when_it_returns(path: Path) -> None:
    run = Run(path)
    run.train(range(5), AT_ONCE, every=2)
    assert run.saver.durable == [2, 4]
    assert found(path, 4) == (True, [4])


def test_a_finalizer_that_runs_steps_later_counts_for_what_was_saved(path: Path) -> None:
    run = Run(path)
    run.train(range(2), IN_BACKGROUND, every=2)
    run.train(range(2, 5))
    run.saver.finish(2)
    assert run.bank.iteration == 4
    late = run.bank.append(token_group(9))
    run.train(range(5, 6))
    again = Run(path, 2)
    assert again.restored.report.recorded
    assert [draw.iteration for draw in again.restored.draws] == [2, 3, 4, 5]
    (group,) = again.restored.take()
    assert (group.uid, again.restored.collected_iteration(group)) == (late, 4)


def test_finalizers_may_run_out_of_order(path: Path) -> None:
    run = Run(path)
    run.train(range(6), IN_BACKGROUND, every=2)
    for step in (4, 2, 6):
        before = run.bank.iteration, run.bank.stats()
        run.saver.finish(step)
        if step == 2:
            assert (run.bank.iteration, run.bank.stats().commits) == (before[0], before[1].commits)
            with pytest.raises(InvalidDrawError, match="checkpoint 4 was"):  # 4 still is the last one
                run.bank.mark_consumed([run.bank.append(token_group(7))], 3)
    assert run.bank.iteration == 5
    assert found(path, 6) == (True, [])


def test_one_that_comes_late_writes_nothing(path: Path) -> None:
    run = Run(path)
    run.train(range(4), IN_BACKGROUND, every=2)
    run.saver.finish(4)
    run.bank._compactor.wait()
    journals = {file.name: file.read_bytes() for file in (path / "journal").iterdir()}
    run.saver.finish(2)
    run.bank._compactor.wait()
    assert {file.name: file.read_bytes() for file in (path / "journal").iterdir()} == journals
    assert found(path, 4) == (True, [])


def test_one_that_comes_after_the_loop_counts_before_the_bank_is_closed(path: Path) -> None:
    run = Run(path)
    run.train(range(4), IN_BACKGROUND, every=2)
    run.do(AFTER_THE_LOOP)
    assert sorted(run.saver.durable) == [2, 4]
    assert {uid for uid, _ in archived_rows(path)} == set(run.uids)
    assert found(path, 4) == (True, [])


def test_a_save_that_is_killed_before_its_finalizer_is_restored_by_its_session(path: Path) -> None:
    run = Run(path)
    run.train(range(4), AT_ONCE, every=2)
    run.train(range(4, 6), IN_BACKGROUND, every=2)
    session = run.bank.session
    assert found(path, 6, session) == (False, [])
    # and the one before it still counts
    assert found(path, 4, session) == (True, [4, 5])


def test_one_that_comes_after_close_loses_nothing(path: Path) -> None:
    run = Run(path)
    run.train(range(4), IN_BACKGROUND, every=2)
    run.bank.close()
    with pytest.raises(BankClosedError):
        run.saver.finish(4)
    with RolloutBank.open(path) as again:
        restored = again.restore(4, session=run.bank.session)
        assert (restored.draws, restored.report.pending_groups) == ([], 0)


def test_one_of_a_trainer_that_was_overtaken_says_so(path: Path) -> None:
    run = Run(path)
    run.train(range(4), IN_BACKGROUND, every=2)
    successor = Run(path, 2, run.bank.session)
    with pytest.raises(FencedError):
        run.saver.finish(4)
    assert [draw.iteration for draw in successor.restored.draws] == [2, 3]
    assert found(path, 2, successor.bank.session) == (False, [2, 3])


def test_one_of_the_history_that_a_restore_has_left_is_refused(path: Path) -> None:
    """While the new history has not got there; later nobody could tell, so wait for saves before restoring anew."""
    run = Run(path)
    run.train(range(4), IN_BACKGROUND, every=2)
    run.bank.restore(2)
    with pytest.raises(InvalidDrawError, match="last iteration begun is 2"):
        run.saver.finish(4)
