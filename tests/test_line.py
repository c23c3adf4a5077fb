"""The rules of resume (DESIGN §5), on journal entries alone. Each example of the design is here by name."""

from __future__ import annotations

import pytest
from line_runs import Run, draw, example, seen

from arrowbank.durable.checkpoints import Checkpoints
from arrowbank.durable.history import DISCARDED, History
from arrowbank.durable.line import Line
from arrowbank.errors import HistoryGoneError

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


def test_of_two_recorders_the_newest_counts_and_then_the_newest_line_that_carries_its_record() -> None:
    """A checkpoint leaves one recorder each, unless damage that was accepted hid one."""
    carried = {1: {5: 1}, 2: {5: 2}, 3: {5: 1}, 4: {5: 2}, 5: {}}
    lines = {number: Line(number, checkpoints=Checkpoints.of(table)) for number, table in carried.items()}
    assert History(lines).parent_of(5) == 4
    del lines[4]
    assert History(lines).parent_of(5) == 2


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
        with pytest.raises(HistoryGoneError, match=rf"checkpoint {gone} .*session 1.*checkpoints 1, 2, 3"):
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


@pytest.mark.parametrize("recorded", [True, False])
def test_a_session_may_be_named_after_others_have_gone_on_from_it_and_let_go_of_its_line(recorded: bool) -> None:
    run = Run("abcdefghi")
    run.restore(0)
    run.draws(*(draw(uid, at) for at, uid in enumerate("abc")))
    if recorded:
        run.checkpoint(3)
    for session, (start, uids) in enumerate([(3, "def"), (6, "ghi")], 1):
        run.restore(start, session=session)
        run.draws(*(draw(uid, at) for at, uid in enumerate(uids, start)))
        run.checkpoint(start + 3)
    assert list(run.history.lines) == [3]
    run.restore(3, session=1)
    assert seen(run) == ("abc", [(at, uid) for at, uid in enumerate("defghi", 3)], "")


def test_a_session_that_saved_again_what_it_had_resumed_at_may_be_named_after_its_line_is_gone() -> None:
    run = Run()
    run.restore(0)
    run.draws(draw("a", 0))
    run.checkpoint(1)
    run.restore(1)  # session 2 saves model 1 again, and is killed
    run.restore(1, session=2)
    run.draws(draw("b", 1))
    run.checkpoint(2)
    assert list(run.history.lines) == [3]
    run.restore(1, session=2)
    assert seen(run) == ("a", [(1, "b")], "cdef")


def test_a_session_that_drew_nothing_may_be_named_again_and_again() -> None:
    run = Run("a")
    for _ in range(3):
        run.restore(1, session=7)
    run.draws(draw("a", 1))
    run.checkpoint(2)
    run.restore(1, session=7)
    assert run.plan == [(1, "a")]


def test_checkpoint_0_may_be_restored_whatever_session_is_named() -> None:
    run = Run()
    run.restore(0)
    run.draws(draw("a", 0))
    run.restore(0)
    run.draws(draw("b", 0))
    run.checkpoint(1)
    run.restore(0, session=1)
    assert seen(run) == ("", [(0, "b")], "acdef")


def test_newer_sessions_that_may_have_got_to_the_checkpoint_too_are_told() -> None:
    run = Run()
    run.restore(0)
    run.draws(draw("a", 0), draw("b", 1))
    run.checkpoint(2)
    run.restore(0)
    run.draws(draw("c", 0), draw("d", 1))  # killed between model save 2 and checkpoint(2)
    assert run.history.parent_of(2) == 1
    assert run.history.rivals(2, 1) == [2]
    assert run.history.rivals(0, 1) == []


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
        with pytest.raises(HistoryGoneError, match=rf"what session {gone} had at 2.*lines of session 2"):
            run.history.parent_of(2, gone)
