"""Short runs on a bank, and what plain readers see of its archive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from builders import token_group

from arrowbank import RolloutBank

__all__ = ["archived_rows", "kill", "train"]


def kill(path: Path, **options: Any) -> RolloutBank:
    """Open a bank whose last handle is given up, as after a kill."""
    return RolloutBank.open(path, takeover="force", **options)


def train(bank: RolloutBank, iterations: range, *, size: int = 2, checkpoints: bool = True) -> list[list[str]]:
    """Train whole iterations of new groups; return each one's uids."""
    drawn = []
    for iteration in iterations:
        bank.begin_iteration(iteration)
        drawn.append(bank.append_many([token_group(100 * iteration + number) for number in range(size)]))
        bank.mark_consumed(drawn[-1], iteration, state=b"at %d" % iteration)
        if checkpoints:
            bank.checkpoint(iteration + 1)
    return drawn


def archived_rows(path: Path) -> list[tuple[str, int]]:
    """Group and member of each row under archive/, as any engine globs it."""
    tables = [pq.read_table(file, columns=["group_uid", "member_index"]) for file in (path / "archive").iterdir()]
    return [(row["group_uid"], row["member_index"]) for table in tables for row in table.to_pylist()]
