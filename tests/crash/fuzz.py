"""Fuzzed files: segments, journals and manifests with many things wrong at once, half of them sealed again.

A file of a small bank is mutated a few times: bits, numbers that overflow, ranges moved, doubled, cut out, zeroed, junk
in between, ends. Read as an open reads it, whatever comes back must be what was written; other things may be missing.
Sealed again, with checksums that are right, a record or a manifest may say anything: then it must be refused, or be
read as what it says, and nothing worse. In either case no reader may die, hang, raise anything but the library's own
errors, or take more memory than ten times the file.

Proves that of the mutants of one seed. Mutants are not guided by coverage. Parquet files, whose reader is pyarrow's,
are never opened without their digest, and are left to ``tests/test_hostile_banks.py``.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import mmap
import os
import random
import resource
import signal
import struct
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from damaged_banks import read_stream
from machine import directory_in_memory

from arrowbank import ArrowbankError
from arrowbank.durable import manifest as manifest_module
from arrowbank.durable import seal
from arrowbank.durable.journal import read_journal
from arrowbank.durable.layout import JournalName
from arrowbank.durable.manifest import read_manifest
from arrowbank.durable.recovery import read_state
from arrowbank.durable.segment import load_rollouts, read_segment
from arrowbank.durable.stream import binding
from crash.bit_rot import Small, make_small

__all__ = ["TARGETS", "fuzz", "fuzz_one"]

BATCH = 2000
"""Mutants that one process reads."""
MOST_SECONDS = 20
MOST_TIMES = 10
"""The file's size, in memory, beside what any reader needs."""
SPARE_BYTES = 48 << 20

# -- mutations

_NUMBERS = (0, 1, 7, 8, 127, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1)


def mutate(data: bytearray, rng: random.Random, *, same_size: bool = False) -> None:
    """Change some bytes, in place."""
    kinds = _IN_PLACE if same_size else (*_IN_PLACE, *_RESIZING)
    for _ in range(rng.choice([1, 1, 2, 4, 9])):
        if data:
            rng.choice(kinds)(data, rng)


def _flip(data: bytearray, rng: random.Random) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _number(data: bytearray, rng: random.Random) -> None:
    size = rng.choice([4, 8])
    place = rng.randrange(max(1, len(data) - size)) // 4 * 4
    number = rng.choice([*_NUMBERS, len(data), len(data) + 8, rng.getrandbits(64)])
    changed = struct.pack("<Q", number % 2**64)[:size]
    data[place : place + size] = changed[: len(data) - place]


def _range(data: bytearray, rng: random.Random) -> tuple[int, int]:
    start = rng.randrange(len(data))
    return start, min(len(data), start + rng.choice([1, 8, 64, 512, 4096]))


def _zero(data: bytearray, rng: random.Random) -> None:
    start, stop = _range(data, rng)
    data[start:stop] = bytes(stop - start)


def _copy(data: bytearray, rng: random.Random) -> None:
    start, stop = _range(data, rng)
    to = rng.randrange(len(data) - (stop - start) + 1)
    data[to : to + stop - start] = data[start:stop]


def _cut_out(data: bytearray, rng: random.Random) -> None:
    start, stop = _range(data, rng)
    del data[start:stop]


def _double(data: bytearray, rng: random.Random) -> None:
    start, stop = _range(data, rng)
    data[stop:stop] = data[start:stop]


def _junk(data: bytearray, rng: random.Random) -> None:
    start, stop = _range(data, rng)
    data[start:start] = rng.randbytes(stop - start)


