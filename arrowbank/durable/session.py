"""One coordinator at a time: session numbers, claimed by exclusive create, and who holds the bank.

``sessions/0003`` is created once, whole (written elsewhere and hard-linked), and says who claimed session 3. The
holder is whoever made the highest claim, until LOCK says that this session was closed. A claim whose process is gone
from the same host and boot is free to be taken over: pids are reused, so the claim holds the process's start time;
zombies count as gone.

Losing one's place: a later claim exists. ``Claim.check`` looks for it, after every fsync and before anything is
acknowledged or unlinked.
"""

from __future__ import annotations

import os
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from arrowbank.durable import files
from arrowbank.durable.layout import BankPaths
from arrowbank.errors import BankLockedError, CorruptionError, FencedError

__all__ = ["Claim", "Holder", "Takeover", "claim_session"]

Takeover: TypeAlias = Literal["auto", "never", "force"]
_Model = TypeVar("_Model", bound=BaseModel)
_ATTEMPTS = 16


class Holder(BaseModel):
    """Who claimed a session."""

    model_config = ConfigDict(frozen=True)

    session: int
    host: str
    boot: str
    pid: int
    started: int
    """The process's start, in clock ticks since boot."""
    since: str

    def __str__(self) -> str:
        return f"session {self.session}: process {self.pid} on {self.host}, since {self.since}"

    def is_gone(self) -> bool | None:
        """Whether the process has ended; None when that cannot be told from here (another host)."""
        if (self.host, self.boot) != (socket.gethostname(), _boot_id()):
            return True if self.host == socket.gethostname() else None
        return _process_start(self.pid) != self.started


class _Lock(BaseModel):
    """LOCK: the newest session that took the bank, and whether it gave it back."""

    holder: Holder
    closed: bool = False


class Claim:
    """A session of this process."""

    def __init__(self, paths: BankPaths, holder: Holder) -> None:
        self.paths = paths
        self.holder = holder
        self.session = holder.session
        self._next = os.fspath(paths.claim(holder.session + 1))

    @property
    def tmp(self) -> Path:
        return self.paths.session_tmp(self.session)

    def check(self) -> None:
        """Raise FencedError when a later session has been claimed."""
        if os.path.exists(self._next):
            raise FencedError(
                f"{self.paths.root}: session {self.session} lost its place to "
                f"{_describe(self.paths, self.session + 1)}; what it had acknowledged is safe, it can do nothing more"
            )

    def release(self) -> None:
        """Say that the session has ended, so that the next one need not ask whether its process lives."""
        lock = _Lock(holder=self.holder, closed=True)
        files.replace(self.paths.lock, lock.model_dump_json().encode(), self.tmp)
        self.tmp.rmdir()


def claim_session(paths: BankPaths, takeover: Takeover) -> Claim:
    """Claim the next session number. Raises BankLockedError, naming the holder, while another holds the bank."""
    for _ in range(_ATTEMPTS):
        sessions = paths.claimed_sessions()
        last = sessions[-1] if sessions else 0
        if last:
            _refuse_held(paths, last, takeover)
        holder = _myself(last + 1)
        tmp = paths.session_tmp(holder.session)
        files.make_directories([tmp])
        try:
            files.create_exclusive(paths.claim(holder.session), holder.model_dump_json().encode(), tmp)
        except FileExistsError:
            continue  # somebody was faster: look again who holds it now
        _clear_tmp(paths, holder.session)
        files.replace(paths.lock, _Lock(holder=holder).model_dump_json().encode(), tmp)
        return Claim(paths, holder)
    raise BankLockedError(f"{paths.root}: {_ATTEMPTS} times another process claimed the next session first; try again")


def _refuse_held(paths: BankPaths, session: int, takeover: Takeover) -> None:
    lock = _read(paths.lock, _Lock)
    if takeover == "force" or (lock is not None and lock.closed and lock.holder.session == session):
        return
    holder = _read(paths.claim(session), Holder)
    if holder is None:
        raise CorruptionError(
            paths.claim(session),
            "the claim does not say who holds the bank",
            hint='Open with takeover="force" if nobody does',
        )
    gone = holder.is_gone()
    if gone and takeover == "auto":
        return
    if gone:
        hint = 'its process is gone without closing; open with takeover="auto" to go on'
    elif gone is None:
        hint = 'whether it lives cannot be told from this host; open with takeover="force" if it does not'
    else:
        hint = "close it first, or end that process"
    raise BankLockedError(f"{paths.root} is held by {holder}: {hint}")


def _clear_tmp(paths: BankPaths, session: int) -> None:
    """Take away the directories of earlier sessions, so that a rename of theirs that is still to come fails."""
    for directory in sorted(paths.tmp.iterdir()):
        if directory != paths.session_tmp(session) and directory.is_dir() and not directory.is_symlink():
            for entry in directory.iterdir():
                entry.unlink()
            directory.rmdir()
    files.fsync_directory(paths.tmp)


def _describe(paths: BankPaths, session: int) -> str:
    holder = _read(paths.claim(session), Holder)
    return str(holder) if holder else f"session {session}"


def _read(path: Path, kind: type[_Model]) -> _Model | None:
    """Read a small JSON file; None when it is missing or is not one."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def _myself(session: int) -> Holder:
    started = _process_start(os.getpid())
    return Holder(
        session=session,
        host=socket.gethostname(),
        boot=_boot_id(),
        pid=os.getpid(),
        started=-1 if started is None else started,
        since=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _process_start(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None when it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])
