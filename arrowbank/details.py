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

Values are of their declared types when a model is made or assigned to; what was put into a list or dict since is
checked here. It must be of the declared type already, since that is what comes back.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, NoReturn

import numpy as np

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
    "json_number",
    "load",
    "number",
    "reward",
    "rollout_details",
    "rollout_fields",
]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_FIELDS = {kind: frozenset(kind.model_fields) for kind in (Rollout, TokenRollout, RolloutGroup)}
_PLAIN = ("problem_id", "failure_reason", "is_truncated", "finish_reasons", "prompt_length")
_VERSIONS = ("policy_versions", "kv_versions")
_MAX_DEPTH = 100
"""Of nested extra fields: far below what any JSON parser takes on any stack."""
_MAX_INT_BITS = 2000
"""About 600 digits, which Python parses under any limit that sys.set_int_max_str_digits allows."""


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
    """Return the rollout's own part, without ``turns`` and ``irregular``.

    Raises UnrepresentableError, naming the field, for whatever is not of its declared type.
    """
    values = rollout.__dict__
    details = {name: _CHECKS[name](values[name], name) for name in _PLAIN if values[name] is not None}
    if values["rollout_status"] != "ok":
        details["rollout_status"] = _string(values["rollout_status"], "rollout_status")
    if values["advantage_override"] is not None:
        details["advantage_override"] = number(values["advantage_override"], "advantage_override")
    if type(values["reward"]) is list:
        details["turn_rewards"] = _list_of(number)(values["reward"], "reward")
    if values["metrics"]:
        details["metrics"] = _metrics(values["metrics"])
    for name in _VERSIONS:
        if values[name] is not None:
            details[name] = _list_of(_version)(values[name], name)
    if values["started_at"] is not None:
        details["started_at"] = _microseconds(values["started_at"])
    if values["arrays"]:
        details["arrays"] = _arrays(values["arrays"])
    known = _FIELDS[Rollout]
    if isinstance(rollout, TokenRollout):
        known = _FIELDS[TokenRollout]
        for name in ("completion_ids", "generation_cap"):
            if values[name] is not None:
                details[name] = _CHECKS[name](values[name], name)
    extra = extra_fields(rollout, known)
    if extra:
        details["extra"] = extra
    return details


def rollout_fields(details: Mapping[str, Any], reward: float | None) -> dict[str, Any]:
    """Return the fields that both kinds of rollout have, from a row's details and its reward column."""
    started = details.get("started_at")
    override = details.get("advantage_override")
    fields: dict[str, Any] = {name: details.get(name) for name in _PLAIN}
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
    """Return extra fields, and those that a subclass declares. Raises UnrepresentableError for what JSON would change.

    A subclass comes back as the class that arrowbank knows, with its own fields as extra ones.
    """
    extra = model.__pydantic_extra__ or {}
    if len(type(model).model_fields) != len(known):
        own = {name: model.__dict__[name] for name in type(model).model_fields if name not in known}
        extra = own | extra
    for name, value in extra.items():
        check_text(name, repr(name))
        _check_json(value, name, 0)
    return extra


def number(value: float, field: str) -> float | dict[str, str]:
    """Return a JSON value for a float."""
    if type(value) is not float:
        _refuse(field, "a float", value)
    return json_number(value)


def json_number(value: float) -> float | dict[str, str]:
    """Return a JSON value for what is known to be a float."""
    return value if math.isfinite(value) else {"f64": struct.pack(">d", value).hex()}


def reward(value: Any) -> float | None:
    """Return what the column ``reward`` says: the reward, or the sum of a list that ``rollout_details`` has checked."""
    if type(value) is list:
        return float(sum(value))
    if value is not None and type(value) is not float:
        _refuse("reward", "a float, a list of floats or None", value)
    return value


def float_of(value: Any) -> float:
    """Return the float that ``json_number`` was given."""
    if isinstance(value, dict):
        return float(struct.unpack(">d", bytes.fromhex(value["f64"]))[0])
    return float(value)


def int64(value: int, field: str) -> int:
    """Return the integer, or raise UnrepresentableError where 64 bits do not hold it."""
    if type(value) is not int:
        _refuse(field, "an int", value)
    if not -(2**63) <= value < 2**63:
        raise UnrepresentableError(field, f"{value} does not fit 64 bits")
    return value


