"""Short runs on a bank, and what is in its files then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from builders import token_group

from arrowbank import RolloutBank
from arrowbank.durable.layout import BankPaths
from arrowbank.durable.manifest import read_manifest

__all__ = ["archive_files", "archive_three", "archived_file", "archived_rows", "kill", "train", "tree"]


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


def archive_three(path: Path, *, files: int = 1) -> None:
    """Make a bank of three settled groups in a few files, and a pending one."""
    with RolloutBank.open(path, keep_checkpoints=1) as bank:
        bank.restore(0)
        for at in range(3):
            bank.begin_iteration(at)
            bank.mark_consumed([bank.append(token_group(at))], at)
            if at >= 3 - files:
                bank.begin_iteration(at + 1)
                bank.checkpoint(at + 1, wait=True)
        bank.append(token_group(9))
    assert len(read_manifest(BankPaths(path)).files) == files


def archive_files(path: Path) -> list[Path]:
    """What a glob of the archive sees, the file without rows first."""
    return sorted((path / "archive").iterdir())


def archived_file(path: Path) -> Path:
    """The real path of the first file that the manifest names."""
    manifest = read_manifest(BankPaths(path))
    return BankPaths(path).version(manifest.version) / manifest.files[0].name


def archived_rows(path: Path) -> list[tuple[str, int]]:
    """Group and member of each row under archive/, as any engine globs it."""
    tables = [pq.read_table(file, columns=["group_uid", "member_index"]) for file in (path / "archive").iterdir()]
    return [(row["group_uid"], row["member_index"]) for table in tables for row in table.to_pylist()]


def tree(path: Path) -> dict[str, Any]:
    """Everything at and below a path, with times and inodes: equal only if nothing was written."""
    return {
        str(entry): (entry.lstat().st_mtime_ns, entry.lstat().st_ino, entry.is_file() and entry.read_bytes())
        for entry in [path, *path.rglob("*")]
    }
