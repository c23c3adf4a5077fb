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
import uuid
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
    token: str
    """Random; tells this process's own handles apart."""

    def __str__(self) -> str:
        return f"session {self.session}: process {self.pid} on {self.host}, since {self.since}"

    def is_gone(self) -> bool | None:
        """Whether the process has ended; None when that cannot be told from here."""
        if (self.host, self.boot) != (socket.gethostname(), _boot_id()):
            return True if self.host == socket.gethostname() else None
        started = _process_start(self.pid)
        if started is None and _is_hidden(self.pid):
            return None
        return started != self.started


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

    def renew(self) -> Claim:
        """Begin the next session of the same handle. Raises FencedError when somebody else has."""
        self.check()
        claim = _try_claim(self.paths, self.session + 1)
        if claim is None:
            self.check()
            raise FencedError(f"{self.paths.root}: session {self.session} lost its place while it began the next one")
        self.forget()
        return claim

    def forget(self) -> None:
        """Give up without a word: this process may claim the next session, others once it has ended."""
        _held.discard(self.holder.token)

    def release(self) -> None:
        """Say that the session has ended, so that the next one need not ask whether its process lives.

        Of a session that lost its place nothing is touched: LOCK and tmp/ are somebody else's now.
        """
        self.forget()
        try:
            self.check()
        except FencedError:
            return
        files.replace(self.paths.lock, _Lock(holder=self.holder, closed=True).model_dump_json().encode(), self.tmp)
        files.clear_directory(self.tmp)


_held: set[str] = set()
"""Tokens of the claims that handles of this process have. A claim of this process that no handle has is free: a full
disk may have kept LOCK from saying that it ended."""


def claim_session(paths: BankPaths, takeover: Takeover) -> Claim:
    """Claim the next session number. Raises BankLockedError, naming the holder, while another holds the bank."""
    for _ in range(_ATTEMPTS):
        sessions = paths.claimed_sessions()
        last = sessions[-1] if sessions else 0
        if last:
            _refuse_held(paths, last, takeover)
        claim = _try_claim(paths, last + 1)
        if claim is not None:
            return claim
    raise BankLockedError(f"{paths.root}: {_ATTEMPTS} times another process claimed the next session first; try again")


def _try_claim(paths: BankPaths, session: int) -> Claim | None:
    """Claim this very session; None when somebody was faster."""
    holder = _myself(session)
    tmp = paths.session_tmp(session)
    files.make_directories([tmp])
    _held.add(holder.token)
    try:
        files.create_exclusive(paths.claim(session), holder.model_dump_json().encode(), tmp)
        _clear_tmp(paths, session)
        files.replace(paths.lock, _Lock(holder=holder).model_dump_json().encode(), tmp)
    except BaseException as error:
        _held.discard(holder.token)
        if isinstance(error, FileExistsError) or (isinstance(error, FileNotFoundError) and not tmp.is_dir()):
            return None  # this session, or one after it, was claimed meanwhile; the latter takes tmp/ away
        raise
    return Claim(paths, holder)


def _refuse_held(paths: BankPaths, session: int, takeover: Takeover) -> None:
    lock = _read(paths.lock, _Lock)
    if takeover == "force" or (lock is not None and lock.closed and lock.holder.session == session):
        return
    holder = _read(paths.claim(session), Holder)
    if holder is not None and _was_dropped(holder):
        return
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
    for number in paths.tmp_sessions():
        if number < session:  # one that came meanwhile has its own
            files.clear_directory(paths.session_tmp(number))
    files.fsync_directory(paths.tmp)


def _was_dropped(holder: Holder) -> bool:
    """Whether this very process made the claim and has no handle for it any more."""
    myself = _myself(holder.session)
    same_process = all(getattr(holder, name) == getattr(myself, name) for name in ("host", "boot", "pid", "started"))
    return same_process and holder.token not in _held


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
        token=uuid.uuid4().hex,
    )


def _is_hidden(pid: int) -> bool:
    """Whether a process is there that /proc does not show us: another user's, where /proc is mounted with hidepid."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return False


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _process_start(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None when it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])
