"""Snapshots: all that a bank's journals say and that still matters, as one journal entry.

Written when compaction begins a new part of the journal; read from the part that the manifest names as base. It holds
the lines with those draws that a live group is in, the evictions of live groups, which checkpoints are gone, and the
facts of segments that are not archived: so its size goes with what is live, not with how long the run has been.

Layout: ``details`` holds the numbers; ``uids`` all groups and ``state`` all draws' states, one behind the other, in
the order in which ``details`` speaks of them: each line's draws, then its lost groups; the evicted ones; the archived.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, islice
from typing import Any

from arrowbank.durable.checkpoints import Checkpoints, Run
from arrowbank.durable.history import History
from arrowbank.durable.journal import Abandoned, Facts, Snapshot
from arrowbank.durable.line import Line, LineDraw

__all__ = ["load_snapshot", "make_snapshot"]

_MAX_CHECKPOINTS = 10**6
"""Somebody else's snapshot may say that there are any number of them, which would be listed."""


def make_snapshot(history: History, facts: Facts) -> Snapshot:
    """Sum up a history and the facts of files that are still there."""
    uids: list[str] = []
    states: list[bytes] = []
    lines = [_line_out(line, uids, states) for _, line in sorted(history.lines.items())]
    evicted = []
    for reason, group in groupby(sorted(history.evicted, key=history.evicted.__getitem__), history.evicted.__getitem__):
        members = list(group)
        uids += members
        evicted.append([reason, len(members)])
    uids += sorted(history.archived)
    details = {
        "lines": lines,
        "evicted": evicted,
        "archived": len(history.archived),
        "gone": [list(run) for run in history.gone.runs],
        "abandoned": [
            [name, gone.start, len(gone)] for name, ranges in sorted(facts.abandoned.items()) for gone in ranges
        ],
        "records": facts.records,
    }
    return Snapshot(tuple(uids), b"".join(states), details)


def load_snapshot(snapshot: Snapshot) -> tuple[History, Facts]:
    """Take a snapshot apart. Raises ValueError, KeyError, TypeError or IndexError for what is none."""
    details = snapshot.details
    uids = iter(snapshot.uids)
    states = _Bytes(snapshot.state)
    history = History()
    for said in details["lines"]:
        line = _line_in(said, uids, states)
        history.lines[line.session] = line
    for reason, count in details["evicted"]:
        history.evicted |= dict.fromkeys(_take(uids, count), str(reason))
    history.archived = set(_take(uids, details["archived"]))
    history.gone = _runs_in(details["gone"])
    facts = Facts(records={str(name): _count(count) for name, count in details["records"].items()})
    for name, first, count in details["abandoned"]:
        facts.add(Abandoned(str(name), _count(first), _count(count)))
    if next(uids, None) is not None or states.rest:
        raise ValueError("the snapshot holds more than it says")
    return history, facts


def _line_out(line: Line, uids: list[str], states: list[bytes]) -> dict[str, Any]:
    tables = {}
    for name, table in (("made", line.made), ("planned", line.planned)):
        tables[name] = [_draw_out(draw, uids, states) for at in sorted(table) for draw in table[at]]
    uids += sorted(line.lost)
    return {
        "session": line.session,
        "parent": line.parent,
        "resumed": line.resumed,
        "makers": [list(part) for part in line.makers],
        "checkpoints": [list(run) for run in line.checkpoints.runs],
        "last_checkpoint": line.last_checkpoint,
        "last_drawn": line.last_drawn,
        "reach": line.reach,
        **tables,
        "lost": len(line.lost),
    }


def _line_in(said: dict[str, Any], uids: Iterator[str], states: _Bytes) -> Line:
    line = Line(
        session=int(said["session"]),
        parent=None if said["parent"] is None else int(said["parent"]),
        resumed=int(said["resumed"]),
        makers=[(int(start), int(session)) for start, session in said["makers"]],
        checkpoints=_runs_in(said["checkpoints"]),
        last_checkpoint=int(said["last_checkpoint"]),
        last_drawn=int(said["last_drawn"]),
        began=int(said["last_drawn"]),
        reach=int(said["reach"]),
    )
    for name, table in (("made", line.made), ("planned", line.planned)):
        for numbers in said[name]:
            draw = _draw_in(numbers, uids, states)
            table.setdefault(draw.iteration, []).append(draw)
    line.lost = frozenset(_take(uids, said["lost"]))
    return line


def _draw_out(draw: LineDraw, uids: list[str], states: list[bytes]) -> list[int | None]:
    uids += draw.uids
    states.append(draw.state or b"")
    state_bytes = None if draw.state is None else len(draw.state)
    return [draw.iteration, draw.index, draw.span, draw.session, len(draw.uids), state_bytes]


def _draw_in(numbers: list[Any], uids: Iterator[str], states: _Bytes) -> LineDraw:
    iteration, index, span, session, size, state_bytes = numbers
    state = None if state_bytes is None else states.take(state_bytes)
    return LineDraw(int(iteration), tuple(_take(uids, size)), int(span), state, int(session), int(index))


def _runs_in(said: list[list[int]]) -> Checkpoints:
    runs = [Run(*map(int, run)) for run in said]
    if sum(len(run.checkpoints) for run in runs) > _MAX_CHECKPOINTS:
        raise ValueError("the snapshot holds more checkpoints than any run has")
    return Checkpoints(runs)


def _count(said: Any) -> int:
    count = int(said)
    if not 0 <= count < 2**62:
        raise ValueError(f"{said} is no count")
    return count


def _take(uids: Iterator[str], count: int) -> list[str]:
    taken = list(islice(uids, count))
    if len(taken) < count:
        raise ValueError("the snapshot holds fewer groups than it says")
    return taken


class _Bytes:
    """Hands out one part of some bytes after another."""

    def __init__(self, data: bytes) -> None:
        self.rest = memoryview(data)

    def take(self, count: int) -> bytes:
        if not 0 <= count <= len(self.rest):
            raise ValueError("the snapshot holds less state than it says")
        part, self.rest = bytes(self.rest[:count]), self.rest[count:]
        return part
