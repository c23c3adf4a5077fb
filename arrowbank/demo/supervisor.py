"""The parent: runs the trainer, kills it, starts it again, and compares it with a twin that is left alone.

Both runs are child processes and work at the same time. Nothing here takes the trainer's word for what matters:
what was generated is read from the generator log, what was learned from the model checkpoints.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import arrowbank
from arrowbank.demo import checkpoints, progress
from arrowbank.demo.checkpoints import ModelState
from arrowbank.demo.generator_log import resume_of, tally
from arrowbank.demo.kills import Kill, KillSchedule, plan_kills, with_rollback
from arrowbank.demo.progress import Progress
from arrowbank.demo.settings import (
    BANK,
    GENERATOR_LOG,
    GROUPS,
    MODEL,
    TRAINER_ERRORS,
    TWIN,
    TrainerSettings,
    checkpoint_every,
)
from arrowbank.errors import ArrowbankError

__all__ = ["DemoResult", "DemoSettings", "Observer", "Rollback", "TrainerFailedError", "prepare", "run_demo"]

MOST_ERROR_LINES = 40


class TrainerFailedError(ArrowbankError):
    """A trainer ended by itself before its work was done; the message ends with what it wrote to stderr."""


@dataclass(frozen=True)
class DemoSettings:
    """What ``arrowbank demo`` is asked for."""

    directory: Path
    iterations: int = 60
    kills: int = 5
    seed: int = 0
    has_bank: bool = True
    """False is the control: the same kills, without a bank."""
    has_rollback: bool = False
    """Whether one start goes back to an older model checkpoint, below what the bank has archived."""


@dataclass(frozen=True)
class Rollback:
    """What one start from an older model checkpoint went over."""

    from_iteration: int
    """Iterations that were complete."""
    to_iteration: int
    """Iterations that the older checkpoint holds."""
    replayed: int
    """Draws that the bank gave back to be trained on again."""
    unarchived: int
    """Groups that the bank took back out of its Parquet files for that."""

    def as_json(self) -> dict[str, int]:
        """Return the object within the one that ``--json`` prints."""
        return {
            "from": self.from_iteration,
            "to": self.to_iteration,
            "replayed": self.replayed,
            "unarchived": self.unarchived,
        }


@dataclass(frozen=True)
class DemoResult:
    """What came of it."""

    kills: int
    restored: int
    """Pending groups handed back, over all resumes."""
    replayed: int
    """Draws replayed, over all resumes."""
    regenerated: int
    """Groups generated again after they had been acknowledged."""
    weights_identical: bool
    """Weights and optimizer of the killed run and of its twin, bit for bit."""
    iterations: int
    groups: int
    rollouts: int
    reward_first: float
    """Mean over the first tenth of the iterations; then over the last tenth."""
    reward_last: float
    bank: Path | None
    seconds: float
    moments: list[str]
    """In which moment each kill landed; not part of the JSON object."""
    rolled_back: Rollback | None = None
    """Part of the JSON object only when there was a rollback."""

    @property
    def is_right(self) -> bool:
        """Whether the bank kept its promise. The control made none but to learn the same."""
        return self.weights_identical and (self.bank is None or self.regenerated == 0)

    def as_json(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints."""
        fields = {name: value for name, value in vars(self).items() if name not in ("moments", "rolled_back")}
        rolled_back = {"rolled_back": self.rolled_back.as_json()} if self.rolled_back else {}
        return fields | {"bank": str(self.bank) if self.bank else None} | rolled_back


class Observer(Protocol):
    """Is told what happens, from several threads."""

    def advanced(self, run: str, line: Progress) -> None:
        """A run ("killed" or "twin") told where it is."""

    def killed(self, number: int, moment: str, iteration: int) -> None:
        """The run to be killed was killed for the ``number``-th time."""

    def rolled_back(self, from_iteration: int, to_iteration: int) -> None:
        """It was stopped, and goes on from an older model checkpoint."""


def prepare(directory: Path) -> None:
    """Create the directory. Raises FileExistsError when anything is there: no file of yours is ever overwritten."""
    if directory.is_dir() and any(directory.iterdir()):
        found = "an earlier demo" if (directory / GENERATOR_LOG).exists() else "files that are not a demo's"
        raise FileExistsError(f"{directory} already holds {found}; choose a new or an empty directory")
    if directory.exists() and not directory.is_dir():
        raise FileExistsError(f"{directory} is not a directory")
    (directory / TWIN).mkdir(parents=True)


def run_demo(settings: DemoSettings, observer: Observer) -> DemoResult:
    """Run both trainers to their end, in a prepared directory.

    Raises: TrainerFailedError; ValueError for a rollback in too short a run. Whatever it raises, KeyboardInterrupt
    included, both trainers are gone by then.
    """
    started = time.monotonic()
    killed_run, twin = _runs(settings, observer)
    with ThreadPoolExecutor(max_workers=2) as threads, _stopping(killed_run, twin):
        futures = [threads.submit(run.execute) for run in (killed_run, twin)]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
    return _result(settings, killed_run, twin, time.monotonic() - started)


