"""What a restore below the archive's horizon takes: seconds, and memory of its own, for the bytes it brings back.

``python -m pytest benchmarks/test_revival.py --revive-mb 1000`` brings back a gigabyte; the default is small. A group
is 8 rollouts of 2,048 tokens with logprobs and masks. The restore runs in a process of its own; its memory is the
peak of RssAnon above what it had before.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_append import arrays

from arrowbank import RolloutBank, RolloutGroup, TokenRollout

GROUPS_PER_ITERATION = 32

_RESTORE = """
import json, sys, threading, time
from arrowbank import RolloutBank

def anonymous_kb():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1])

bank = RolloutBank.open(sys.argv[1])
before, peak, running = anonymous_kb(), 0, True

def watch():
    global peak
    while running:
        peak = max(peak, anonymous_kb())
        time.sleep(0.005)

watcher = threading.Thread(target=watch)
watcher.start()
start = time.perf_counter()
restored = bank.restore(0)
seconds = time.perf_counter() - start
running = False
watcher.join()
groups = restored.report.revived_groups
print(json.dumps({"seconds": seconds, "added_mb": (peak - before) / 1024, "groups": groups,
                  "mb": restored.report.nbytes / 1e6, "draws": len(restored.draws)}))
bank.close()
"""


def make(path: Path, groups: int) -> int:
    """Train on so many groups and archive them all; return the iterations."""
    with RolloutBank.open(path, keep_checkpoints=1) as bank:
        bank.restore(0)
        members = arrays()
        for at in range(0, groups, GROUPS_PER_ITERATION):
            iteration = at // GROUPS_PER_ITERATION
            bank.begin_iteration(iteration)
            batch = [
                RolloutGroup(rollouts=[TokenRollout(**member) for member in members])
                for _ in range(GROUPS_PER_ITERATION)
            ]
            bank.mark_consumed(bank.append_many(batch), iteration)
            bank.checkpoint(iteration + 1)
        bank.close(final=True)
        return iteration + 1


@pytest.mark.benchmark(group="revival")
def test_a_restore_below_the_horizon(
    request: pytest.FixtureRequest, tmp_path: Path, benchmark: Any, report_table: Callable[[str], None]
) -> None:
    megabytes = float(request.config.getoption("--revive-mb"))
    groups = max(GROUPS_PER_ITERATION, int(megabytes * 1e6 / 132_000))
    iterations = make(tmp_path / "bank", groups)
    done: dict[str, Any] = {}

    def restore() -> None:
        out = subprocess.run([sys.executable, "-c", _RESTORE, tmp_path / "bank"], capture_output=True, check=True)
        done.update(json.loads(out.stdout))

    benchmark.pedantic(restore, rounds=1)
    assert done["draws"] == iterations
    report_table(
        f"restore(0) brought back {done['groups']:,} groups, {done['mb']:,.0f} MB of records, in "
        f"{done['seconds']:.1f} s ({done['mb'] / done['seconds']:,.0f} MB/s); "
        f"peak added memory {done['added_mb']:,.0f} MB"
    )
