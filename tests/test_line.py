"""The rules of resume, by the examples that define them."""

from __future__ import annotations

import pytest

from arrowbank.durable.journal import Checkpointed, Drawn, Evicted, Restored
from arrowbank.durable.line import DISCARDED, History
from arrowbank.errors import InvalidDrawError


class Story:
    """A bank's history told call by call. Groups are letters."""

    def __init__(self) -> None:
        self.history = History()
        self.session = 0
        self.restore(0)

    def restore(self, checkpoint: int, mode: str = "replay") -> Story:
        self.session += 1
        self.history.apply(self.session, Restored(checkpoint, mode, self.history.parent_of(checkpoint)))
        return self

    def draw(self, uids: str, at: int, span: int = 1) -> Story:
        drawn = Drawn(at, tuple(uids), span)
        if self.line.check_draw(drawn, self.history.evicted):
            self.history.apply(self.session, drawn)
        return self

    def checkpoint(self, iteration: int) -> Story:
        if self.line.check_checkpoint(iteration):
            self.history.apply(self.session, Checkpointed(iteration))
        return self

    def evict(self, uids: str) -> Story:
        self.line.check_evict(uids)
        self.history.apply(self.session, Evicted(tuple(uids), "stale"))
        return self

    @property
    def line(self):  # type: ignore[no-untyped-def]
        return self.history.lines[self.session]

    @property
    def settled(self) -> str:
        return "".join(sorted("".join("".join(draw.uids) for draw in self.line.settled(self.line.resumed))))

    @property
    def plan(self) -> list[tuple[str, int]]:
        return [("".join(draw.uids), draw.iteration) for draw in self.line.plan()]

    def pending(self, groups: str = "abcdef") -> str:
        return "".join(uid for uid in groups if self.line.find(uid) is None and uid not in self.history.evicted)


@pytest.fixture
def killed() -> Story:
    """Groups a…f appended; draws [a,b]@0, [c,d]@1; checkpoint(1); draw [e]@2; kill."""
    return Story().draw("ab", 0).draw("cd", 1).checkpoint(1).draw("e", 2)


def test_restore_1(killed: Story) -> None:
    killed.restore(1)
    assert (killed.settled, killed.plan, killed.pending()) == ("ab", [("cd", 1), ("e", 2)], "f")


def test_restore_1_requeue(killed: Story) -> None:
    killed.restore(1, "requeue")
    assert (killed.settled, killed.plan, killed.pending()) == ("ab", [], "cdef")


def test_restore_1_discard(killed: Story) -> None:
    killed.restore(1, "discard")
    assert (killed.settled, killed.plan, killed.pending()) == ("ab", [], "f")
    assert killed.history.evicted == dict.fromkeys("cde", DISCARDED)


def test_a_kill_in_mid_replay_keeps_the_rest_of_the_plan(killed: Story) -> None:
    killed.restore(1).draw("cd", 1).restore(1)
    assert (killed.plan, killed.pending()) == ([("cd", 1), ("e", 2)], "f")


def test_a_draw_that_diverges_replaces_the_planned_one(killed: Story) -> None:
    killed.restore(1).draw("cd", 1).draw("ef", 2).restore(1)
    assert (killed.plan, killed.pending()) == ([("cd", 1), ("ef", 2)], "")


def test_what_a_diverging_draw_leaves_is_pending_and_older_checkpoints_follow_this_line(killed: Story) -> None:
    killed.restore(1).draw("cd", 1).draw("f", 2).checkpoint(2).restore(2)
    assert (killed.settled, killed.plan, killed.pending()) == ("abcd", [("f", 2)], "e")
    killed.restore(0)
    assert (killed.settled, killed.plan, killed.pending()) == ("", [("ab", 0), ("cd", 1), ("f", 2)], "e")


def test_drawing_beyond_a_planned_iteration_voids_it(killed: Story) -> None:
    killed.restore(1).draw("cd", 1).draw("f", 2).checkpoint(2).restore(0).draw("cd", 1).restore(0)
    assert (killed.plan, killed.pending()) == ([("cd", 1), ("f", 2)], "abe")


def test_a_checkpoint_beyond_planned_draws_voids_them(killed: Story) -> None:
    killed.restore(1)
    killed.line.began = 3
    killed.checkpoint(3).restore(3)
    assert (killed.settled, killed.plan, killed.pending()) == ("ab", [], "cdef")


def test_a_group_drawn_elsewhere_leaves_its_planned_draw(killed: Story) -> None:
    killed.restore(1).draw("ce", 1).restore(1)
    assert (killed.plan, killed.pending()) == ([("ce", 1)], "df")


def test_a_checkpoint_that_nobody_recorded_is_taken_on_the_newest_line_that_reaches_it(killed: Story) -> None:
    killed.restore(3)
    assert (killed.settled, killed.plan, killed.pending()) == ("abcde", [], "f")
    killed.restore(1).restore(3)
    assert (killed.settled, killed.plan) == ("abcde", [])


def test_evictions_hold_on_every_line(killed: Story) -> None:
    killed.restore(1).evict("f").restore(0)
    assert killed.pending() == ""


def test_repeating_a_draw_or_a_late_checkpoint_changes_nothing(killed: Story) -> None:
    before = (killed.plan, [*killed.line.draws()], dict(killed.line.checkpoints))
    killed.draw("e", 2).checkpoint(1).checkpoint(0)
    assert (killed.plan, [*killed.line.draws()], dict(killed.line.checkpoints)) == before


@pytest.mark.parametrize(
    ("uids", "at", "message"),
    [
        ("", 3, "an empty draw"),
        ("ff", 3, r"names \['f'\] twice"),
        ("f", 0, "checkpoint 1 was restored or recorded"),
        ("f", 1, "after one at 2"),
        ("e", 3, "which this session drew at iteration 2"),
        ("a", 3, "which this session drew at iteration 0"),
    ],
)
def test_draws_that_no_trainer_could_make_are_refused(killed: Story, uids: str, at: int, message: str) -> None:
    with pytest.raises(InvalidDrawError, match=message):
        killed.draw(uids, at)


def test_settled_and_evicted_groups_cannot_be_drawn_after_a_restore(killed: Story) -> None:
    killed.restore(1).evict("f")
    with pytest.raises(InvalidDrawError, match="was trained on at iteration 0: checkpoint 1 holds it"):
        killed.draw("a", 1)
    with pytest.raises(InvalidDrawError, match=r"evicted groups: \['f'\]"):
        killed.draw("f", 1)
    with pytest.raises(InvalidDrawError, match="was trained on"):
        killed.evict("a")


def test_a_checkpoint_beyond_what_was_begun_is_refused(killed: Story) -> None:
    with pytest.raises(InvalidDrawError, match="the last iteration begun is 2"):
        killed.checkpoint(4)
    killed.checkpoint(3)
