"""What calls cost against the length of the run before them: the promise is that it does not matter.

A run of so many iterations (two small groups each, a checkpoint every 20) is made first; then each call is timed in
turn. ``python -m pytest benchmarks/test_history.py --history 100,10000,100000 -s`` prints the table; the default is
short. Figures are medians in milliseconds; the last column of each is the ratio to the shortest run.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arrowbank import RolloutBank, RolloutGroup, TokenRollout

EVERY = 20
CALLS = ("open", "restore", "append", "mark_consumed", "checkpoint", "close")
ROUNDS = 15


def group(seed: int) -> RolloutGroup:
    tokens = np.arange(seed, seed + 64, dtype=np.int32)
    rollout = TokenRollout(trajectory=[tokens], generation_mask=[tokens % 2 == 0], reward=1.0, env_id="math")
    return RolloutGroup(rollouts=[rollout])


class Timed:
    """Seconds of each call."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def call(self, name: str, function: Callable[[], object]) -> object:
        start = time.perf_counter()
        result = function()
        self.seconds[name].append(time.perf_counter() - start)
        return result


def make_history(path: Path, iterations: int) -> None:
    with RolloutBank.open(path) as bank:
        bank.restore(0)
        for at in range(iterations):
            bank.begin_iteration(at)
            bank.mark_consumed(bank.append_many([group(at), group(at + 1)]), at)
            if (at + 1) % EVERY == 0:
                bank.checkpoint(at + 1, wait=True)


def measure(path: Path, start: int) -> dict[str, float]:
    """Resume and train on, a few iterations a session, and time every call."""
    timed = Timed()
    at = start
    for _ in range(ROUNDS):
        bank = timed.call("open", lambda: RolloutBank.open(path))
        assert isinstance(bank, RolloutBank)
        timed.call("restore", lambda at=at, bank=bank: bank.restore(at))
        for _ in range(EVERY):
            bank.begin_iteration(at)
            uid = timed.call("append", lambda at=at, bank=bank: bank.append(group(at)))
            timed.call("mark_consumed", lambda at=at, uid=uid, bank=bank: bank.mark_consumed([str(uid)], at))
            at += 1
        timed.call("checkpoint", lambda at=at, bank=bank: bank.checkpoint(at))
        bank.checkpoint(at, wait=True)
        timed.call("close", bank.close)
    return {name: statistics.median(timed.seconds[name]) * 1e3 for name in CALLS}


@pytest.mark.benchmark(group="history")
def test_calls_cost_the_same_however_long_the_run_has_been(
    request: pytest.FixtureRequest, tmp_path: Path, benchmark: Any, report_table: Callable[[str], None]
) -> None:
    lengths = [int(part) for part in str(request.config.getoption("--history")).split(",")]
    table: dict[int, dict[str, float]] = {}
    for length in lengths:
        path = tmp_path / str(length)
        make_history(path, length)
        table[length] = measure(path, length)
    benchmark.pedantic(lambda: None, rounds=1)  # the table is the result
    first = table[lengths[0]]
    lines = [f"| call, ms | {' | '.join(f'{length:,} iterations' for length in lengths)} | ratio |"]
    lines.append("|" + "---|" * (len(lengths) + 2))
    for name in CALLS:
        cells = " | ".join(f"{table[length][name]:.2f}" for length in lengths)
        lines.append(f"| `{name}` | {cells} | {table[lengths[-1]][name] / first[name]:.2f} |")
    report_table("\n".join(lines))
