"""What lies where in a bank: kinds of files, strangers among them, leftovers, claims, LOCK, ``archive``. Reading only.

What an open refuses, or what readers of ``archive/*.parquet`` would trip over, is damage; anything else that arrowbank
did not put there is a note.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from arrowbank.archive.parquet import is_of_bank
from arrowbank.durable.layout import ArchiveName, BankPaths, JournalName, SegmentName
from arrowbank.durable.manifest import Manifest
from arrowbank.durable.session import Holder, read_claim, read_lock
from arrowbank.errors import CorruptionError
from arrowbank.verification.report import Finding, Mending, damage, note, printable

__all__ = ["KnownPaths", "check_archive_link", "check_places", "check_sessions", "status_of", "strangers"]

_MOVED = "repair moves it into quarantine/"
_BEHIND_LINK = "Put the directory itself in its place: repair does not follow links, nor take it from behind one"
_ROOT = {"MANIFEST.json", "LOCK", "sessions", "segments", "journal", "archive", ".archive", "quarantine", "tmp"}


class KnownPaths(BankPaths):
    """The places inside one bank, for whoever reads past files that are none of arrowbank's: these are told apart."""

    def segment_names(self) -> list[SegmentName]:
        """The segments that are there, oldest first."""
        return sorted(_known(self.segments, SegmentName.parse))

    def journal_names(self) -> list[JournalName]:
        """The parts of the journal that are there, oldest first."""
        return sorted(_known(self.journal, JournalName.parse))


def check_places(paths: BankPaths, manifest: Manifest | None) -> Iterator[Finding]:
    """Tell of everything that is not where, or not what, it should be."""
    for path, reason in strangers(paths, manifest):
        if _leads_to_a_directory(path) and path in paths.directories:
            yield damage(_name(paths, path), reason, _BEHIND_LINK)
        else:
            yield damage(_name(paths, path), reason, _MOVED, Mending.REPAIR)
    for path in _unknown(paths):
        yield note(_name(paths, path), "not arrowbank's; it is left alone")
    if manifest is not None:
        yield from _leftovers_of_commits(paths, manifest)
    yield from _leftovers(paths)


def strangers(paths: BankPaths, manifest: Manifest | None) -> Iterator[tuple[Path, str]]:
    """Yield what stands in the way of an open or of readers of the archive, and why it is not arrowbank's."""
    for directory in paths.directories:
        yield from _unless(directory, stat.S_ISDIR, "a directory")
    for path in (paths.manifest, paths.lock, *map(paths.claim, paths.claimed_sessions())):
        yield from _unless(path, stat.S_ISREG, "a file")
    for path in (*map(paths.version, paths.version_numbers()), *map(paths.session_tmp, paths.tmp_sessions())):
        yield from _unless(path, stat.S_ISDIR, "a directory")
    yield from _unless(paths.archive, stat.S_ISLNK, "a symbolic link, which is made anew")
    for directory, parse in ((paths.segments, SegmentName.parse), (paths.journal, JournalName.parse)):
        for entry in _entries(directory):
            if parse(entry.name) is None and not entry.name.startswith("."):
                yield entry, "not a file that arrowbank writes here"
            elif parse(entry.name) is not None:
                yield from _unless(entry, stat.S_ISREG, "a file")
    listed = _listed(manifest)
    for entry in _entries(paths.version(manifest.version)) if manifest else ():
        if ArchiveName.parse(entry.name) is not None:
            yield from _unless(entry, stat.S_ISREG, "a file")
            is_file = entry.name not in listed and _is(entry, stat.S_ISREG)
            if manifest and is_file and is_of_bank(entry, manifest.bank_id) is False:
                yield entry, "not a file of this bank's archive, and whoever globs archive/*.parquet reads it"
        elif entry.name.endswith(".parquet"):
            yield entry, "not a file of the archive, and whoever globs archive/*.parquet reads it"


