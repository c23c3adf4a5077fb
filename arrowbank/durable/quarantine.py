"""Damaged bytes, kept: no byte that does not verify is deleted before it lies here.

``quarantine/<file>-<offset, 16 hexadecimal digits>.bytes`` holds the bytes as they were, the .json beside it what is
known of them. Keeping the same damage twice changes nothing, so a crash in between costs nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from arrowbank.durable import files
from arrowbank.durable.layout import BankPaths, JournalName
from arrowbank.durable.stream import Damage, map_file

__all__ = ["count", "keep"]


def count(paths: BankPaths) -> int:
    """Count the damaged parts that lie in quarantine. Somebody may have taken all of it away."""
    return sum(entry.suffix == ".json" for entry in paths.quarantine.iterdir()) if paths.quarantine.is_dir() else 0


def keep(paths: BankPaths, tmp: Path, damage: Iterable[Damage]) -> None:
    """Copy damaged parts of segments and journals. Durability: on return the copies survive power loss.

    Raises OSError.
    """
    for part in damage:
        stem = f"{part.name}-{part.offset:016x}"
        directory = paths.segments if JournalName.parse(part.name) is None else paths.journal
        data = map_file(directory / part.name)[part.offset : part.offset + part.length]
        note = {
            "file": part.name,
            "offset": part.offset,
            "length": part.length,
            "reason": part.reason,
            "torn": part.torn,
            "records": part.lost,
            "uid": part.uid,
        }
        files.replace(paths.quarantine / f"{stem}.bytes", data, tmp)
        files.replace(paths.quarantine / f"{stem}.json", json.dumps(note, indent=1).encode() + b"\n", tmp)
