"""Durable append of one group against the raw limit: os.write + os.fdatasync of as many bytes to the same disk.

A group is 8 rollouts of 2,048 tokens with logprobs and masks. Raw writes and appends take turns, so that both meet the
same disk. Run ``python -m pytest benchmarks``; figures are medians.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arrowbank import RolloutBank, RolloutGroup, TokenRollout

MEMBERS, TOKENS, PROMPT = 8, 2048, 512


class RawFile:
    """The limit: bytes appended to a file and synced."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
        self._payload = os.urandom(nbytes)
        self.seconds: list[float] = []

    def write(self) -> None:
        start = time.perf_counter()
        os.write(self._descriptor, self._payload)
        os.fdatasync(self._descriptor)
        self.seconds.append(time.perf_counter() - start)


def arrays() -> list[dict[str, Any]]:
    rng = np.random.default_rng(1)
    mask = np.arange(TOKENS) >= PROMPT
    return [
        {
            "trajectory": [rng.zipf(1.2, TOKENS).clip(max=150_000).astype(np.int32)],
            "generation_mask": [mask.copy()],
            "logprobs": [-rng.exponential(1.0, TOKENS - PROMPT).astype(np.float32)],
            "reward": float(index % 2),
            "env_id": "math",
            "problem_id": "p1",
        }
        for index in range(MEMBERS)
    ]


def lists() -> list[dict[str, Any]]:
    turns = ("trajectory", "generation_mask", "logprobs")
    return [{key: [v[0].tolist()] if key in turns else v for key, v in member.items()} for member in arrays()]


@pytest.fixture
def bank(tmp_path: Path) -> Iterator[RolloutBank]:
    with RolloutBank.open(tmp_path / "bank") as opened:
        opened.restore(0)
        yield opened


def against_raw(benchmark: Any, rounds: int, raw: RawFile, append: Callable[[], object], report_ratio: Any) -> None:
    """Time ``append``, with one raw write before each round."""
    append()
    benchmark.pedantic(append, setup=raw.write, rounds=rounds)
    median = benchmark.stats.stats.median if benchmark.stats else statistics.median(raw.seconds)
    benchmark.extra_info["ratio_to_raw"] = report_ratio(median, statistics.median(raw.seconds))


def record_bytes(bank: RolloutBank, append: Callable[[], object]) -> int:
    before = bank.live_bytes
    append()
    return bank.live_bytes - before


def test_append_of_arrays(benchmark: Any, bank: RolloutBank, tmp_path: Path, rounds: int, report_ratio: Any) -> None:
    group = RolloutGroup(rollouts=[TokenRollout(**member) for member in arrays()])

    def append() -> None:
        group.uid = None
        bank.append(group)

    append()
    against_raw(benchmark, rounds, RawFile(tmp_path / "raw", record_bytes(bank, append)), append, report_ratio)


def test_append_of_lists_with_models(
    benchmark: Any, bank: RolloutBank, tmp_path: Path, rounds: int, report_ratio: Any
) -> None:
    members = lists()

    def append() -> None:
        bank.append(RolloutGroup(rollouts=[TokenRollout(**member) for member in members]))

    append()
    against_raw(benchmark, rounds, RawFile(tmp_path / "raw", record_bytes(bank, append)), append, report_ratio)