def check_archive_link(paths: BankPaths, manifest: Manifest) -> Iterator[Finding]:
    """``archive`` points at the version that the manifest names; after a kill it may be one version late."""
    right, repoints = f".archive/v{manifest.version:06d}", "repair points it there"
    kind = _kind(paths.archive)
    if kind is None:
        yield damage("archive", f"missing: it should point at {right}", repoints, Mending.REPAIR)
    elif stat.S_ISLNK(kind):
        target = os.readlink(paths.archive)
        older = {f".archive/v{number:06d}" for number in paths.version_numbers() if number < manifest.version}
        if target in older:
            reason = f"points at {target}, the version before {right}, as a kill leaves it"
            yield note("archive", reason, repoints, Mending.REPAIR)
        elif target != right:
            yield damage("archive", f"points at {printable(target)}, not at {right}", repoints, Mending.REPAIR)


def check_sessions(paths: BankPaths) -> tuple[list[Finding], str]:
    """Tell what is wrong with claims and LOCK, and who holds the bank."""
    numbers = [number for number in paths.claimed_sessions() if _is(paths.claim(number), stat.S_ISREG)]
    newest = numbers[-1] if numbers else 0
    found: list[Finding] = []
    holder = None
    for number in numbers:
        holder, wrong = _claim(paths, number, newest)
        found += wrong
    used = max(paths.used_sessions(), default=0)
    if used > newest:
        claimed = f"the newest claim is session {newest}'s" if newest else "no claim is there"
        reason = f"{claimed}, and there are files of session {used}: claims are missing"
        found.append(damage("sessions", reason, "repair claims the next number", Mending.REPAIR))
    gaps = sorted(set(range(1, newest)) - set(numbers))[:3] if newest <= _MANY else []
    if gaps:
        found.append(note("sessions", f"claims are missing, of session {gaps[0]} for one; nothing depends on them"))
    if _is(paths.lock, stat.S_ISREG) or _kind(paths.lock) is None:
        found += _lock(paths, holder, newest)
    return found, _holder(paths, holder)


_MANY = 10**6


def _claim(paths: BankPaths, number: int, newest: int) -> tuple[Holder | None, list[Finding]]:
    """A claim that says nothing still fences those before it, so it stays; who the holder is depends on the newest."""
    name = f"sessions/{number:04d}"
    try:
        holder, reason = read_claim(paths, number), "the claim does not say who made it"
    except CorruptionError as error:
        holder, reason = None, error.reason
    if holder is not None and holder.session == number:
        return holder, []
    if number < newest:
        return None, [note(name, reason, "Nothing depends on what it says, only on its being there")]
    return None, [damage(name, reason, "repair claims the next number", Mending.REPAIR)]


def _lock(paths: BankPaths, holder: Holder | None, newest: int) -> Iterator[Finding]:
    """LOCK repeats the newest claim; who was killed in between has left it one claim late."""
    advice = "repair writes it anew"
    if _kind(paths.lock) is None:
        if newest:
            yield damage("LOCK", "missing", advice, Mending.REPAIR)
        return
    try:
        lock = read_lock(paths)
    except CorruptionError as error:
        yield damage("LOCK", error.reason, advice, Mending.REPAIR)
        return
    if lock is None or "closed" not in lock.model_fields_set:
        yield damage("LOCK", "it does not say who has the bank", advice, Mending.REPAIR)
    elif lock.holder.session > newest:
        yield damage("LOCK", f"of session {lock.holder.session}, whose claim is missing", advice, Mending.REPAIR)
    elif holder is not None and lock.holder.session == newest and lock.holder != holder:
        yield damage("LOCK", f"says other things than sessions/{newest:04d}", advice, Mending.REPAIR)


def _holder(paths: BankPaths, holder: Holder | None) -> str:
    try:
        lock = read_lock(paths)
    except CorruptionError:
        lock = None
    if holder is None and lock is not None and not lock.closed:
        holder = lock.holder
    if holder is None:
        return "nobody, as far as can be told"
    if lock is not None and lock.closed and lock.holder.session == holder.session:
        return f"nobody: session {holder.session} closed it"
    gone = holder.is_gone()
    state = {True: "gone without closing", False: "alive", None: "not known from here whether it lives"}[gone]
    return f"{holder}, {state}"


