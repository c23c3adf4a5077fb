"""One coordinator at a time: session numbers, claimed by exclusive create, and who holds the bank.

``sessions/0003`` is created once, whole (written elsewhere and hard-linked), and says who claimed session 3. The
holder is whoever made the highest claim, until LOCK says that this session was closed. A claim may be taken over when
its process is gone from the same host, boot and pid namespace (pids are reused, so the claim holds the process's start
time; zombies count as gone), or when its heartbeat has not changed for a lease: see ``heartbeat``.

Taking over: claim the next number; take away the earlier sessions' tmp/, so that what they have not renamed yet they
never will; only then read the bank. Losing one's place: a later claim exists. ``Claim.check`` looks for it, after every
fsync and before anything is acknowledged or unlinked.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from arrowbank.durable import files
from arrowbank.durable.heartbeat import BEAT_S, Heartbeat, last_beat
from arrowbank.durable.layout import LAST_SESSION, BankPaths
from arrowbank.errors import BankLockedError, CorruptionError, FencedError

__all__ = [
    "LEASE_S", "Claim", "Holder", "JournalEnd", "Lock", "Membership", "Takeover", "claim_session", "journal_ends",
    "read_claim", "read_lock",
]  # fmt: skip

_log = logging.getLogger("arrowbank")

Takeover: TypeAlias = Literal["auto", "never", "force"]
_Model = TypeVar("_Model", bound=BaseModel)
_ATTEMPTS = 16
_MAX_BYTES = 1 << 16
LEASE_S = 60.0
"""How long a heartbeat must stand still before its bank is taken over."""


class JournalEnd(BaseModel):
    """How a journal ended when its session was closed: whoever opens it finds so many records, or some are lost."""

    model_config = ConfigDict(frozen=True)

    name: str
    """Its last part."""
    records: int
    checksum: str
    """Of both; neither LOCK nor a claim has one of its own."""

    @classmethod
    def of(cls, name: str, records: int) -> JournalEnd:
        return cls(name=name, records=records, checksum=cls._checksum(name, records))

    @property
    def is_whole(self) -> bool:
        return self.records >= 0 and self.checksum == self._checksum(self.name, self.records)

    @staticmethod
    def _checksum(name: str, records: int) -> str:
        return xxhash.xxh3_64_hexdigest(f"{name} {records}".encode())


class Holder(BaseModel):
    """Who claimed a session."""

    model_config = ConfigDict(frozen=True)

    session: int
    host: str
    boot: str
    namespace: str = ""
    """Of pids: containers of one host may each have a process 1."""
    pid: int
    started: int
    """The process's start, in clock ticks since boot."""
    since: str
    token: str
    """Random; tells this process's own handles apart."""
    bank: str = ""
    """The bank's id, or the one it was about to get: should the manifest be lost, nothing else may know it."""
    journal: JournalEnd | None = None
    """Of the session before, if that was closed."""

    def __str__(self) -> str:
        return f"session {self.session}: process {self.pid} on {self.host}, since {self.since}"

    def is_gone(self) -> bool | None:
        """Whether the process has ended; None when that cannot be told from here."""
        if (self.host, self.boot, self.namespace) != (socket.gethostname(), _boot_id(), _pid_namespace()):
            return None
        started = _process_start(self.pid)
        if started is None and _is_hidden(self.pid):
            return None
        return started != self.started

    def is_this_process(self) -> bool:
        mine = _myself(self.session)
        return all(
            getattr(self, name) == getattr(mine, name) for name in ("host", "boot", "namespace", "pid", "started")
        )


class Lock(BaseModel):
    """LOCK: the newest session that took the bank, and whether it gave it back."""

    holder: Holder
    closed: bool = False
    journal: JournalEnd | None = None
    """Of the holder's session, once it is closed and if it has one."""


class Membership:
    """Of a session, for whoever writes in it: the coordinator, and other processes of the run."""

    def __init__(self, paths: BankPaths, session: int, token: str) -> None:
        """Raises FencedError when the session was never claimed under this token."""
        self.paths = paths
        self.session = session
        self._own = os.fspath(paths.claim(session))
        self._next = os.fspath(paths.claim(session + 1))
        self._identity = _identity(self._own)
        holder = read_claim(paths, session)
        if holder is None or holder.token != token:
            raise FencedError(f"{paths.root}: session {session} is {holder or 'not there'}: another than was meant")

    def check(self) -> None:
        """Raise FencedError when a later session has been claimed, FileNotFoundError when the bank is not there.

        Any other OSError passes through: who cannot look is not to believe that all is well.
        """
        try:
            os.stat(self._next)
        except FileNotFoundError:
            pass
        else:
            raise FencedError(
                f"{self.paths.root}: session {self.session} lost its place to "
                f"{_describe(self.paths, self.session + 1)}; what it had acknowledged is safe, it can do nothing more"
            )
        if _identity(self._own) != self._identity:  # gone, or another bank's
            raise FileNotFoundError(
                errno.ENOENT, "the bank was removed or moved away while it was open", os.fspath(self.paths.root)
            )


