"""The rules of resume (DESIGN §5), on journal entries alone. Each example of the design is here by name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import pytest

from arrowbank.durable.journal import Checkpointed, Drawn, Entry, Evicted, Restored
from arrowbank.durable.line import DISCARDED, History, Line
from arrowbank.errors import HistoryGoneError, InvalidDrawError

Step: TypeAlias = "Entry | tuple[int, str]"
Draws: TypeAlias = list[tuple[int, str]]


def draw(uids: str, at: int, *, span: int = 1, state: bytes | None = None) -> Drawn:
    """A draw of groups with one-letter uids."""
    return Drawn(at, tuple(uids), span, state)


class Run:
    """A run's sessions, one after another, on one history."""

    def __init__(self, groups: str = "abcdef") -> None:
        self.groups = groups
        self.history = History()
        self.session = 0

    def restore(
        self, iteration: int, mode: str = "replay", *, session: int | None = None, lost: Sequence[str] = ()
    ) -> Line:
        """A kill, and a new session that restores."""
        self.session += 1
        parent = self.history.parent_of(iteration, session)
        self.history.apply(self.session, Restored(iteration, mode, parent, tuple(lost)))
        return self.line

    @property
    def line(self) -> Line:
        return self.history.line(self.session)

    def draws(self, *drawn: Drawn) -> None:
        for one in drawn:
            if self.line.check_draw(one, self.history.evicted):
                self.history.apply(self.session, one)

    def checkpoint(self, iteration: int) -> None:
        if self.line.check_checkpoint(iteration):
            self.history.apply(self.session, Checkpointed(iteration))

    def evict(self, uids: str) -> None:
        self.line.check_evict(uids)
        self.history.apply(self.session, Evicted(tuple(uids), "why"))

    @property
    def settled(self) -> str:
        return "".join(sorted(uid for one in self.line.settled(self.line.resumed) for uid in one.uids))

    @property
    def plan(self) -> Draws:
        return [(one.iteration, "".join(one.uids)) for one in self.line.plan()]

    @property
    def pending(self) -> str:
        return "".join(uid for uid in self.groups if self.line.find(uid) is None and uid not in self.history.evicted)


def example() -> Run:
    """Groups a…f appended; draws [a,b]@0, [c,d]@1; checkpoint(1); draw [e]@2; kill."""
    run = Run()
    run.restore(0)
    run.draws(draw("ab", 0), draw("cd", 1))
    run.checkpoint(1)
    run.draws(draw("e", 2))
    return run


def seen(run: Run) -> tuple[str, Draws, str]:
    return run.settled, run.plan, run.pending


# -- the examples


def test_example_restore_1_replays_what_the_checkpoint_does_not_hold() -> None:
    run = example()
    run.restore(1)
    assert seen(run) == ("ab", [(1, "cd"), (2, "e")], "f")


def test_example_requeue_makes_the_plan_pending() -> None:
    run = example()
    run.restore(1, "requeue")
    assert seen(run) == ("ab", [], "cdef")


def test_discard_evicts_the_plan() -> None:
    run = example()
    run.restore(1, "discard")
    assert seen(run) == ("ab", [], "f")
    assert run.history.evicted == dict.fromkeys("cde", DISCARDED)


def test_example_repeating_the_first_planned_draw_keeps_the_second_planned() -> None:
    run = example()
    run.restore(1)
    run.draws(draw("cd", 1))
    run.restore(1)
    assert seen(run) == ("ab", [(1, "cd"), (2, "e")], "f")


def test_example_a_larger_draw_takes_the_place_of_the_planned_one() -> None:
    run = example()
    run.restore(1)
    run.draws(draw("cd", 1), draw("ef", 2))
    run.restore(1)
    assert seen(run) == ("ab", [(1, "cd"), (2, "ef")], "")


def after_f_at_2() -> Run:
    run = example()
    run.restore(1)
    run.draws(draw("cd", 1), draw("f", 2))
    run.checkpoint(2)
    return run


def test_example_a_group_of_a_planned_draw_that_was_not_made_is_pending() -> None:
    run = after_f_at_2()
    run.restore(2)
    assert seen(run) == ("abcd", [(2, "f")], "e")


