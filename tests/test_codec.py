"""Groups through sealed records: every one comes back bit for bit, or is refused by the name of a field."""

from __future__ import annotations

import copy
import io
import math
import pickle
import struct
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from types import MappingProxyType
from typing import Any

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pytest
import rich.pretty
from builders import (
    COMPLETED_AT_US,
    EVERY,
    NAN_32,
    build,
    chain_rollout,
    parse,
    round_trip,
    sealed,
    stored,
    stream,
    text_rollout,
    token_rollout,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from pydantic import BaseModel, Field, TypeAdapter

from arrowbank import codec
from arrowbank.arrays import same_bits
from arrowbank.codec import StoredGroup
from arrowbank.columns import Columns
from arrowbank.durable.message import read_head
from arrowbank.errors import UnrepresentableError
from arrowbank.schema import SEGMENT_SCHEMA
from arrowbank.types import Rollout, RolloutGroup, TokenRollout, VersionSpan

unhurried = settings(deadline=None, max_examples=60)  # a busy machine is no falsifying example


# -- the round trip


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("name", EVERY)
def test_every_kind_of_group_comes_back_bit_for_bit(name: str, seed: int) -> None:
    group = build(name, seed)
    restored = round_trip(group)
    assert restored == group and group == restored
    assert [type(rollout) for rollout in restored] == [type(rollout) for rollout in group]


@pytest.mark.parametrize("name", EVERY)
def test_a_restored_group_encodes_to_the_same_bytes(name: str) -> None:
    group = build(name)
    assert sealed(round_trip(group)) == sealed(group)


@pytest.mark.parametrize("name", EVERY)
def test_encoding_changes_nothing(name: str) -> None:
    group = build(name)
    sealed(group)
    assert group == build(name)


def test_none_and_empty_lists_are_told_apart() -> None:
    lists: list[Any] = [None, []]
    members = [
        TokenRollout(trajectory=[], generation_mask=mask, logprobs=logprobs, completion_ids=ids, finish_reasons=ids,
                     prompt_length=ids, policy_versions=ids, kv_versions=ids, reward=ids)
        for mask in lists for logprobs in lists for ids in lists
    ]  # fmt: skip
    restored = round_trip(RolloutGroup(rollouts=members))
    for found, given_ in zip(restored, members, strict=True):
        assert found.model_dump() == given_.model_dump()


def test_arrays_keep_dtype_shape_and_bits_whatever_their_order() -> None:
    group = build("arrays")
    for found, given_ in zip(round_trip(group), group, strict=True):
        assert list(found.arrays) == list(given_.arrays)
        for name, array in given_.arrays.items():
            assert same_bits(found.arrays[name], array), name


def test_extra_fields_come_back_with_their_types() -> None:
    restored = round_trip(build("extras"))
    nested = restored[0].nested  # type: ignore[union-attr]
    assert [type(value) for value in nested["a"]] == [int, float, bool, type(None), str]
    assert math.copysign(1, nested["b"][""]) == -1 and nested["big"] == 2**80
    assert restored.wave == [1] and restored.kept == {"k": 1.5}  # type: ignore[attr-defined]


def test_token_turns_are_read_only_views_of_the_record() -> None:
    message = sealed(RolloutGroup(rollouts=[chain_rollout(turns=3)]))
    turns = codec.decode_group(parse(message))[0].trajectory
    assert all(isinstance(turn, np.ndarray) and not turn.flags.owndata and not turn.flags.writeable for turn in turns)


class Graded(Rollout):
    grade: int
    rubric: dict[str, float] = Field(default_factory=dict)


class Routed(TokenRollout):
    completion_tags: list[str] = Field(default_factory=list)


class Wave(RolloutGroup):
    number: int = 0


def test_fields_that_subclasses_declare_come_back_as_extra_ones() -> None:
    rollouts = [Graded(trajectory=["a"], grade=3, note="x"), Routed(trajectory=[[1]], completion_tags=["t"])]
    group = Wave(rollouts=rollouts, number=4)
    restored = round_trip(group)
    assert restored.number == 4 and restored[0].grade == 3 and restored[1].completion_tags == ["t"]  # type: ignore
    assert restored == group and group == restored
    assert [type(rollout) for rollout in restored] == [Rollout, TokenRollout]


def test_a_subclasss_field_that_json_would_change_is_refused() -> None:
    class Paired(Rollout):
        pair: tuple[int, int]

    with pytest.raises(UnrepresentableError, match=r"^rollouts\[0\]\.pair: .*tuple"):
        sealed(RolloutGroup(rollouts=[Paired(trajectory=["a"], pair=(1, 2))]))


def test_a_text_subclass_may_name_its_fields_as_token_rollouts_do() -> None:
    class Sampled(Rollout):
        completion_ids: list[int]

    group = RolloutGroup(rollouts=[Sampled(trajectory=["a"], completion_ids=[1])])
    assert round_trip(group) == group


def test_the_head_says_what_sorting_needs() -> None:
    message = sealed(build("fields"), uid="u9", split="eval", evicted="stale", source_index=5, iteration=8)
    assert read_head(memoryview(message)) == {
        "uid": "u9", "iteration": 8, "env": "maze", "split": "eval", "size": 5, "problem": None, "batch_id": 7,
        "index_in_batch": 3, "source_index": 5, "evicted": "stale", "at": COMPLETED_AT_US,
    }  # fmt: skip


# -- any group

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
whole = st.integers(-(2**63), 2**63 - 1)
doubles = (
    st.integers(0, 2**64 - 1).map(lambda bits: float(struct.unpack("<d", struct.pack("<Q", bits))[0])) | st.floats()
)
finite = st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | finite | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=5,
)
spans = st.lists(st.builds(VersionSpan, whole, whole, whole), max_size=3)
plain_arrays = npst.arrays(
    npst.boolean_dtypes() | npst.integer_dtypes() | npst.floating_dtypes() | npst.complex_number_dtypes()
    | npst.unicode_string_dtypes(max_len=3) | npst.byte_string_dtypes(max_len=3) | npst.datetime64_dtypes(),
    npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
)  # fmt: skip
common: dict[str, Any] = {
    "reward": st.none() | doubles | st.lists(doubles, max_size=3),
    "env_id": st.sampled_from([None, "", "maze"]),
    "problem_id": st.none() | words,
    "rollout_status": words,
    "failure_reason": st.none() | words,
    "prompt_length": st.none() | st.lists(st.integers(0, 2**63 - 1), max_size=3),
    "advantage_override": st.none() | doubles,
    "finish_reasons": st.none() | st.lists(st.none() | words, max_size=3),
    "is_truncated": st.none() | st.booleans(),
    "metrics": st.dictionaries(words, doubles, max_size=3),
    "policy_versions": st.none() | spans,
    "kv_versions": st.none() | spans,
    "arrays": st.dictionaries(words, plain_arrays, max_size=2),
    "started_at": st.none() | st.datetimes(timezones=st.just(UTC)),
}
extras = st.dictionaries(words.filter(lambda name: name.startswith("x")), json_values, max_size=2)


