"""The README's trainers, as a newcomer copies them: killed again and again, they end as if nothing had been."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest

from arrowbank import scan

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
STEPS, GROUPS = 30, 4

pytestmark = pytest.mark.slow


def copy_to(directory: Path) -> Path:
    """Save both programs under the names that the README gives them."""
    (trainer,) = [block for block in BLOCKS if "def generate(prompt)" in block]
    (split,) = [block for block in BLOCKS if "def act(" in block]
    directory.mkdir()
    (directory / "trainer.py").write_text(trainer)
    (directory / "split.py").write_text(split)
    return directory


class Script:
    """One process of a program, and what it says."""

    running: ClassVar[list[subprocess.Popen[str]]] = []

    def __init__(self, directory: Path, name: str) -> None:
        with (directory / "errors.txt").open("a") as errors:
            self.process = subprocess.Popen(
                [sys.executable, name],
                cwd=directory,
                env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.running.append(self.process)
        self.said: list[str] = []

    def until(self, steps: int) -> bool:
        """Whether it lived to say so many steps."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line)
            steps -= "step " in line
            if steps <= 0:
                return True
        return False

    def end(self) -> int:
        self.said += self.process.communicate(timeout=60)[0].splitlines(keepends=True)
        return self.process.returncode

    def generated(self) -> dict[int, int]:
        """Step → how many of its groups were generated; the others came out of the bank."""
        steps = [line for line in self.said if "step " in line]
        return {int(line.rpartition("step ")[2]): line.count("generated") for line in steps}

    def actor(self) -> int:
        """The process that it has started; only one of its children has the bank's program."""
        pids = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        (actor,) = [pid for pid in pids if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        return int(actor)


def stopped_by(script: Script, number: signal.Signals) -> None:
    """Send a signal at some moment of a step; what is left must be the signal's death, or a whole run."""
    script.process.send_signal(number)
    assert script.end() in (-number, 0)


def outcome(directory: Path) -> dict[str, Any]:
    """The weights, and each group that was trained on: its tokens, and when."""
    rows = scan(directory / "run" / "bank").to_arrow().to_pylist()
    assert {row["outcome"] for row in rows} == {"consumed"}
    assert len({row["group_uid"] for row in rows}) == STEPS * GROUPS == len({row["problem_id"] for row in rows})
    names = ("problem_id", "member_index", "tokens", "reward", "consumed_iteration", "consumed_position")
    model = json.loads((directory / "run" / "model.json").read_text())
    assert model["step"] == STEPS
    trained = sorted(([row[name] for name in names] for row in rows), key=repr)
    return {"weights": model["weights"], "trained": trained}


@pytest.fixture(autouse=True, scope="module")
def _ended() -> Iterator[None]:
    """Leave no process of a test that failed."""
    yield
    for process in Script.running:
        with process:
            process.kill()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], dict[str, Any]]:
    """What a run leaves that nobody stops; it goes on beside the others."""
    directory = copy_to(tmp_path_factory.mktemp("twin") / "here")
    script = Script(directory, "trainer.py")

    @cache
    def found() -> dict[str, Any]:
        assert script.end() == 0
        assert set(script.generated().values()) == {GROUPS}
        return outcome(directory)

    return found


@pytest.mark.parametrize("programs", [["trainer.py"], ["split.py"], ["split.py", "trainer.py"]], ids=" then ".join)
def test_a_program_goes_on_where_it_was(
    tmp_path: Path, undisturbed: Callable[[], dict[str, Any]], programs: list[str]
) -> None:
    directory = copy_to(tmp_path / "here")
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    dice = random.Random(seed)
    runs: list[Script] = []
    for number in range(6):
        script = Script(directory, programs[number % len(programs)])
        runs.append(script)
        if script.until(dice.randint(0, 12)):
            time.sleep(dice.uniform(0, 0.25))
            stopped_by(script, (signal.SIGKILL, signal.SIGINT)[number // len(programs) % 2])
        else:
            assert script.end() == 0, (directory / "errors.txt").read_text()[-4000:]
    while runs[-1].process.returncode:  # a step a run at worst
        runs.append(Script(directory, programs[0]))
        assert runs[-1].end() == 0, (directory / "errors.txt").read_text()[-4000:]
    assert outcome(directory) == undisturbed()
    for before, after in itertools.pairwise(runs):
        again = before.generated().keys() & after.generated().keys()
        assert not any(after.generated()[step] for step in again)
    assert sum("".join(run.said).count("generated") for run in runs) <= STEPS * GROUPS
    last = Script(directory, programs[0])  # there is nothing left to do
    assert last.end() == 0
    assert not last.generated()


def test_either_of_two_processes_may_be_killed(tmp_path: Path, undisturbed: Callable[[], dict[str, Any]]) -> None:
    directory = copy_to(tmp_path / "here")
    for kill_actor in (True, False, True):
        script = Script(directory, "split.py")
        assert script.until(3)
        actor = script.actor()
        if kill_actor:
            os.kill(actor, signal.SIGKILL)
            assert script.end() == 1  # EOFError: it cannot go on alone
        else:
            stopped_by(script, signal.SIGKILL)
            deadline = time.monotonic() + 60
            while Path(f"/proc/{actor}").exists():  # the actor ends by itself
                assert time.monotonic() < deadline
                time.sleep(0.02)
    assert Script(directory, "split.py").end() == 0
    assert outcome(directory) == undisturbed()