class TrainerRun:
    """One training run from its first start to its end, over as many processes as the kills make of it."""

    def __init__(
        self, name: str, directory: Path, settings: DemoSettings, schedule: KillSchedule, observer: Observer
    ) -> None:
        self.directory = directory
        self.schedule = schedule
        self._name = name
        self._settings = settings
        self._observer = observer
        self._child: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._is_stopped = False
        self._gone_back: tuple[int, int, int] | None = None
        """Iterations before and after the rollback, and the attempt that began with it."""

    @property
    def rollback(self) -> Rollback | None:
        """What was rolled back, as far as that start noted what it was given."""
        if self._gone_back is None:
            return None
        before, after, attempt = self._gone_back
        resume = resume_of(self.directory / GENERATOR_LOG, attempt)
        return Rollback(before, after, resume.draws, resume.unarchived)

    @property
    def model(self) -> ModelState:
        """The newest model checkpoint."""
        model = checkpoints.load_newest(self.directory / MODEL)
        if model is None:
            raise TrainerFailedError(f"the {self._name} run left no model checkpoint in {self.directory / MODEL}")
        return model

    def execute(self) -> None:
        """Start the trainer again and again until it comes to its end. Raises TrainerFailedError."""
        attempt = 1
        while self._runs_into_a_kill(attempt):
            attempt += 1

    def stop(self) -> None:
        """Kill the trainer, if there is one, for good."""
        with self._lock:
            self._is_stopped = True
            if self._child:
                self._child.kill()

    def _runs_into_a_kill(self, attempt: int) -> bool:
        self.schedule.begin_attempt()
        child = self._start(attempt)
        if child is None:
            return False
        with child:
            last = self._follow(child)
        if self._is_stopped:
            return False
        if child.returncode == -signal.SIGKILL and last is not None and self.schedule.is_rollback_due:
            self.schedule.rolled_back()
            self._roll_back(last.iteration, attempt + 1)
            return True
        if child.returncode == -signal.SIGKILL and last is not None and self.schedule.is_due:
            moment = self.schedule.killed()
            self._observer.killed(len(self.schedule.landed), moment, last.iteration)
            return True
        if child.returncode:
            raise TrainerFailedError(self._failure(child.returncode))
        return False

    def _roll_back(self, iteration: int, next_attempt: int) -> None:
        older = checkpoints.roll_back(self.directory / MODEL)
        if older is None:
            raise TrainerFailedError(f"the {self._name} run left no model checkpoint to go back to")
        self._gone_back = iteration, older.iteration, next_attempt
        self._observer.rolled_back(iteration, older.iteration)

    def _start(self, attempt: int) -> subprocess.Popen[str] | None:
        given = TrainerSettings(
            self.directory, self._settings.iterations, self._settings.seed, attempt, self._settings.has_bank
        )
        command = [sys.executable, "-m", "arrowbank.demo.trainer", *given.arguments()]
        with self._lock, (self.directory / TRAINER_ERRORS).open("wb") as errors:
            if not self._is_stopped:
                # its own session: Ctrl-C reaches the parent alone, which then ends both
                self._child = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    env=_environment(),
                    start_new_session=True,
                )
                return self._child
        return None

    def _follow(self, child: subprocess.Popen[str]) -> Progress | None:
        """Read the child's progress to its end, killing it when the schedule says so. Return the last line."""
        last = None
        timer: threading.Timer | None = None
        for text in child.stdout or ():
            line = progress.parse(text)
            if line is None:
                continue
            delay_s = self.schedule.is_time(line)
            if delay_s == 0:
                child.kill()
            elif delay_s is not None:
                timer = threading.Timer(delay_s, child.kill)
                timer.start()
            self._observer.advanced(self._name, line)
            last = line
        if timer:
            timer.cancel()
        return last

    def _failure(self, returncode: int) -> str:
        errors = (self.directory / TRAINER_ERRORS).read_text(errors="replace").rstrip().splitlines()
        how = f"died of signal {-returncode}" if returncode < 0 else f"ended with exit code {returncode}"
        return "\n".join([f"the {self._name} run's trainer {how} by itself:", *errors[-MOST_ERROR_LINES:]])


def _plan(settings: DemoSettings) -> list[Kill]:
    every = checkpoint_every(settings.iterations)
    kills = plan_kills(
        settings.kills,
        iterations=settings.iterations,
        checkpoint_every=every,
        groups=GROUPS,
        seed=settings.seed,
        has_bank=settings.has_bank,
    )
    if settings.has_rollback:
        return with_rollback(kills, iterations=settings.iterations, checkpoint_every=every, groups=GROUPS)
    return kills


def _runs(settings: DemoSettings, observer: Observer) -> tuple[TrainerRun, TrainerRun]:
    directory = settings.directory.resolve()
    return (
        TrainerRun("killed", directory, settings, KillSchedule(_plan(settings)), observer),
        TrainerRun("twin", directory / TWIN, settings, KillSchedule([]), observer),
    )


@contextmanager
def _stopping(*runs: TrainerRun) -> Iterator[None]:
    try:
        yield
    finally:
        for run in runs:
            run.stop()


def _environment() -> dict[str, str]:
    """Let the child import this very arrowbank, and do its arithmetic on one thread: for its speed and its bits."""
    here = str(Path(arrowbank.__file__).parents[1])
    path = os.pathsep.join(part for part in (here, os.environ.get("PYTHONPATH")) if part)
    threads = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return os.environ | threads | {"PYTHONPATH": path}


def _result(settings: DemoSettings, killed_run: TrainerRun, twin: TrainerRun, seconds: float) -> DemoResult:
    model = killed_run.model
    tenth = max(1, settings.iterations // 10)
    counts = tally(killed_run.directory / GENERATOR_LOG)
    return DemoResult(
        kills=len(killed_run.schedule.landed),
        restored=counts.restored,
        replayed=counts.replayed,
        regenerated=counts.regenerated,
        weights_identical=checkpoints.same_bits(model, twin.model),
        iterations=model.iteration,
        groups=model.num_groups,
        rollouts=model.num_rollouts,
        reward_first=sum(model.rewards[:tenth]) / tenth,
        reward_last=sum(model.rewards[-tenth:]) / tenth,
        bank=killed_run.directory / BANK if settings.has_bank else None,
        seconds=round(seconds, 1),
        moments=killed_run.schedule.landed,
        rolled_back=killed_run.rollback,
    )
