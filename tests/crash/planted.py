"""Planted faults, one at a time, each with the instrument that must catch it: ``python -m tests.crash --planted``.

A fault is planted below the public API, in a child process or by patching, and cannot be reached otherwise. Those that
``controls`` has are mistakes about the disk. An instrument that does not catch its faults proves nothing of the bank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest
from kill_model import Violation
from machine import directory_in_memory
from takeovers import Takeovers

from arrowbank.durable import seal
from arrowbank.durable.stream import Record
from crash import controls
from crash.block_replay import record, replay
from crash.fuzz import fuzz
from crash.power_cuts import FILE_SYSTEMS, cut_often
from crash.states import explore
from crash.traced import Tracer, tracing
from crash.training_kills import kill_trainings, training_server

__all__ = ["PLANTED", "Planted", "Tracers"]

OF_FAILURES = ("failed_syncs_tried_again", "abandonment_not_told")
"""Faults that show where calls fail."""


class Tracers(contextlib.ExitStack):
    """One tracer for all searches of a process, made when it is first asked for."""

    _tracer: Tracer | None = None

    def one(self) -> Tracer:
        if self._tracer is None:
            self._tracer = self.enter_context(tracing())
        return self._tracer


@dataclass(frozen=True)
class Planted:
    """A fault and who catches it."""

    fault: str
    instrument: str
    search: Callable[[Tracers, int], str | None]
    """Given a seed, returns what was caught."""

    def __str__(self) -> str:
        return f"{self.instrument}: {self.fault}"


def _of_states(fault: str) -> Planted:
    def search(tracers: Tracers, seed: int) -> str | None:
        scenarios = ["failed_appends"] if fault in OF_FAILURES else ["takeovers", "checkpoints"]
        found = explore(1_500, seed, tracers.one(), scenarios=scenarios, fault=fault, most_violations=1).violations
        return f"{found[0][0]}: {found[0][1]}" if found else None

    return Planted(fault.replace("_", " "), "states", search)


def _of_cuts(file_system: str) -> Planted:
    def search(_: Tracers, seed: int) -> str | None:
        with directory_in_memory() as directory:
            return _caught(lambda: cut_often(directory, file_system, 12, seed, fault="sync-nothing"))

    return Planted(f"nothing is synced, on {file_system}", "cuts", search)


def _unsynced_blocks(_: Tracers, seed: int) -> str | None:
    with directory_in_memory() as directory:
        recording = record(directory, seed, fault="sync-nothing")
        return _caught(lambda: replay(directory, recording, 12, seed, fault="sync-nothing"))


def _draws_not_kept(_: Tracers, seed: int) -> str | None:
    with directory_in_memory() as directory, contextlib.closing(training_server("mark-nothing")) as server:
        return _caught(lambda: kill_trainings(directory, 25, seed, server))


def _of_takeovers(fault: str, said: str) -> Planted:
    def search(_: Tracers, seed: int) -> str | None:
        with directory_in_memory() as directory, Takeovers(Path(directory), seed, fault) as takeovers:
            for _ in range(8):
                caught = _caught(lambda: takeovers.run("force", None))
                if caught:
                    return caught
        return None

    return Planted(said, "takeovers", search)


@contextlib.contextmanager
def _every_seal_believed() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seal, "verify", lambda *_: True)
        yield


def _believed_states(tracers: Tracers, seed: int) -> str | None:
    with _every_seal_believed():
        found = explore(1_500, seed, tracers.one(), scenarios=["two_kept"], most_violations=1).violations
    return f"{found[0][0]}: {found[0][1]}" if found else None


def _believed_mutants(_: Tracers, seed: int) -> str | None:
    with _every_seal_believed():
        return next((wrong[0] for _, _, wrong in fuzz(100, seed, ["segment", "journal"]) if wrong), None)


def _not_validated(_: Tracers, seed: int) -> str | None:
    def parse(self: Record, schema: pa.Schema) -> pa.RecordBatch:
        return pa.ipc.read_record_batch(pa.py_buffer(self.message), schema)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Record, "batch", parse)
        wrong = [said for _, _, found in fuzz(300, seed, ["segment, sealed again"]) for said in found]
    return next((said for said in wrong if "the reader died" in said), None)


def _caught(work: Callable[[], object]) -> str | None:
    try:
        work()
    except Violation as violation:
        return str(violation)
    return None


PLANTED = [
    *map(_of_states, controls.FAULTS),
    Planted("every seal is believed", "states", _believed_states),
    *map(_of_cuts, FILE_SYSTEMS),
    Planted("nothing is synced, and blocks are lost", "blocks", _unsynced_blocks),
    Planted("draws are acknowledged and not kept", "kills", _draws_not_kept),
    Planted("every seal is believed", "fuzz", _believed_mutants),
    Planted("records are parsed and not validated", "fuzz", _not_validated),
    _of_takeovers("no-fence", "nobody looks for a later claim"),
    _of_takeovers("writes-lock", "who lost a bank still writes LOCK"),
]
