"""What ``verify`` and ``repair`` say: findings, each with its place, its reason and what to do, and counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

__all__ = [
    "Counts", "Finding", "Mending", "RepairReport", "Severity", "VerifyReport", "by_iteration", "counted", "damage",
    "distinct", "note", "printable",
]  # fmt: skip


class Severity(StrEnum):
    """How bad it is."""

    DAMAGE = "damage"
    """Bytes that are not what was written, data that is missing, or what an open refuses."""
    NOTE = "note"
    """Expected after a kill, handled before, or none of arrowbank's concern."""


class Mending(StrEnum):
    """What becomes of a finding in ``repair``."""

    NONE = "none"
    REPAIR = "repair"
    ACCEPT = "accept-damage"
    """Mended only when told to accept that something is lost, since a copy may still be put back."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found."""

    severity: Severity
    path: str
    """Relative to the bank."""
    reason: str
    advice: str = ""
    """What to do about it, or what ``repair`` does."""
    offset: int | None = None
    """Bytes from the start of the file, where known."""
    mending: Mending = Mending.NONE
    uids: tuple[str, ...] = ()
    """Groups that it concerns, where known."""
    iteration: int | None = None
    """Of the draw that lacks groups."""

    @property
    def is_damage(self) -> bool:
        """Whether a bank with it is not healthy."""
        return self.severity is Severity.DAMAGE

    def __str__(self) -> str:
        where = self.path if self.offset is None else f"{self.path} at byte {self.offset}"
        return f"{self.severity}: {where}: {self.reason}" + (f". {self.advice}" if self.advice else "")


def damage(path: str, reason: str, advice: str = "", mending: Mending = Mending.NONE, **more: Any) -> Finding:
    """Return a finding that makes a bank damaged."""
    return Finding(Severity.DAMAGE, path, _on_one_line(reason), advice, mending=mending, **more)


def note(path: str, reason: str, advice: str = "", mending: Mending = Mending.NONE, **more: Any) -> Finding:
    """Return a finding that is information."""
    return Finding(Severity.NOTE, path, _on_one_line(reason), advice, mending=mending, **more)


def _on_one_line(reason: str) -> str:
    """What libraries and strangers say may hold line breaks, and what terminals obey."""
    line = " ".join(reason.split())
    return line if line.isprintable() else line.encode("unicode_escape").decode()


@dataclass(frozen=True, slots=True)
class Counts:
    """What was read and found whole."""

    files: int = 0
    records: int = 0
    """Sealed ones, of segments and journals."""
    groups: int = 0
    """Archived and live."""
    rollouts: int = 0
    bytes: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            *(mine + theirs for mine, theirs in zip(asdict(self).values(), asdict(other).values(), strict=True))
        )


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What ``verify`` found. Prints as a few lines."""

    path: str
    findings: tuple[Finding, ...]
    counts: Counts
    holder: str
    """Who has the bank, and whether it lives, as far as can be told."""
    seconds: float

    @property
    def is_healthy(self) -> bool:
        """Whether nothing is damaged; notes do not count."""
        return not self.damage

    @property
    def verdict(self) -> str:
        """ "healthy" or "damaged"."""
        return "healthy" if self.is_healthy else "damaged"

    @property
    def damage(self) -> tuple[Finding, ...]:
        """The findings that make it damaged."""
        return tuple(found for found in self.findings if found.is_damage)

    @property
    def notes(self) -> tuple[Finding, ...]:
        """The findings that are information."""
        return tuple(found for found in self.findings if not found.is_damage)

    def as_json(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        return {
            "path": self.path,
            "verdict": self.verdict,
            "findings": [asdict(found) for found in self.findings],
            "counts": asdict(self.counts),
            "holder": self.holder,
            "seconds": round(self.seconds, 3),
        }

    def __str__(self) -> str:
        counts = ", ".join(f"{count:,} {name}" for name, count in asdict(self.counts).items())
        return "\n".join([f"{self.path}: {self.verdict}", counts, *map(str, self.findings)])


@dataclass(frozen=True, slots=True)
class RepairReport:
    """What ``repair`` did, or with ``dry_run`` would do. Prints as a few lines."""

    path: str
    dry_run: bool
    mended: tuple[Finding, ...]
    """What it found and mended; of each, ``advice`` says how."""
    left: tuple[Finding, ...]
    """Damage that is still there; of each, ``advice`` says what can be done."""
    lost_records: int
    """Records that were acknowledged once, and could not be saved."""
    lost_draws: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """Iteration → groups of its draws that could not be saved."""
    lost_journals: tuple[str, ...] = ()
    """Parts of the journal, in all or part of which there may have been draws, evictions and checkpoints."""
    quarantined: int = 0
    """Places in quarantine/ afterwards."""
    holder: str = ""
    """Who had the bank before."""

    @property
    def is_healthy(self) -> bool:
        """Whether no damage is left."""
        return not self.left

    def as_json(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        return {
            "path": self.path,
            "dry_run": self.dry_run,
            "mended": [asdict(found) for found in self.mended],
            "left": [asdict(found) for found in self.left],
            "lost_records": self.lost_records,
            "lost_draws": {str(at): list(uids) for at, uids in self.lost_draws.items()},
            "lost_journals": list(self.lost_journals),
            "quarantined": self.quarantined,
            "holder": self.holder,
        }

    def __str__(self) -> str:
        verb = "would be mended" if self.dry_run else "mended"
        lines = [f"{self.path}: {len(self.mended)} {verb}, {len(self.left)} left, {self.lost_records} records lost"]
        return "\n".join([*lines, *(f"{verb}: {found}" for found in self.mended), *(f"left: {f}" for f in self.left)])


def by_iteration(findings: Iterable[Finding]) -> dict[int, tuple[str, ...]]:
    """Return, of findings about draws, which groups each iteration lacks."""
    found: dict[int, dict[str, None]] = {}
    for one in findings:
        if one.iteration is not None:
            found.setdefault(one.iteration, {}).update(dict.fromkeys(one.uids))
    return {at: tuple(uids) for at, uids in sorted(found.items())}


def printable(text: str) -> str:
    """Return a name as it may be shown: a stranger's may hold line breaks, and what terminals obey."""
    return text if text.isprintable() else repr(text)


def counted(count: int, word: str) -> str:
    """Return a count with its word, which takes an s unless there is one of it."""
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def distinct(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return each finding once, damage first, in the order of their finding."""
    once = list(Counter(findings))
    return tuple(sorted(once, key=lambda found: not found.is_damage))
