"""What drawing, evicting and checkpoints do to a line, and what is refused (DESIGN §5, 3 and 4)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import pytest
from line_runs import Run, draw, example, planned, seen

from arrowbank.durable.history import DISCARDED, History
from arrowbank.durable.journal import Checkpointed, Drawn, Restored
from arrowbank.durable.line import Line
from arrowbank.errors import InvalidDrawError

# -- what drawing does to the plan


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


@pytest.mark.parametrize("mode", ["replay", "requeue", "discard"])
def test_planned_draws_that_a_session_skipped_before_it_saved_are_pending_though_it_was_killed_before_checkpoint(
    mode: str,
) -> None:
    run = planned(draw("ab", 1), draw("cd", 2), draw("e", 3))  # session 2
    run.restore(2, mode, session=2)  # it got to 2, and never drew ab
    assert run.settled == ""
    assert set("ab") <= set(run.pending)
    assert run.history.evicted.keys() == (set("cde") if mode == "discard" else set())


def test_planned_draws_before_a_checkpoint_that_no_line_is_known_to_have_reached_are_settled() -> None:
    run = planned(draw("ab", 1), draw("cd", 2))
    run.history.lines.pop(1)  # the session that drew them was let go of
    run.restore(2)
    assert seen(run) == ("ab", [(2, "cd")], "efgh")


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
    assert run.line.check_checkpoint(2)  # a restore begins the iteration that it resumes at
    with pytest.raises(InvalidDrawError, match=re.escape("checkpoint(3), but the last iteration begun is 1")):
        run.line.check_checkpoint(3)
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


# -- draws that a checkpoint cut


def cut() -> Run:
    """Draws [ab]@4 of span 3 and [c]@5; checkpoint 5 is restored, which holds one of the three steps of the first."""
    run = Run("abcdef")
    run.restore(0)
    run.draws(draw("ab", 4, span=3, state=b"s"), draw("c", 5))
    run.checkpoint(5)
    run.restore(5)
    assert run.plan == [(4, "ab"), (5, "c")]
    return run


@pytest.mark.parametrize("at", [5, 6])
def test_drawing_a_cut_draw_again_inside_its_span_continues_it_where_it_is(at: int) -> None:
    run = cut()
    run.draws(draw("ab", at))
    (made,) = run.line.made[4]
    assert (made.uids, made.span, made.state, run.line.owns(made)) == (("a", "b"), 3, b"s", True)
    assert run.line.last_drawn == at
    assert not run.line.check_draw(draw("ab", 6), {})  # it has been drawn; step 6 is another one of it
    assert not run.line.check_draw(draw("ab", 5), {})
    assert run.line.check_draw(draw("d", at), {})
    assert run.line.made.keys() == {4}
    run.line.began = 6
    with pytest.raises(InvalidDrawError, match="which this session drew"):
        run.line.check_evict("a")
    run.checkpoint(7)
    run.restore(7)
    assert run.settled == "ab"


def test_a_cut_draw_that_was_continued_is_planned_with_its_offset_again_after_a_kill() -> None:
    run = cut()
    run.draws(draw("ab", 5), draw("d", 5))
    run.restore(5)
    assert run.plan == [(4, "ab"), (5, "d")]


@pytest.mark.parametrize(("uids", "at"), [("a", 5), ("ba", 5), ("abd", 6), ("bd", 6), ("ab", 7)])
def test_a_draw_that_takes_a_cut_draw_apart_or_comes_after_it_is_refused(uids: str, at: int) -> None:
    run = cut()
    assert "checkpoint 5 holds a part of the training of its draw at 4" in refused(run, draw(uids, at))
    assert "['a', 'b'] together, below 7" in refused(run, draw(uids, at))


def test_a_cut_draw_is_continued_without_its_lost_and_evicted_groups() -> None:
    run = Run("abcd")
    run.restore(0)
    run.draws(draw("abcd", 4, span=3))
    run.checkpoint(5)
    run.restore(5, lost="b")
    run.evict("c")
    run.draws(draw("ad", 5))
    (made,) = run.line.made[4]
    assert (made.uids, run.line.owns(made)) == (tuple("abcd"), True)


def test_a_cut_draw_is_settled_by_its_end_even_when_nobody_drew_it_again() -> None:
    run = cut()
    run.draws(draw("d", 6))
    run.checkpoint(7)
    with pytest.raises(InvalidDrawError, match="checkpoint 7 holds it"):
        run.line.check_evict("a")
    run.restore(7)
    assert seen(run) == ("abd", [], "cef")


# -- lost and evicted groups of the plan


def test_a_planned_draw_is_repeated_without_its_evicted_groups_and_the_rest_stays_planned() -> None:
    run = planned(draw("abc", 1), draw("de", 1))
    run.evict("b")
    run.draws(draw("ac", 1))
    assert (run.plan, run.pending) == ([(1, "de")], "fgh")


def test_a_planned_draw_is_repeated_without_its_lost_groups_and_the_rest_stays_planned() -> None:
    run = Run("abcde")
    run.restore(0)
    run.draws(draw("abc", 1), draw("de", 1))
    run.restore(0, lost="a")
    run.draws(draw("bc", 1))
    assert run.plan == [(1, "de")]


def test_a_planned_draw_without_any_group_left_is_passed_over() -> None:
    run = planned(draw("ab", 1), draw("cd", 1), draw("ef", 1))
    run.evict("ab")
    run.draws(draw("cd", 1))
    assert run.plan == [(1, "ef")]


def test_discard_keeps_the_first_reason_of_what_was_evicted_before() -> None:
    run = example()
    run.restore(1)
    run.evict("d")
    run.restore(1, "discard")
    assert run.history.evicted == {"d": "why", "c": DISCARDED, "e": DISCARDED}


# -- places among the draws of an iteration


def places(run: Run) -> list[tuple[int, int, str]]:
    return [(one.iteration, one.index, "".join(one.uids)) for one in run.line.draws()]


def test_draws_of_an_iteration_are_numbered_in_the_order_in_which_they_were_made() -> None:
    run = planned(draw("ab", 1), draw("cd", 1), draw("ef", 1))
    assert places(run) == [(1, 0, "ab"), (1, 1, "cd"), (1, 2, "ef")]
    run.draws(draw("ab", 1), draw("cd", 1))
    run.restore(0)
    assert places(run) == [(1, 0, "ab"), (1, 1, "cd"), (1, 2, "ef")]
    run.draws(draw("ef", 1))
    assert places(run) == [(1, 0, "ef")]


def test_a_draw_behind_one_that_lost_all_its_groups_moves_up() -> None:
    run = planned(draw("a", 2), draw("b", 2), draw("c", 2))
    run.draws(draw("a", 1))
    assert places(run) == [(1, 0, "a"), (2, 0, "b"), (2, 1, "c")]


def test_a_draw_behind_one_that_was_passed_over_moves_up() -> None:
    run = planned(draw("a", 1), draw("bc", 1), draw("de", 1))
    run.evict("a")
    run.draws(draw("bc", 1))
    assert places(run) == [(1, 0, "bc"), (1, 1, "de")]
    run.restore(0)
    assert places(run) == [(1, 0, "bc"), (1, 1, "de")]


def test_a_draw_whose_neighbour_is_settled_keeps_its_place() -> None:
    run = Run("ab")
    run.restore(0)
    run.draws(draw("a", 4), draw("b", 4, span=3))
    run.checkpoint(5)
    run.restore(5)
    assert [(one.index, one.uids) for one in run.line.plan()] == [(1, ("b",))]


def test_another_state_or_span_is_another_draw() -> None:
    run = example()
    run.restore(1)
    run.draws(draw("cd", 1, state=b"x"))
    assert not run.line.check_draw(draw("cd", 1, state=b"x"), {})
    for other in (draw("cd", 1, state=b"y"), draw("cd", 1), draw("cd", 1, span=2, state=b"x")):
        assert "which this session drew" in refused(run, other)


def test_two_restores_that_do_nothing_leave_the_line_as_it_is() -> None:
    run = example()
    run.restore(1)
    before = seen(run)
    run.restore(1)
    run.restore(1)
    assert seen(run) == before
