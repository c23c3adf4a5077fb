"""Group ↔ the columns of one record batch of ``SEGMENT_SCHEMA``.

Invariant (I2): ``decode_group(encode_group(g)) == g`` bit for bit, or ``encode_group`` raises UnrepresentableError
with the field's name. Encoding copies each token once; decoding gives views of the record's bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from arrowbank import arrays, details, turns
from arrowbank.columns import Columns
from arrowbank.errors import UnrepresentableError
from arrowbank.types import AgentBaseModel, Rollout, RolloutGroup, Rollouts, TokenRollout

__all__ = [
    "MAX_GROUP_BYTES",
    "EncodedGroup",
    "RowColumns",
    "StoredGroup",
    "decode_group",
    "decode_rollout",
    "encode_group",
]

_Model = TypeVar("_Model", bound=AgentBaseModel)

MAX_GROUP_BYTES = 2**30
"""A group's record may be this long; columns have 32-bit offsets."""


_HEAD_OF_GROUP = (("batch_id", "batch_id"), ("index_in_batch", "index_in_batch"), ("extra", "group_extra"))
_decoding = threading.RLock()  # one for all groups: decoding holds the interpreter's lock anyway


@dataclass(slots=True)
class EncodedGroup:
    columns: Columns
    head: dict[str, Any]
    """Of the record: uid, iteration, env, problem, split, size, and where they say something the rest."""


