"""Rollouts and groups of rollouts, with the field names of Megatron-LM's RL types.

    Rollout          one episode as text turns
    TokenRollout     one episode as token turns, holding NumPy arrays
    RolloutGroup     the rollouts of one problem: the unit of durability
    Rollouts         list[TokenRollout | Rollout]
    GroupedRollouts  list[RolloutGroup]
    EnvId            str; groups without one are filed under ""
    GroupsPerEnv     dict[EnvId, list[RolloutGroup]]
    GroupQueuesPerEnv  dict[EnvId, deque[RolloutGroup]], oldest first
    VersionSpan      (turn, start, version): from token ``start`` of that turn on, this policy version sampled

Equality is by value and bit for bit: NaN equals the same NaN, −0.0 differs from 0.0. Every model allows extra
fields; they are kept when JSON can carry them unchanged and refused at ``append`` otherwise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)

from arrowbank import arrays
from arrowbank.errors import UnrepresentableError

__all__ = [
    "AgentBaseModel",
    "EnvId",
    "GroupQueuesPerEnv",
    "GroupedRollouts",
    "GroupsPerEnv",
    "Rollout",
    "RolloutGroup",
    "Rollouts",
    "TokenRollout",
    "VersionSpan",
]

EnvId: TypeAlias = str


class VersionSpan(NamedTuple):
    """From token ``start`` of turn ``turn`` on, weights of ``version`` (an iteration count) were in use."""

    turn: int
    start: int
    version: int


def _turns(convert: Callable[[Any], Any]) -> PlainValidator:
    """Validate a list of turns, each by ``convert``."""

    def validate(value: Any) -> list[Any]:
        if not isinstance(value, list | tuple):
            raise ValueError(f"expected a list with one array a turn, found {type(value).__name__}")
        turns = []
        for index, turn in enumerate(value):
            try:
                turns.append(convert(turn))
            except UnrepresentableError as error:
                raise UnrepresentableError(f"[{index}]{error.field}", error.reason) from None
        return turns

    return PlainValidator(validate)


def _optional_turns(convert: Callable[[Any], Any]) -> PlainValidator:
    validate = _turns(convert).func
    return PlainValidator(lambda value: None if value is None else validate(value))  # type: ignore[call-arg]  # the stubs know validators with an info argument only


def _named_arrays(value: Any) -> dict[str, NDArray[Any]]:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise ValueError("expected a dict from names to arrays")
    found = {}
    for name, array in value.items():
        try:
            found[name] = arrays.ndarray(array)
        except UnrepresentableError as error:
            raise UnrepresentableError(f"[{name!r}]{error.field}", error.reason) from None
    return found


def _lists(value: Any) -> Any:
    """Nested lists in place of arrays, for JSON."""
    if isinstance(value, list):
        return [turn.tolist() for turn in value]
    if isinstance(value, dict):
        return {name: array.tolist() for name, array in value.items()}
    return value


_AS_LISTS = PlainSerializer(_lists, when_used="json")

TokenTurns = Annotated[list[NDArray[np.int32]], _turns(arrays.tokens), _AS_LISTS]
MaskTurns = Annotated[list[NDArray[np.bool_]] | None, _optional_turns(arrays.bools), _AS_LISTS]
LogprobTurns = Annotated[list[NDArray[np.float32]] | None, _optional_turns(arrays.float32s), _AS_LISTS]
NamedArrays = Annotated[dict[str, NDArray[Any]], PlainValidator(_named_arrays), _AS_LISTS]
PromptLengths = Annotated[list[int], PlainValidator(lambda value: _prompt_lengths(value))]
UtcDatetime = Annotated[AwareDatetime, AfterValidator(lambda moment: _utc(moment))]


def _utc(moment: datetime) -> datetime:
    if getattr(moment, "nanosecond", 0):  # pandas.Timestamp is a datetime
        raise UnrepresentableError("", "times are kept in microseconds, and this one has nanoseconds")
    try:
        utc = moment.astimezone(UTC)
    except OverflowError:
        raise UnrepresentableError("", f"{moment} is outside the years 1 … 9999 in UTC") from None
    return datetime.combine(utc.date(), utc.time(), UTC)


def _prompt_lengths(value: Any) -> list[int]:
    value = value.tolist() if isinstance(value, np.ndarray) else value
    lengths = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(length, int | np.integer) and length >= 0 for length in lengths):
        raise ValueError("expected the prompt's length, or one for each turn")
    return [int(length) for length in lengths]


class AgentBaseModel(BaseModel):
    """Base of the rollout types: extra fields allowed, assignments validated, equality by value."""

    model_config = ConfigDict(extra="allow", validate_assignment=True, arbitrary_types_allowed=True)

    if not TYPE_CHECKING:  # the checker is to see the fields as keyword arguments

        def __init__(self, /, **data: Any) -> None:
            try:
                super().__init__(**data)
            except ValidationError as error:
                raise _refusal(error) from None

        def __setattr__(self, name: str, value: Any) -> None:
            try:
                super().__setattr__(name, value)
            except ValidationError as error:
                raise _refusal(error) from None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AgentBaseModel):
            return NotImplemented
        if not (isinstance(other, type(self)) or isinstance(self, type(other))):
            return NotImplemented
        return arrays.same_bits(self._values(), other._values())

    def _values(self) -> dict[str, Any]:
        """What equality compares: all fields. One that a subclass declares equals the extra one it comes back as."""
        declared = {name: getattr(self, name) for name in type(self).model_fields}
        return declared | (self.__pydantic_extra__ or {})

    __hash__ = None  # type: ignore[assignment]  # mutable, as its arrays are


class _Episode(AgentBaseModel):
    """What text and token rollouts have in common."""

    reward: float | list[float] | None = None
    """The episode's reward, or one for each turn (their sum is then the row's ``reward``)."""
    env_id: str | None = None
    problem_id: str | None = None
    rollout_status: str = "ok"
    """"ok", "placeholder", "masked" or "graded"."""
    failure_reason: str | None = None
    prompt_length: PromptLengths | None = None
    """Prompt tokens (or characters, of text) of each turn. A single number is taken as the first turn's."""
    advantage_override: float | None = None
    finish_reasons: list[str | None] | None = None
    """One a turn."""
    is_truncated: bool | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    """Reward components and other named numbers."""
    policy_versions: list[VersionSpan] | None = None
    kv_versions: list[VersionSpan] | None = None
    arrays: NamedArrays = Field(default_factory=dict)
    """Routed experts, pixel values, teacher logprobs …: any shape and plain dtype."""
    started_at: UtcDatetime | None = None