def test_example_then_restore_0_replays_everything_that_was_drawn() -> None:
    run = after_f_at_2()
    run.restore(2)
    run.restore(0)
    assert seen(run) == ("", [(0, "ab"), (1, "cd"), (2, "f")], "e")


def test_example_skipping_an_iteration_makes_its_groups_pending() -> None:
    run = after_f_at_2()
    run.restore(2)
    run.restore(0)
    run.draws(draw("cd", 1))
    run.restore(0)
    assert seen(run) == ("", [(1, "cd"), (2, "f")], "abe")


def test_example_a_checkpoint_inside_a_span_replays_the_draw_with_an_offset() -> None:
    run = Run("a")
    run.restore(0)
    run.draws(draw("a", 4, span=3))
    run.checkpoint(5)
    line = run.restore(5)
    assert seen(run) == ("", [(4, "a")], "")
    assert line.resumed - line.plan()[0].iteration == 1
    assert [one.uids for one in line.settled(6)] == []
    assert [one.uids for one in line.settled(7)] == [("a",)]


@pytest.mark.parametrize("mode", ["requeue", "discard"])
def test_a_draw_that_the_checkpoint_cuts_is_settled_with_a_shorter_span_in(mode: str) -> None:
    run = Run("a")
    run.restore(0)
    run.draws(draw("a", 4, span=3))
    run.checkpoint(5)
    line = run.restore(5, mode)
    assert seen(run) == ("a", [], "")
    (made,) = line.made[4]
    assert (made.span, line.owns(made), run.history.evicted) == (1, False, {})


# -- which line


def test_a_restore_on_an_empty_history_has_no_parent() -> None:
    assert History().parent_of(0) is None
    assert History().parent_of(7) is None


def test_a_checkpoint_that_nobody_recorded_is_taken_on_the_newest_line_that_reaches_it() -> None:
    run = Run()
    run.restore(0)
    run.draws(draw("a", 0), draw("b", 1))  # reaches 2; killed between model save and checkpoint
    run.restore(0)
    run.draws(draw("c", 0))  # reaches 1
    assert run.history.parent_of(2) == 1
    assert run.history.parent_of(1) == 2
    run.restore(2)
    assert seen(run) == ("ab", [], "cdef")


def test_a_checkpoint_that_no_line_reaches_settles_everything_on_the_newest() -> None:
    run = example()
    run.restore(9)
    assert seen(run) == ("abcde", [], "f")


def test_the_newest_recorder_of_a_checkpoint_wins() -> None:
    run = example()
    run.restore(0)
    run.draws(draw("a", 0))
    run.checkpoint(1)
    run.restore(1)
    assert seen(run) == ("a", [(1, "cd"), (2, "e")], "bf")
    assert run.history.parent_of(1) == 3


def test_a_checkpoint_lets_go_of_other_lines_and_never_mixes_them() -> None:
    run = Run()
    run.restore(0)
    for at, uid in enumerate("abcde"):
        run.draws(draw(uid, at))
        run.checkpoint(at + 1)
    run.restore(2)
    run.draws(draw("f", 2))
    run.checkpoint(3)
    assert run.history.parent_of(3) == 2
    for gone in (4, 5):
        with pytest.raises(HistoryGoneError, match=rf"checkpoint {gone} was recorded by session 1.*checkpoints 1, 2, 3"):
            run.history.parent_of(gone)


def test_a_checkpoint_of_a_line_let_go_is_gone_until_a_kept_line_records_it_or_a_session_is_named() -> None:
    run = Run()
    run.restore(0)
    for at, uid in enumerate("abc"):
        run.draws(draw(uid, at))
        run.checkpoint(at + 1)
    run.restore(1)
    run.draws(draw("d", 1))
    run.checkpoint(2)
    run.draws(draw("e", 2))  # killed between model save 3 and checkpoint(3); session 1 recorded a checkpoint 3 too
    with pytest.raises(HistoryGoneError, match=r"recorded by session 1.*restore\(3, session=…\)"):
        run.history.parent_of(3)
    run.restore(3, session=2)
    assert seen(run) == ("ade", [], "bcf")
    run.restore(2)
    run.draws(draw("e", 2))
    run.checkpoint(3)
    assert run.history.parent_of(3) == run.session