@dataclass(slots=True)
class _Rows:
    """The columns-to-be of a group's rows, in row order."""

    env_ids: list[bytes | None] = field(default_factory=list)
    kinds: list[bytes] = field(default_factory=list)
    rewards: list[float | None] = field(default_factory=list)
    num_tokens: list[int | None] = field(default_factory=list)
    num_generated: list[int | None] = field(default_factory=list)
    tokens: list[NDArray[Any] | None] = field(default_factory=list)
    masks: list[NDArray[Any] | None] = field(default_factory=list)
    logprobs: list[NDArray[Any] | None] = field(default_factory=list)
    known: list[NDArray[np.bool_]] = field(default_factory=list)
    texts: list[bytes | None] = field(default_factory=list)
    details: list[bytes] = field(default_factory=list)
    blobs: list[NDArray[Any]] = field(default_factory=list)
    blob_counts: list[int | None] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Of what grows with the rollouts."""
        texts = (self.env_ids, self.texts, self.details)
        numbers = (self.tokens, self.logprobs, self.blobs)
        return (
            sum(len(part) for column in texts for part in column if part is not None)
            + sum(part.nbytes for column in numbers for part in column if part is not None)
            + sum(mask.nbytes // 8 for mask in self.masks if mask is not None)
        )


def encode_group(
    group: RolloutGroup,
    *,
    uid: str,
    iteration: int,
    session: int,
    writer: str,
    completed_at_us: int,
    split: str = "train",
    evicted: str | None = None,
    source_index: int | None = None,
) -> EncodedGroup:
    """Encode a group. Raises UnrepresentableError, naming the field, for what could not come back exactly."""
    for name, given in (("split", split), ("evicted", evicted)):
        if given is not None and (not isinstance(given, str) or not given):
            raise ValueError(f"{name}={given!r}: give a text that is not empty")
    details.check_text({"uid": uid, "split": split, "evicted": evicted}, "")
    shared = details.group_details(group, session=session, writer=writer, source_index=source_index)
    rows = _rows(group, shared)
    _check_size(rows.nbytes)  # before anything is laid out: offsets have 32 bits
    columns = _columns(rows, len(group.rollouts), uid, iteration, split, completed_at_us)
    _check_size(columns.nbytes)
    head = _head(group, shared, uid, iteration, split, evicted, source_index)
    head["at"] = completed_at_us
    return EncodedGroup(columns, head)


def _rows(group: RolloutGroup, shared: dict[str, Any]) -> _Rows:
    rows = _Rows()
    if type(group.rollouts) is not list:
        raise UnrepresentableError("rollouts", f"expected a list, found {type(group.rollouts).__name__}")
    for index, rollout in enumerate(group.rollouts):
        place = f"rollouts[{index}]"
        if not isinstance(rollout, Rollout | TokenRollout):
            raise UnrepresentableError(place, f"expected a Rollout or TokenRollout, found {type(rollout).__name__}")
        try:
            _add_row(rows, rollout, shared)
        except UnrepresentableError as error:
            raise error.inside(place) from None
        if rollout.env_id and rollout.env_id != group.env_id:
            raise UnrepresentableError(
                f"{place}.env_id", f"{rollout.env_id!r} in a group whose rollouts before it name {group.env_id!r}"
            )
    if not group.rollouts:
        _add_empty_row(rows, shared)
    return rows


def _check_size(nbytes: int) -> None:
    if nbytes > MAX_GROUP_BYTES:
        raise UnrepresentableError("rollouts", f"{nbytes:,} bytes; a group may have {MAX_GROUP_BYTES:,} (1 GiB)")


def _head(
    group: RolloutGroup,
    shared: dict[str, Any],
    uid: str,
    iteration: int,
    split: str,
    evicted: str | None,
    source_index: int | None,
) -> dict[str, Any]:
    problems = {rollout.problem_id for rollout in group.rollouts}
    head: dict[str, Any] = {"uid": uid, "iteration": iteration, "env": group.env_id, "split": split}
    head["size"] = len(group.rollouts)
    head["problem"] = problems.pop() if len(problems) == 1 else None
    head |= {name: shared[key] for name, key in _HEAD_OF_GROUP if shared.get(key)}
    if source_index is not None:
        head["source_index"] = source_index
    if evicted is not None:
        head["evicted"] = evicted
    return head


def _add_row(rows: _Rows, rollout: Rollout | TokenRollout, shared: dict[str, Any]) -> None:
    own = details.rollout_details(rollout)
    blobs = [_bytes_of(array) for array in rollout.arrays.values()]
    rows.rewards.append(details.reward(rollout.reward))
    if not isinstance(rollout.env_id, str | None):
        raise UnrepresentableError("env_id", f"expected a string or None, found {type(rollout.env_id).__name__}")
    if isinstance(rollout, TokenRollout):
        rows.kinds.append(b"token")
        _add_tokens(rows, rollout, own, blobs)
    else:
        rows.kinds.append(b"text")
        _add_text(rows, rollout, own)
    try:
        rows.env_ids.append(None if rollout.env_id is None else rollout.env_id.encode())
        rows.details.append(details.dump(shared | own).encode())
    except UnicodeEncodeError:
        details.check_text(dict(rollout.__dict__), "")
        raise
    rows.blobs += blobs
    rows.blob_counts.append(len(blobs))


def _bytes_of(array: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _add_tokens(rows: _Rows, rollout: TokenRollout, own: dict[str, Any], blobs: list[NDArray[Any]]) -> None:
    masks = (
        None
        if rollout.generation_mask is None
        else arrays.exact_turns("generation_mask", rollout.generation_mask, np.bool_)
    )
    logprobs = None if rollout.logprobs is None else arrays.exact_turns("logprobs", rollout.logprobs, np.float32)
    folded = turns.fold(arrays.exact_turns("trajectory", rollout.trajectory, np.int32), masks, logprobs)
    final = folded.final
    rows.texts.append(None)
    if final is None:  # no turns: an empty list is told from None by a column that is empty rather than null
        nothing = np.zeros(0, np.bool_)
        rows.num_tokens.append(0)
        rows.num_generated.append(0)
        rows.tokens.append(None)
        rows.masks.append(None if masks is None else nothing)
        rows.logprobs.append(None if logprobs is None else nothing.astype(np.float32))
        if logprobs is not None:
            rows.known.append(nothing)
        return
    rows.num_tokens.append(len(final.tokens))
    rows.num_generated.append(None if final.mask is None else turns.count_sampled(folded))
    rows.tokens.append(final.tokens)
    rows.masks.append(final.mask)
    rows.logprobs.append(final.logprobs)
    if final.known is not None:
        rows.known.append(final.known)
    own["turns"] = folded.turns
    if folded.irregular:
        own["irregular"] = [[sequence.mask is not None, sequence.logprobs is not None] for sequence in folded.irregular]
        for sequence in folded.irregular:
            parts = (sequence.tokens, sequence.mask, sequence.logprobs, sequence.known)
            blobs += [_bytes_of(part) for part in parts if part is not None]


def _add_text(rows: _Rows, rollout: Rollout, own: dict[str, Any]) -> None:
    if type(rollout.trajectory) is not list or not all(type(turn) is str for turn in rollout.trajectory):
        raise UnrepresentableError("trajectory", "expected a list with one string a turn")
    final, cut, irregular = turns.fold_text(rollout.trajectory)
    try:
        rows.texts.append(None if final is None else final.encode())
    except UnicodeEncodeError:
        details.check_text(rollout.trajectory, "trajectory")
        raise
    rows.num_tokens.append(None)
    rows.num_generated.append(None)
    rows.tokens.append(None)
    rows.masks.append(None)
    rows.logprobs.append(None)
    if cut:
        own["turns"] = [turn[:2] for turn in cut]
    if irregular:
        own["irregular"] = irregular


def _add_empty_row(rows: _Rows, shared: dict[str, Any]) -> None:
    rows.env_ids.append(None)
    rows.kinds.append(b"empty")
    rows.details.append(details.dump(shared).encode())
    rows.blob_counts.append(0)
    for column in (rows.rewards, rows.num_tokens, rows.num_generated):
        column.append(None)
    for arrays_column in (rows.tokens, rows.masks, rows.logprobs):
        arrays_column.append(None)
    rows.texts.append(None)


def _columns(rows: _Rows, size: int, uid: str, iteration: int, split: str, completed_at_us: int) -> Columns:
    """Lay the rows out in the order of ``SEGMENT_SCHEMA``."""
    count = max(size, 1)
    columns = Columns(count)
    columns.constant(uid.encode())
    columns.strings(rows.env_ids)
    columns.constant(split.encode())
    columns.strings(rows.kinds)
    columns.numbers("i", range(count))
    columns.numbers("i", [size] * count)
    columns.numbers("q", [iteration] * count)
    columns.numbers("q", [completed_at_us] * count)
    columns.numbers("d", rows.rewards)
    columns.numbers("q", rows.num_tokens)
    columns.numbers("q", rows.num_generated)
    columns.lists([None if part is None else len(part) for part in rows.tokens])
    columns.child([part for part in rows.tokens if part is not None], np.int32)
    columns.lists([None if part is None else len(part) for part in rows.masks])
    columns.bits_child([part for part in rows.masks if part is not None])
    columns.lists([None if part is None else len(part) for part in rows.logprobs])
    columns.child([part for part in rows.logprobs if part is not None], np.float32, rows.known)
    columns.strings(rows.texts)
    columns.strings(rows.details)
    columns.lists(rows.blob_counts)
    columns.large_binaries_child(rows.blobs)
    return columns


def decode_group(batch: pa.RecordBatch) -> Rollouts:
    """Decode a validated record's rollouts; token arrays are read-only views of the record's bytes.

    Raises: KeyError, ValueError, TypeError or IndexError when the rows contradict one another.
    """
    if batch.column("kind")[0].as_py() == "empty":
        return []
    return [decode_rollout(columns, row) for columns in (RowColumns(batch),) for row in range(batch.num_rows)]


class RowColumns:
    """A batch's columns as NumPy arrays and lists, each converted once."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self.kinds = batch.column("kind").to_pylist()
        self.env_ids = batch.column("env_id").to_pylist()
        self.rewards = _float64s(batch.column("reward"))
        self.details = [details.load(text) for text in batch.column("details").to_pylist()]
        self.texts = batch.column("text").to_pylist()
        self.tokens = _lists(batch.column("tokens"), np.int32)
        self.masks = _lists(batch.column("generation_mask"), np.bool_)
        self.logprobs = _lists(batch.column("logprobs"), np.float32)
        self.blobs = _binaries(batch.column("arrays"))


