"""The archive's files: version directories, what is in them, and the commits that change them.

``archive`` points at one version directory, which holds only complete Parquet files. A commit that only adds renames
its file into that directory and then replaces the manifest. One that also takes files out makes the next version
directory, of hard links, replaces the manifest and then repoints ``archive``, so that a glob sees every rollout once.
A file that the manifest does not name was left by a crash in between; its inputs are still live, so it is removed at
open: into quarantine/, when anything is missing of which it may be the last copy.
"""

from __future__ import annotations

import contextlib
import itertools
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from arrowbank.archive.parquet import is_of_bank, write_parquet
from arrowbank.durable import files, quarantine
from arrowbank.durable.layout import ArchiveName, BankPaths, JournalName, SegmentName
from arrowbank.durable.manifest import ArchiveFile, Manifest, read_manifest, write_manifest
from arrowbank.errors import ArrowbankError, CorruptionError, CorruptManifestError

__all__ = ["ArchiveStore", "Change", "create_bank"]

_KEPT = "left by a kill, and kept, since something is missing of which it may be the last copy"
_EMPTY = str(ArchiveName(0, 0))
"""The file without rows."""


def create_bank(paths: BankPaths, manifest: Manifest, tmp: Path) -> None:
    """Make an archive of one file without rows, then the manifest, which makes it a bank."""
    directory = paths.version(manifest.version)
    files.make_directories([directory])
    write_parquet(tmp / _EMPTY, [])
    with contextlib.suppress(FileExistsError):  # of an attempt that a kill cut short, or somebody who is faster
        files.publish(tmp / _EMPTY, directory / _EMPTY)
    _point(paths, tmp, manifest.version)
    write_manifest(paths, manifest, tmp)


@dataclass(frozen=True, slots=True)
class Change:
    """What one commit does."""

    file: ArchiveFile | None = None
    """A Parquet file made under tmp/."""
    replaced: tuple[str, ...] = ()
    """Parquet files that leave the archive."""
    retired: tuple[SegmentName, ...] = ()
    """Segments that the files made here take the place of."""
    carried: tuple[SegmentName, ...] = ()
    """Segments made under tmp/."""
    archived_through: int | None = None


