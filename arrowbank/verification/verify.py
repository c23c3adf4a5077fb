"""``verify``: whether a bank is whole. Writes nothing, takes no lock, and bears with a trainer that is at work.

A trainer changes files while they are read. So what looks damaged is looked at again, and is called damage only when
two looks in a row say the same.
"""

from __future__ import annotations

import errno
import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arrowbank.durable.layout import BankPaths
from arrowbank.durable.manifest import Manifest, data_without_manifest, read_manifest
from arrowbank.durable.recovery import State
from arrowbank.errors import (
    ArrowbankError,
    BankNotFoundError,
    CorruptionError,
    CorruptManifestError,
    FormatVersionError,
)
from arrowbank.verification.archived import ArchiveCheck, Rows, check_archive, wanted_files
from arrowbank.verification.live import LiveCheck, Quarantined, check_live, check_quarantine, check_superseded
from arrowbank.verification.places import KnownPaths, check_archive_link, check_places, check_sessions, status_of
from arrowbank.verification.rebuild import Rebuilt, UnclearError, is_old_copy, rebuild
from arrowbank.verification.report import Counts, Finding, Mending, VerifyReport, damage, distinct

__all__ = ["Look", "Looker", "Progress", "verify"]

_PATIENCE_S = 60.0
"""Within which a look may begin again; beyond it, too, there are as many as ``_LOOKS``."""
_LOOKS = 10
_PAUSE_S = 0.01
"""Before the second look; twice as long before each further one, up to ``_LONGEST_PAUSE_S``."""
_LONGEST_PAUSE_S = 0.5
Progress = Callable[[int, int], None]
"""Is told how many bytes have been read, and of how many."""


def verify(path: str | Path, *, on_progress: Progress | None = None) -> VerifyReport:
    """Check everything in the bank at ``path``, which may be in use, and return what was found; nothing is written.

    Every seal, number and place of records, every digest, footer and count of archived files, the manifest and all
    that it names, what the journal says of groups and files, claims, LOCK, links; and that each group is there once.
    Damage does not raise. Needs no lock. Memory: as an open, and sixteen bytes for each archived group.

    on_progress: is told how many bytes have been read, and of how many.
    Raises: BankNotFoundError, FormatVersionError, SchemaMismatchError; OSError where a file may not be read;
    ArrowbankError when the bank never stood still long enough.
    """
    started = time.monotonic()
    look = Looker(path, on_progress).settled()
    return VerifyReport(str(path), look.findings, look.counts, look.holder, time.monotonic() - started)


@dataclass(slots=True)
class Look:
    """What one reading of a bank found."""

    manifest: Manifest | None
    """The one that counts, or the one that can be made again; None when there is neither."""
    rebuilt: Rebuilt | None = None
    """Set when the manifest is lost, and can be made again."""
    findings: tuple[Finding, ...] = ()
    counts: Counts = field(default_factory=Counts)
    holder: str = ""
    state: State | None = None
    """Journals and live segments, where they could be read."""
    archive: ArchiveCheck = field(default_factory=ArchiveCheck)
    quarantined: Quarantined = field(default_factory=Quarantined)

    @property
    def damage(self) -> frozenset[Finding]:
        """What makes the bank damaged."""
        return frozenset(found for found in self.findings if found.is_damage)