def decode_rollout(columns: RowColumns, row: int) -> Rollout | TokenRollout:
    """Decode one row."""
    found = columns.details[row]
    fields = details.rollout_fields(found, columns.rewards[row])
    fields["env_id"] = columns.env_ids[row]
    cut = [turns.Turn(*turn) for turn in found.get("turns", ())]
    blobs = iter(columns.blobs[row])
    fields["arrays"] = {
        name: next(blobs).view(arrays.named_dtype(dtype)).reshape(shape)
        for name, dtype, shape in found.get("arrays", ())
    }
    if columns.kinds[row] == "text":
        fields["trajectory"] = turns.unfold_text(columns.texts[row], cut, found.get("irregular", []))
        return _construct(Rollout, fields, found.get("extra"))
    final = columns.tokens[row]
    masks, logprobs = columns.masks[row], columns.logprobs[row]
    if final is None:
        fields["trajectory"] = []
        fields["generation_mask"] = None if masks is None else []
        fields["logprobs"] = None if logprobs is None else []
    else:
        irregular = [_irregular(blobs, *has) for has in found.get("irregular", ())]
        folded = turns.Folded(turns.Sequence(final, masks, logprobs, None), cut, irregular)
        fields["trajectory"], fields["generation_mask"], fields["logprobs"] = turns.unfold(folded)
    fields["completion_ids"] = found.get("completion_ids")
    fields["generation_cap"] = found.get("generation_cap")
    return _construct(TokenRollout, fields, found.get("extra"))


def _irregular(blobs: Iterator[NDArray[Any]], has_mask: bool, has_logprobs: bool) -> turns.Sequence:
    tokens = next(blobs).view(np.int32)
    mask = next(blobs).view(np.bool_) if has_mask else None
    logprobs = next(blobs).view(np.float32) if has_logprobs else None
    known = next(blobs).view(np.bool_) if has_logprobs else None
    return turns.Sequence(tokens, mask, logprobs, known)