@st.composite
def rollouts(draw: Any) -> Rollout | TokenRollout:
    fields = draw(st.fixed_dictionaries({}, optional=common)) | draw(extras)
    if draw(st.booleans()):
        return Rollout(trajectory=draw(st.lists(words, max_size=3)), **fields)
    turns = draw(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=4), max_size=3))
    masks = draw(st.none() | st.just([[draw(st.booleans()) for _ in turn] for turn in turns]))
    counts = map(len, turns) if masks is None or draw(st.booleans()) else map(sum, masks)
    values = [np.array([draw(st.integers(0, 2**32 - 1)) for _ in range(n)], np.uint32).view(np.float32) for n in counts]
    return TokenRollout(
        trajectory=turns,
        generation_mask=masks,
        logprobs=draw(st.sampled_from([None, values])),
        completion_ids=draw(st.none() | st.lists(words, max_size=2)),
        generation_cap=draw(st.none() | whole),
        **fields,
    )


groups = st.builds(
    lambda members, extra, **order: RolloutGroup(rollouts=members, **order, **extra),
    st.lists(rollouts(), max_size=3), extras, batch_id=whole, index_in_batch=whole,
)  # fmt: skip


@unhurried
@given(groups)
def test_any_group_comes_back_bit_for_bit(group: RolloutGroup) -> None:
    assert round_trip(group) == group