def test_a_named_session_takes_the_newest_line_with_its_draws_up_to_the_checkpoint() -> None:
    run = Run()
    run.restore(0)
    run.draws(draw("a", 0))
    run.checkpoint(1)
    run.restore(1)  # session 2
    run.draws(draw("b", 1))
    run.restore(0)  # session 3 draws something else at 0
    run.draws(draw("c", 0), draw("d", 1))
    assert (run.history.parent_of(1, 1), run.history.parent_of(1, 3)) == (2, 3)
    assert (run.history.parent_of(2, 2), run.history.parent_of(2, 3)) == (2, 3)
    run.restore(1, session=1)  # session 4
    assert seen(run) == ("a", [(1, "b")], "cdef")
    assert run.history.parent_of(1, 1) == 4
    assert run.history.parent_of(2, 2) == 2


def test_a_checkpoint_at_or_below_what_the_named_session_restored_means_its_very_line() -> None:
    run = Run()
    run.restore(0)
    run.draws(draw("a", 0))
    run.restore(0)
    run.draws(draw("b", 0))
    assert (run.history.parent_of(0), run.history.parent_of(0, 1)) == (2, 1)


def test_naming_a_session_that_was_let_go_of_or_never_was_is_an_error_that_says_what_is_kept() -> None:
    run = Run()
    run.restore(0)
    run.draws(draw("a", 0), draw("b", 1))
    run.restore(0)
    run.draws(draw("c", 0))
    run.checkpoint(1)
    for gone in (1, 9):
        with pytest.raises(HistoryGoneError, match=rf"session {gone} is not kept.*lines of session 2"):
            run.history.parent_of(2, gone)


# -- what drawing does to the plan


def planned(*drawn: Drawn) -> Run:
    run = Run("abcdefgh")
    run.restore(0)
    run.draws(*drawn)
    run.restore(0)
    return run


def test_a_proper_prefix_of_the_planned_draws_leaves_the_rest_planned() -> None:
    run = planned(draw("ab", 1), draw("cd", 1), draw("ef", 1))
    run.draws(draw("ab", 1))
    assert run.plan == [(1, "cd"), (1, "ef")]
    run.draws(draw("cd", 1))
    assert run.plan == [(1, "ef")]


def test_the_rest_of_a_prefix_is_void_once_a_later_iteration_is_drawn() -> None:
    run = planned(draw("ab", 1), draw("cd", 1))
    run.draws(draw("ab", 1), draw("ef", 2))
    assert seen(run) == ("", [], "cdgh")


@pytest.mark.parametrize("own", ["a", "abg", "ba", "cd"])
def test_anything_but_a_prefix_voids_what_was_planned_at_that_iteration(own: str) -> None:
    run = planned(draw("ab", 1), draw("cd", 1))
    run.draws(draw(own, 1))
    assert run.plan == []
    assert run.pending == "".join(uid for uid in "abcdefgh" if uid not in own)


def test_a_group_drawn_leaves_any_other_planned_draw() -> None:
    run = planned(draw("ab", 1), draw("cd", 3), draw("e", 4))
    run.draws(draw("abc", 1))
    assert run.plan == [(3, "d"), (4, "e")]
    run.draws(draw("e", 2))
    assert run.plan == [(3, "d")]


def test_a_checkpoint_beyond_planned_draws_voids_them() -> None:
    run = planned(draw("ab", 1), draw("cd", 2))
    run.line.began = 1
    run.checkpoint(2)
    assert (run.plan, run.pending) == ([(2, "cd")], "abefgh")


def test_a_draw_that_the_restore_cut_is_not_void_when_later_ones_are_drawn() -> None:
    run = Run("ab")
    run.restore(0)
    run.draws(draw("a", 4, span=3))
    run.checkpoint(5)
    run.restore(5)
    run.draws(draw("b", 6))
    assert run.plan == [(4, "a")]


def test_evictions_hold_on_every_line_and_settled_beats_evicted() -> None:
    run = example()
    run.restore(1)
    run.evict("f")
    run.restore(0)
    assert "f" not in run.pending
    assert run.history.evicted == {"f": "why"}


# -- refusals


def refused(run: Run, drawn: Drawn) -> str:
    with pytest.raises(InvalidDrawError) as error:
        run.line.check_draw(drawn, run.history.evicted)
    assert isinstance(error.value, ValueError)
    return str(error.value)


