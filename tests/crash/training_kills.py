"""Kills of a whole training run: the demo's trainer dies by SIGKILL at random moments, and learns what its twin learns.

Each run is a small GRPO training (``arrowbank.demo``) that is started again after each kill, now and then from an older
model checkpoint, until it comes to its end. Then, bit for bit, its weights and its optimizer are those of a twin that
nobody killed; its bank has the same batches, in the same order, with the same tokens and rewards; and no generator was
asked for a group that had been acknowledged.

Proves the promises end to end, with a real trainer, pipeline and model checkpoints. Cannot prove anything of losses of
power, since what a killed process has written stays.

Run as ``training_kills.py REPORT_FD [FAULT]`` this is the server that forks the trainers (``forked``).
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forked import Report, Server, be_ready, serve
from kill_model import Violation

from arrowbank import RolloutBank, scan
from arrowbank.demo import checkpoints, trainer
from arrowbank.demo.generator_log import tally
from arrowbank.demo.settings import BANK, GENERATOR_LOG, MODEL, TrainerSettings

__all__ = ["Training", "kill_trainings", "training_server"]

ITERATIONS = 7
ROLLBACK_ODDS = 0.08
"""After a kill."""
MOST_STARTS = 400
MOST_SECONDS = 60
LATENCY_S = 0.00005
"""Simulated, for each sampled token."""


@dataclass
class Start:
    """One start of a trainer."""

    directory: str
    seed: int
    attempt: int


class Training:
    """One training run, over all its starts."""

    def __init__(self, directory: Path, seed: int, server: Server) -> None:
        directory.mkdir()
        self.directory = directory
        self.kills = 0
        self._seed = seed
        self._server = server

    def run(self, rng: random.Random | None = None) -> None:
        """Start the trainer until it comes to its end; with ``rng``, kill it at random moments."""
        for attempt in range(1, MOST_STARTS):
            lifetime_s = rng.choice([0.05, 0.2, 0.6]) * rng.random() if rng else MOST_SECONDS
            if self._lives(attempt, lifetime_s):
                return
            self.kills += 1
            if rng and rng.random() < ROLLBACK_ODDS:
                checkpoints.roll_back(self.directory / MODEL)
        raise Violation(f"{self.directory.name}: no end after {MOST_STARTS} starts")

    def _lives(self, attempt: int, lifetime_s: float) -> bool:
        """Start it once; return whether it came to its end."""
        self._server.start(Start(str(self.directory), self._seed, attempt))
        pid, deadline = 0, time.monotonic() + MOST_SECONDS
        while True:
            lines = self._server.read(deadline - time.monotonic())
            if lines is None and pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                deadline = time.monotonic() + MOST_SECONDS
            for kind, _, rest in (line.partition(" ") for line in lines or ()):
                if kind == "B":
                    pid, deadline = int(rest), time.monotonic() + lifetime_s
                elif kind == "!":
                    raise Violation(f"start {attempt} failed: " + rest.encode().decode("unicode_escape"))
                elif kind == "X":
                    return rest == "0"

    def outcome(self) -> dict[str, Any]:
        """What the bank holds of what was trained on: tokens and rewards, by iteration and place."""
        names = ("consumed_iteration", "consumed_draw", "consumed_position", "member_index", "env_id", "reward")
        rows = scan(self.directory / BANK).to_arrow().select([*names, "tokens", "outcome"]).to_pylist()
        if {row["outcome"] for row in rows} != {"consumed"}:
            raise Violation(f"{self.directory.name}: rows that are { ({row['outcome'] for row in rows}) }")
        trained: dict[str, Any] = {}
        for row in rows:
            trained.setdefault(str([row[name] for name in names[:4]]), []).append([row[name] for name in names[4:]])
            trained[str([row[name] for name in names[:4]])].append(row["tokens"])
        return trained

    def check_against(self, twin: Training) -> None:
        """Raise Violation unless this run has learned what its twin has, from the same groups, generated once."""
        mine, other = (checkpoints.load_newest(run.directory / MODEL) for run in (self, twin))
        if mine is None or other is None or not checkpoints.same_bits(mine, other):
            raise Violation("other weights than the twin's")
        if self.outcome() != twin.outcome():
            raise Violation("other batches than the twin's")
        again = tally(self.directory / GENERATOR_LOG).regenerated
        if again:
            raise Violation(f"{again} groups were generated again after they had been acknowledged")


def training_server(fault: str | None = None) -> Server:
    """Start what forks the trainers, with a planted fault if there is to be one. They compute on one thread each, for
    the sake of their bits.
    """
    threads = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    here = Path(__file__).parent
    path = os.pathsep.join(map(str, (here.parent, here.parent.parent)))
    return Server(Path(__file__), *([fault] if fault else []), PYTHONPATH=path, **threads)


def kill_trainings(directory: Path, kills: int, seed: int, server: Server) -> tuple[int, int]:
    """Kill trainers until there were so many kills; return them and the runs. Raises Violation."""
    rng, done, runs = random.Random(seed), 0, 0
    twin_seed = rng.randrange(1000)
    twin = Training(directory / "twin", twin_seed, server)
    twin.run()
    while done < kills:
        runs += 1
        run_seed = rng.getrandbits(32)
        run = Training(directory / f"run-{runs}", twin_seed, server)
        try:
            run.run(random.Random(run_seed))
            run.check_against(twin)
        except Violation as violation:
            violation.add_note(f"run {runs} of seed {seed}, after {run.kills} kills")
            raise
        done += run.kills
    return done, runs


# -- the server's children


def _train(start: Start, report: Report) -> None:
    directory = Path(start.directory)
    settings = TrainerSettings(directory, ITERATIONS, start.seed, start.attempt, has_bank=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # its progress
    trainer.LATENCY_S = LATENCY_S
    sys.argv = ["trainer", *settings.arguments()]
    trainer.main()


def _mark_nothing() -> None:
    """A bank that acknowledges draws and does not keep them."""
    RolloutBank.mark_consumed = lambda self, uids, iteration, **options: None  # type: ignore[method-assign]


FAULTS = {"mark-nothing": _mark_nothing}


def main() -> None:
    be_ready()
    if len(sys.argv) > 2:
        FAULTS[sys.argv[2]]()
    serve(Report(int(sys.argv[1])), Start, _train, MOST_SECONDS)


if __name__ == "__main__":
    main()