class Claim(Membership):
    """A session of this process. Its heart beats until it is released or given up, or the process ends."""

    def __init__(self, paths: BankPaths, holder: Holder) -> None:
        super().__init__(paths, holder.session, holder.token)
        self.holder = holder
        self._heart = Heartbeat(paths.claim(holder.session))

    @property
    def tmp(self) -> Path:
        return self.paths.session_tmp(self.session)

    def renew(self, journal: JournalEnd | None = None) -> Claim:
        """Begin the next session of the same handle, whose journal ended so. Raises FencedError, when another has."""
        self.check()
        claim = _try_claim(self.paths, self.session + 1, self.holder.bank, journal)
        if claim is None:
            self.check()
            raise FencedError(f"{self.paths.root}: session {self.session} lost its place while it began the next one")
        self.forget()
        return claim

    def forget(self) -> None:
        """Give up without a word: this process may claim the next session, others once the lease is over."""
        self._heart.stop()
        _held.discard(self.holder.token)

    def release(self, journal: JournalEnd | None = None) -> None:
        """Say that the session has ended, so that the next one need not ask whether its process lives.

        journal: how its journal ended, for the next one to look for.

        Of a session that lost its place nothing is touched: LOCK and tmp/ are somebody else's now.
        """
        self.forget()
        try:
            self.check()
            lock = Lock(holder=self.holder, closed=True, journal=journal)
            files.replace(self.paths.lock, lock.model_dump_json().encode(), self.tmp)
        except FencedError:
            return
        except OSError:
            with contextlib.suppress(FencedError):
                self.check()
                raise
            return
        files.clear_directory(self.tmp)


_held: set[str] = set()
"""Tokens of the claims that handles of this process have. A claim of this process that no handle has is free: a full
disk may have kept LOCK from saying that it ended."""


