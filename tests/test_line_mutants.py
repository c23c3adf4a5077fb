"""Each rule of ``line`` and ``history`` (under durable/) is held by a test: without it, the tests of lines turn red.

Every mutant drops or bends one rule in the source, and runs the tests of lines against it in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import arrowbank.durable.line

DURABLE = Path(arrowbank.durable.line.__file__).parent
TESTS = Path(__file__).parent

MUTANTS = {
    "a draw is settled one step too early": (
        "if draw.end <= iteration:\n                    _put(line.made",
        "if draw.end <= iteration + 1:\n                    _put(line.made",
    ),
    "requeue keeps the plan": ("elif keep_plan:", "elif True:"),
    "requeue forgets the part of a draw that the checkpoint holds": (
        "elif draw.iteration < iteration:\n",
        "elif False:\n",
    ),
    "checkpoints beyond the restored one are inherited": (
        "parent.checkpoints.upto(iteration)",
        "parent.checkpoints.upto(iteration + 9)",
    ),
    "discard evicts nothing": ('if entry.mode == "discard":', "if False:"),
    "discard evicts the groups of skipped draws, too": (
        "for draw in plan if draw.iteration >= at for uid",
        "for draw in parent.draws() for uid",
    ),
    "discard gives evicted groups another reason": (
        "self.evicted.setdefault(uid, reason)",
        "self.evicted[uid] = reason",
    ),
    "skipped draws stay planned when a later iteration is drawn": (
        "self._void_skipped(before=at)",
        "pass",
    ),
    "a checkpoint leaves the draws before it planned": ("self._void_skipped(before=iteration)", "pass"),
    "a cut draw is void when it is skipped": ("if self.resumed <= at < before", "if at < before"),
    "a prefix of the planned draws voids the rest": (
        "self._drop(planned[: planned.index(first) + 1])",
        "self._drop(planned)",
    ),
    "another draw leaves the planned ones of its iteration": (
        "            else:\n                self._drop(planned)\n",
        "",
    ),
    "a drawn group stays in its planned draw": ("            self._leave_planned(drawn.uids)\n", ""),
    "drawing a cut draw again makes a second draw": (
        "return draw if self._there(draw, evicted) == drawn.uids else None",
        "return None",
    ),
    "a cut draw may be taken apart": ("                self._refuse_cut(uid, at, evicted)\n", ""),
    "lost groups must be drawn again": (" and uid not in self.lost", ""),
    "evicted groups of the plan must be drawn again": (
        "uid not in evicted and uid not in self.lost",
        "uid not in self.lost",
    ),
    "a draw below the restored checkpoint is taken": ("if at < floor:", "if False:"),
    "a draw below the last drawn iteration is taken": ("if at < self.last_drawn:", "if False:"),
    "an evicted group is drawn": ("gone = [uid for uid in drawn.uids if uid in evicted]", "gone = []"),
    "a group is drawn twice by a session": ("if draw is not None and self.owns(draw):", "if False:"),
    "a settled group is drawn": ("if draw is not None and draw.end <= held:", "if False:"),
    "repeating a draw is an error": ("if self._was_made(drawn) or (", "if ("),
    "a checkpoint beyond what was begun is taken": ("if iteration > latest:", "if False:"),
    "a late checkpoint is news": ("return iteration > self.last_checkpoint", "return True"),
    "a checkpoint keeps other lines": ("self.lines = {session: kept}", "pass"),
    "a checkpoint of a line that was let go of is taken on another": (
        "if iteration in self.gone:",
        "if False:",
    ),
    "the oldest recorder wins": ("recorder = max(recorders)", "recorder = min(recorders)"),
    "an unrecorded checkpoint is taken on the newest line, reached or not": (
        "return (reaching or newest)[0]",
        "return newest[0]  # mutated",
    ),
    "what a session skipped before it saved is settled": (
        "skipped = [] if guessed else parent.skipped(before=iteration)",
        "skipped = []",
    ),
    "of a checkpoint that nobody got to, planned draws are void": (
        "return iteration not in line.checkpoints and line.reach < iteration",
        "return False",
    ),
    "a session is known by its parent only, not by who got how far": (
        "line.makers = [*(part for part in parent.makers if part[0] <= iteration), *line.makers]",
        "pass",
    ),
    "a named session means its very line": (
        "if line is not None and iteration <= line.resumed:",
        "if line is not None:",
    ),
    "a draw behind an emptied one keeps its number": ("if draw.index != index:", "if False:"),
    "draws of archived groups stay": ("if not all(uid in archived for uid in draw.uids)", "if True"),
    "draws that left the archive are not told": (
        "line.revive(draw for draw in draws if",
        "line.revive(draw for draw in () if",
    ),
}

_RUN = """
import importlib.util, sys, pathlib, pytest
old, new, durable, *tests = sys.argv[1:]
import arrowbank.durable.checkpoints, arrowbank.durable.journal
for name in ("line", "history"):
    source = pathlib.Path(durable, f"{name}.py")
    spec = importlib.util.spec_from_loader(f"arrowbank.durable.{name}", loader=None)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    exec(compile(source.read_text().replace(old, new), source, "exec"), module.__dict__)
sys.exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests]))
"""


def run_with(old: str, new: str) -> subprocess.CompletedProcess[str]:
    """Run the tests of lines with one piece of the sources replaced."""
    tests = [str(TESTS / name) for name in ("test_line.py", "test_line_draws.py", "test_snapshot.py")]
    command = [sys.executable, "-c", _RUN, old, new, str(DURABLE), *tests]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=TESTS, env=os.environ | {"PYTHONPATH": str(TESTS)}
    )


def test_the_tests_are_green_without_a_mutant() -> None:
    done = run_with("nothing of the sources", "")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_the_tests_of_lines_catch(name: str) -> None:
    old, new = MUTANTS[name]
    sources = [(DURABLE / f"{module}.py").read_text() for module in ("line", "history")]
    assert sum(text.count(old) for text in sources) == 1, f"{name}: the source has changed; mutate it where the rule is"
    done = run_with(old, new)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, f"{name}: survived\n{done.stdout}{done.stderr}"
