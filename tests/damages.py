"""What is done to the files of a bank: damages with names, and any damage at random."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import corruptors
from damaged_banks import Model, Stream

from arrowbank.durable.layout import BankPaths, SegmentName

__all__ = ["NAMED", "Harm", "at_random", "pick"]


Harm = Callable[[Path, Model, Model], None]
"""Does something to a copy of a bank; the last one is another bank."""


def pick(model: Model, which: str) -> str:
    """Name a segment: "own" is the one with most groups that a session wrote itself, "carried" the carried one."""
    names = [name for name in model.segments if _is_carried(name) == (which == "carried")]
    return max(names, key=lambda name: len(model.segments[name].keys))


def _is_carried(name: str) -> bool:
    parsed = SegmentName.parse(name)
    assert parsed is not None, name
    return parsed.is_carried


def middle(stream: Stream) -> tuple[int, int]:
    return stream.ranges[len(stream.ranges) // 2]


def in_segment(change: Callable[[bytes, Stream], bytes], which: str = "own") -> Harm:
    def harm(root: Path, model: Model, _: Model) -> None:
        name = pick(model, which)
        corruptors.rewrite(root / "segments" / name, lambda data: change(data, model.segments[name]))

    return harm


def in_journal(change: Callable[[bytes, Stream], bytes], part: int = -1) -> Harm:
    def harm(root: Path, model: Model, _: Model) -> None:
        name = sorted(model.journal)[part]
        corruptors.rewrite(root / "journal" / name, lambda data: change(data, model.journal[name]))

    return harm


def swap_segments(root: Path, model: Model, _: Model) -> None:
    corruptors.swap(*(root / "segments" / name for name in sorted(model.segments)[-2:]))


def foreign_segment(root: Path, model: Model, other: Model) -> None:
    corruptors.copy_over(other.root / "segments" / pick(other, "own"), root / "segments" / pick(model, "own"))


def foreign_segments_all(root: Path, model: Model, other: Model) -> None:
    for name in other.segments:
        corruptors.copy_over(other.root / "segments" / name, root / "segments" / name)


def second_name(root: Path, model: Model, _: Model) -> None:
    name = SegmentName.parse(pick(model, "own"))
    assert name is not None
    corruptors.copy_over(root / "segments" / str(name), root / "segments" / str(replace(name, part=7)))


def swap_journal(root: Path, model: Model, _: Model) -> None:
    names = sorted(model.journal)
    corruptors.swap(root / "journal" / names[0], root / "journal" / names[-1])


def foreign_journal(root: Path, model: Model, other: Model) -> None:
    for name, theirs in zip(sorted(model.journal), sorted(other.journal), strict=True):
        corruptors.copy_over(other.root / "journal" / theirs, root / "journal" / name)


def drop_journal(part: int | None) -> Harm:
    def harm(root: Path, model: Model, _: Model) -> None:
        for name in sorted(model.journal) if part is None else [sorted(model.journal)[part]]:
            corruptors.delete(root / "journal" / name)

    return harm


def archive_file(root: Path, model: Model, number: int = 0) -> Path:
    return BankPaths(root).version(model.manifest.version) / model.manifest.files[number].name


def in_archive(change: Callable[[bytes], bytes] | None) -> Harm:
    def harm(root: Path, model: Model, _: Model) -> None:
        path = archive_file(root, model)
        if change is None:
            corruptors.delete(path)
        else:
            corruptors.rewrite(path, change)

    return harm


def foreign_archive(root: Path, model: Model, other: Model) -> None:
    corruptors.copy_over(archive_file(other.root, other), archive_file(root, model))


def swap_archive_with_empty(root: Path, model: Model, _: Model) -> None:
    path = archive_file(root, model)
    corruptors.swap(path, path.with_name("c000000-s0000.parquet"))


def in_file(name: str, change: Callable[[bytes], bytes] | None) -> Harm:
    def harm(root: Path, model: Model, _: Model) -> None:
        if change is None:
            corruptors.delete(root / name)
        else:
            corruptors.rewrite(root / name, change)

    return harm


def no_sessions(root: Path, model: Model, _: Model) -> None:
    for path in (root / "sessions").iterdir():
        path.unlink()


def archive_link(target: str | None) -> Harm:
    def harm(root: Path, model: Model, _: Model) -> None:
        (root / "archive").unlink()
        if target:
            (root / "archive").symlink_to(target)

    return harm


def archive_directory(root: Path, model: Model, _: Model) -> None:
    (root / "archive").unlink()
    (root / "archive").mkdir()
    (root / "archive" / "mine.txt").write_text("not ours")


def unknown_files(root: Path, model: Model, _: Model) -> None:
    for name in (
        "notes.txt",
        "quarantine/x",
        "tmp/x",
        "sessions/x",
        ".archive/x",
        "segments/.nfs0001",
        "journal/.nfs1",
    ):
        (root / name).write_text("not ours")
    (root / ".archive/v000099").mkdir()
    (root / "tmp/s0001").mkdir(exist_ok=True)
    (root / "tmp/s0001/half").write_text("unfinished")


def unknown_segment(root: Path, model: Model, _: Model) -> None:
    (root / "segments/notes.txt").write_text("not ours")


def _middle_start(stream: Stream) -> int:
    return middle(stream)[0]


def _flip_middle(data: bytes, stream: Stream) -> bytes:
    return corruptors.flip(data, 8 * sum(middle(stream)) // 2)


def _flip_last(data: bytes, stream: Stream) -> bytes:
    return corruptors.flip(data, 8 * sum(stream.ranges[-1]) // 2)


def _flip_first(data: bytes, stream: Stream) -> bytes:
    return corruptors.flip(data, 8 * sum(stream.ranges[0]) // 2)


def _zero_header(data: bytes, stream: Stream) -> bytes:
    return corruptors.zero(data, _middle_start(stream), _middle_start(stream) + 8)


def _zero_record(data: bytes, stream: Stream) -> bytes:
    return corruptors.zero(data, *middle(stream))


def _cut_middle(data: bytes, stream: Stream) -> bytes:
    return corruptors.truncate(data, sum(middle(stream)) // 2)


def _cut_between(data: bytes, stream: Stream) -> bytes:
    return corruptors.truncate(data, _middle_start(stream))


def _cut_last(data: bytes, stream: Stream) -> bytes:
    return corruptors.truncate(data, sum(stream.ranges[-1]) // 2)


def _take_out(data: bytes, stream: Stream) -> bytes:
    start, stop = middle(stream)
    return data[:start] + data[stop:]


def _first_over_middle(data: bytes, stream: Stream) -> bytes:
    return corruptors.move(data, *stream.ranges[0], _middle_start(stream))


def _zero_schema(data: bytes, stream: Stream) -> bytes:
    return corruptors.zero(data, 0, stream.ranges[0][0])


def _zeros_behind(data: bytes, _: Stream) -> bytes:
    return corruptors.append(data, bytes(1 << 16))


def _junk_behind(data: bytes, _: Stream) -> bytes:
    return corruptors.append(data, corruptors.junk(5000))


def _twice(data: bytes, _: Stream) -> bytes:
    return corruptors.second_stream(data, data)


def _nothing(data: bytes, _: Stream) -> bytes:
    return b""


STREAM_CHANGES: dict[str, Callable[[bytes, Stream], bytes]] = {
    "a bit of the first record": _flip_first,
    "a bit of a middle record": _flip_middle,
    "a bit of the last record": _flip_last,
    "first eight bytes of a middle record zeroed": _zero_header,
    "a middle record zeroed": _zero_record,
    "cut in a middle record": _cut_middle,
    "cut between two records": _cut_between,
    "cut in the last record": _cut_last,
    "a middle record taken out": _take_out,
    "the first record over a middle one": _first_over_middle,
    "schema zeroed": _zero_schema,
    "64 KiB of zeros behind": _zeros_behind,
    "junk behind": _junk_behind,
    "a second stream behind the end mark": _twice,
    "empty": _nothing,
}


def _flip_footer(data: bytes) -> bytes:
    return corruptors.flip(data, 8 * (len(data) - 40))


def _flip_page(data: bytes) -> bytes:
    return corruptors.flip(data, 8 * (len(data) // 4))


NAMED: dict[str, Harm] = {
    **{f"segment: {name}": in_segment(change) for name, change in STREAM_CHANGES.items()},
    **{f"carried segment: {name}": in_segment(change, "carried") for name, change in STREAM_CHANGES.items()},
    **{f"journal's last part: {name}": in_journal(change) for name, change in STREAM_CHANGES.items()},
    **{f"journal's first part: {name}": in_journal(change, 0) for name, change in STREAM_CHANGES.items()},
    "segments: two swapped": swap_segments,
    "segments: another bank's": foreign_segment,
    "segments: all of another bank's": foreign_segments_all,
    "segments: one under a second name": second_name,
    "segments: one deleted": lambda root, model, _: corruptors.delete(root / "segments" / pick(model, "own")),
    "segments: carried one deleted": lambda root, model, _: corruptors.delete(
        root / "segments" / pick(model, "carried")
    ),
    "segments: a file of no known name": unknown_segment,
    "journal: first and last part swapped": swap_journal,
    "journal: another bank's": foreign_journal,
    "journal: all deleted": drop_journal(None),
    "journal: first part deleted": drop_journal(0),
    "journal: last part deleted": drop_journal(-1),
    "archive: a bit of a page": in_archive(_flip_page),
    "archive: a bit of the footer": in_archive(_flip_footer),
    "archive: cut": in_archive(lambda data: data[: len(data) // 2]),
    "archive: a file deleted": in_archive(None),
    "archive: another bank's file": foreign_archive,
    "archive: swapped with the empty one": swap_archive_with_empty,
    "archive link: deleted": archive_link(None),
    "archive link: elsewhere": archive_link("/tmp"),
    "archive link: a loop": archive_link("archive"),
    "archive link: a directory": archive_directory,
    "LOCK: a bit": in_file("LOCK", lambda data: corruptors.flip(data, 100)),
    "LOCK: empty": in_file("LOCK", lambda data: b""),
    "LOCK: deleted": in_file("LOCK", None),
    "claim: a bit of the last": in_file("sessions/0002", lambda data: corruptors.flip(data, 100)),
    "claim: last empty": in_file("sessions/0002", lambda data: b""),
    "claim: last deleted": in_file("sessions/0002", None),
    "claim: first deleted": in_file("sessions/0001", None),
    "claims: all deleted": no_sessions,
    "manifest: a bit": in_file("MANIFEST.json", lambda data: corruptors.flip(data, 1003)),
    "manifest: cut": in_file("MANIFEST.json", lambda data: data[:200]),
    "manifest: empty": in_file("MANIFEST.json", lambda data: b""),
    "manifest: deleted": in_file("MANIFEST.json", None),
    "unknown files": unknown_files,
}


def at_random(picked: random.Random, root: Path, model: Model, other: Model) -> str:
    """Do one thing to one file; say what."""
    paths = BankPaths(root)
    files = [root / "segments" / name for name in model.segments] + [root / "journal" / name for name in model.journal]
    files += [archive_file(root, model), paths.manifest, paths.lock, paths.claim(1), paths.claim(2)]
    path = picked.choice(files)
    data = path.read_bytes()
    start = picked.randrange(len(data))
    stop = min(start + picked.choice([1, 8, 100, 4096]), len(data))
    match picked.choice(["flip", "flip", "flip", "truncate", "zero", "junk", "second", "move", "copy", "delete"]):
        case "flip":
            bit = picked.randrange(8 * len(data))
            corruptors.rewrite(path, partial(corruptors.flip, bit=bit))
            return f"bit {bit} of {path.name}"
        case "truncate":
            corruptors.rewrite(path, partial(corruptors.truncate, length=start))
            return f"{path.name} cut at {start}"
        case "zero":
            corruptors.rewrite(path, partial(corruptors.zero, start=start, stop=stop))
            return f"{path.name}: zeros in {start} … {stop}"
        case "junk":
            corruptors.rewrite(path, partial(corruptors.append, tail=corruptors.junk(stop - start, start)))
            return f"{path.name}: {stop - start} bytes of junk behind"
        case "second":
            source = picked.choice(files)
            corruptors.rewrite(path, partial(corruptors.second_stream, other=source.read_bytes()))
            return f"{source.name} behind the end of {path.name}"
        case "move":
            to = picked.randrange(len(data)) // 8 * 8
            corruptors.rewrite(path, partial(corruptors.move, start=start, stop=stop, to=to))
            return f"{path.name}: {start} … {stop} over {to}"
        case "copy":
            source = picked.choice([*files, other.root / "segments" / pick(other, "own")])
            corruptors.copy_over(source, path)
            return f"{source.name} over {path.name}"
    corruptors.delete(path)
    return f"{path.name} deleted"