class ArchiveStore:
    """Commits changes of what is archived and what is carried. Its owner serialises calls."""

    def __init__(self, paths: BankPaths, manifest: Manifest, session: int, check_fence: Callable[[], None]) -> None:
        self.paths = paths
        self.manifest = manifest
        self.session = session
        self.tmp = paths.session_tmp(session)
        self._check_fence = check_fence
        self._numbers = itertools.count()
        self.unfinished: OSError | None = None
        """What kept the last commit from being tidied up."""
        self._unlinked: frozenset[str] = frozenset()
        """Retired segments whose unlinking is durable: the next commit need not name them any more."""

    def target(self) -> Path:
        """Where the next commit's file is to be written."""
        return self.tmp / str(ArchiveName(self.manifest.commit + 1, self.session))

    def next_number(self) -> int:
        """Return a number for a carried segment that this session has not used."""
        return next(self._numbers)

    def settle(self, *, is_whole: bool) -> None:
        """At open: finish what a crash cut short. What the manifest does not name goes, and the link is set right.

        is_whole: whether what is not archived is all there. If it is not, or a file of the archive is missing, what
        would go may be the last copy of something, and lies in quarantine/ afterwards.
        Raises: CorruptionError, FencedError, OSError.
        """
        directory = self.paths.version(self.manifest.version)
        unlisted = self._unlisted(directory)
        strays = [self.paths.segments / str(name) for name in self.paths.segment_names() if self._is_stray(name)]
        self._set_link()
        if is_whole and all(_size(directory / file.name) == file.nbytes for file in self.manifest.files):
            self._remove(unlisted, directory)
            self._remove(strays, self.paths.segments)
            self._clean_up(self.manifest, self.manifest.retired)
            return
        retired = [self.paths.segments / name for name in self.manifest.retired]
        parts = [self.paths.journal / str(name) for name in self._superseded(self.manifest)]
        versions = [self.paths.version(number) for number in self._other_versions(self.manifest)]
        self._check_fence()
        for path in (*unlisted, *strays, *retired, *parts, *versions):
            if path.exists():
                quarantine.move_aside(self.paths, path, _KEPT, self.tmp)
        self._unlinked = frozenset(self.manifest.retired)

    def _unlisted(self, directory: Path) -> list[Path]:
        """Return what a crash has left of a commit that did not come to be; its inputs are live.

        A file of a later commit than the next is none of these: then the manifest is an old copy. Other names, and
        files of other banks, are not ours to touch.
        """
        try:
            entries = list(directory.iterdir())
        except FileNotFoundError:
            raise CorruptionError(
                directory, "the archive's files are gone with their directory", hint="Put it back from a copy"
            ) from None
        listed = {file.name for file in self.manifest.files} | {_EMPTY}
        found = []
        for entry in entries:
            name = ArchiveName.parse(entry.name)
            if name is None or entry.name in listed or not is_of_bank(entry, self.manifest.bank_id):
                continue
            if name.commit > self.manifest.commit + 1:
                raise CorruptManifestError(
                    self.paths.manifest,
                    f"of commit {self.manifest.commit}, but {entry.name} is in the archive: an old copy",
                    hint="Put the newest MANIFEST.json back. Nothing was changed",
                )
            found.append(entry)
        return found

    def _is_stray(self, name: SegmentName) -> bool:
        return name.is_carried and str(name) not in self.manifest.carried and str(name) not in self.manifest.retired

    def commit(self, change: Change, roll: Callable[[], JournalName] | None = None) -> None:
        """Publish what was made under tmp/ and replace the manifest.

        roll: begins a new part of the journal that sums up the bank as it is after this commit.

        Durability: on return the files and the manifest that names them survive power loss, unless ``unfinished`` says
        otherwise. Inputs of earlier commits are unlinked then, those of this one by the next commit, so that readers
        holding the old manifest can go on.
        Raises: OSError, FencedError; then nothing has changed. Once the manifest is replaced it does not raise OSError
        any more, since the owner must take note: what is left undone is in ``unfinished``, and the next commit does it.
        """
        old = self.manifest
        self._check_fence()
        self._require_known_manifest()
        try:
            new = self._publish(change, roll)
            failure = self._replace_manifest(new)
        except BaseException:
            self._take_back(change)
            raise
        self.manifest, self.unfinished = new, failure
        if failure is None:
            self.tidy(old)

    def _publish(self, change: Change, roll: Callable[[], JournalName] | None) -> Manifest:
        """Give names to what was made under tmp/; return the manifest that will make it count."""
        for name in change.carried:
            files.publish(self.tmp / str(name), self.paths.segments / str(name))
        version = self._new_version(change) if change.replaced else self.manifest.version
        if change.file is not None:
            path = self.paths.version(version) / change.file.name
            files.discard(path)  # of an attempt of this session that failed, and could not be taken back
            files.publish(self.tmp / change.file.name, path)
        return self._changed(change, version, roll)

    def _replace_manifest(self, new: Manifest) -> OSError | None:
        """Return what failed after the manifest was replaced: only whether that survives a power cut is open then."""
        try:
            write_manifest(self.paths, new, self.tmp)
        except OSError as error:
            if read_manifest(self.paths) != new:
                raise
            return error
        return None

    def _take_back(self, change: Change) -> None:
        """Remove what a commit that failed has published, as far as that is possible: open does the rest."""
        with contextlib.suppress(OSError, ArrowbankError):
            if read_manifest(self.paths) == self.manifest:
                for name in change.carried:
                    files.discard(self.paths.segments / str(name))
                if change.file is not None and not change.replaced:
                    files.discard(self.paths.version(self.manifest.version) / change.file.name)
        self.discard_unfinished()

    def discard_unfinished(self) -> None:
        """Remove what was being made for a commit that will not be: on a full disk it takes the last room."""
        with contextlib.suppress(OSError):
            for entry in list(self.tmp.iterdir()):
                segment = SegmentName.parse(entry.name)
                if ArchiveName.parse(entry.name) is not None or (segment is not None and segment.is_carried):
                    files.discard(entry)

    def tidy(self, old: Manifest | None = None) -> None:
        """Do what a commit leaves to be done: set the link, remove what is older than the manifest before."""
        self.unfinished = None
        try:
            self._set_link()
            before = [name for name, at in self.manifest.retired.items() if at < self.manifest.commit]
            self._clean_up(old or self.manifest, before)
        except OSError as error:
            self.unfinished = error

    def _require_known_manifest(self) -> None:
        """An interrupted commit may have left another manifest than this handle knows: do not go on from that."""
        if read_manifest(self.paths) != self.manifest:
            raise CorruptManifestError(
                self.paths.manifest, "not the one that this handle wrote last", hint="Open the bank again"
            )

    def finish(self) -> None:
        """Commit until nothing retired is left behind: at the end of a run."""
        while self.manifest.retired and self.unfinished is None:
            self.commit(Change())

    def _changed(self, change: Change, version: int, roll: Callable[[], JournalName] | None) -> Manifest:
        old = self.manifest
        commit = old.commit + 1
        kept = [file for file in old.files if file.name not in change.replaced]
        retired = {name: at for name, at in old.retired.items() if name not in self._unlinked}
        leaving = set(map(str, change.retired))
        through = old.archived_through if change.archived_through is None else change.archived_through
        return old.model_copy(
            update={
                "commit": commit,
                "version": version,
                "files": (*kept, change.file) if change.file else tuple(kept),
                "archived_through": through,
                "journal": str(roll()) if roll is not None else old.journal,
                "carried": (*(name for name in old.carried if name not in leaving), *map(str, change.carried)),
                "retired": retired | dict.fromkeys(sorted(leaving), commit),
            }
        )

    def _new_version(self, change: Change) -> int:
        """Make the next version directory, of hard links to the files that stay."""
        old = self.paths.version(self.manifest.version)
        version = max([self.manifest.version, *self.paths.version_numbers()]) + 1
        unfinished = self.tmp / self.paths.version(version).name
        files.begin_directory(unfinished)
        kept = [file.name for file in self.manifest.files if file.name not in change.replaced]
        for name in (_EMPTY, *kept):
            if not (old / name).is_file():
                raise CorruptionError(
                    old / name, "the manifest names this file, and it is not there", hint="Put it back from a copy"
                )
            files.link(old / name, unfinished / name)
        files.publish_directory(unfinished, self.paths.version(version))
        return version

    def _set_link(self) -> None:
        """Point ``archive`` at the manifest's version, before any directory that it may point at is removed."""
        if not self.paths.archive.is_symlink() or self.paths.archive.readlink() != _target(self.manifest.version):
            _point(self.paths, self.tmp, self.manifest.version)

    def _clean_up(self, manifest: Manifest, retired: Iterable[str]) -> None:
        """Remove what is older than ``manifest``: retired segments, version directories, parts of the journal."""
        gone = frozenset(retired)
        self._remove([self.paths.segments / name for name in gone], self.paths.segments)
        self._unlinked = gone
        versions = self._other_versions(manifest)
        parts = self._superseded(manifest)
        self._remove([self.paths.journal / str(name) for name in parts], self.paths.journal)
        if versions:
            self._check_fence()
            for number in versions:
                files.remove_directory(self.paths.version(number), self.tmp)

    def _other_versions(self, manifest: Manifest) -> list[int]:
        current = {manifest.version, self.manifest.version}
        return [number for number in self.paths.version_numbers() if number not in current]

    def _superseded(self, manifest: Manifest) -> list[JournalName]:
        """Return the parts of the journal that the one which reading starts with has summed up."""
        base = JournalName.parse(manifest.journal)
        return [] if base is None else [name for name in self.paths.journal_names() if name < base]

    def _remove(self, paths: list[Path], directory: Path) -> None:
        if paths:
            self._check_fence()  # after listing: what a later session adds is not ours to remove
            files.remove(paths, directory)


def _size(path: Path) -> int | None:
    """Return how large a file is; None when no file is there."""
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _target(version: int) -> Path:
    return Path(".archive", f"v{version:06d}")


def _point(paths: BankPaths, tmp: Path, version: int) -> None:
    files.repoint(paths.archive, str(_target(version)), tmp)