# -- refusals


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


# -- lazily


class Loader:
    """Counts how often a group is loaded."""

    def __init__(self, group: RolloutGroup) -> None:
        self.group = group
        self.calls = 0

    def __call__(self) -> Any:
        self.calls += 1
        return copy.deepcopy(self.group.rollouts)

    def lazy(self) -> StoredGroup:
        head = {"uid": self.group.uid, "batch_id": self.group.batch_id, "index_in_batch": self.group.index_in_batch}
        return StoredGroup.of(head | {"extra": dict(self.group.__pydantic_extra__ or {})}, self)


@pytest.fixture
def loader() -> Loader:
    group = build("fields")
    group.uid, group.note = "u1", {"a": 1}  # type: ignore[attr-defined]
    return Loader(group)


def test_what_the_head_says_needs_no_decoding(loader: Loader) -> None:
    group = loader.lazy()
    assert (group.uid, group.batch_id, group.index_in_batch, group.note) == ("u1", 7, 3, {"a": 1})  # type: ignore[attr-defined]
    assert isinstance(group, RolloutGroup) and loader.calls == 0


class Holder(BaseModel):
    group: RolloutGroup
    others: list[RolloutGroup] = []


TOUCHES: dict[str, Callable[[RolloutGroup], Any]] = {
    "rollouts": lambda group: group.rollouts,
    "length": len,
    "iteration": list,
    "index": lambda group: group[0],
    "env_id": lambda group: group.env_id,
    "dump": lambda group: group.model_dump(),
    "dump of what was set": lambda group: sorted(group.model_dump(exclude_unset=True)),
    "json": lambda group: group.model_dump_json(),
    "repr": repr,
    "str": str,
    "rich": lambda group: rich.pretty.pretty_repr(group).partition("Group(")[2],
    "equality": lambda group: group == build("fields"),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "model_copy": lambda group: group.model_copy(update={"uid": None}),
    "deep model_copy": lambda group: group.model_copy(deep=True),
    "pickle": lambda group: pickle.loads(pickle.dumps(group)),
    "oldest pickle": lambda group: pickle.loads(pickle.dumps(group, 2)),
    "nested dump": lambda group: Holder(group=group, others=[group]).model_dump(),
    "nested json": lambda group: Holder(group=group, others=[group]).model_dump_json(),
    "nested copy": lambda group: Holder(group=group).model_copy(deep=True).group,
    "nested pickle": lambda group: pickle.loads(pickle.dumps(Holder(group=group))).group,
    "adapter": lambda group: TypeAdapter(list[RolloutGroup]).dump_json([group]),
    "encoding": lambda group: sealed(group),
}


@pytest.mark.parametrize("touch", TOUCHES)
def test_every_look_at_a_stored_group_decodes_it_once_and_finds_what_a_plain_one_shows(
    touch: str, loader: Loader
) -> None:
    group = loader.lazy()
    found, expected = TOUCHES[touch](group), TOUCHES[touch](loader.group)
    if touch == "dump of what was set":
        assert "rollouts" in found
    else:
        assert same_bits(found, expected)
    assert loader.calls == 1
    TOUCHES[touch](group)
    assert group == loader.group and loader.calls == 1


def test_copies_and_pickles_are_plain_groups(loader: Loader) -> None:
    group = loader.lazy()
    for same in (copy.copy(group), copy.deepcopy(group), group.model_copy(), pickle.loads(pickle.dumps(group))):
        assert type(same) is RolloutGroup and same == group


def test_two_stored_groups_compare_by_value(loader: Loader) -> None:
    assert loader.lazy() == loader.lazy()
    other = loader.lazy()
    other.rollouts[0].reward = None
    assert other != loader.lazy()