def test_draws_that_no_trainer_could_have_made_are_refused() -> None:
    run = example()
    run.restore(1)
    run.draws(draw("cd", 1), draw("e", 3))
    run.evict("f")
    assert "empty draw at iteration 3" in refused(run, draw("", 3))
    assert "['e'] twice" in refused(run, draw("ee", 3))
    assert "span 0" in refused(run, draw("f", 3, span=0))
    assert "checkpoint 1 was restored" in refused(run, draw("x", 0))
    assert "after one at 3; iterations only go up" in refused(run, draw("x", 2))
    assert "evicted groups: ['f']" in refused(run, draw("xf", 3))
    assert "group c, which this session drew at iteration 1" in refused(run, draw("c", 3))
    assert "group a, which was trained on at iteration 0: checkpoint 1 holds it" in refused(run, draw("a", 4))


def test_a_draw_below_the_sessions_last_checkpoint_is_refused() -> None:
    run = example()
    run.restore(1)
    run.line.began = 4
    run.checkpoint(5)
    assert "checkpoint 5 was restored or recorded; draw at 5 or later" in refused(run, draw("x", 4))


def test_evicting_what_was_trained_on_or_drawn_is_refused() -> None:
    run = example()
    run.restore(1)
    run.draws(draw("cd", 1))
    for uids, match in (("fa", "group a, which was trained on"), ("c", "group c, which this session drew")):
        with pytest.raises(InvalidDrawError, match=match):
            run.line.check_evict(uids)
    run.line.check_evict("ef")  # planned and pending ones


def test_repeating_a_draw_exactly_is_no_draw() -> None:
    run = example()
    run.restore(1)
    run.draws(draw("cd", 1))
    run.line.began = 5
    run.checkpoint(3)
    assert not run.line.check_draw(draw("cd", 1), {})
    assert "1" in refused(run, draw("dc", 1))
    before = repr(run.line)
    run.line.draw(draw("cd", 1))
    assert repr(run.line) == before


def test_a_checkpoint_at_or_below_the_last_one_is_no_checkpoint() -> None:
    run = example()
    run.restore(1)
    for late in (-1, 0, 1):
        assert not run.line.check_checkpoint(late)
    run.draws(draw("cd", 1))
    assert run.line.check_checkpoint(2)
    run.checkpoint(2)
    assert not run.line.check_checkpoint(2)


def test_a_checkpoint_beyond_the_last_begun_iteration_is_refused() -> None:
    run = example()
    run.restore(1)
    with pytest.raises(InvalidDrawError, match=re.escape("checkpoint(2), but the last iteration begun is 0")):
        run.line.check_checkpoint(2)
    run.line.began = 4
    assert run.line.check_checkpoint(5)
    with pytest.raises(InvalidDrawError, match="5 is the highest"):
        run.line.check_checkpoint(6)


# -- invariants


def each_group_is_in_one_place(line: Line, groups: Iterable[str]) -> None:
    placed: Sequence[str] = [uid for one in line.draws() for uid in one.uids]
    assert len(placed) == len(set(placed))
    for uid in groups:
        found = line.find(uid)
        assert (found is not None) == (uid in placed)
        assert found is None or uid in found.uids


def test_a_group_is_in_at_most_one_draw_of_a_line_whatever_was_drawn() -> None:
    run = planned(draw("ab", 0), draw("cd", 1), draw("ef", 1), draw("g", 2, span=4))
    for own in (draw("a", 0), draw("bc", 1), draw("eg", 1), draw("fh", 2)):
        run.draws(own)
        each_group_is_in_one_place(run.line, run.groups)
    run.restore(0)
    each_group_is_in_one_place(run.line, run.groups)


def test_entries_that_contradict_each_other_are_folded_without_an_error() -> None:
    """What is left of a journal after damage was accepted."""
    history = History()
    for entry in (draw("ab", 0), draw("bc", 1), draw("ab", 0), Checkpointed(1), draw("c", 0), Restored(0, "replay", 9)):
        history.apply(1, entry)
    history.apply(2, Restored(0, "replay", 1))
    history.apply(2, draw("abc", 3))
    assert history.parent_of(0) == 2
