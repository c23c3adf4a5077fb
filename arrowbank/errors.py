"""Every error that arrowbank raises on purpose.

    ArrowbankError
    ├── BankNotFoundError        (also FileNotFoundError)  nothing that could be a bank at this path
    ├── BankLockedError          another coordinator holds the bank; the message names it
    ├── BankClosedError          the handle was closed, or belongs to the process that forked this one
    ├── FencedError              another coordinator took the bank over; this handle can do nothing more
    ├── FormatVersionError       written by a newer arrowbank
    ├── SchemaMismatchError      (also ValueError)  the bank was frozen with another schema
    ├── CorruptionError          damage: carries path, offset, reason, hint
    │   ├── CorruptRecordError
    │   └── CorruptManifestError
    ├── DuplicateGroupError      the group was appended before
    ├── InvalidDrawError         (also ValueError)  a draw or eviction that no trainer could have made
    │   └── UnknownGroupError    no live group of that uid in the bank
    ├── UnrepresentableError     (also ValueError)  a value that could not come back exactly; names the field
    ├── ReplayUnavailableError   draws would have to be replayed, and not all their groups are there any more
    └── HistoryGoneError         only a line that was let go of recorded this checkpoint

``OSError`` passes through with its errno: a full disk is the caller's to see. All errors survive pickling.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = [
    "ArrowbankError",
    "BankClosedError",
    "BankLockedError",
    "BankNotFoundError",
    "CorruptManifestError",
    "CorruptRecordError",
    "CorruptionError",
    "DuplicateGroupError",
    "FencedError",
    "FormatVersionError",
    "HistoryGoneError",
    "InvalidDrawError",
    "ReplayUnavailableError",
    "SchemaMismatchError",
    "UnknownGroupError",
    "UnrepresentableError",
]


class ArrowbankError(Exception):
    """Base of every error below."""


class BankNotFoundError(ArrowbankError, FileNotFoundError):
    """Nothing at this path is a bank."""


class BankLockedError(ArrowbankError):
    """A living coordinator holds the bank."""


class BankClosedError(ArrowbankError):
    """The handle was closed, or was inherited through a fork."""


class FencedError(ArrowbankError):
    """A later session has claimed the bank; nothing this handle does counts any more."""


class FormatVersionError(ArrowbankError):
    """The bank's format is newer than this arrowbank understands."""


class SchemaMismatchError(ArrowbankError, ValueError):
    """The bank's frozen schema is not the one this arrowbank writes."""


class CorruptionError(ArrowbankError):
    """Bytes of the bank are not what was written."""

    def __init__(self, path: str | Path, reason: str, *, offset: int | None = None, hint: str = "") -> None:
        self.path = str(path)
        """The damaged file."""
        self.reason = reason
        self.offset = offset
        """Bytes from the start of the file, where known."""
        self.hint = hint
        where = self.path if offset is None else f"{self.path} at byte {offset}"
        super().__init__(f"{where}: {reason}" + (f". {hint}" if hint else ""))

    def __reduce__(self) -> tuple[Callable[..., CorruptionError], tuple[Any, ...]]:
        return _rebuild_corruption, (type(self), self.path, self.reason, self.offset, self.hint)


class CorruptRecordError(CorruptionError):
    """A sealed record does not match its seal."""


class CorruptManifestError(CorruptionError):
    """The manifest is missing beside data, malformed, or does not match its checksum."""


class DuplicateGroupError(ArrowbankError):
    """The group already has a uid, and no append of it has failed."""


class InvalidDrawError(ArrowbankError, ValueError):
    """A draw or an eviction contradicts what the bank knows of this line."""


class UnknownGroupError(InvalidDrawError):
    """No live group has that uid: it was never appended, or it is archived."""


class UnrepresentableError(ArrowbankError, ValueError):
    """A value could not come back bit for bit, so it is refused."""

    def __init__(self, field: str, reason: str) -> None:
        self.field = field
        """The path of the refused value, as ``rollouts[2].logprobs[0]``."""
        self.reason = reason
        super().__init__(f"{field}: {reason}")

    def __reduce__(self) -> tuple[type[UnrepresentableError], tuple[str, str]]:
        return type(self), (self.field, self.reason)

    def inside(self, container: str) -> UnrepresentableError:
        """Return the same refusal seen from the object that holds the field."""
        return UnrepresentableError(f"{container}.{self.field}", self.reason)


class ReplayUnavailableError(ArrowbankError):
    """Draws would have to be replayed, and not all their groups are there any more."""


class HistoryGoneError(ArrowbankError):
    """The line that recorded this checkpoint has been let go of."""


def _rebuild_corruption(
    kind: type[CorruptionError], path: str, reason: str, offset: int | None, hint: str
) -> CorruptionError:
    return kind(path, reason, offset=offset, hint=hint)
