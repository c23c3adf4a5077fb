"""What a restore hands back: taking pending groups, and the five lines of the report."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
from builders import token_group, token_rollout
from runs import kill, train

from arrowbank import RolloutBank, RolloutGroup


def group(seed: int, env: str, problem: str | None) -> RolloutGroup:
    return RolloutGroup(rollouts=[token_rollout(seed, env_id=env, problem_id=problem) for _ in range(2)])


def filled(path: Path) -> list[str]:
    """Six pending groups, in two environments and of two problems or none."""
    kinds = [("a", "p"), ("b", "p"), ("a", "q"), ("b", None), ("a", "p"), ("b", "q")]
    with RolloutBank.open(path) as bank:
        bank.restore(0)
        return [bank.append(group(seed, *kind), source_index=seed) for seed, kind in enumerate(kinds)]


# -- take


def test_take_hands_out_the_oldest_first_over_all_environments_each_once(path: Path) -> None:
    uids = filled(path)
    with RolloutBank.open(path) as bank:
        restored = bank.restore(0)
        taken = [one.uid for count in (1, 2, 0, 9, 1) for one in restored.take(count)]
        assert taken == uids
        assert not any(restored.pending.values())


@pytest.mark.parametrize(
    ("env", "problem", "wanted"),
    [("a", None, [0, 2, 4]), (None, "p", [0, 1, 4]), ("b", "q", [5]), ("b", "none", []), ("c", None, [])],
)
def test_take_keeps_to_the_environment_and_the_problem(
    path: Path, env: str | None, problem: str | None, wanted: list[int]
) -> None:
    uids = filled(path)
    with RolloutBank.open(path) as bank:
        restored = bank.restore(0)
        assert [one.uid for one in restored.take(9, env_id=env, problem_id=problem)] == [uids[at] for at in wanted]
        left = {str(one.uid) for queue in restored.pending.values() for one in queue}
        assert left == set(uids) - {uids[at] for at in wanted}


def test_threads_that_take_at_once_share_the_groups(path: Path) -> None:
    with RolloutBank.open(path) as bank:
        bank.restore(0)
        uids = bank.append_many([token_group(seed, members=1) for seed in range(300)])
    with RolloutBank.open(path) as bank:
        restored = bank.restore(0)
        taken: list[str] = []

        def take() -> None:
            while found := restored.take(3):
                taken.extend(str(one.uid) for one in found)

        threads = [threading.Thread(target=take) for _ in range(4)]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(interval)
        assert sorted(taken) == sorted(uids)


def test_a_group_that_somebody_else_put_into_pending_is_the_youngest(path: Path) -> None:
    uids = filled(path)
    with RolloutBank.open(path) as bank:
        restored = bank.restore(0)
        restored.pending["a"].appendleft(token_group(7))
        assert [one.uid for one in restored.take(9)] == [*uids, None]


def test_take_refuses_what_is_no_count(path: Path) -> None:
    filled(path)
    with RolloutBank.open(path) as bank:
        restored = bank.restore(0)
        with pytest.raises(ValueError, match=r"take\(-1\)"):
            restored.take(-1)
        with pytest.raises(TypeError):
            restored.take(1.5)  # type: ignore[arg-type]


# -- the report


def test_the_report_has_five_lines_with_counts_bytes_damage_and_seconds(path: Path) -> None:
    with RolloutBank.open(path, keep_checkpoints=1) as bank:
        bank.restore(0)
        drawn = train(bank, range(4))
        bank.checkpoint(4, wait=True)
        bank.append(token_group(9))
        bank.evict([bank.append(token_group(10))], "x")
    with RolloutBank.open(path) as bank:
        report = bank.restore(1).report
        assert (report.iteration, report.session, report.parent, report.recorded) == (1, 2, 1, True)
        assert (report.draws, report.planned_groups, report.pending_groups) == (3, 6, 1)
        assert report.revived_groups == len(drawn[1] + drawn[2])
        assert (report.torn, report.corrupt, report.lost_records, report.lost_groups) == ((), (), 0, 0)
        lines = str(report).splitlines()
        assert len(lines) == 5
        assert lines[0] == "checkpoint 1 on the line of session 1, now session 2"
        assert lines[1:3] == ["replay: 3 draws, 6 groups", "pending: 1 groups"]
        assert lines[3].endswith("; 4 groups came back from the archive")
        assert f"{report.nbytes:,} bytes in {report.seconds:.2f} s" in lines[3]
        assert lines[4] == "damage: 0 torn, 0 corrupt, 0 records lost"


def test_a_checkpoint_that_nobody_got_to_is_a_guess_that_is_told(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with RolloutBank.open(path) as bank:
        bank.restore(0)
        train(bank, range(2))
        report = bank.restore(50).report
        assert (report.guessed, report.recorded) == (True, False)
        assert "no session is known to have got there" in str(report)
        assert "Is this the bank of that run?" in caplog.text
        caplog.clear()
        assert not bank.restore(2).report.guessed
        assert caplog.text == ""


def test_a_newer_session_that_may_have_saved_the_model_is_told(path: Path) -> None:
    with RolloutBank.open(path) as bank:
        bank.restore(0)
        train(bank, range(2))
    with kill(path) as bank:
        bank.restore(0)
        train(bank, range(2), checkpoints=False)
    with kill(path) as bank:
        report = bank.restore(2).report
        assert (report.parent, report.rivals) == (1, (2,))
        assert "sessions [2] may have got there, too: session=" in str(report)
        assert bank.restore(2, session=2).report.rivals == ()


def test_groups_of_the_plan_that_are_lost_are_counted(path: Path) -> None:
    with RolloutBank.open(path) as bank:
        bank.restore(0)
        drawn = train(bank, range(1), checkpoints=False)
        bank.restore(0)
        bank.evict(drawn[0][:1], "x")
    with kill(path) as bank:
        restored = bank.restore(0)
        assert restored.draws[0].lost == (drawn[0][0],)
        assert str(restored.report).splitlines()[1] == "replay: 1 draws, 1 groups, 1 more are lost"


def test_a_replayed_draw_that_is_not_marked_again_is_void_with_a_warning(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with RolloutBank.open(path) as bank:
        bank.restore(0)
        drawn = train(bank, range(2), checkpoints=False)
    with kill(path) as bank:
        bank.restore(0)
        bank.mark_consumed(drawn[0], 0, state=b"at 0")
        bank.checkpoint(1)
        assert caplog.text == ""
        bank.begin_iteration(1)
        bank.checkpoint(2)
        assert "the planned draws of iterations [1] were not marked as consumed again" in caplog.text
        assert [str(one.uid) for one in bank.restore(2).take(9)] == drawn[1]
