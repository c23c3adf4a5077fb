"""A snapshot says all that still matters of a history, and nothing that a damaged or forged one claims is believed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from arrowbank.durable.checkpoints import Checkpoints
from arrowbank.durable.history import History
from arrowbank.durable.journal import (
    Abandoned,
    Checkpointed,
    Drawn,
    Evicted,
    Facts,
    Journal,
    Restored,
    Sealed,
    Snapshot,
    read_journal,
)
from arrowbank.durable.layout import BankPaths
from arrowbank.durable.segment import SegmentFacts
from arrowbank.durable.snapshot import load_snapshot, make_snapshot


def history() -> History:
    """Two lines, one cut draw, evictions, a checkpoint that is gone, states of every kind."""
    made = History()
    entries = [
        (1, Restored(0, "replay", None)),
        (1, Drawn(0, ("a", "b"), 1, b"state 0")),
        (1, Drawn(0, ("ä",), 3, b"")),
        (1, Checkpointed(1)),
        (1, Drawn(1, ("c", "d"), 2)),
        (1, Checkpointed(2)),
        (2, Restored(1, "replay", 1, ("lost",))),
        (2, Drawn(1, ("c", "d"), 2)),
        (2, Evicted(("e", "f"), "why")),
        (2, Evicted(("g",), "other")),
        (3, Restored(1, "replay", 2)),
        (3, Drawn(2, ("h",), 1, b"\0\xff")),
    ]
    for session, entry in entries:
        made.apply(session, entry)
    made.gone = Checkpoints.of({7: 1, 9: 1})
    made.archived = {"a"}
    return made


def told(of: History) -> object:
    """Everything a history says, in a form that compares by value."""
    draw = ["iteration", "uids", "span", "state", "session", "index"]
    return (
        of.evicted,
        dict(of.gone.items()),
        set(of.archived),
        {
            number: (
                line.session, line.parent, line.resumed, line.last_checkpoint, line.last_drawn, line.reach, line.lost,
                dict(line.checkpoints.items()),
                [[getattr(one, name) for name in draw] for one in line.draws()],
                [[getattr(one, name) for name in draw] for one in line.plan()],
            )
            for number, line in of.lines.items()
        },
    )  # fmt: skip


FACTS = Facts()
FACTS.add(Abandoned("s", 3, 2))
FACTS.add(Sealed((SegmentFacts("t", 5, 100),)))


def test_what_is_loaded_is_what_was_summed_up() -> None:
    loaded, facts = load_snapshot(make_snapshot(history(), FACTS))
    assert told(loaded) == told(history())
    assert (facts.abandoned, facts.records) == ({"s": [range(3, 5)]}, {"t": 5})


def test_it_survives_the_journal(tmp_path: Path) -> None:
    paths = BankPaths(tmp_path)
    for directory in (paths.journal, paths.session_tmp(1)):
        directory.mkdir(parents=True)
    journal = Journal(paths, "bank", 1, lambda: None)
    journal.write([Checkpointed(1)])
    name = journal.roll(lambda facts: make_snapshot(history(), FACTS))
    journal.close()
    ((_, entry),), damage = read_journal(paths, name, "bank")
    assert damage == []
    assert isinstance(entry, Snapshot)
    assert told(load_snapshot(entry)[0]) == told(history())


def test_both_go_on_alike() -> None:
    loaded, _ = load_snapshot(make_snapshot(history(), FACTS))
    other = history()
    for one in (loaded, other):
        one.apply(3, Drawn(3, ("i",)))
        one.apply(3, Checkpointed(4))
        one.apply(4, Restored(1, "requeue", one.parent_of(1)))
    assert told(loaded) == told(other)


@pytest.mark.parametrize("fault", ["uid too few", "uid too many", "state too short", "state too long", "field missing"])
def test_a_snapshot_that_contradicts_itself_is_refused(fault: str) -> None:
    good = make_snapshot(history(), FACTS)
    bad = {
        "uid too few": replace(good, uids=good.uids[:-1]),
        "uid too many": replace(good, uids=(*good.uids, "x")),
        "state too short": replace(good, state=good.state[:-1]),
        "state too long": replace(good, state=good.state + b"x"),
        "field missing": replace(good, details={name: good.details[name] for name in good.details if name != "gone"}),
    }[fault]
    with pytest.raises((ValueError, KeyError)):
        load_snapshot(bad)


def test_what_is_archived_is_let_go_of_and_comes_back() -> None:
    made = history()
    before = told(made)
    drawn = [one for one in made.lines[3].draws() if one.iteration == 0]
    gone = [one for one in drawn if one.uids == ("a", "b")]
    made.forget(["b"], live={"c", "d", "e", "f", "h", "ä"})
    assert all(one.find("a") is None and one.find("b") is None for one in made.lines.values())
    assert made.archived == set()
    assert made.evicted == {"e": "why", "f": "why"}  # g is neither live nor drawn
    assert [one.index for one in made.lines[3].at(0)] == [1]
    made.revive(gone)
    made.evicted["g"], made.archived = "other", {"a"}
    assert told(made) == before
