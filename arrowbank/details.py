"""The ``details`` column: JSON text for what a row has besides the lean columns.

Keys are there only when they say something. Of the group: session, writer, batch_id, index_in_batch, source_index,
group_extra. Of the rollout: its fields by their own names, and
    turn_rewards  the rewards of the turns, when ``reward`` is a list
    started_at    microseconds since 1970, UTC
    turns         [source, end] or [source, end, mask_from, form, given] a turn (see ``turns.Turn``)
    arrays        [name, dtype, shape] an array; the bytes are in the ``arrays`` column, in this order
    irregular     a text for each irregular sequence, or [has_mask, has_logprobs]: its tokens (int32), mask (a byte
                  each), logprobs (float32) and which are known (a byte each) follow in the ``arrays`` column
    extra         the extra fields
A float that JSON has no number for is {"f64": its 16 hexadecimal digits}.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from arrowbank.arrays import dtype_name
from arrowbank.errors import UnrepresentableError
from arrowbank.types import AgentBaseModel, Rollout, RolloutGroup, TokenRollout, VersionSpan

__all__ = [
    "check_text",
    "dump",
    "extra_fields",
    "float_of",
    "group_details",
    "int64",
    "load",
    "number",
    "rollout_details",
    "rollout_fields",
]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_FIELDS = {kind: frozenset(kind.model_fields) for kind in (Rollout, TokenRollout, RolloutGroup)}
_PLAIN = ("problem_id", "failure_reason", "is_truncated")
_LISTS = ("finish_reasons", "completion_ids")
_VERSIONS = ("policy_versions", "kv_versions")


def dump(details: Mapping[str, Any]) -> str:
    """Return the JSON text of details whose values were checked."""
    return _ENCODER.encode(details)


def load(text: str) -> dict[str, Any]:
    """Parse a row's details."""
    found: dict[str, Any] = json.loads(text)
    return found


def group_details(group: RolloutGroup, *, session: int, writer: str, source_index: int | None) -> dict[str, Any]:
    """Return what every row of the group says of the group."""
    details: dict[str, Any] = {
        "session": session,
        "writer": writer,
        "batch_id": int64(group.batch_id, "batch_id"),
        "index_in_batch": int64(group.index_in_batch, "index_in_batch"),
    }
    if source_index is not None:
        details["source_index"] = int64(source_index, "source_index")
    extra = extra_fields(group, _FIELDS[RolloutGroup])
    if extra:
        details["group_extra"] = extra
    return details


def rollout_details(rollout: Rollout | TokenRollout) -> dict[str, Any]:
    """Return the rollout's own part, without ``turns`` and ``irregular``."""
    values = rollout.__dict__
    details = {name: values[name] for name in _PLAIN if values[name] is not None}
    details |= {name: values[name] for name in _LISTS if values.get(name) is not None}
    if rollout.rollout_status != "ok":
        details["rollout_status"] = rollout.rollout_status
    if rollout.prompt_length is not None:
        details["prompt_length"] = [int64(length, "prompt_length") for length in rollout.prompt_length]
    if rollout.advantage_override is not None:
        details["advantage_override"] = number(rollout.advantage_override)
    if isinstance(rollout.reward, list):
        details["turn_rewards"] = [number(reward) for reward in rollout.reward]
    if rollout.metrics:
        details["metrics"] = {name: number(value) for name, value in rollout.metrics.items()}
    for name in _VERSIONS:
        if values[name] is not None:
            details[name] = [[int64(part, name) for part in span] for span in values[name]]
    if rollout.started_at is not None:
        details["started_at"] = (rollout.started_at - _EPOCH) // timedelta(microseconds=1)
    if rollout.arrays:
        details["arrays"] = [[name, _dtype(name, array), array.shape] for name, array in rollout.arrays.items()]
    if isinstance(rollout, TokenRollout) and rollout.generation_cap is not None:
        details["generation_cap"] = int64(rollout.generation_cap, "generation_cap")
    known = _FIELDS[TokenRollout if isinstance(rollout, TokenRollout) else Rollout]
    if rollout.__pydantic_extra__ or len(values) != len(known):
        extra = extra_fields(rollout, known)
        if extra:
            details["extra"] = extra
    return details


