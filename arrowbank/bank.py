"""RolloutBank: the facade over segments, journal, line and archive.

Locks, in the order in which they may be taken: the bank's (line and groups), then those of journal, appender and
archive. Who writes records or commits the archive never takes the bank's. It is taken by a plain ``with`` only: an
interrupt inside a context manager of ours would leave it taken.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import operator
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from arrowbank import exits
from arrowbank.appending import Appends
from arrowbank.archive.archivist import Archivist
from arrowbank.archive.store import ArchiveStore, create_bank
from arrowbank.durable import files, quarantine
from arrowbank.durable.appender import Appender
from arrowbank.durable.following import MAIN
from arrowbank.durable.gauge import Gauge
from arrowbank.durable.heartbeat import BEAT_S
from arrowbank.durable.intake import Intake
from arrowbank.durable.journal import Drawn, Journal
from arrowbank.durable.layout import BankPaths
from arrowbank.durable.ledger import Ledger
from arrowbank.durable.manifest import create_manifest, data_without_manifest, read_manifest
from arrowbank.durable.recovery import read_state
from arrowbank.durable.session import LEASE_S, Claim, Takeover, claim_session
from arrowbank.errors import BankClosedError, CorruptionError, FencedError, InvalidDrawError
from arrowbank.restored import BankStats, Restored, hand_back
from arrowbank.writer import WriterToken

__all__ = ["RolloutBank"]

_log = logging.getLogger("arrowbank")


class RolloutBank(Appends):
    """A run's durable rollouts: append finished groups, mark what was trained on, get everything back at resume.

    Thread-safe. One coordinator at a time; a context manager that closes.
    """

    def __init__(self, paths: BankPaths, claim: Claim, *, max_bytes: int | None, keep_checkpoints: int) -> None:
        """Use ``RolloutBank.open``."""
        self._pid = os.getpid()
        self._closed = False
        self._paths = paths
        self._gauge = Gauge(paths.root, max_bytes, lambda: self.live_bytes)
        self._keep_checkpoints = keep_checkpoints
        self._lock = threading.RLock()
        self._begin_session(claim)
        exits.watch(self)

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        takeover: Takeover = "auto",
        lease_s: float = LEASE_S,
        max_bytes: int | None = None,
        keep_checkpoints: int = 2,
    ) -> Self:
        """Open the bank at ``path`` as its coordinator; an empty or missing directory becomes a new bank.

        takeover: "auto" takes over from a coordinator whose process is gone, or that has shown no sign of life for
        ``lease_s`` seconds while this call looked on (on another host, or stopped); "never" leaves that to you; "force"
        takes over whoever holds it, who can do nothing to the bank any more. max_bytes: warn once when live bytes pass
        it; nothing is ever dropped. keep_checkpoints: the archive takes what the oldest of so many last checkpoints
        holds, so that stepping back is cheap.

        It is closed when the interpreter exits, and in a forked child. While it is open, SIGTERM, unless you handle it,
        is SystemExit(143) in the main thread. Damaged segments are replaced by what is good in them.

        Durability: the claim on the bank is durable on return.
        Raises: BankLockedError, FormatVersionError, SchemaMismatchError, CorruptionError (the manifest's among them),
        OSError.
        """
        if keep_checkpoints < 1:
            raise ValueError(f"keep_checkpoints {keep_checkpoints}: at least the last checkpoint is kept")
        if lease_s < 2 * BEAT_S:
            raise ValueError(
                f"lease_s {lease_s}: a holder gives a sign of life every {BEAT_S} s; at least {2 * BEAT_S}"
            )
        if "://" in os.fspath(path):
            raise ValueError(f"{path}: a bank being written lies in a directory, not at a URL")
        paths = BankPaths.at(path)
        if paths.root.exists() and not paths.root.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "a bank is a directory, and this is none", os.fspath(path))
        paths.refuse_strangers(link=True)
        is_new = not paths.manifest.exists() and data_without_manifest(paths) is None
        manifest = create_manifest() if is_new else read_manifest(paths)  # raises before anything is touched
        files.make_directories([paths.root, *paths.directories])
        claim = claim_session(paths, takeover, lease_s, bank_id=manifest.bank_id, beyond=manifest.last_session)
        try:
            if is_new and not paths.manifest.exists():
                create_bank(paths, manifest, claim.tmp)
            return cls(paths, claim, max_bytes=max_bytes, keep_checkpoints=keep_checkpoints)
        except BaseException as error:
            try:
                if isinstance(error, OSError | CorruptionError):
                    claim.check()  # a takeover takes files away: say that rather than "no such file"
            finally:
                with contextlib.suppress(OSError):
                    claim.release()
            raise

    def _begin_session(self, claim: Claim) -> None:
        """Read what is there and start writing under a newly claimed session."""
        started = time.monotonic()
        self._claim = claim
        manifest = read_manifest(self._paths)
        self._store = ArchiveStore(self._paths, manifest, claim.session, claim.check)
        state = read_state(self._paths, manifest)
        self._store.settle(is_whole=state.is_whole)
        claim.check()  # before anything is made of what a takeover may have taken away meanwhile
        self._iteration = 0
        self._journal = Journal(self._paths, manifest.bank_id, claim.session, claim.check, state.facts)
        self._appender = Appender(
            self._paths,
            manifest.bank_id,
            claim.session,
            MAIN,
            check_fence=claim.check,
            abandon=self._journal.abandon,
            begin=self._journal.begin,
        )
        has_groups = bool(state.groups) or bool(manifest.files)
        self._ledger = Ledger(
            self._paths, manifest.bank_id, claim.session, state, self._journal, self._appender, must_restore=has_groups
        )
        self._intake = Intake(self._appender, session=claim.session, writer=MAIN, on_written=self._gauge.rose)
        self._archivist = Archivist(
            self._store,
            self._ledger,
            self._journal,
            self._appender,
            lock=self._lock,
            check_fence=claim.check,
            on_freed=self._gauge.fell,
        )
        self._compactor = self._archivist.compactor
        self._archivist.heal()
        self._open_seconds = time.monotonic() - started

    def __enter__(self) -> Self:
        self._require_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as failure:  # whatever closing met must not hide what the trainer itself raised
            if error is None:
                raise
            if failure is not error:
                error.add_note(f"closing the bank failed as well: {failure}")

    def _require_open(self) -> None:
        if self._closed:
            raise BankClosedError(f"{self._paths.root}: this handle was closed; open the bank again")
        self._require_own_process()

    def _require_own_process(self) -> None:
        if os.getpid() != self._pid:
            raise BankClosedError(
                f"{self._paths.root}: this handle belongs to process {self._pid}, which forked this one; use it there"
            )

    # -- what it says of itself
    @property
    def session(self) -> int:
        """This coordinator's session number. Keep it in the model checkpoint to name this line later."""
        return self._claim.session

    @property
    def iteration(self) -> int:
        """The iteration being collected."""
        return self._iteration

    @property
    def live_bytes(self) -> int:
        """Bytes of segments that are not archived."""
        return self._ledger.live_bytes

    def stats(self) -> BankStats:
        """Return counts of this handle."""
        self._require_own_process()  # a fork may have copied the lock while it was held
        with self._lock:
            self._ledger.take_arrivals()
            archived = self._store.manifest.files
            return BankStats(
                session=self.session,
                iteration=self._iteration,
                live_groups=len(self._ledger.state.groups),
                live_bytes=self.live_bytes,
                appended_groups=self._appender.groups,
                appended_bytes=self._appender.nbytes,
                commits=self._appender.commits,
                archived_files=len(archived),
                archived_groups=sum(file.groups for file in archived),
                archived_rows=sum(file.rows for file in archived),
                compaction_error=None if self._compactor.error is None else str(self._compactor.error),
            )

    # -- resume

    def restore(
        self,
        iteration: int,
        *,
        mode: Literal["replay", "requeue", "discard"] = "replay",
        session: int | None = None,
        accept_damage: bool = False,
    ) -> Restored:
        """Take up work at the model checkpoint that holds ``iteration`` iterations (0: none).

        mode: what becomes of draws that this checkpoint does not hold. "replay" hands them back in order, "requeue"
        makes their groups pending, "discard" evicts them for good; in the last two, a draw whose training the
        checkpoint holds in part counts as trained on. session: ``bank.session`` as it was when the model checkpoint was
        saved; it says for certain whose weights these are. Without it, they are those of the newest session that
        recorded this checkpoint, else of the newest that may have got there; the report says which.
        accept_damage: go on although a damaged journal record may hide a draw.

        Any checkpoint may be restored, however old: what it rolls back leaves the Parquet files and is live again.

        Durability: the restore is on disk on return. A second restore on a handle begins a new session.
        Raises: HistoryGoneError when only a line that was let go of had this checkpoint; ReplayUnavailableError,
        naming the iterations, when the archive has not got all that would have to be replayed; CorruptRecordError for
        a damaged journal, CorruptionError for a damaged archive; FencedError; OSError. Then nothing has changed; one
        that comes between two sessions closes the handle.
        """
        iteration = operator.index(iteration)
        session = None if session is None else operator.index(session)
        if mode not in ("replay", "requeue", "discard"):
            raise ValueError(f'mode {mode!r}: use "replay", "requeue" or "discard"')
        if iteration < 0:
            raise ValueError(f"restore({iteration}): a checkpoint counts complete iterations, 0 or more")
        while True:
            self._compactor.wait()  # without the lock, which planning takes
            self._require_open()
            with self._lock:
                self._require_open()
                if not self._compactor.is_running:
                    return self._restore(iteration, mode, session, accept_damage)

    def _restore(self, iteration: int, mode: str, session: int | None, accept_damage: bool) -> Restored:
        started = time.monotonic()
        self._ledger.check_restore(iteration, session, accept_damage=accept_damage)
        if self._ledger.is_used:
            self._renew_session()
            self._ledger.check_restore(iteration, session, accept_damage=accept_damage)
        revived = 0
        if iteration < self._store.manifest.archived_through:
            try:
                revived = self._archivist.revive(iteration)
            except (OSError, CorruptionError):
                self._claim.check()  # a takeover takes files away: say that rather than "no such file"
                raise
        self._ledger.restore(iteration, mode, session)
        if self._ledger.state.hidden:  # and accepted
            self._archivist.heal(accepted=True)
        self._iteration = iteration
        seconds = self._open_seconds + time.monotonic() - started
        quarantined = quarantine.count(self._paths)
        return hand_back(self._ledger, revived_groups=revived, quarantined=quarantined, seconds=seconds)

    def _renew_session(self) -> None:
        """Close the session and begin the next one. A failure closes the handle."""
        before = self._claim
        try:
            self._ledger.finish()
            self._compactor.close()
            ended = self._journal.close()
            self._begin_session(self._claim.renew(ended))
        except BaseException as error:
            self._closed = True
            try:
                if self._claim is not before and isinstance(error, OSError | CorruptionError):
                    self._claim.check()
            finally:
                with contextlib.suppress(OSError):
                    self._claim.release()
            raise

    # -- collecting
    def begin_iteration(self, iteration: int) -> None:
        """Say that groups finished from now on are collected at ``iteration``. Iterations only go up."""
        iteration = operator.index(iteration)
        self._require_open()
        with self._lock:
            self._require_open()
            line = self._ledger.line
            floor = max(self._iteration, line.resumed)
            if iteration < floor:
                raise InvalidDrawError(f"begin_iteration({iteration}) after iteration {floor}; iterations only go up")
            self._appender.roll(iteration)
            self._iteration = iteration
            line.began = max(line.began, iteration)

    def writer_token(self) -> WriterToken:
        """Return what ``BankWriter.open`` needs in another process of the run, for as long as this session lasts.

        Raises InvalidDrawError before ``restore``.
        """
        self._require_open()
        with self._lock:
            self._require_open()
            if not self._ledger.restored:
                raise InvalidDrawError("writer_token before restore: a restore may begin another session")
            bank_id, holder = self._store.manifest.bank_id, self._claim.holder
            return WriterToken(str(self._paths.root), bank_id, self.session, holder.token, self._iteration)

    def _wait_for_successor(self, intake: Intake) -> None:
        self._require_open()
        with self._lock:
            self._require_open()
            if self._intake is intake:
                raise BankClosedError(f"{self._paths.root}: this handle is being closed; nothing was appended")

    # -- training

    def mark_consumed(self, uids: Iterable[str], iteration: int, *, span: int = 1, state: bytes | None = None) -> None:
        """Record one draw: the groups, in order, that the batch of ``iteration`` is made of.

        span: optimizer steps that the batch feeds, ``iteration`` … ``iteration + span − 1``. state: the trainer's own
        bytes (prompt cursor, random state), given back with the draw. Repeating a draw exactly changes nothing.

        Durability: as ``append``; the groups are durable before it. Waits for appends in flight.
        Raises: InvalidDrawError, UnknownGroupError, FencedError, OSError (then the draw was not made).
        """
        kept = None if state is None else bytes(memoryview(state))
        drawn = Drawn(operator.index(iteration), _uids(uids), operator.index(span), kept)
        self._require_open()
        with self._lock:
            self._require_open()
            self._ledger.draw(drawn)

    def evict(self, uids: Iterable[str], reason: str) -> None:
        """Say that groups will never be trained on, and why. Already evicted ones keep their reason.

        An eviction is for good: it holds after a restore of any checkpoint. A replayed draw names it in ``lost``.

        Durability: as ``append``. Raises: UnknownGroupError; InvalidDrawError for settled groups and those that this
        session drew.
        """
        names = _uids(uids)
        if not isinstance(reason, str) or not reason:
            raise ValueError(f"evict: say the reason in words, not {reason!r}")
        self._require_open()
        with self._lock:
            self._require_open()
            self._ledger.evict(names, reason)

    def checkpoint(self, iteration: int, *, wait: bool = False) -> None:
        """Record that the model checkpoint holding ``iteration`` iterations is durable. Call it after that.

        Returns at once; compaction goes on in the background. wait: until it is done, raising what it met.
        At or below the last checkpoint it changes nothing, so late finalizers may call it. Never changes the
        iteration being collected.

        Raises: InvalidDrawError beyond the last begun iteration + 1; FencedError; OSError.
        """
        iteration = operator.index(iteration)
        self._require_open()
        with self._lock:
            self._require_open()
            if self._ledger.checkpoint(iteration) or (wait and self._compactor.error is not None):
                self._compactor.start(self._archivist.horizon(self._keep_checkpoints))
        if wait:
            self._compactor.wait()
            self._compactor.raise_error()

    # -- the end

    def close(self, *, final: bool = False) -> None:
        """Write what waits, wait for compaction, give the bank back. Closing twice is no error.

        final: the run is over; everything that its last checkpoint settles, and all evicted, is archived first. After a
        compaction that failed, another one is tried.
        Raises: what compaction met last; OSError; the bank is given back all the same. RuntimeError in a signal handler
        that interrupted a call.
        """
        if os.getpid() != self._pid:
            return
        exits.refuse_inside_a_write("close()")
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            with self._lock:
                self._ledger.finish()
            if final or self._compactor.error is not None:
                horizon = self._archivist.horizon(1 if final else self._keep_checkpoints)
                self._compactor.start(horizon, last=final)
            self._compactor.wait()
            self._compactor.raise_error()
        except FencedError as error:
            _log.warning("%s", error)  # nothing that was acknowledged is lost, and the bank is another's to close
        finally:
            self._let_go()

    def _let_go(self) -> None:
        ended = None
        try:
            self._compactor.close()
            ended = self._journal.close()
        except FencedError:
            pass  # told when it happened
        finally:
            self._claim.release(ended)
            exits.forget(self)


def _uids(uids: Iterable[str]) -> tuple[str, ...]:
    """Check that these are uids: a single one, or groups, are easily given instead."""
    names = (uids,) if isinstance(uids, str) else tuple(uids)
    wrong = [name for name in names if not isinstance(name, str)]
    if wrong or isinstance(uids, str):
        raise TypeError(
            f"expected a list of uids (group.uid), found {type((wrong or names)[0]).__name__}: {uids!r:.100}"
        )
    return names
