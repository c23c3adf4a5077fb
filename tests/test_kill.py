"""SIGKILL from outside, again and again: nothing that was acknowledged is lost, changed or handed out twice.

``KillLoop`` kills, and checks against a plain model what is left each time; each of its checks is proven red by a
planted fault in ``test_planted_faults``. The seed is in every failure; ``ARROWBANK_KILL_SEED`` sets it.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

from kill_loop import COMPACTION, KillLoop, a_seed, telling_the_seed
from kill_model import check_archive_once, check_contents

from arrowbank import RolloutBank

CYCLES = 48
MOST_CYCLES = 120
"""Cycles go on, up to so many, until each phase was hit."""
BUSY = ("in flight", "draw", "drawn", "evict", "checkpoint", *COMPACTION)
"""Where to kill a trainer that has appends in flight all the time."""
ALONE = ("append", "open", "restore", "draw", "drawn", "checkpoint", *COMPACTION)
"""Where to kill one that waits for each append."""


def test_nothing_acknowledged_is_lost_or_changed_by_kills(tmp_path: Path) -> None:
    seed = a_seed()
    began = time.monotonic()
    with telling_the_seed(seed), KillLoop(tmp_path, seed) as loop:
        hits: Counter[str] = Counter()
        while len(loop.kills) < CYCLES or not hits.keys() >= {*BUSY, *ALONE}:
            assert len(loop.kills) < MOST_CYCLES, f"never hit: {sorted({*BUSY, *ALONE} - hits.keys())}"
            pair, is_busy = divmod(len(loop.kills), 2)
            targets = BUSY if is_busy else ALONE
            if len(loop.kills) >= CYCLES:
                targets = tuple(phase for phase in targets if phase not in hits) or targets
            kill = loop.cycle(targets[pair % len(targets)], in_flight=bool(is_busy))
            hits.update({*kill.phases, *(["in flight"] if kill.in_flight else [])})
        groups = check_contents(loop.bank)
        finish(loop)
        seconds = time.monotonic() - began
        print(f"seed {seed}: {len(loop.kills)} kills, {loop.model.acknowledged} groups, {dict(hits)}, {seconds:.1f} s")
        assert groups >= loop.model.acknowledged > 500
        assert len(loop.model.draws) > 60
        assert loop.model.checkpoint > 40
        assert hits["in flight"] >= CYCLES // 3
        assert sum(hits[phase] for phase in COMPACTION) >= CYCLES // 6
        for kills in (loop.kills[::2], loop.kills[1::2]):  # trainers that append alone, and busy ones
            assert sum(kill.acknowledged > 0 for kill in kills) >= len(kills) // 3


def finish(loop: KillLoop) -> None:
    """Resume a last time, here, archive what can be, and check the whole once more."""
    with RolloutBank.open(loop.bank) as bank:
        restored = bank.restore(loop.model.checkpoint)
        assert restored.report.lost_records == 0
        bank.close(final=True)
    loop.check_left_over()
    assert check_archive_once(loop.bank) > 500
