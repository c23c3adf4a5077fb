"""The adapter for Megatron-LM: which iterations a checkpoint holds, and runs that are killed and resumed."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from megatron_calls import Run, kill, megatron_bank, run_with_a_cut_batch, token_group, trainer_module

from arrowbank import HistoryGoneError, UnknownGroupError, scan
from arrowbank.integrations.megatron import MegatronBank, install, steps_per_collection

pytestmark = pytest.mark.usefixtures("closed_in_the_end")


# -- iterations


@pytest.mark.parametrize(("marked", "settled"), [(9, True), (10, True), (11, False)])
def test_a_mark_says_which_checkpoint_holds_it(path: Path, marked: int, settled: bool) -> None:
    bank = MegatronBank.open(path)
    bank.recover(0)
    bank.set_collection(5)
    drawn, waiting = bank.append(token_group(1)), bank.append(token_group(2))
    bank.mark_consumed(drawn, marked)
    bank.checkpoint(10)
    assert [group.uid for group in kill(path).recover(10)] == ([waiting] if settled else [drawn, waiting])
    bank = kill(path)
    bank.recover(10)
    bank.close(final=True)
    rows = scan(path).to_arrow().to_pylist()
    assert {row["consumed_iteration"] for row in rows if row["outcome"]} == ({marked - 1} if settled else set())


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("checkpoint", range(0, 13, 4))
def test_a_batch_is_settled_once_all_its_steps_are_in_the_checkpoint(path: Path, steps: int, checkpoint: int) -> None:
    bank = kill(path, span=steps)
    bank.recover(0)
    drawn = {}
    for k in range(0, 12, steps):
        bank.set_collection(k)
        drawn[k] = bank.append(token_group(k))
        bank.mark_consumed_many([drawn[k]], k + 1)
        if k + steps <= checkpoint:
            bank.checkpoint(k + steps)  # Megatron says nothing of the iterations between
    left = kill(path, span=steps).recover(checkpoint)
    assert [group.uid for group in left] == [uid for k, uid in drawn.items() if k + steps > checkpoint]


def test_late_finalizers_change_nothing(path: Path) -> None:
    bank = MegatronBank.open(path)
    bank.recover(0)
    uids = []
    for k in range(4):
        bank.set_collection(k)
        uids.append(bank.append(token_group(k)))
        bank.mark_consumed_many([uids[-1]], k + 1)
    bank.checkpoint(2)
    assert bank.bank.iteration == 3
    bank.checkpoint(1)
    bank.checkpoint(4)
    bank.checkpoint(4)
    assert [group.uid for group in kill(path).recover(2)] == uids[2:]


def test_groups_without_uid_are_passed_over(path: Path) -> None:
    bank = MegatronBank.open(path)
    bank.recover(0)
    bank.mark_consumed_many([], 1)
    bank.mark_consumed_many([None, "", None], 1)
    bank.mark_consumed(None, 1)
    uid = bank.append(token_group())
    bank.mark_consumed_many(iter([None, uid]), 1)
    with pytest.raises(UnknownGroupError):
        bank.mark_consumed("no such uid", 2)
    bank.checkpoint(1)
    assert kill(path).recover(1) == []


def test_steps_per_collection_are_counted_as_megatron_counts_them() -> None:
    args = SimpleNamespace(grpo_iterations=2, grpo_prompts_per_step=32, grpo_group_size=4, global_batch_size=64)
    assert steps_per_collection(args) == 4
    args.global_batch_size = 256
    assert steps_per_collection(args) == 1
    with pytest.raises(ValueError, match="at least one optimizer step"):
        MegatronBank(None, span=0)  # type: ignore[arg-type]  # refused before it is looked at


# -- a run


def test_batches_are_replayed_in_their_order_and_nothing_is_generated(path: Path) -> None:
    run = Run(path)
    run.start(0)
    before = run.collect(0, 1, 2)
    run.bank.checkpoint(1)
    ahead = [run.bank.append(run.generate(env_id, 0)) for env_id in ("code", "math", "math")]
    for _ in range(2):  # a second kill, right after replaying
        run.start(1)
        assert [group.uid for group in run.restored] == [*before[1], *before[2], *ahead]
        assert run.collect(1, 2) == before[1:]
        assert run.generated == 0
    assert [set(batch) for batch in run.collect(3)] == [set(ahead)]
    assert run.generated == 0
    run.collect(4)
    assert run.generated == 3
    assert run.trainer.request_ledger == {}


def test_an_older_checkpoint_is_replayed_too(path: Path) -> None:
    run = Run(path)
    run.start(0)
    before = []
    for k in range(6):
        before += run.collect(k)
        run.bank.checkpoint(k + 1)
    run.start(2)
    assert run.collect(2, 3, 4, 5) == before[2:] and run.generated == 0


@pytest.mark.parametrize("mode", ["requeue", "discard"])
def test_how_to_restore_is_the_callers_choice(path: Path, mode: str) -> None:
    run = Run(path)
    run.start(0)
    drawn = run.collect(0, 1)
    waiting = run.bank.append(run.generate("math", 0))
    run.bank.checkpoint(1)
    first = run.bank.bank.session
    run.start(1, mode=mode, session=first)
    assert [group.uid for group in run.restored] == ([*drawn[1]] if mode == "requeue" else []) + [waiting]
    with pytest.raises(HistoryGoneError):
        run.start(1, session=77)


def test_a_batch_that_a_checkpoint_cuts_comes_back_whole(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, before = run_with_a_cut_batch(path)
    run.start(6)
    assert "checkpoint 6 holds 2 of the 4 steps on the batch of iteration 4" in caplog.text
    assert run.collect(6) == before[1:] and run.generated == 0
    run.collect(10)
    run.start(7)
    assert run.collect(7) == before[1:]
    run.bank.checkpoint(11)
    run.start(11, mode="requeue")
    assert not {group.uid for group in run.restored} & set(before[1])


@pytest.mark.parametrize("at", [6, 9])
def test_another_layout_may_divide_a_batch_that_a_checkpoint_cut(path: Path, at: int) -> None:
    run, before = run_with_a_cut_batch(path)
    run.envs = {"code": 1, "math": 1}
    run.start(6)
    assert [set(batch) <= set(before[1]) for batch in run.collect(at, at + 4)] == [True, False]
    run.start(6)
    assert {group.uid for group in run.restored} >= set(before[1])  # it is still the draw that it was
    run.collect(6, 10)
    run.bank.checkpoint(14)
    run.start(14)
    assert run.restored == []


def test_a_batch_that_a_checkpoint_cut_may_be_drawn_late(path: Path) -> None:
    run, before = run_with_a_cut_batch(path)
    run.start(6)
    assert run.collect(9) == before[1:]  # iterations were skipped
    run.bank.checkpoint(13)
    run.start(13)
    assert run.restored == []


def test_who_goes_on_with_a_cut_batch_is_known_to_have_got_to_its_end(path: Path) -> None:
    run, _ = run_with_a_cut_batch(path)
    run.start(6)
    run.collect(6)
    session = run.bank.bank.session
    run.start(8)  # killed between the save of the model and the bank's checkpoint
    assert run.bank.report is not None and run.bank.report.parent == session


def test_a_cut_batch_may_be_lost(path: Path) -> None:
    run = Run(path, steps=4)
    run.start(0)
    before = run.collect(4)
    run.bank.checkpoint(6)
    run.start(6)
    run.bank.bank.evict(before[0], "seen to be wrong")
    run.start(6)
    assert run.restored == [] and run.bank.report is not None and run.bank.report.lost_groups == 3
    assert len(run.collect(6)[0]) == 3 == run.generated


def test_another_layout_may_divide_batches_that_are_replayed(path: Path) -> None:
    run = Run(path)
    run.start(0)
    before = run.collect(0, 1)
    run.envs = {"math": 1, "code": 1}
    run.start(0)
    math = [uid for batch in before for uid in batch[:2]]
    code = [batch[2] for batch in before]
    assert run.collect(0, 1) == [[math[0], code[0]], [math[1], code[1]]]
    run.bank.checkpoint(2)
    run.start(2)
    assert [group.uid for group in run.restored] == math[2:]


def test_megatron_opens_this_bank_once_installed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_bank, "RolloutBank", megatron_bank.RolloutBank)
    args = SimpleNamespace(grpo_iterations=3, grpo_prompts_per_step=4, grpo_group_size=2, global_batch_size=8)
    args.rl_durable_rollout_bank, args.rl_rollout_bank_dir, args.rl_rollout_bank_max_bytes = True, str(path), 0
    variables = SimpleNamespace(get_args=lambda: args)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", variables)
    monkeypatch.setattr(trainer_module, "_ROLLOUT_BANK", None)
    install(mode="requeue")
    bank = trainer_module.maybe_get_rollout_bank(args)
    assert isinstance(bank, MegatronBank) and bank.span == 3
    assert trainer_module.maybe_get_rollout_bank(args) is bank
    assert bank.recover(0) == []
    bank.mark_consumed(bank.append(token_group()), 1)
    trainer_module.maybe_compact_rollout_bank(3)
    assert [group.uid for group in bank.restore(3)] == []
    bank.close()
    install(span=5)
    monkeypatch.setattr(trainer_module, "_ROLLOUT_BANK", None)
    bank = trainer_module.maybe_get_rollout_bank(args)
    assert bank.span == 5
    bank.close()