def claim_session(
    paths: BankPaths,
    takeover: Takeover,
    lease_s: float = LEASE_S,
    *,
    bank_id: str,
    beyond: int = 0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Claim:
    """Claim the next session number. Raises BankLockedError, naming the holder, while another holds the bank.

    Where nothing but its heartbeat can tell whether the holder lives, this watches it: a beat, and the bank is refused;
    none for ``lease_s`` seconds of ``clock``, and it is taken over. The number is higher than ``beyond``.
    """
    for _ in range(_ATTEMPTS):
        last = max(beyond, *paths.used_sessions(), 0)
        if last >= LAST_SESSION:
            raise CorruptionError(paths.root, f"a file's name says session {last}, and no number is left for another")
        lock = _told(read_lock, paths)  # before the claims are listed: it never names one that is still to come
        sessions = paths.claimed_sessions()
        if takeover != "force":
            _require_no_unclaimed(paths, lock, max(sessions, default=0))
            if sessions:
                _wait_until_free(paths, sessions[-1], takeover, lease_s, clock, sleep)
        lock = _told(read_lock, paths)
        journal = lock.journal if lock and lock.closed and sessions[-1:] == [lock.holder.session] else None
        # Not a higher number: who claims this one meanwhile must be asked, too.
        claim = _try_claim(paths, last + 1, bank_id, journal)
        if claim is not None:
            return claim
    raise BankLockedError(f"{paths.root}: {_ATTEMPTS} times another process claimed the next session first; try again")


def _try_claim(paths: BankPaths, session: int, bank_id: str, journal: JournalEnd | None) -> Claim | None:
    """Claim this very session; None when somebody was faster."""
    holder = _myself(session).model_copy(update={"bank": bank_id, "journal": journal})
    tmp = paths.session_tmp(session)
    files.make_directories([tmp])
    _held.add(holder.token)
    claimed = False
    try:
        files.create_exclusive(paths.claim(session), holder.model_dump_json().encode(), tmp)
        claimed = True
        files.empty_directory(tmp)  # of what is left of others' tries for this number, and of a stranger's
        _clear_tmp(paths, session)
        files.replace(paths.lock, Lock(holder=holder).model_dump_json().encode(), tmp)
    except BaseException as error:
        _held.discard(holder.token)
        faster = paths.claimed_sessions()[-1:] >= [session + claimed]  # and may have taken away what is in tmp/
        if faster and isinstance(error, FileExistsError | FileNotFoundError):
            return None
        raise
    return Claim(paths, holder)


def _wait_until_free(
    paths: BankPaths,
    session: int,
    takeover: Takeover,
    lease_s: float,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> None:
    """Return once ``session`` may be taken over, or is the last one no more. Raises BankLockedError."""
    if _was_closed(paths, session):
        return
    claimed = _told(read_claim, paths, session)
    holder = claimed if claimed is not None and claimed.session == session else _locked(paths, session)
    if holder is None:
        raise BankLockedError(
            f"{paths.root}: neither {paths.claim(session)} nor LOCK says who has the bank; if nobody does, open it "
            'with takeover="force" (arrowbank repair --takeover force)'
        )
    held = f"{paths.root} is held by {holder}"
    if holder.is_this_process():
        if holder.token not in _held:
            return
        raise BankLockedError(
            f"{held}: another handle of this very process; close that one first, or, if it was lost, open with "
            'takeover="force"'
        )
    gone = holder.is_gone()
    if takeover == "never":
        hint = "its process is gone without closing" if gone else "it has not closed"
        raise BankLockedError(f'{held}: {hint}; open with takeover="auto" to go on once it is gone')
    if not gone:
        _watch(paths, holder, held, lease_s, clock, sleep)


def _require_no_unclaimed(paths: BankPaths, lock: Lock | None, newest: int) -> None:
    """Raise BankLockedError where LOCK names a living process whose claim is gone."""
    if lock is None or lock.closed or lock.holder.session <= newest or lock.holder.is_gone() is not False:
        return
    if not lock.holder.is_this_process() or lock.holder.token in _held:
        raise BankLockedError(
            f"{paths.root} is held by {lock.holder}, which lives, though its claim was removed: end that process first"
        )


def _locked(paths: BankPaths, session: int) -> Holder | None:
    """Return who holds a session by what LOCK says, which repeats the newest claim."""
    lock = _told(read_lock, paths)
    return lock.holder if lock is not None and lock.holder.session == session else None


def _watch(
    paths: BankPaths,
    holder: Holder,
    held: str,
    lease_s: float,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> None:
    """Watch a holder's heartbeat for ``lease_s`` seconds; raise BankLockedError when it beats."""
    path = paths.claim(holder.session)
    step = min(BEAT_S, lease_s) / 5
    beat, watched, last = last_beat(path), 0.0, clock()
    _log.info("%s; watching its heartbeat for %g s", held, lease_s)
    while watched < lease_s:
        sleep(step)
        now = clock()
        watched, last = watched + min(now - last, 2 * step), now  # not the time in which this process stood still, too
        if paths.claimed_sessions()[-1:] != [holder.session] or _was_closed(paths, holder.session) or holder.is_gone():
            return
        if last_beat(path) != beat:
            raise BankLockedError(f"{held}, and lives: close it first, or end that process")
    _log.warning("%s, and has shown no sign of life for %g s: taking over", held, lease_s)


def _was_closed(paths: BankPaths, session: int) -> bool:
    lock = _told(read_lock, paths)
    return lock is not None and lock.closed and lock.holder.session == session


def _clear_tmp(paths: BankPaths, session: int) -> None:
    """Take away the directories of earlier sessions, so that a rename of theirs that is still to come fails."""
    for number in paths.tmp_sessions():
        if number < session:  # one that came meanwhile has its own
            files.clear_directory(paths.session_tmp(number))
    files.fsync_directory(paths.tmp)


def _describe(paths: BankPaths, session: int) -> str:
    holder = read_claim(paths, session)
    return str(holder) if holder else f"session {session}"


def journal_ends(paths: BankPaths, newest: int) -> Iterator[JournalEnd]:
    """Yield what is said of how journals ended, of session ``newest`` or later: by LOCK, and by the claims that came
    then.
    """
    lock = _told(read_lock, paths)
    if lock is not None and lock.closed and lock.journal is not None and lock.journal.is_whole:
        yield lock.journal
    for session in paths.claimed_sessions():
        holder = _told(read_claim, paths, session) if session > newest else None
        if holder is not None and holder.journal is not None and holder.journal.is_whole:
            yield holder.journal


def _told(read: Callable[..., _Model | None], *arguments: Any) -> _Model | None:
    """Return what a small file says; None for one that is damaged: an open says so elsewhere."""
    try:
        return read(*arguments)
    except CorruptionError:
        return None


def read_claim(paths: BankPaths, session: int) -> Holder | None:
    """Return who claimed a session; None when the claim is missing or does not say it. Raises CorruptionError."""
    return _read(paths.claim(session), Holder)


def read_lock(paths: BankPaths) -> Lock | None:
    """Return what LOCK says; None when it is missing or does not say it. Raises CorruptionError."""
    return _read(paths.lock, Lock)


def _read(path: Path, kind: type[_Model]) -> _Model | None:
    """Read a small JSON file; None when it is missing or is not one."""
    try:
        return kind.model_validate_json(files.read_small(path, _MAX_BYTES))
    except (FileNotFoundError, ValidationError):
        return None


def _identity(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _myself(session: int) -> Holder:
    started = _process_start(os.getpid())
    return Holder(
        session=session,
        host=socket.gethostname(),
        boot=_boot_id(),
        namespace=_pid_namespace(),
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


def _pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")


def _process_start(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None when it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])
