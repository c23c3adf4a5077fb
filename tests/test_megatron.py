"""The adapter for Megatron-LM, called as Megatron calls its bank.

Classes are those of a small stand-in (``megatron_standin``), which is held against a table of names and calls; with
MEGATRON_LM=checkout they are Megatron's own, and the checkout is held against the table, too.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from megatron_standin.pinned import PINNED, STANDIN, facts

from arrowbank import (
    BankLockedError,
    DuplicateGroupError,
    FencedError,
    HistoryGoneError,
    RolloutBank,
    RolloutGroup,
    TokenRollout,
    UnknownGroupError,
    UnrepresentableError,
    scan,
)
from arrowbank.integrations.megatron import MegatronBank, install, steps_per_collection

CHECKOUT = os.environ.get("MEGATRON_LM")
sys.path.insert(0, str(CHECKOUT or STANDIN))
kinds: Any = importlib.import_module("megatron.rl.types")
megatron_bank: Any = importlib.import_module("megatron.rl.rollout_bank")
sys.path.remove(str(CHECKOUT or STANDIN))  # others may look whether there is a megatron


def from_standin(name: str) -> Any:
    """A module of the stand-in, also where the classes are Megatron's own."""
    spec = importlib.util.spec_from_file_location(f"standin_{Path(name).stem}", STANDIN / "megatron/rl" / name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


trainer_module = from_standin("rl_utils.py")
pipeline_module = from_standin("agent/rollout_pipeline.py")


# -- Megatron's groups


def token_rollout(seed: int = 0, *, turns: int = 2, **fields: Any) -> Any:
    """As an agent packages an episode: logprobs of sampled tokens only, a completion id for each turn."""
    ends = [3 * (turn + 1) for turn in range(turns)]
    given: dict[str, Any] = {
        "trajectory": [[seed % 1000 + token for token in range(end)] for end in ends],
        "reward": float(seed),
        "generation_mask": [[False] * (end - 2) + [True] * 2 for end in ends],
        "logprobs": [[-0.5 - seed, -0.25] for _ in ends],
        "env_id": "math",
        "problem_id": f"p{seed}",
        "completion_ids": [f"c{seed}-{turn}" for turn in range(turns)],
        "generation_cap": 7,
    }
    return kinds.TokenRollout(**given | fields)


def text_rollout(seed: int = 0, **fields: Any) -> Any:
    given: dict[str, Any] = {"trajectory": [f"Q{seed}", f"Q{seed} A"], "prompt_length": [2, 3], "reward": float(seed)}
    return kinds.Rollout(**given | {"env_id": "math"} | fields)


def group_of(*rollouts: Any, **fields: Any) -> Any:
    return kinds.RolloutGroup(rollouts=list(rollouts), **fields)


def token_group(seed: int = 0, **fields: Any) -> Any:
    return group_of(token_rollout(2 * seed, **fields), token_rollout(2 * seed + 1, turns=1, **fields))


def content(group: Any) -> Any:
    """What must come back: everything but the uid and the completion ids of token rollouts."""
    dumped = group.model_dump(exclude={"uid"})
    for rollout, member in zip(dumped["rollouts"], group, strict=True):
        if isinstance(member, kinds.TokenRollout):
            del rollout["completion_ids"]
    return dumped


@pytest.fixture(autouse=True)
def _opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close what a test has opened, those that it has "killed" among them."""
    opened: list[RolloutBank] = []
    opener = RolloutBank.open

    def opening(*args: Any, **options: Any) -> RolloutBank:
        opened.append(opener(*args, **options))
        return opened[-1]

    monkeypatch.setattr(RolloutBank, "open", opening)
    yield
    for bank in opened:
        with contextlib.suppress(FencedError):  # raised by a background compaction that was overtaken
            bank.close()


def kill(path: Path, **options: Any) -> MegatronBank:
    """Open a bank whose last handle is given up, as after a kill."""
    return MegatronBank(RolloutBank.open(path, takeover="force"), **options)


def through_a_kill(path: Path, *groups: Any) -> list[Any]:
    bank = kill(path)
    bank.recover(0)
    for group in groups:
        group.uid = bank.append(group)
    restored = kill(path).recover(0)
    assert [group.uid for group in restored] == [group.uid for group in groups]
    return restored


# -- the table


@pytest.mark.parametrize("root", [STANDIN, *([Path(CHECKOUT)] if CHECKOUT else [])], ids=lambda root: root.name)
def test_what_the_adapter_relies_on_is_as_pinned(root: Path) -> None:
    assert facts(root) == PINNED


def test_the_adapter_takes_the_calls_that_megatron_makes() -> None:
    called = {method for calls in PINNED["calls"].values() for whose, method, _ in calls if whose == "bank"}
    assert called | {"mark_consumed", "restore", "close"} <= set(vars(MegatronBank))


# -- groups


@pytest.mark.parametrize(
    "group",
    [
        pytest.param(lambda: token_group(3), id="tokens"),
        pytest.param(lambda: group_of(text_rollout(1), text_rollout(2, prompt_length=None, reward=None)), id="texts"),
        pytest.param(lambda: group_of(), id="no-rollouts"),
        pytest.param(lambda: group_of(token_rollout(trajectory=[], logprobs=[], generation_mask=[])), id="placeholder"),
        pytest.param(lambda: group_of(token_rollout(trajectory=[], logprobs=None, generation_mask=None)), id="bare"),
        pytest.param(lambda: group_of(token_rollout(reward=[0.5, -1.0])), id="reward-a-turn"),
        pytest.param(
            lambda: group_of(token_rollout(rollout_status="masked", failure_reason="timeout", env_id="")), id="failed"
        ),
        pytest.param(lambda: group_of(token_rollout(), batch_id=7, index_in_batch=3, wave={"a": [1]}), id="group"),
    ],
)
def test_groups_come_back_as_they_were(path: Path, group: Callable[[], Any]) -> None:
    given = group()
    expected = content(given)
    (restored,) = through_a_kill(path, given)
    assert type(restored) is kinds.RolloutGroup
    assert [type(member) for member in restored] == [type(member) for member in given]
    assert content(restored) == expected
    assert content(kinds.RolloutGroup.model_validate(restored.model_dump())) == expected


def test_restored_rollouts_hold_lists(path: Path) -> None:
    (group,) = through_a_kill(path, token_group())
    for name, kind in (("trajectory", int), ("logprobs", float), ("generation_mask", bool)):
        turns = getattr(group[0], name)
        assert type(turns) is list and {type(turn) for turn in turns} == {list}
        assert {type(value) for turn in turns for value in turn} == {kind}
    assert group.model_dump_json()


@pytest.mark.parametrize("kind", [token_rollout, text_rollout])
def test_extra_fields_come_back_by_their_names(path: Path, kind: Callable[..., Any]) -> None:
    pixels = np.arange(6, dtype=np.uint8).reshape(2, 3)
    extra: dict[str, Any] = {
        "note": "n",
        "nested": {"a": [1, None, True]},
        "kl": 0.5,
        "nan": math.nan,
        "pixels": pixels,
        "megatron": "a name that the adapter uses",
        "metrics": {"of": "another kind"},
        "arrays": None,
        "finish_reasons": "stop",
        "is_truncated": 3,
        "advantage_override": -1.5,
        "policy_versions": [[0, 0, 17]],
    }
    (group,) = through_a_kill(path, group_of(kind(**extra)))
    found = dict(group[0].__pydantic_extra__)
    found["pixels"] += 0  # it may be written to
    assert math.isnan(found.pop("nan")) and np.array_equal(found.pop("pixels"), pixels)
    assert found == {name: value for name, value in extra.items() if name not in ("nan", "pixels")}
    frame = scan(path).to_arrow().to_pylist()[0]
    metrics = {entry["key"]: entry["value"] for entry in frame["metrics"]}
    assert metrics["kl"] == 0.5 and metrics["advantage_override"] == -1.5
    assert [entry["name"] for entry in frame["arrays"]] == ["pixels"]


def test_fields_that_a_subclass_declares_come_back(path: Path) -> None:
    class Tool(kinds.TokenRollout):  # type: ignore[misc, name-defined]  # the base is found at run time
        tool: str = "none"
        cost: float = 0.0

    given = Tool(**token_rollout().model_dump(), tool="python", cost=2.5)
    (group,) = through_a_kill(path, group_of(given))
    assert (group[0].tool, group[0].cost) == ("python", 2.5)


def test_rollouts_that_are_not_megatrons_are_given_its_classes(path: Path) -> None:
    bank = MegatronBank.open(path)
    bank.bank.append(RolloutGroup(rollouts=[TokenRollout(trajectory=[[1, 2]])]))
    (group,) = kill(path).recover(0)
    assert type(group[0]) is kinds.TokenRollout
    assert (group[0].trajectory, group[0].env_id, group[0].reward) == ([[1, 2]], "", None)


def test_a_limit_of_0_bytes_is_none(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for max_bytes in (0, 100):
        bank = MegatronBank.open(path, max_bytes=max_bytes)
        bank.recover(0)
        bank.append(token_group())
        bank.close()
        assert ("more than max_bytes" in caplog.text) is bool(max_bytes)


def test_what_cannot_come_back_is_refused_by_name(path: Path) -> None:
    bank = MegatronBank.open(path)
    with pytest.raises(UnrepresentableError, match=r"rollouts\[1\]\.trajectory\[0\]"):
        bank.append(group_of(token_rollout(), kinds.TokenRollout.model_construct(trajectory=[[-1]], reward=0.0)))
    with pytest.raises(UnrepresentableError, match=r"rollouts\[0\]\.handle"):
        bank.append(group_of(token_rollout(handle=object())))
    assert bank.recover(0) == []


def test_completion_ids_are_kept_and_restored_ones_are_not_looked_up(path: Path) -> None:
    given = token_group(3)
    ids = [member.completion_ids for member in given]
    (restored,) = through_a_kill(path, given)
    assert [member.completion_ids for member in restored] == [[], []]
    assert scan(path).to_arrow()["completion_ids"].to_pylist() == ids
    trainer = trainer_module.Trainer(None, None, 0)
    trainer.request_ledger = dict.fromkeys(ids[0] + ids[1], "how it was sampled")
    assert len(trainer.join([given])) == 3
    assert trainer.join([restored]) == []  # nor would an id of an earlier process be there


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


class Run:
    """Processes of one run, each killed, on one bank."""

    def __init__(self, path: Path, *, steps: int = 1, envs: dict[str, int] | None = None) -> None:
        self.path, self.steps, self.envs = path, steps, envs or {"math": 2, "code": 1}
        self.seeds = itertools.count()

    def start(self, iteration: int, **options: Any) -> Any:
        self.bank = kill(self.path, span=self.steps, **options)
        pipeline = pipeline_module.RolloutPipeline(self.bank, self.envs, self.generate)
        self.trainer = trainer_module.Trainer(self.bank, pipeline, iteration)
        self.restored = self.trainer.resume()
        return self.trainer

    def generate(self, env_id: str, _: int) -> Any:
        group = token_group(next(self.seeds), env_id=env_id)
        for member in group:
            self.trainer.request_ledger |= dict.fromkeys(member.completion_ids, "sampled")
        return group

    def collect(self, *iterations: int) -> list[list[str]]:
        return [[group.uid for group in self.trainer.collect(k)] for k in iterations]

    @property
    def generated(self) -> int:
        return self.trainer.pipeline.generated  # type: ignore[no-any-return]


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
    run = Run(path, steps=4)
    run.start(0)
    before = run.collect(0, 4)
    run.bank.checkpoint(6)  # saved at a signal, between two collections
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
    run = Run(path, steps=4)
    run.start(0)
    before = run.collect(0, 4)
    run.bank.checkpoint(6)
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
    run = Run(path, steps=4)
    run.start(0)
    before = run.collect(0, 4)
    run.bank.checkpoint(6)
    run.start(6)
    assert run.collect(9) == before[1:]  # iterations were skipped
    run.bank.checkpoint(13)
    run.start(13)
    assert run.restored == []


def test_who_goes_on_with_a_cut_batch_is_known_to_have_got_to_its_end(path: Path) -> None:
    run = Run(path, steps=4)
    run.start(0)
    run.collect(0, 4)
    run.bank.checkpoint(6)
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


# -- faults of Megatron's own bank (August 2026)


def test_uids_do_not_collide_after_recovery(path: Path) -> None:
    bank = MegatronBank.open(path)
    bank.recover(0)
    bank.set_collection(5)
    before = [bank.append(token_group(seed)) for seed in range(2)]
    bank = kill(path)
    bank.recover(3)
    bank.set_collection(5)  # again
    after = bank.append(token_group(9))
    assert after not in before
    bank.mark_consumed(after, 6)  # takes only that one
    bank.checkpoint(6)
    assert [group.uid for group in kill(path).recover(6)] == before


def test_a_failed_write_spoils_no_later_group(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bank = MegatronBank.open(path)
    bank.recover(0)
    good, bad, later = token_group(1), token_group(2), token_group(3)
    uids = [bank.append(good)]
    pwritev = os.pwritev

    def full(descriptor: int, views: list[memoryview], offset: int) -> int:
        """Half of it is written; then the disk is full."""
        monkeypatch.setattr(os, "pwritev", pwritev)
        pwritev(descriptor, [views[0][: len(views[0]) // 2]], offset)
        raise OSError(28, "planted")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(OSError, match="planted"):
        bank.append(bad)
    uids += [bank.append(later), bank.append(bad)]
    restored = kill(path).recover(0)
    assert [group.uid for group in restored] == uids
    assert [content(group) for group in restored] == [content(group) for group in (good, later, bad)]


def test_logprobs_are_not_rounded(path: Path) -> None:
    logprobs = np.array([-70000.0, -1e-8, -0.0, -math.inf, -0.1, -12.345678, -3e38, 1e-45], np.float32).tolist()
    given = token_rollout(trajectory=[list(range(9))], generation_mask=[[False] + [True] * 8], logprobs=[logprobs])
    (group,) = through_a_kill(path, group_of(given))
    assert np.array(group[0].logprobs[0]).tobytes() == np.array(logprobs).tobytes()


def test_damage_inside_a_file_costs_one_group_and_is_told(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bank = MegatronBank.open(path)
    bank.recover(0)
    uids = [bank.append(token_group(seed, problem_id=f"marked{seed}")) for seed in range(3)]
    bank.mark_consumed_many(uids, 1)
    bank.close()
    (segment,) = (path / "segments").iterdir()
    data = bytearray(segment.read_bytes())
    data[data.index(b"marked1")] ^= 1
    segment.write_bytes(data)
    caplog.set_level(logging.WARNING, "arrowbank")
    bank = MegatronBank.open(path)
    restored = bank.recover(0)
    assert [group.uid for group in restored] == [uids[0], uids[2]]
    assert bank.report is not None and bank.report.lost_groups == 1 and bank.report.lost_records == 1
    assert segment.name in caplog.text and "lost" in caplog.text
    assert f"the batch of iteration 0 comes back without {uids[1]}" in caplog.text


def test_a_torn_tail_costs_the_group_that_was_being_written(path: Path) -> None:
    bank = MegatronBank.open(path)
    bank.recover(0)
    bank.set_collection(3)
    uids = [bank.append(token_group(seed)) for seed in range(2)]
    bank.close()
    (segment,) = (path / "segments").iterdir()
    os.truncate(segment, segment.stat().st_size - 100)
    bank = MegatronBank.open(path)
    assert [group.uid for group in bank.recover(0)] == uids[:1]
    assert bank.report is not None and bank.report.damage
    assert bank.append(token_group(1)) not in uids


def test_a_second_opener_is_refused(path: Path) -> None:
    bank = MegatronBank.open(path)
    with pytest.raises(BankLockedError, match=str(os.getpid())):
        MegatronBank.open(path)
    bank.recover(0)
    bank.append(token_group())


def test_groups_may_be_appended_right_after_a_checkpoint(path: Path) -> None:
    bank = MegatronBank.open(path)
    unplaced = bank.append(token_group(0))  # nor is set_collection needed before the first
    bank.recover(0)
    bank.set_collection(0)
    drawn = bank.append(token_group(1))
    bank.mark_consumed(drawn, 1)
    bank.checkpoint(1)
    after = bank.append(token_group(2))
    assert [group.uid for group in kill(path).recover(1)] == [unplaced, after]


@pytest.mark.parametrize(
    "group",
    [
        pytest.param(lambda: group_of(token_rollout(1), token_rollout(2, logprobs=None)), id="partial-logprobs"),
        pytest.param(
            lambda: group_of(token_rollout(1, turns=1, generation_mask=None, logprobs=[[-1.0] * 3]), token_rollout(2)),
            id="partial-masks",
        ),
        pytest.param(lambda: group_of(token_rollout(1), text_rollout(2)), id="tokens-and-text"),
        pytest.param(
            lambda: group_of(text_rollout(1), token_rollout(trajectory=[], logprobs=None, generation_mask=None)),
            id="text-and-placeholder",
        ),
    ],
)
def test_mixed_groups_are_taken(path: Path, group: Callable[[], Any]) -> None:
    given = group()
    (restored,) = through_a_kill(path, given)
    assert content(restored) == content(given)
    assert [type(member) for member in restored] == [type(member) for member in given]


def test_a_group_is_banked_once(path: Path) -> None:
    bank = MegatronBank.open(path)
    bank.recover(0)
    group = token_group()
    group.uid = bank.append(group)
    with pytest.raises(DuplicateGroupError):
        bank.append(group)
    (restored,) = bank.recover(0)
    with pytest.raises(DuplicateGroupError):
        bank.append(restored)


def test_the_run_is_read_as_parquet(path: Path) -> None:
    run = Run(path)
    run.start(0)
    run.collect(0, 1)
    run.bank.checkpoint(2)
    run.bank.close(final=True)
    table = scan(path).to_arrow()
    assert table.num_rows == 2 * 3 * 2
    assert pa.compute.sum(table["consumed_iteration"]).as_py() == 6
    assert pa.compute.all(pa.compute.equal(pa.compute.list_value_length(table["completion_ids"]), table["num_turns"]))