class Looker:
    """Looks at one bank, as often as it takes."""

    def __init__(self, path: str | Path, on_progress: Progress | None = None) -> None:
        """Raises BankNotFoundError where there is no bank; FormatVersionError, SchemaMismatchError."""
        self.paths = KnownPaths.at(path)
        self._on_progress = on_progress or (lambda done, total: None)
        self._cache: dict[Any, Finding | Rows] = {}
        self._done = self._total = 0
        if self.paths.root.exists() and not self.paths.root.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "a bank is a directory, and this is none", os.fspath(path))
        if not os.path.lexists(self.paths.manifest) and not _looks_like_a_bank(self.paths):
            raise BankNotFoundError(f"{self.paths.root}: no bank here (no MANIFEST.json)")

    def settled(self) -> Look:
        """Look until what is found is no trick of the moment."""
        before: frozenset[Finding] | None = None
        started = time.monotonic()
        pause = _PAUSE_S
        for attempt in itertools.count():
            if attempt >= _LOOKS and time.monotonic() - started > _PATIENCE_S:
                break
            if attempt:
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            try:
                look = self.look()
            except FileNotFoundError:  # taken away by whoever is at work
                before = None
                continue
            if not look.damage or look.damage == before:
                return look
            before = look.damage
        raise ArrowbankError(
            f"{self.paths.root}: the bank changed at each of {attempt} looks; verify it again, when its trainer rests"
        )

    def look(self) -> Look:
        """Read all of it once. Raises FileNotFoundError when a file goes meanwhile."""
        manifest, rebuilt, findings = self._manifest()
        look = Look(manifest, rebuilt)
        findings += check_places(self.paths, manifest)
        told, look.holder = check_sessions(self.paths)
        findings += told
        look.quarantined = check_quarantine(self.paths)
        findings += look.quarantined.findings
        if manifest is not None:
            findings += check_archive_link(self.paths, manifest)
            findings += self._contents(look, manifest)
        look.findings = distinct(findings)
        return look

    def _contents(self, look: Look, manifest: Manifest) -> list[Finding]:
        """Read what the manifest names, and the rest."""
        self._measure(manifest)
        look.archive = check_archive(self.paths, manifest, self._cache, self._advance)
        parts: list[LiveCheck] = [
            check_live(self.paths, manifest, look.archive, look.quarantined, self._passed),
            check_superseded(self.paths, manifest, self._passed),
        ]
        look.state = parts[0].state
        look.counts = Counts(files=1) + look.archive.counts + parts[0].counts + parts[1].counts
        return [*look.archive.findings, *parts[0].findings, *parts[1].findings]

    def _manifest(self) -> tuple[Manifest | None, Rebuilt | None, list[Finding]]:
        try:
            manifest = read_manifest(self.paths)
        except (CorruptionError, FormatVersionError, BankNotFoundError) as error:
            return self._without_manifest(error)
        later = is_old_copy(self.paths, manifest)
        if later is None:
            return manifest, None, []
        reason = f"an old copy, of commit {manifest.commit}: {later} is in the archive"
        return self._without_manifest(CorruptManifestError(self.paths.manifest, reason))

    def _without_manifest(
        self, error: CorruptionError | FormatVersionError | BankNotFoundError
    ) -> tuple[Manifest | None, Rebuilt | None, list[Finding]]:
        """See what can be made of a bank whose manifest cannot be believed."""
        reason = error.reason if isinstance(error, CorruptionError) else str(error)
        if isinstance(error, BankNotFoundError):
            reason = "missing"
        try:
            rebuilt = rebuild(self.paths)
        except UnclearError as unclear:
            if isinstance(error, FormatVersionError):
                raise error from None
            advice = f"Put a copy of it back: repair cannot make it again, since {unclear}"
            return None, None, [damage("MANIFEST.json", reason, advice)]
        return rebuilt.manifest, rebuilt, [damage("MANIFEST.json", reason, rebuilt.how, Mending.REPAIR)]

    def _measure(self, manifest: Manifest) -> None:
        directory = self.paths.version(manifest.version)
        archived = [directory / file.name for file in wanted_files(manifest)]
        streams = [self.paths.segments / str(name) for name in self.paths.segment_names()]
        streams += [self.paths.journal / str(name) for name in self.paths.journal_names()]
        self._done, self._total = 0, sum(map(_size, (*archived, *streams)))

    def _passed(self, name: str) -> None:
        """A stream was read."""
        path = self.paths.segments / name
        self._advance(_size(path) or _size(self.paths.journal / name))

    def _advance(self, nbytes: int) -> None:
        self._done = min(self._done + nbytes, self._total)
        self._on_progress(self._done, self._total)


def _looks_like_a_bank(paths: BankPaths) -> bool:
    """Whether a directory without a manifest has something of a bank's in it: then that is missing."""
    ours = (paths.segments, paths.journal, paths.versions)
    return any(map(os.path.lexists, ours)) and data_without_manifest(paths) is not None


def _size(path: Path) -> int:
    status = status_of(path)
    return 0 if status is None else status.st_size