def check_text(value: Any, field: str) -> None:
    """Raise UnrepresentableError naming the string inside ``value`` that has no UTF-8 form, if any.

    field: the path of ``value``; "" for a mapping from fields to their values.
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            reason = f"a lone surrogate at character {error.start} has no UTF-8 form"
            raise UnrepresentableError(field, reason) from None
    elif isinstance(value, Mapping):
        for key, part in value.items():
            check_text(key, field or repr(key))
            check_text(part, f"{field}.{key}" if field else key)
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            check_text(part, f"{field}[{index}]")


def _refuse(field: str, expected: str, value: Any) -> NoReturn:
    raise UnrepresentableError(field, f"expected {expected}, found {type(value).__module__}.{type(value).__qualname__}")


def _string(value: Any, field: str) -> str:
    if type(value) is not str:
        _refuse(field, "a string", value)
    return value


def _optional_string(value: Any, field: str) -> str | None:
    return None if value is None else _string(value, field)


def _bool(value: Any, field: str) -> bool:
    if type(value) is not bool:
        _refuse(field, "True, False or None", value)
    return value


def _list_of(convert: Callable[[Any, str], Any]) -> Callable[[Any, str], list[Any]]:
    def each(values: Any, field: str) -> list[Any]:
        if type(values) is not list:
            _refuse(field, "a list", values)
        return [convert(value, f"{field}[{index}]") for index, value in enumerate(values)]

    return each


def _version(span: Any, field: str) -> list[int]:
    if type(span) is not VersionSpan:
        _refuse(field, "a VersionSpan", span)
    return [int64(part, f"{field}.{name}") for name, part in zip(span._fields, span, strict=True)]


def _metrics(metrics: Any) -> dict[str, Any]:
    if type(metrics) is not dict:
        _refuse("metrics", "a dict", metrics)
    return {_key(name, "metrics"): number(value, f"metrics[{name!r}]") for name, value in metrics.items()}


def _arrays(found: Any) -> list[list[Any]]:
    """Name, dtype and shape of each array."""
    if type(found) is not dict:
        _refuse("arrays", "a dict", found)
    named = []
    for name, array in found.items():
        field = f"arrays[{_key(name, 'arrays')!r}]"
        if type(array) is not np.ndarray:
            _refuse(field, "a NumPy array", array)
        try:
            named.append([name, dtype_name(array.dtype), array.shape])
        except UnrepresentableError as error:
            raise UnrepresentableError(field, error.reason) from None
    return named


def _key(name: Any, field: str) -> str:
    if type(name) is not str:
        raise UnrepresentableError(field, f"expected strings as keys, found the {type(name).__name__} {name!r}")
    return name


def _microseconds(moment: Any) -> int:
    if type(moment) is not datetime or moment.utcoffset() != timedelta(0):
        raise UnrepresentableError("started_at", f"expected a datetime in UTC, found {moment!r}")
    return (moment - _EPOCH) // timedelta(microseconds=1)


_CHECKS: dict[str, Callable[[Any, str], Any]] = {
    "problem_id": _string,
    "failure_reason": _string,
    "is_truncated": _bool,
    "finish_reasons": _list_of(_optional_string),
    "prompt_length": _list_of(int64),
    "completion_ids": _list_of(_string),
    "generation_cap": int64,
}


def _check_json(value: Any, field: str, depth: int) -> None:
    """Raise UnrepresentableError unless JSON gives back the same value of the same type."""
    kind = type(value)
    if value is None or kind is bool:
        return
    if kind is int:
        if value.bit_length() > _MAX_INT_BITS:
            raise UnrepresentableError(field, f"an int of {value.bit_length()} bits is too long for JSON parsers")
    elif kind is str:
        check_text(value, field)
    elif kind is float:
        if not math.isfinite(value):
            raise UnrepresentableError(field, f"JSON has no {value}; keep such numbers in metrics or arrays")
    elif kind is list or kind is dict:
        if depth >= _MAX_DEPTH:
            raise UnrepresentableError(field, f"nested more than {_MAX_DEPTH} deep")
        for key, part in value.items() if kind is dict else enumerate(value):
            if kind is dict and type(key) is not str:
                raise UnrepresentableError(field, f"JSON would turn the {type(key).__name__} key {key!r} into a string")
            check_text(key, field)
            _check_json(part, f"{field}.{key}" if kind is dict else f"{field}[{key}]", depth + 1)
    else:
        raise UnrepresentableError(
            field,
            f"JSON would not give back a {kind.__module__}.{kind.__qualname__}; use str, int, float, bool, list, "
            "dict or None, or keep arrays in the field arrays",
        )