def _end(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


def _tail(data: bytearray, rng: random.Random) -> None:
    data += rng.choice([bytes(rng.randrange(600)), rng.randbytes(rng.randrange(600)), bytes(data)])


Mutation = Callable[[bytearray, random.Random], None]
_IN_PLACE: tuple[Mutation, ...] = (_flip, _flip, _number, _number, _zero, _copy)
_RESIZING: tuple[Mutation, ...] = (_cut_out, _double, _junk, _end, _tail)


def _mutate_sealed(data: bytes, edges: list[int], bound: bytes, rng: random.Random) -> bytes:
    """Mutate some records, and seal them again."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 2])):
        number = rng.randrange(len(edges) - 1)
        start, stop = edges[number], edges[number + 1]
        message = changed[start:stop]
        was = seal.find(message, 0, len(message))
        if was is None:
            continue  # mutated before, and its seal with it
        kept = bytes(message[was.place - len(seal.MAGIC) : was.place + len(seal.BLANK)])
        head = 8 + int.from_bytes(message[4:8], "little")
        part = message[8:head] if rng.random() < 0.7 else message[head:]
        mutate(part, rng, same_size=True)
        message = message[:8] + part + message[head:] if len(part) == head - 8 else message[:head] + part
        message[was.place - len(seal.MAGIC) : was.place + len(seal.BLANK)] = kept
        if message.find(seal.MAGIC) >= 0 and len(message) == stop - start:
            seal.stamp(message, bound, sequence=was.sequence, offset=start, first=was.first)
            changed[start:stop] = message
    return bytes(changed)


def _mutate_json(value: Any, rng: random.Random) -> Any:
    """Change one thing somewhere in a JSON document."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {name: item for name, item in value.items() if name != key}
        return value | {key: _mutate_json(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        place = rng.randrange(len(value))
        return [*value[:place], _mutate_json(value[place], rng), *value[place + rng.randrange(2) :]]
    wilder = [None, True, -1, 2**63, 1e308, "", "../x", "x" * 5000, [], {}, "00000000-main-s0001-0000.arrows"]
    return rng.choice([*wilder, rng.getrandbits(rng.choice([4, 31, 64])), [value] * 3, str(value)[::-1]])


# -- readers


def _segment(case: Small, rng: random.Random) -> str | None:
    changed = bytearray(case.segment_bytes)
    mutate(changed, rng)
    found = read_stream(bytes(changed), case.segment.name, case.manifest.bank_id)
    for record in found.records:
        if bytes(record.message) != case.messages[record.sequence]:
            return f"record {record.sequence} is not what was written"
    return None


def _sealed_segment(case: Small, rng: random.Random) -> str | None:
    bound = binding(case.manifest.bank_id, case.segment.name)
    changed = _mutate_sealed(case.segment_bytes, case.edges, bound, rng)
    found = read_stream(changed, case.segment.name, case.manifest.bank_id)
    for record in found.records:
        if record.sequence < len(case.messages) and bytes(record.message) == case.messages[record.sequence]:
            continue
        with contextlib.suppress(ArrowbankError):
            repr(list(load_rollouts(record)))  # decodes all of it
    case.segment.write_bytes(changed)
    with contextlib.suppress(ArrowbankError):
        read_state(case.paths, case.manifest)
    return None


def _journal(case: Small, rng: random.Random) -> str | None:
    changed = bytearray(case.journal_bytes)
    mutate(changed, rng)
    case.journal.write_bytes(changed)
    entries, _ = read_journal(case.paths, JournalName(1, 0), case.manifest.bank_id)
    for record, entry in entries:
        if entry != case.entries[record.sequence]:
            return f"entry {record.sequence} is not what was written: {entry}"
    return None


def _sealed_journal(case: Small, rng: random.Random) -> str | None:
    bound = binding(case.manifest.bank_id, case.journal.name)
    case.journal.write_bytes(_mutate_sealed(case.journal_bytes, case.entry_edges, bound, rng))
    with contextlib.suppress(ArrowbankError):
        read_state(case.paths, case.manifest)
    return None


def _manifest(case: Small, rng: random.Random) -> str | None:
    changed = bytearray(case.manifest_bytes)
    mutate(changed, rng)
    case.paths.manifest.write_bytes(changed)
    try:
        found = read_manifest(case.paths)
    except ArrowbankError:
        return None
    return None if found == case.manifest else "another manifest was read"


def _sealed_manifest(case: Small, rng: random.Random) -> str | None:
    content = json.loads(case.manifest_bytes)
    content.pop("checksum")
    for _ in range(rng.choice([1, 2, 3])):
        content = _mutate_json(content, rng)
    if isinstance(content, dict):
        content["checksum"] = manifest_module._checksum(content)
    case.paths.manifest.write_text(json.dumps(content))
    with contextlib.suppress(ArrowbankError):
        read_state(case.paths, read_manifest(case.paths))
    return None


TARGETS: dict[str, Callable[[Small, random.Random], str | None]] = {
    "segment": _segment,
    "segment, sealed again": _sealed_segment,
    "journal": _journal,
    "journal, sealed again": _sealed_journal,
    "manifest": _manifest,
    "manifest, sealed again": _sealed_manifest,
}


# -- processes


@dataclass(frozen=True)
class _Batch:
    target: str
    seed: int
    numbers: range


def fuzz(mutants: int, seed: int, targets: Sequence[str] = tuple(TARGETS)) -> Iterator[tuple[str, int, list[str]]]:
    """Read so many mutants, of the targets alike; yield each target, how many there were, and what was wrong."""
    with directory_in_memory() as directory:
        case = make_small(directory / "small")
        for target in targets:
            share, wrong = -(-mutants // len(targets)), []
            for start in range(0, share, BATCH):
                wrong += _in_processes(case, _Batch(target, seed, range(start, min(share, start + BATCH))))
            yield target, share, wrong


def fuzz_one(target: str, seed: int, number: int) -> str | None:
    """Read one mutant again, in this process."""
    with directory_in_memory() as directory:
        return _read(make_small(directory / "small"), target, seed, number)


def _read(case: Small, target: str, seed: int, number: int) -> str | None:
    _put_back(case)
    try:
        return TARGETS[target](case, random.Random(f"{target} {seed} {number}"))
    except ArrowbankError as error:
        return f"raised {error!r} where damage is told otherwise"
    except Exception:
        return traceback.format_exc()[-1500:]


def _put_back(case: Small) -> None:
    case.segment.write_bytes(case.segment_bytes)
    case.journal.write_bytes(case.journal_bytes)
    case.paths.manifest.write_bytes(case.manifest_bytes)


def _in_processes(case: Small, batch: _Batch) -> list[str]:
    """Read a batch in children; where one dies, another goes on behind the mutant that it died of."""
    wrong, numbers = [], batch.numbers
    with mmap.mmap(-1, 8) as reached:
        while numbers:
            said, status = _in_child(case, batch, numbers, reached)
            wrong += said
            if status == 0:
                break
            number = int.from_bytes(reached[:8], "little")
            how = "hung" if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM else "died"
            wrong.append(f"{batch.target} {number}: the reader {how}, wait status {status}")
            numbers = range(number + 1, numbers.stop)
    return wrong


def _in_child(case: Small, batch: _Batch, numbers: range, reached: mmap.mmap) -> tuple[list[str], int]:
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        _child(case, batch, numbers, reached, write_end)
    os.close(write_end)
    with open(read_end, "rb") as told:
        said = [json.loads(line) for line in told]
    return said, os.waitpid(pid, 0)[1]


def _child(case: Small, batch: _Batch, numbers: range, reached: mmap.mmap, write_end: int) -> NoReturn:
    status = 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        faulthandler.disable()  # it is told how a reader died
        _put_back(case)
        found, _ = read_segment(case.segment, case.manifest.bank_id)
        repr([list(load_rollouts(record)) for record in found.records])  # what is loaded once is not any mutant's
        for number in numbers:
            reached[:8] = number.to_bytes(8, "little")
            signal.alarm(MOST_SECONDS)
            said = _measured(case, batch, number)
            if said:
                os.write(write_end, (json.dumps(f"{batch.target} {number}: {said}") + "\n").encode())
        status = 0
    finally:
        os._exit(status)


def _measured(case: Small, batch: _Batch, number: int) -> str | None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    said = _read(case, batch.target, batch.seed, number)
    grown, size = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10, len(case.segment_bytes)
    if grown > MOST_TIMES * size + SPARE_BYTES:
        said = f"{said or ''} took {grown:,} bytes of memory for a file of {size:,}"
    return said
