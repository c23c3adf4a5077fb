"""What would not come back bit for bit is refused, by the name of the field."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from builders import round_trip, sealed, stored, text_rollout, token_rollout

from arrowbank import codec
from arrowbank.columns import Columns
from arrowbank.errors import UnrepresentableError
from arrowbank.types import Rollout, RolloutGroup, TokenRollout, VersionSpan


def refused(group: RolloutGroup, **options: Any) -> UnrepresentableError:
    with pytest.raises(UnrepresentableError) as refusal:
        sealed(group, **options)
    str(refusal.value).encode()  # a message that cannot be printed helps nobody
    return refusal.value


LONE = "a\ud800"
SURROGATES: dict[str, tuple[dict[str, Any], str]] = {
    "env_id": ({"env_id": LONE}, "env_id"),
    "problem_id": ({"problem_id": LONE}, "problem_id"),
    "rollout_status": ({"rollout_status": LONE}, "rollout_status"),
    "failure_reason": ({"failure_reason": LONE}, "failure_reason"),
    "finish_reasons": ({"finish_reasons": [None, LONE]}, "finish_reasons[1]"),
    "metrics": ({"metrics": {LONE: 1.0}}, "metrics"),
    "arrays": ({"arrays": {LONE: [1]}}, "arrays"),
    "extra": ({"note": LONE}, "note"),
    "inside an extra": ({"note": [{"a": LONE}]}, "note[0].a"),
    "key inside an extra": ({"note": {"a": {LONE: 1}}}, "note.a"),
}


@pytest.mark.parametrize("make", [token_rollout, text_rollout])
@pytest.mark.parametrize("where", SURROGATES)
def test_lone_surrogates_are_refused_wherever_they_are(where: str, make: Any) -> None:
    fields, place = SURROGATES[where]
    refusal = refused(RolloutGroup(rollouts=[text_rollout(), make(**fields)]))
    assert refusal.field == f"rollouts[1].{place}"
    assert "surrogate" in refusal.reason


def test_lone_surrogates_in_the_name_of_an_extra_field_are_refused() -> None:
    with pytest.raises(UnrepresentableError, match=r"^extra: a lone surrogate"):
        token_rollout(**{LONE: 1})
    rollout = token_rollout(note=1)
    assert rollout.__pydantic_extra__ is not None
    rollout.__pydantic_extra__[LONE] = 1
    assert refused(RolloutGroup(rollouts=[rollout])).field == f"rollouts[0].{LONE!r}"


def test_lone_surrogates_of_tokens_texts_and_groups_are_refused() -> None:
    texts = Rollout(trajectory=["a", LONE, LONE + "b"])
    assert refused(RolloutGroup(rollouts=[texts])).field == "rollouts[0].trajectory[1]"
    dropped = Rollout(trajectory=["a", LONE, "b"])
    assert refused(RolloutGroup(rollouts=[dropped])).field == "rollouts[0].trajectory[1]"
    ids = token_rollout(completion_ids=["a", LONE])
    assert refused(RolloutGroup(rollouts=[ids])).field == "rollouts[0].completion_ids[1]"
    for rollouts_ in ([], [token_rollout()]):
        assert refused(RolloutGroup(rollouts=rollouts_, note=[LONE])).field == "note[0]"
        assert refused(RolloutGroup(rollouts=rollouts_), split=LONE).field == "split"
        assert refused(RolloutGroup(rollouts=rollouts_), evicted=LONE).field == "evicted"


class Text(str):
    """Looks like a string."""


CHANGED_BY_JSON: dict[str, tuple[Any, str]] = {
    "int key": ({1: 2}, "note"),
    "None key": ({None: 2}, "note"),
    "int key inside": ([{"a": {1: 2}}], "note[0].a"),
    "tuple": ((1, 2), "note"),
    "tuple inside": ({"a": [1, (2,)]}, "note.a[1]"),
    "set": ({1}, "note"),
    "float64": (np.float64(1), "note"),
    "float32": ([np.float32(1)], "note[0]"),
    "int64": (np.int64(1), "note"),
    "bool_": (np.True_, "note"),
    "array": (np.zeros(2), "note"),
    "str_": (np.str_("a"), "note"),
    "str subclass": (Text("a"), "note"),
    "datetime": (datetime(2026, 1, 1), "note"),
    "bytes": (b"a", "note"),
    "complex": (1j, "note"),
    "nan": (float("nan"), "note"),
    "inf": ({"a": float("-inf")}, "note.a"),
    "mapping": (MappingProxyType({}), "note"),
    "model": (Rollout(trajectory=[]), "note"),
    "object": (object(), "note"),
    "endless int": (10**5000, "note"),
}


@pytest.mark.parametrize("name", CHANGED_BY_JSON)
def test_extra_fields_that_json_would_change_are_refused(name: str) -> None:
    value, place = CHANGED_BY_JSON[name]
    assert refused(RolloutGroup(rollouts=[token_rollout(note=value)])).field == f"rollouts[0].{place}"
    assert refused(RolloutGroup(rollouts=[text_rollout(note=value)])).field == f"rollouts[0].{place}"
    assert refused(RolloutGroup(rollouts=[], note=value)).field == place


def test_extra_fields_nested_too_deeply_are_refused_and_others_read_on_any_stack() -> None:
    def nested(depth: int) -> list[Any]:
        found: list[Any] = []
        for _ in range(depth):
            found = [found]
        return found

    group = RolloutGroup(rollouts=[], note=nested(90))
    assert round_trip(group) == group
    endless: list[Any] = []
    endless.append(endless)
    for note in (nested(101), nested(100_000), endless):
        assert refused(RolloutGroup(rollouts=[], note=note)).field.startswith("note[0][0]")


RAGGED: dict[str, tuple[dict[str, Any], str]] = {
    "mask": ({"trajectory": [[1, 2]], "generation_mask": [[1]]}, "generation_mask[0]"),
    "masks": ({"trajectory": [[1, 2]], "generation_mask": [[0, 1], [1, 1]]}, "generation_mask"),
    "logprobs": ({"trajectory": [[1, 2]], "logprobs": [[1]]}, "logprobs[0]"),
    "sampled logprobs": (
        {"trajectory": [[1, 2, 3, 4]], "generation_mask": [[0, 0, 0, 1]], "logprobs": [[1, 2]]}, "logprobs[0]",
    ),
    "turns of logprobs": ({"trajectory": [[1], [1, 2]], "logprobs": [[1]]}, "logprobs"),
    "a placeholder's masks": ({"trajectory": [], "generation_mask": [[1]]}, "generation_mask"),
}  # fmt: skip


@pytest.mark.parametrize("name", RAGGED)
def test_ragged_lengths_are_refused(name: str) -> None:
    fields, place = RAGGED[name]
    assert refused(RolloutGroup(rollouts=[token_rollout(), TokenRollout(**fields)])).field == f"rollouts[1].{place}"


@pytest.mark.parametrize("beyond", [2**63, -(2**63) - 1, 2**70])
def test_integers_beyond_64_bits_are_refused(beyond: int) -> None:
    assert refused(RolloutGroup(rollouts=[], batch_id=beyond)).field == "batch_id"
    assert refused(RolloutGroup(rollouts=[], index_in_batch=beyond)).field == "index_in_batch"
    assert refused(RolloutGroup(rollouts=[]), source_index=beyond).field == "source_index"
    assert refused(RolloutGroup(rollouts=[token_rollout(generation_cap=beyond)])).field == "rollouts[0].generation_cap"
    spans_ = token_rollout(kv_versions=[(0, 0, 1), (0, beyond, 1)])
    assert refused(RolloutGroup(rollouts=[spans_])).field == "rollouts[0].kv_versions[1].start"
    if beyond > 0:
        lengths = token_rollout(prompt_length=[1, beyond])
        assert refused(RolloutGroup(rollouts=[lengths])).field == "rollouts[0].prompt_length[1]"


def test_two_environments_in_one_group_are_refused() -> None:
    members = [token_rollout(), token_rollout(env_id="a"), token_rollout(env_id=""), token_rollout(env_id="b")]
    assert refused(RolloutGroup(rollouts=members)).field == "rollouts[3].env_id"
    group = RolloutGroup(rollouts=members[:3])
    assert round_trip(group) == group and stored(group).env_id == "a"


def _put(field: str, value: Any) -> Callable[[Any], None]:
    """Set a field past validation."""
    return lambda rollout: rollout.__dict__.__setitem__(field, value)


BEHIND: dict[str, tuple[Callable[[Any], Any], str]] = {
    "turn of a list": (lambda rollout: rollout.trajectory.append([1, 2]), "trajectory[1]"),
    "turn of int64": (lambda rollout: rollout.trajectory.append(np.array([1])), "trajectory[1]"),
    "turn of floats": (lambda rollout: rollout.trajectory.append(np.array([1.0])), "trajectory[1]"),
    "turn of two dimensions": (lambda rollout: rollout.trajectory.append(np.ones((1, 2), np.int32)), "trajectory[1]"),
    "turn of no dimension": (lambda rollout: rollout.trajectory.append(np.array(1, np.int32)), "trajectory[1]"),
    "turn of another byte order": (lambda rollout: rollout.trajectory.append(np.ones(1, ">i4")), "trajectory[1]"),
    "turn of text": (lambda rollout: rollout.trajectory.append("a"), "trajectory[1]"),
    "masked turn": (lambda rollout: rollout.trajectory.append(np.ma.array([1], np.int32)), "trajectory[1]"),
    "negative token": (lambda rollout: rollout.trajectory.append(np.array([1, -1], np.int32)), "trajectory[1]"),
    "no list of turns": (_put("trajectory", (np.ones(1, np.int32),)), "trajectory"),
    "mask of integers": (lambda rollout: rollout.generation_mask.append(np.array([1])), "generation_mask[1]"),
    "logprobs of float64": (lambda rollout: rollout.logprobs.append(np.array([0.1])), "logprobs[1]"),
    "logprobs of a list": (lambda rollout: rollout.logprobs.append([0.1]), "logprobs[1]"),
    "reward of another kind": (_put("reward", "0.5"), "reward"),
    "reward of float32": (_put("reward", np.float32(0.5)), "reward"),
    "list of rewards": (_put("reward", [0.5, None]), "reward[1]"),
    "advantage": (_put("advantage_override", 1), "advantage_override"),
    "env_id": (_put("env_id", 3), "env_id"),
    "problem_id": (_put("problem_id", 3), "problem_id"),
    "rollout_status": (_put("rollout_status", None), "rollout_status"),
    "failure_reason": (_put("failure_reason", ValueError("x")), "failure_reason"),
    "is_truncated": (_put("is_truncated", 1), "is_truncated"),
    "finish reason": (_put("finish_reasons", ["stop", 3]), "finish_reasons[1]"),
    "completion id": (_put("completion_ids", ["a", 3]), "completion_ids[1]"),
    "completion ids": (_put("completion_ids", ("a",)), "completion_ids"),
    "prompt length": (_put("prompt_length", [np.int64(3)]), "prompt_length[0]"),
    "generation_cap": (_put("generation_cap", True), "generation_cap"),
    "metric of None": (lambda rollout: rollout.metrics.update(a=None), "metrics['a']"),
    "metric of int": (lambda rollout: rollout.metrics.update(a=2**60 + 1), "metrics['a']"),
    "metric of float64": (lambda rollout: rollout.metrics.update(a=np.float64(1)), "metrics['a']"),
    "metric's name": (lambda rollout: rollout.metrics.update({1: 1.0}), "metrics"),
    "span": (_put("policy_versions", [(0, 0, 1)]), "policy_versions[0]"),
    "span of floats": (_put("policy_versions", [VersionSpan(0, 0, 1.0)]), "policy_versions[0].version"),  # type: ignore[arg-type]
    "started_at without a zone": (_put("started_at", datetime(2026, 1, 1)), "started_at"),
    "started_at in another zone": (
        _put("started_at", datetime(2026, 1, 1, tzinfo=timezone(timedelta(hours=1)))), "started_at",
    ),
    "started_at as a number": (_put("started_at", 0), "started_at"),
    "array of a list": (lambda rollout: rollout.arrays.update(a=[1]), "arrays['a']"),
    "array of objects": (lambda rollout: rollout.arrays.update(a=np.array([None])), "arrays['a']"),
    "masked array": (lambda rollout: rollout.arrays.update(a=np.ma.array([1])), "arrays['a']"),
    "array's name": (lambda rollout: rollout.arrays.update({1: np.zeros(1)}), "arrays"),
}  # fmt: skip


@pytest.mark.parametrize("name", BEHIND)
def test_what_was_changed_behind_pydantics_back_is_refused(name: str) -> None:
    change, place = BEHIND[name]
    rollout = token_rollout()
    change(rollout)
    assert refused(RolloutGroup(rollouts=[text_rollout(), rollout])).field == f"rollouts[1].{place}"


def test_strangers_among_the_rollouts_are_refused() -> None:
    group = RolloutGroup(rollouts=[token_rollout()])
    group.rollouts.append({"trajectory": []})  # type: ignore[arg-type]
    assert refused(group).field == "rollouts[1]"
    text = text_rollout()
    text.trajectory.append(3)  # type: ignore[arg-type]
    assert refused(RolloutGroup(rollouts=[text])).field == "rollouts[0].trajectory"


def test_a_group_over_the_limit_is_refused_before_it_is_laid_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_GROUP_BYTES", 20_000)
    size = 5_001
    for big in (
        TokenRollout(trajectory=[np.zeros(size, np.int32)]),
        TokenRollout(trajectory=[np.zeros(2500, np.int32)], logprobs=[np.zeros(2500, np.float32)], note="n" * 10),
        Rollout(trajectory=["ä" * 2 * size]),
        token_rollout(arrays={"a": np.zeros(4 * size, np.uint8)}),
        token_rollout(note="n" * 4 * size),
        token_rollout(env_id="n" * 4 * size),
    ):
        with monkeypatch.context() as context:
            context.setattr(Columns, "constant", None)  # what would begin to lay it out
            refusal = refused(RolloutGroup(rollouts=[big]))
        assert refusal.field == "rollouts" and "20,000" in refusal.reason
    assert round_trip(RolloutGroup(rollouts=[TokenRollout(trajectory=[np.zeros(4_000, np.int32)])]))
    many = [text_rollout() for _ in range(400)]
    assert refused(RolloutGroup(rollouts=many), uid="u" * 50).field == "rollouts"