def _construct(kind: type[_Model], fields: dict[str, Any], extra: dict[str, Any] | None) -> _Model:
    """Make a model of values that are known to be valid: what ``model_construct`` does, at a fifth of its cost."""
    model = kind.__new__(kind)
    object.__setattr__(model, "__dict__", fields)
    object.__setattr__(model, "__pydantic_fields_set__", set(fields))
    object.__setattr__(model, "__pydantic_extra__", extra or {})
    object.__setattr__(model, "__pydantic_private__", None)
    return model


def _float64s(column: pa.Array) -> list[float | None]:
    """Values by their bits: going through Python floats is exact, NaN payloads included."""
    values = np.frombuffer(column.buffers()[1], np.float64, len(column) + column.offset)[column.offset :].tolist()
    if not column.null_count:
        return values  # type: ignore[no-any-return]  # NumPy's tolist is typed Any
    return [value if valid else None for value, valid in zip(values, column.is_valid().to_pylist(), strict=True)]


def _lists(column: pa.ListArray, dtype: Any) -> list[NDArray[Any] | None]:
    """A list column's rows as views of its child (a copy for bools, which Arrow packs)."""
    child = column.values
    if dtype is np.bool_:
        values = child.to_numpy(zero_copy_only=False)
    else:
        values = _view(child.buffers()[1], dtype, child.offset, len(child))
    offsets = column.offsets.to_pylist()
    rows: list[NDArray[Any] | None] = [values[start:end] for start, end in pairwise(offsets)]
    if column.null_count:
        return [row if valid else None for row, valid in zip(rows, column.is_valid().to_pylist(), strict=True)]
    return rows


def _binaries(column: pa.ListArray) -> list[list[NDArray[np.uint8]]]:
    child = column.values
    if not len(child):
        return [[] for _ in range(len(column))]
    edges = np.frombuffer(child.buffers()[1], np.int64)[child.offset : child.offset + len(child) + 1].tolist()
    data = _view(child.buffers()[2], np.uint8, 0, edges[-1])
    items = [data[start:end] for start, end in pairwise(edges)]
    return [items[start:end] for start, end in pairwise(column.offsets.to_pylist())]


def _view(buffer: pa.Buffer | None, dtype: Any, offset: int, count: int) -> NDArray[Any]:
    if not count or buffer is None:
        return np.zeros(0, dtype)
    return np.frombuffer(buffer, dtype, count, offset * np.dtype(dtype).itemsize)


class StoredGroup(RolloutGroup):
    """A group read back from a bank: its rollouts are decoded from the mapped record when first touched.

    Dump, copy, repr, equality and pickle decode first; copies and pickles are plain RolloutGroups.
    """

    __slots__ = ("_load",)  # a slot, since pydantic's private attributes cost every group a dict

    if TYPE_CHECKING:
        _load: Callable[[], Rollouts]

    @classmethod
    def of(cls, head: dict[str, Any], load: Callable[[], Rollouts]) -> StoredGroup:
        """Return the group that a record's head describes. ``load`` is called once, at the first touch."""
        fields = {
            "batch_id": head.get("batch_id", 0),
            "index_in_batch": head.get("index_in_batch", 0),
            "uid": head["uid"],
        }
        group = _construct(cls, fields, head.get("extra"))
        group.__pydantic_fields_set__.add("rollouts")
        object.__setattr__(group, "_load", load)
        return group

    def __getattr__(self, name: str) -> Any:
        if name != "rollouts":
            return super().__getattr__(name)  # type: ignore[misc]  # pydantic hides its __getattr__ from checkers
        with _decoding:
            if name not in self.__dict__:  # another thread may have been first
                object.__setattr__(self, "__dict__", {name: self._load(), **self.__dict__})  # in the fields' order
                object.__setattr__(self, "_load", None)
            return self.__dict__[name]

    def plain(self) -> RolloutGroup:
        """Return a RolloutGroup with the same rollouts."""
        order = {name: getattr(self, name) for name in RolloutGroup.model_fields}
        return _construct(RolloutGroup, order, dict(self.__pydantic_extra__ or {}))

    def __eq__(self, other: object) -> bool:
        return self.plain() == other

    def __copy__(self) -> RolloutGroup:  # type: ignore[override]  # a copy need not stay mapped
        return self.plain()

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> RolloutGroup:  # type: ignore[override]  # as __copy__
        return self.plain().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return _itself, (self.plain(),)

    def __repr__(self) -> str:
        return repr(self.plain())

    def __str__(self) -> str:
        return str(self.plain())

    def __repr_args__(self) -> Any:  # what rich and devtools print
        return self.plain().__repr_args__()


def _itself(group: RolloutGroup) -> RolloutGroup:
    """What unpickles a stored group: the plain group it was pickled as."""
    return group