class Rollout(_Episode):
    """One episode as text. ``trajectory[i]`` is the whole text up to turn i."""

    trajectory: list[str]

    @property
    def is_placeholder(self) -> bool:
        """Whether this stands for an episode that failed: an empty trajectory."""
        return not self.trajectory


class TokenRollout(_Episode):
    """One episode as tokens; takes lists, NumPy arrays and whatever has ``__array__``.

    Shapes: ``trajectory[i]`` (T_i,) int32, the whole sequence up to turn i. ``generation_mask[i]`` (T_i,) bool,
    True where the policy sampled. ``logprobs[i]`` float32, of the sampled tokens only or (T_i,).
    Python floats become float32 here, where you can see it.
    """

    trajectory: TokenTurns
    generation_mask: MaskTurns = None
    logprobs: LogprobTurns = None
    completion_ids: list[str] | None = None
    generation_cap: int | None = None
    """Tokens the sampler was allowed to generate."""

    @property
    def is_placeholder(self) -> bool:
        """Whether this stands for an episode that failed: an empty trajectory."""
        return not self.trajectory


Rollouts: TypeAlias = list[TokenRollout | Rollout]


class RolloutGroup(AgentBaseModel):
    """The rollouts of one problem. ``uid`` is minted by the bank when the group is appended."""

    rollouts: Rollouts
    batch_id: int = 0
    index_in_batch: int = 0
    uid: str | None = None

    @property
    def env_id(self) -> EnvId:
        """The environment that the members name; "" when none does."""
        return next((rollout.env_id for rollout in self.rollouts if rollout.env_id), "")

    def __iter__(self) -> Iterator[TokenRollout | Rollout]:  # type: ignore[override]  # a sequence of rollouts, as in Megatron
        return iter(self.rollouts)

    def __len__(self) -> int:
        return len(self.rollouts)

    def __getitem__(self, index: int) -> TokenRollout | Rollout:
        return self.rollouts[index]

    @model_serializer(mode="wrap")
    def _serialize(self, handler: SerializerFunctionWrapHandler) -> Any:
        _ = self.rollouts  # of a group on disk: decodes; here, since a model that holds one dumps it as a RolloutGroup
        return handler(self)


GroupedRollouts: TypeAlias = list[RolloutGroup]
GroupsPerEnv: TypeAlias = dict[EnvId, list[RolloutGroup]]
GroupQueuesPerEnv: TypeAlias = dict[EnvId, deque[RolloutGroup]]


def _refusal(error: ValidationError) -> Exception:
    """Return the UnrepresentableError inside a pydantic error, its field seen from this model; or the error itself."""
    for detail in error.errors(include_url=False, include_input=False):
        place = _path(detail["loc"])
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, UnrepresentableError):
            joint = "" if not cause.field or cause.field.startswith("[") else "."
            return UnrepresentableError(f"{place}{joint}{cause.field}", cause.reason)
        if detail["type"] == "string_unicode":
            return UnrepresentableError(place or "extra", "a lone surrogate has no UTF-8 form")
    return error


def _path(location: tuple[int | str, ...]) -> str:
    """Format a pydantic location as ``rollouts[2].trajectory``, leaving out the names of union branches."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in {"TokenRollout", "Rollout"}:
            path += f".{part}" if path else part
    return path