def _leftovers_of_commits(paths: BankPaths, manifest: Manifest) -> Iterator[Finding]:
    """What a kill has left of commits that did not come to be, or were not tidied up."""
    advice = "The next open takes it away; into quarantine/, while anything is missing of which it may be the last copy"
    reason, listed = "the manifest does not name it: left by a kill", _listed(manifest)
    for entry in _entries(paths.version(manifest.version)):
        is_ours = ArchiveName.parse(entry.name) is not None and entry.name not in listed
        if is_ours and is_of_bank(entry, manifest.bank_id):
            yield note(_name(paths, entry), reason, advice, Mending.REPAIR)
    for name in _known(paths.segments, SegmentName.parse):
        if name.is_carried and str(name) not in manifest.carried and str(name) not in manifest.retired:
            yield note(f"segments/{name}", reason, advice, Mending.REPAIR)


def _listed(manifest: Manifest | None) -> set[str]:
    return {str(ArchiveName(0, 0)), *(file.name for file in (manifest.files if manifest else ()))}


def _leftovers(paths: BankPaths) -> Iterator[Finding]:
    newest = max(paths.claimed_sessions(), default=0)
    for number in paths.tmp_sessions():
        directory = paths.session_tmp(number)
        if _is(directory, stat.S_ISDIR) and next(iter(_entries(directory)), None) is not None:
            is_old = number < newest or _is_free(paths, newest)
            reason = f"unfinished files of session {number}" + (", which has ended" if is_old else ", which is at it")
            advice, mending = ("The next open takes them away", Mending.REPAIR) if is_old else ("", Mending.NONE)
            yield note(_name(paths, directory), reason, advice, mending)


def _is_free(paths: BankPaths, newest: int) -> bool:
    """Whether the newest session has ended, as far as that can be told from here at once."""
    try:
        holder, lock = read_claim(paths, newest), read_lock(paths)
    except CorruptionError:
        return False
    closed = lock is not None and lock.closed and lock.holder.session == newest
    return closed or (holder is not None and holder.is_gone() is True)


def _unknown(paths: BankPaths) -> Iterator[Path]:
    for entry in _entries(paths.root):
        if entry.name not in _ROOT:
            yield entry
    claims = {paths.claim(number) for number in paths.claimed_sessions()}
    versions = {paths.version(number) for number in paths.version_numbers()}
    unfinished = {paths.session_tmp(number) for number in paths.tmp_sessions()}
    for directory, known in ((paths.sessions, claims), (paths.versions, versions), (paths.tmp, unfinished)):
        yield from (entry for entry in _entries(directory) if entry not in known)


def _known(directory: Path, parse: Callable[[str], Any]) -> Iterator[Any]:
    for entry in _entries(directory):
        name = parse(entry.name)
        if name is not None and _is(entry, stat.S_ISREG):
            yield name


def _entries(directory: Path) -> list[Path]:
    """What is in a directory, unless that is a link or no directory."""
    if not _is(directory, stat.S_ISDIR):
        return []
    try:
        return sorted(directory.iterdir())
    except FileNotFoundError:
        return []


def _unless(path: Path, is_kind: Callable[[int], bool], what: str) -> Iterator[tuple[Path, str]]:
    mode = _kind(path)
    if mode is not None and not is_kind(mode):
        found = "a symbolic link" if stat.S_ISLNK(mode) else "not what belongs there"
        yield path, f"{found}: arrowbank only ever makes {what} here"


def _is(path: Path, is_kind: Callable[[int], bool]) -> bool:
    mode = _kind(path)
    return mode is not None and is_kind(mode)


def status_of(path: Path) -> os.stat_result | None:
    """Return what stands at a path, a link itself; None when nothing does, or it cannot be got to. Raises OSError."""
    try:
        return path.lstat()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return None
        raise


def _kind(path: Path) -> int | None:
    status = status_of(path)
    return None if status is None else status.st_mode


def _leads_to_a_directory(path: Path) -> bool:
    try:
        return path.is_symlink() and path.is_dir()
    except OSError:  # a loop
        return False


def _name(paths: BankPaths, path: Path) -> str:
    return printable(str(path.relative_to(paths.root)))