def rollout_fields(details: Mapping[str, Any], reward: float | None) -> dict[str, Any]:
    """Return the fields that both kinds of rollout have, from a row's details and its reward column."""
    started = details.get("started_at")
    override = details.get("advantage_override")
    fields: dict[str, Any] = {name: details.get(name) for name in (*_PLAIN, "finish_reasons", "prompt_length")}
    fields["rollout_status"] = details.get("rollout_status", "ok")
    fields["reward"] = [float_of(value) for value in details["turn_rewards"]] if "turn_rewards" in details else reward
    fields["advantage_override"] = None if override is None else float_of(override)
    fields["metrics"] = {name: float_of(value) for name, value in details.get("metrics", {}).items()}
    fields["started_at"] = None if started is None else _EPOCH + timedelta(microseconds=started)
    for name in _VERSIONS:
        spans = details.get(name)
        fields[name] = None if spans is None else [VersionSpan(*span) for span in spans]
    return fields


def extra_fields(model: AgentBaseModel, known: frozenset[str]) -> dict[str, Any]:
    """Return extra fields, and a subclass's own, or raise UnrepresentableError for what JSON would change."""
    extra = {name: value for name, value in model.__dict__.items() if name not in known}
    extra |= model.__pydantic_extra__ or {}
    try:
        for name, value in extra.items():
            _check_json(value, name)
    except RecursionError:
        raise UnrepresentableError("extra", "nested too deeply for JSON") from None
    return extra


def number(value: float) -> float | dict[str, str]:
    """Return a JSON value for a float."""
    return float(value) if math.isfinite(value) else {"f64": struct.pack(">d", value).hex()}


def float_of(value: Any) -> float:
    """Return the float that ``number`` was given."""
    if isinstance(value, dict):
        return float(struct.unpack(">d", bytes.fromhex(value["f64"]))[0])
    return float(value)


def int64(value: int, field: str) -> int:
    """Return the integer, or raise UnrepresentableError where 64 bits do not hold it."""
    if type(value) is not int:
        raise UnrepresentableError(field, f"expected an int, found {type(value).__name__}")
    if not -(2**63) <= value < 2**63:
        raise UnrepresentableError(field, f"{value} does not fit 64 bits")
    return value


def check_text(value: Any, field: str) -> None:
    """Raise UnrepresentableError naming the string inside ``value`` that has no UTF-8 form, if any."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise UnrepresentableError(
                field, f"a lone surrogate at character {error.start} has no UTF-8 form"
            ) from None
    elif isinstance(value, Mapping):
        for key, part in value.items():
            check_text(key, field)
            check_text(part, f"{field}.{key}" if field else str(key))
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            check_text(part, f"{field}[{index}]")


def _dtype(name: str, array: Any) -> str:
    try:
        return dtype_name(array.dtype)
    except UnrepresentableError as error:
        raise UnrepresentableError(f"arrays[{name!r}]", error.reason) from None


def _check_json(value: Any, field: str) -> None:
    """Raise UnrepresentableError unless JSON gives back the same value of the same type."""
    kind = type(value)
    if value is None or kind in (bool, int):
        return
    if kind is str:
        check_text(value, field)
    elif kind is float:
        if not math.isfinite(value):
            raise UnrepresentableError(field, f"JSON has no {value}; keep such numbers in metrics or arrays")
    elif kind is list:
        for index, part in enumerate(value):
            _check_json(part, f"{field}[{index}]")
    elif kind is dict:
        for key, part in value.items():
            if type(key) is not str:
                raise UnrepresentableError(field, f"JSON would turn the {type(key).__name__} key {key!r} into a string")
            check_text(key, field)
            _check_json(part, f"{field}.{key}")
    else:
        raise UnrepresentableError(
            field,
            f"JSON would not give back a {kind.__module__}.{kind.__qualname__}; use str, int, float, bool, list, "
            "dict or None, or keep arrays in the field arrays",
        )
