"""``repair``: what an open heals, and what an open refuses, under the claim that an open takes.

It looks as ``verify`` does, and ends at once where there is nothing to mend. Then, in this order, each step with its
damaged bytes in quarantine/ before anything is cut or removed: strangers go out of the way; a lost manifest is made
again; files of the archive are put back; damaged segments and journals are copied without their damage, in one commit;
what could not be saved is written down. A crash in between leaves a bank that the next repair goes on with.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

from arrowbank.archive.archivist import Archivist
from arrowbank.archive.healing import drop_undecodable
from arrowbank.archive.parquet import write_parquet
from arrowbank.archive.store import ArchiveStore
from arrowbank.durable import files, quarantine
from arrowbank.durable.appender import Appender
from arrowbank.durable.following import MAIN
from arrowbank.durable.journal import Journal
from arrowbank.durable.layout import BankPaths, SegmentName
from arrowbank.durable.ledger import Ledger
from arrowbank.durable.manifest import Manifest, write_manifest
from arrowbank.durable.quarantine import keep_copy, move_aside, note_losses
from arrowbank.durable.recovery import State, read_state
from arrowbank.durable.segment import read_segment
from arrowbank.durable.session import LEASE_S, Claim, Takeover, claim_session
from arrowbank.verification.archived import EMPTY_FILE, Copies, check_file, wanted_files
from arrowbank.verification.live import require_group
from arrowbank.verification.places import strangers
from arrowbank.verification.report import Finding, Mending, RepairReport, by_iteration, distinct
from arrowbank.verification.verify import Look, Looker, Progress

__all__ = ["repair"]

_COPIED_BYTES = 1 << 24
"""What is larger in the place of the manifest is moved rather than copied."""


def repair(
    path: str | Path,
    *,
    dry_run: bool = False,
    accept_damage: bool = False,
    takeover: Takeover = "auto",
    lease_s: float = LEASE_S,
    on_progress: Progress | None = None,
) -> RepairReport:
    """Mend the bank at ``path``, and return what was done, what is left, and what could not be saved.

    dry_run: change nothing; the report says what would be done. accept_damage: go on although a damaged journal may
    hide a draw, and without files that are missing: put them back from a copy instead, if there is one. takeover,
    lease_s: as for ``RolloutBank.open``.

    A second repair finds nothing to do. What it leaves as it is: damaged files of the archive of which no copy is
    there, banks of a newer format, manifests that the files leave in doubt.

    Durability: what is mended survives power loss on return; no damaged byte is removed before a copy of it lies in
    quarantine/, or it was moved there.
    Raises: BankLockedError beside a living holder; what ``verify`` raises; FencedError; OSError.
    """
    looker = Looker(path, on_progress)
    before = looker.settled()
    wanted = _wanted(before, accept_damage)
    if dry_run or not wanted:
        mending = set(wanted)
        left = tuple(found for found in before.findings if found.is_damage and found not in mending)
        return _report(path, dry_run, before, wanted, left, before.quarantined.notes)
    under_claim = _Repair(looker, accept_damage, takeover, lease_s).run(before)
    after = looker.settled()
    every = distinct((*wanted, *_wanted(under_claim, accept_damage)))  # the claim itself has mended some
    once = {(found.path, found.offset, found.reason): found for found in reversed(every)}
    still = set(after.findings)
    mended = tuple(found for found in reversed(once.values()) if found not in still)
    left = tuple(found for found in after.findings if found.is_damage)
    return _report(path, dry_run, under_claim, mended, left, after.quarantined.notes)


def _wanted(look: Look, accept_damage: bool) -> tuple[Finding, ...]:
    """Return what repair does something about. Without a manifest it does nothing: who knows what counts?"""
    if look.manifest is None or _blocked(look):
        return ()
    does = {Mending.REPAIR, Mending.ACCEPT} if accept_damage else {Mending.REPAIR}
    return tuple(found for found in look.findings if found.mending in does)


def _blocked(look: Look) -> bool:
    """Whether a directory of the bank is a link to one elsewhere: what lies there is not ours to touch."""
    names = {"sessions", "segments", "journal", ".archive", "quarantine", "tmp"}
    return any(found.path in names and found.mending is Mending.NONE for found in look.damage)


def _report(
    path: str | Path, dry_run: bool, look: Look, mended: tuple[Finding, ...], left: tuple[Finding, ...], notes: int
) -> RepairReport:
    hidden = [] if look.state is None else [place for place, _ in look.state.hidden]
    lost = sum(place.lost or 0 for place in hidden) + (0 if look.state is None else sum(look.state.lost.values()))
    draws = by_iteration(found for found in (*mended, *left) if found.is_damage)
    journals = tuple(dict.fromkeys(place.name for place in hidden))
    return RepairReport(str(path), dry_run, mended, left, lost, draws, journals, notes, look.holder)


class _Repair:
    """One repair of one bank."""

    def __init__(self, looker: Looker, accept_damage: bool, takeover: Takeover, lease_s: float) -> None:
        self._looker = looker
        self._paths = BankPaths(looker.paths.root)
        self._accept_damage, self._takeover, self._lease_s = accept_damage, takeover, lease_s
        self._hides = False
        """Whether damage of the journal may hide a draw."""

    def run(self, before: Look) -> Look:
        """Return what was found under the claim, before anything was changed."""
        assert before.manifest is not None
        self._make_room_for_a_claim()
        claim = claim_session(
            self._paths,
            self._takeover,
            self._lease_s,
            bank_id=before.manifest.bank_id,
            beyond=before.manifest.last_session,
        )
        try:
            look = self._looker.settled()
            self._hides = any(found.mending is Mending.ACCEPT for found in _of_journal(look))
            if _wanted(look, self._accept_damage):
                self._mend(look, claim)
        finally:
            claim.release()
        return look

    def _make_room_for_a_claim(self) -> None:
        """Move away what stands where directories, claims and LOCK do: without these nothing can be claimed."""
        paths = self._paths
        places = {*paths.directories, paths.lock}
        places |= {*map(paths.claim, paths.claimed_sessions()), *map(paths.session_tmp, paths.tmp_sessions())}
        found = {path: reason for path, reason in strangers(paths, None) if path in places}
        if found:
            for path in sorted(found, key=lambda path: (path != paths.quarantine, path != paths.tmp)):
                files.make_directories([paths.quarantine] if path != paths.quarantine else [])
                tmp = paths.quarantine  # tmp/ may be what is in the way
                move_aside(paths, path, found[path], tmp)
                if path.parent == paths.sessions:
                    files.make_directories([paths.tmp])
                    files.create_exclusive(path, b"", paths.tmp)  # it goes on to fence those before it
        files.make_directories(paths.directories)

    def _mend(self, look: Look, claim: Claim) -> None:
        paths = self._paths
        for path, reason in list(strangers(paths, look.manifest)):
            claim.check()
            move_aside(paths, path, reason, claim.tmp)
        files.make_directories(paths.directories)
        manifest = look.manifest
        assert manifest is not None
        self._mend_archive(manifest, claim)
        if look.rebuilt is not None:
            self._keep_retired(manifest, claim)
            size = paths.manifest.stat().st_size if paths.manifest.exists() else 0
            if size > _COPIED_BYTES:
                move_aside(paths, paths.manifest, "not the manifest, which was made again", claim.tmp)
            elif size:
                keep_copy(paths, paths.manifest, "the manifest, which was made again", claim.tmp)
            claim.check()
            write_manifest(paths, manifest, claim.tmp)
        paths.refuse_strangers(link=True)
        self._heal(look, claim, manifest)

    def _mend_archive(self, manifest: Manifest, claim: Claim) -> None:
        """Put files of the archive back of which a copy is there, and the one without rows."""
        directory = self._paths.version(manifest.version)
        files.make_directories([directory])
        for file in reversed(wanted_files(manifest)):  # the one without rows last: another may stand under its name
            path, unfinished = directory / file.name, claim.tmp / file.name
            copies = Copies(self._paths, manifest)  # each time anew: the one before may have moved some
            if path.exists() and not isinstance(check_file(self._paths, path, file, copies), Finding):
                continue
            if file is EMPTY_FILE:
                write_parquet(unfinished, [])
            elif (copy := copies.find(file)) is not None:
                files.link(copy, unfinished)
            else:
                continue
            claim.check()
            if path.exists():
                move_aside(self._paths, path, "not the file that the manifest names", claim.tmp)
            files.publish(unfinished, path)

    def _keep_retired(self, manifest: Manifest, claim: Claim) -> None:
        """Keep the damage of segments that a manifest made again retires: the next step removes them."""
        for name in manifest.retired:
            if not (self._paths.segments / name).exists():
                continue
            found, _ = read_segment(self._paths.segments / name, manifest.bank_id)
            quarantine.keep(self._paths, claim.tmp, [place for place in found.damage if place.length])

    def _heal(self, look: Look, claim: Claim, manifest: Manifest) -> None:
        """Do what an open does, and besides what only ``accept_damage`` allows."""
        with _session(self._paths, claim, manifest) as (ledger, archivist):
            state = ledger.state
            drop_undecodable(state, state.segment_bytes, require_group)
            gone = _missing_segments(state) if self._accept_damage else []
            lost = by_iteration(found for found in _wanted(look, self._accept_damage) if found.is_damage)
            missing: dict[str, int | None] = {str(name): state.lost.get(str(name), 0) for name in gone}
            if self._accept_damage:  # of damage that has bytes, these lie in quarantine
                missing |= {place.name: place.lost for place, _ in state.hidden if not place.length}
            if lost or missing:
                note_losses(self._paths, claim.tmp, claim.session, lost, missing)
            if look.rebuilt is not None and not look.rebuilt.is_exact:
                drawn = {uid for line in state.history.lines.values() for uid in line.places}
                archived = {uid for uid in drawn if uid in look.archive.uids and uid not in state.groups}
                state.history.forget(archived, state.groups)
            begins_anew = look.rebuilt is not None and not state.hidden
            archivist.heal(accepted=(self._accept_damage and self._hides) or begins_anew, gone=gone)


def _of_journal(look: Look) -> list[Finding]:
    return [found for found in look.findings if found.path.startswith("journal/")]


def _missing_segments(state: State) -> list[SegmentName]:
    """Segments that the journal or the manifest speaks of, and that are not there."""
    names = [SegmentName.parse(place.name) for place in state.damage if not place.length and not place.torn]
    return sorted({name for name in names if name is not None and name not in state.segment_bytes})


@contextlib.contextmanager
def _session(paths: BankPaths, claim: Claim, manifest: Manifest) -> Iterator[tuple[Ledger, Archivist]]:
    """Begin a session that only mends, as an open does, and end it."""
    store = ArchiveStore(paths, manifest, claim.session, claim.check)
    state = read_state(paths, manifest)
    store.settle(is_whole=state.is_whole)
    journal = Journal(paths, manifest.bank_id, claim.session, claim.check, state.facts)
    journal.forget(manifest.retired)  # one that was made again may retire more than the journal knows of
    appender = Appender(paths, manifest.bank_id, claim.session, MAIN, check_fence=claim.check, abandon=journal.abandon)
    ledger = Ledger(paths, manifest.bank_id, claim.session, state, journal, appender, must_restore=True)
    archivist = Archivist(
        store, ledger, journal, appender, lock=threading.RLock(), check_fence=claim.check, on_freed=lambda: None
    )
    try:
        yield ledger, archivist
    finally:
        archivist.compactor.close()
        journal.close()
