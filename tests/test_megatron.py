"""The adapter for Megatron-LM: what it relies on, and that groups come back as they were.

With MEGATRON_LM=checkout the checkout, too, is held against the table of names and calls, and the classes of this and
of the other ``test_megatron`` files are Megatron's own (see ``megatron_calls``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron_calls import (
    CHECKOUT,
    content,
    group_of,
    kill,
    kinds,
    text_rollout,
    through_a_kill,
    token_group,
    token_rollout,
    trainer_module,
)
from megatron_standin.pinned import PINNED, STANDIN, facts

from arrowbank import RolloutGroup, TokenRollout, UnrepresentableError, scan
from arrowbank.integrations.megatron import MegatronBank

pytestmark = pytest.mark.usefixtures("closed_in_the_end")


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