def test_fields_set_before_the_decode_stay(loader: Loader) -> None:
    group = loader.lazy()
    group.batch_id = 40
    group.uid = None
    group.tag = "t"  # type: ignore[attr-defined]
    assert loader.calls == 0
    assert len(group) == len(loader.group) and loader.calls == 1
    assert (group.batch_id, group.uid, group.index_in_batch) == (40, None, 3)
    assert group.model_dump()["batch_id"] == 40 and group.model_dump()["tag"] == "t"
    assert copy.copy(group).batch_id == 40


def test_rollouts_may_be_replaced_before_the_decode(loader: Loader) -> None:
    group = loader.lazy()
    group.rollouts = [text_rollout()]
    assert group.rollouts == [text_rollout()] and loader.calls == 0
    with pytest.raises(UnrepresentableError, match=r"^rollouts\[0\]\.trajectory\[0\]"):
        group.rollouts = [{"trajectory": [[-1]]}]  # type: ignore[list-item]


def test_changes_after_the_decode_stay(loader: Loader) -> None:
    group = loader.lazy()
    group[0].reward = 9.0
    group.batch_id = 1
    assert group[0].reward == 9.0 and loader.calls == 1


def test_threads_that_touch_a_group_together_decode_it_once(loader: Loader) -> None:
    entered, leave = threading.Event(), threading.Event()

    def slow() -> Any:
        entered.set()
        leave.wait(10)
        return loader()

    group = StoredGroup.of({"uid": "u"}, slow)
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(group.rollouts)) for _ in range(4)]
    for thread in threads:
        thread.start()
    entered.wait(10)
    leave.set()
    for thread in threads:
        thread.join()
    assert loader.calls == 1 and len(found) == 4 and all(rollouts_ is found[0] for rollouts_ in found)


def test_a_decode_that_fails_may_be_tried_again(loader: Loader) -> None:
    errors = [OSError("gone")]

    def load() -> Any:
        if errors:
            raise errors.pop()
        return loader()

    group = StoredGroup.of({"uid": "u"}, load)
    with pytest.raises(OSError, match="gone"):
        len(group)
    assert len(group) == 5


def test_unknown_names_of_a_stored_group_are_attribute_errors(loader: Loader) -> None:
    group = loader.lazy()
    assert not hasattr(group, "nothing") and loader.calls == 0


# -- other readers


def test_plain_readers_read_the_stream() -> None:
    data = stream([build(name) for name in EVERY])
    expected = sum(max(len(build(name)), 1) for name in EVERY)
    table = pa.ipc.open_stream(data).read_all()
    table.validate(full=True)
    assert table.schema.equals(SEGMENT_SCHEMA) and table.num_rows == expected
    frame = pl.read_ipc_stream(io.BytesIO(data))
    assert frame["tokens"].list.sum().sum() == sum(map(sum, filter(None, table["tokens"].to_pylist())))
    assert frame.height == expected and frame["details"].to_list() == table["details"].to_pylist()
    reader = pa.ipc.open_stream(data)  # noqa: F841  # DuckDB finds it by its name
    rows = duckdb.sql("select count(*), count(tokens), count(distinct group_uid) from reader").fetchall()
    assert rows == [(expected, expected - table["tokens"].null_count, len(EVERY))]


def test_null_logprobs_stand_exactly_where_none_was_given() -> None:
    rollout = TokenRollout(trajectory=[[5, 6, 7, 8]], generation_mask=[[0, 1, 1, 1]], logprobs=[NAN_32])
    row = parse(sealed(RolloutGroup(rollouts=[rollout])))
    assert row.column("logprobs")[0].values.is_null().to_pylist() == [True, False, False, False]
    short = rollout.model_copy(update={"logprobs": [NAN_32[:2]]})
    row = parse(sealed(RolloutGroup(rollouts=[short])))
    assert row.column("logprobs")[0].values.is_null().to_pylist() == [True, False, False, True]
