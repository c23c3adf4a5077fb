"""What a crash may leave of a traced run: at each moment, which effects must be there, and which may.

A disk here promises what POSIX does and no more: bytes written are there once a sync of their file has returned, names
once a sync of their directory has (of a rename, that of the new name); one name changes in one step. Until then each
effect may be there or not, whatever came before or after it: a write whole, its first half, cut at any sector, or with
sectors of zeros; a file's size with or without its bytes. That is weaker than ext4 and xfs, which keep names in
order: what survives here survives there. A sync that failed promises nothing, and takes away what a later one would
have promised.

A state has a number: moment and choice. The choices of a moment come in a fixed order: nothing of what may be there,
all of it, each alone, all but each, then random ones, whose dice are thrown by seed, moment and choice.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import xxhash

from crash.effects import ROOT, Change, Effect, Fact, Sync, Trace, Write

__all__ = ["Crashes", "Moment", "State", "merged"]

SECTOR = 512
PAGE = 4096
RECENT = 8
"""Of the effects that may be there, so many of the last are tried one by one."""

Node: TypeAlias = bytes | str | None
"""A file's bytes, where a link leads, or a directory."""


@dataclass(frozen=True)
class State:
    """What is on the disk."""

    nodes: dict[str, Node]
    """Path → what is there."""
    told: str
    """Which effects were left out or cut, in words."""

    @cached_property
    def digest(self) -> bytes:
        found = xxhash.xxh3_128()
        for path, node in sorted(self.nodes.items()):
            data = node if isinstance(node, bytes) else str(node).encode()
            found.update(f"{path}\0{type(node).__name__}\0{len(data)}\0".encode())
            found.update(data)
        return found.digest()

    def write(self, root: Path) -> None:
        """Make it, in an empty directory."""
        for path, node in sorted(self.nodes.items()):
            place = os.path.join(root, path)
            if node is None:
                os.mkdir(place)
            elif isinstance(node, str):
                os.symlink(node, place)
            else:
                descriptor = os.open(place, os.O_WRONLY | os.O_CREAT)
                os.write(descriptor, node)
                os.close(descriptor)


@dataclass
class Moment:
    """A moment at which the machine may stop."""

    at: int
    """Effects that began at or before this line of the trace have begun."""
    facts: list[Fact]
    """What had been told."""
    must: list[Effect]
    may: list[Effect]


