"""Make a golden bank: ``python -m tests.golden NAME`` writes NAME.tar.xz and, with what is in it, NAME.json.xz.

The bank has three sessions: groups of every kind, some archived (consumed and evicted), some carried out of segments
that were; draws to replay, with states and spans; pending groups of several environments; evaluations; segments of
another process. Then damage: a record with a flipped bit, which an open has healed, and another, which none has; a
torn tail. What is written beside it is what the version that made the bank gives back. Nothing is ever overwritten: a
bank is made once, and kept.
"""

from __future__ import annotations

import json
import lzma
import multiprocessing
import socket
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the helpers of all tests

from builders import EVERY, build, token_group

from arrowbank import BankWriter, Restored, RolloutBank, RolloutGroup, exits, scan, verify
from golden.described import describe, describe_restored, describe_verified

__all__ = ["HERE", "extract", "read"]

HERE = Path(__file__).parent
CHECKPOINT = 2
KIND_OF_LATER = ("tokens", "fields", "texts")


def main() -> None:
    name = sys.argv[1]
    bank_file, content_file = HERE / f"{name}.tar.xz", HERE / f"{name}.json.xz"
    if bank_file.exists() or content_file.exists():
        sys.exit(f"{name} is there already, and is never made again")
    with tempfile.TemporaryDirectory() as directory:
        socket.gethostname = lambda: "golden"
        make(Path(directory, "bank"))
        with tarfile.open(bank_file, "w:xz") as archive:
            archive.add(Path(directory, "bank"), "bank", filter=_of_nobody)
    with tempfile.TemporaryDirectory() as directory:
        content = json.dumps(read(extract(name, Path(directory))), indent=1, sort_keys=True)
    content_file.write_bytes(lzma.compress(content.encode(), preset=9))


def _of_nobody(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


def extract(name: str, directory: Path) -> Path:
    """Unpack a golden bank; return where it lies."""
    with tarfile.open(HERE / f"{name}.tar.xz") as archive:
        archive.extractall(directory, filter="tar")
    return directory / "bank"


def read(path: Path) -> dict[str, Any]:
    """Return all that a bank has to give, as JSON: to who checks it, to readers, to a trainer that resumes twice."""
    verified = describe_verified(verify(path))
    view = scan(path)
    rows = [describe(row) for row in view.to_arrow().to_pylist()]
    with RolloutBank.open(path, takeover="force", keep_checkpoints=1) as bank:
        restored = describe_restored(bank.restore(CHECKPOINT))
    with RolloutBank.open(path, takeover="force", keep_checkpoints=1) as bank:
        again = describe_restored(bank.restore(CHECKPOINT, mode="requeue"))
    rows.sort(key=lambda row: (row["group_uid"], row["member_index"]))
    return {"verified": verified, "rows": rows, "damage": list(view.damage), "restored": restored, "requeued": again}


# -- making one


def make(path: Path) -> None:
    """Make the bank as its last trainer left it: killed."""
    with RolloutBank.open(path, keep_checkpoints=1) as bank:
        bank.restore(0)
        _begin(bank)
    _flip(path, "00000002-main-s0001-0000.arrows", number=1)
    bank = RolloutBank.open(path, keep_checkpoints=1)  # heals that
    _go_on(bank, bank.restore(CHECKPOINT))
    bank._claim.forget()  # as after a kill
    exits.forget(bank)
    _flip(path, "00000003-main-s0002-0000.arrows", number=2)
    segment = path / "segments" / "00000004-main-s0002-0000.arrows"
    data = segment.read_bytes().rstrip(b"\0")
    segment.write_bytes(data[: len(data) - 100])


def _begin(bank: RolloutBank) -> None:
    """Iterations 0 to 2, and their checkpoint: two of them are archived, with one group of every kind."""
    uids = [bank.append(build(kind), source_index=index) for index, kind in enumerate(EVERY)]
    bank.append(token_group(100), evicted="zero variance")
    bank.append(token_group(101), split="eval")
    waits = [bank.append(token_group(102 + number, env_id=env)) for number, env in enumerate(["math", "code", None])]
    bank.mark_consumed(uids[:12], 0, state=b"cursor\0\xff")
    bank.begin_iteration(1)
    bank.mark_consumed(uids[12:], 1)
    bank.evict(waits[:1], "stale")
    bank.begin_iteration(2)
    planned = [bank.append(build(kind, 2)) for kind in EVERY]
    bank.checkpoint(CHECKPOINT, wait=True)
    bank.mark_consumed(planned[::2], 2, span=2, state=b"")
    bank.mark_consumed(planned[1::2], 2)


def _go_on(bank: RolloutBank, restored: Restored) -> None:
    """The next session: replays two draws, and makes a third; another process appends, too."""
    for draw in restored.draws:
        uids = [group.uid for group in draw.groups if group.uid]
        bank.mark_consumed(uids, draw.iteration, span=draw.span, state=draw.state)
    bank.begin_iteration(3)
    groups = [bank.append(build(kind, 3)) for kind in KIND_OF_LATER]
    groups += _from_another_process(bank, [build(kind, 4) for kind in KIND_OF_LATER])
    bank.mark_consumed(groups[1:5], 3, state=b"Zustand")
    bank.begin_iteration(4)
    for number in range(3):
        bank.append(token_group(200 + number, env_id="code"), source_index=500 + number)


def _from_another_process(bank: RolloutBank, groups: list[RolloutGroup]) -> list[str]:
    processes = multiprocessing.get_context("fork")
    with processes.Pool(1) as pool:
        return pool.apply(_append, (bank.writer_token(), groups))


def _append(token: Any, groups: list[RolloutGroup]) -> list[str]:
    with BankWriter.open(token, "rank-1") as writer:
        writer.begin_iteration(3)
        return writer.append_many(groups)


def _flip(path: Path, segment: str, *, number: int) -> None:
    """Flip one bit in the middle of a record."""
    place = path / "segments" / segment
    data = bytearray(place.read_bytes())
    seals = [at for at in range(len(data)) if data.startswith(b"arrowbank-seal-1:", at)]
    data[seals[number] + 400] ^= 16
    place.write_bytes(data)


if __name__ == "__main__":
    main()
