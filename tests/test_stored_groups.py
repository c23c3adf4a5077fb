"""A group that was read is decoded at the first look, once, and is what a plain one is."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import rich.pretty
from builders import build, sealed, text_rollout
from pydantic import BaseModel, TypeAdapter

from arrowbank.arrays import same_bits
from arrowbank.codec import StoredGroup
from arrowbank.errors import UnrepresentableError
from arrowbank.types import RolloutGroup


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
        leave.wait(60)
        return loader()

    group = StoredGroup.of({"uid": "u"}, slow)
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(group.rollouts)) for _ in range(4)]
    for thread in threads:
        thread.start()
    entered.wait(60)
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