@dataclass
class Crashes:
    """All the states that crashes of one run may leave."""

    trace: Trace
    seed: str
    moments: list[Moment] = field(init=False)

    def __post_init__(self) -> None:
        effects = merged(self.trace.effects)
        self._order = {id(effect): number for number, effect in enumerate(effects)}
        self.moments = [_moment(effects, at) for at in _moments(effects)]

    def systematic(self, number: int) -> int:
        """How many choices of a moment are not random."""
        recent = min(len(self.moments[number].may), RECENT)
        return 1 if not recent else 2 if recent == 1 else 2 + 2 * recent

    def state(self, number: int, choice: int) -> State:
        """Return the state of a moment, by numbers."""
        moment = self.moments[number]
        kept = self._choose(moment, choice, random.Random(f"{self.seed}/{number}/{choice}"))
        told = [f"{_describe(effect, self.trace)}: {how}" for effect, how in kept if how != "kept"]
        return State(self._build(moment, kept), "; ".join(told))

    def _choose(self, moment: Moment, choice: int, dice: random.Random) -> list[tuple[Effect, str]]:
        """Return what becomes of each effect that may be there."""
        may, recent = moment.may, min(len(moment.may), RECENT)
        if choice < 2:
            return [(effect, "dropped" if choice == 0 else "kept") for effect in may]
        if recent > 1 and choice < 2 + 2 * recent:
            chosen = may[-recent:][(choice - 2) // 2]
            others = "dropped" if choice % 2 == 0 else "kept"
            mine = "kept" if choice % 2 == 0 else "dropped"
            return [(effect, mine if effect is chosen else others) for effect in may]
        keep, spoil = dice.choice((0.1, 0.5, 0.9)), dice.choice((0.0, 0.3, 0.8))
        found = []
        for effect in may:
            how = "kept" if dice.random() < keep else "dropped"
            if isinstance(effect, Write) and dice.random() < spoil:
                how = _spoiled(effect, dice)
            found.append((effect, how))
        return found

    def _build(self, moment: Moment, kept: list[tuple[Effect, str]]) -> dict[str, Node]:
        """Put together what is there: the latest of those effects that are, for each name and each byte."""
        effects = [(effect, "kept") for effect in moment.must] + [one for one in kept if one[1] != "dropped"]
        effects.sort(key=lambda one: self._order[id(one[0])])
        entries = {at: dict(names) for at, names in self.trace.base.items()}
        bytes_of: dict[int, bytearray] = {}
        for effect, how in effects:
            if isinstance(effect, Change):
                for directory, name, inode in effect.entries:
                    names = entries.setdefault(directory, {})
                    if inode is None:
                        names.pop(name, None)
                    else:
                        names[name] = inode
            elif isinstance(effect, Write):
                base = self.trace.inodes[effect.inode].base
                _put(bytes_of.setdefault(effect.inode, bytearray(base)), effect, how)
        return dict(self._walk(ROOT, "", entries, bytes_of))

    def _walk(
        self, directory: int, prefix: str, entries: dict[int, dict[str, int]], bytes_of: dict[int, bytearray]
    ) -> Iterator[tuple[str, Node]]:
        for name, number in entries.get(directory, {}).items():
            inode, path = self.trace.inodes[number], prefix + name
            if inode.kind == "link":
                yield path, inode.target
            elif inode.kind == "file":
                yield path, bytes(bytes_of.get(number, inode.base))
            else:
                yield path, None
                yield from self._walk(number, f"{path}/", entries, bytes_of)


def merged(effects: Iterable[Effect]) -> list[Effect]:
    """Join writes that follow one another, in a file and in time: how many calls they took says nothing."""
    found: list[Effect] = []
    for effect in effects:
        last = found[-1] if found else None
        if (
            isinstance(effect, Write) and isinstance(last, Write) and effect.inode == last.inode
            and last.offset + len(last.data) == effect.offset and last.end < effect.begin
        ):  # fmt: skip
            found[-1] = replace(last, end=effect.end, data=last.data + effect.data)
        else:
            found.append(effect)
    return found


def _moments(effects: list[Effect]) -> list[int]:
    """Return when something changes: an effect begins, a sync returns, a fact is told."""
    return sorted({effect.end if isinstance(effect, Sync) else effect.begin for effect in effects} | {-1})


def _moment(effects: list[Effect], at: int) -> Moment:
    begun = [effect for effect in effects if effect.begin <= at]
    syncs: dict[int, list[Sync]] = {}
    for effect in begun:
        if isinstance(effect, Sync) and effect.end <= at:
            syncs.setdefault(effect.inode, []).append(effect)
    moment = Moment(at, [effect for effect in begun if isinstance(effect, Fact)], [], [])
    for effect in begun:
        if isinstance(effect, Write | Change):
            home = effect.inode if isinstance(effect, Write) else effect.home
            after = next((sync for sync in syncs.get(home, ()) if effect.end < sync.begin), None)
            (moment.may if after is None or after.failed else moment.must).append(effect)
    return moment


# -- what becomes of a write


def _spoiled(write: Write, dice: random.Random) -> str:
    """Return how a write is there in part. Within a sector, eight aligned bytes are whole or not there."""
    if len(write.data) <= 8:
        return dice.choice(("kept", "dropped"))
    unit = dice.choice((8, SECTOR, PAGE))
    first, last = write.offset // unit, (write.offset + len(write.data) - 1) // unit
    match dice.choice(("half", "cut", "zeros", "sectors", "sectors of zeros")):
        case "half":
            return f"first {len(write.data) // 2} bytes"
        case "cut":
            return f"first {max(dice.randint(first, last) * unit - write.offset, 0)} bytes"
        case "zeros":
            return "zeros"
        case how:
            unit = max(unit, SECTOR)
            sectors = range(write.offset // unit, (write.offset + len(write.data) - 1) // unit + 1)
            gone = [sector for sector in sectors if dice.random() < 0.5]
            return f"without {how.replace('sectors', str(unit))} {' '.join(map(str, gone))}"


def _put(data: bytearray, write: Write, how: str) -> None:
    """Write as much as is there."""
    offset, end = write.offset, write.offset + len(write.data)
    if how.startswith("first"):
        end = offset + int(how.split()[1])
    new = write.data[: end - offset]
    if end > len(data) and (new or how == "zeros"):
        data.extend(bytes(end - len(data)))
    if how == "zeros":
        data[offset:end] = bytes(end - offset)
    elif how.startswith("without"):
        _put_sectors(data, write, how)
    else:
        data[offset:end] = new


def _put_sectors(data: bytearray, write: Write, how: str) -> None:
    """Write all but some sectors, which hold zeros, or what they held before."""
    words = how.split()
    unit, zeros = int(words[1]), "zeros" in words
    gone = {int(word) for word in words[2:] if word.isdigit()}
    place, end = write.offset, write.offset + len(write.data)
    while place < end:
        sector = place // unit
        stop = min((sector + 1) * unit, end)
        if sector not in gone:
            data[place:stop] = write.data[place - write.offset : stop - write.offset]
        elif zeros:
            data[place:stop] = bytes(stop - place)
        place = stop


def _describe(effect: Effect, trace: Trace) -> str:
    if isinstance(effect, Write):
        return f"{len(effect.data)} bytes at {effect.offset} of inode {effect.inode}"
    assert isinstance(effect, Change)
    return ", ".join(f"{'no ' if inode is None else ''}{name} (inode {inode})" for _, name, inode in effect.entries)
