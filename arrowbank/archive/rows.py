"""Lean rows ↔ whole rows: ``SEGMENT_SCHEMA`` with its JSON details, and ``ROW_SCHEMA`` with a column for each.

Invariant: ``narrow(widen(rows))`` decodes to the same groups, bit for bit. Numbers go through Arrow buffers, never
through Python floats, where NaN payloads could be at stake.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from arrowbank import details
from arrowbank.schema import ROW_SCHEMA, SEGMENT_SCHEMA
from arrowbank.turns import CUMULATIVE, FULL, NO_LOGPROBS, NO_MASK, SAMPLED

__all__ = ["group_slices", "head_of", "narrow", "widen"]

_FORMS = {NO_LOGPROBS: None, SAMPLED: "sampled", FULL: "full", CUMULATIVE: "cumulative"}
_FORM_NUMBERS = {name: number for number, name in _FORMS.items()}
_PLAIN = (
    "problem_id", "source_index", "started_at", "failure_reason", "finish_reasons", "is_truncated", "prompt_length",
    "completion_ids", "generation_cap", "batch_id", "index_in_batch", "session", "writer",
)  # fmt: skip
_VERSIONS = ("policy_versions", "kv_versions")
_NO_TURN = {"source": 0, "end": 0}
_HEAD_COLUMNS = [
    "group_uid", "collected_iteration", "split", "group_size", "batch_id", "index_in_batch", "group_extra",
    "source_index", "session",
]  # fmt: skip


def widen(lean: pa.Table, run_id: str) -> pa.Table:
    """Return the rows with all columns of ``ROW_SCHEMA``."""
    lean = lean.combine_chunks()
    rows = [details.load(text) for text in lean["details"].to_pylist()]
    kinds = lean["kind"].to_pylist()
    blobs = _binaries(lean["arrays"])
    columns: dict[str, Any] = {name: lean[name] for name in lean.schema.names if name in ROW_SCHEMA.names}
    columns |= {name: [row.get(name) for row in rows] for name in _PLAIN}
    columns["run_id"] = pa.repeat(pa.scalar(run_id), len(rows))
    columns["rollout_status"] = [row.get("rollout_status", "ok") for row in rows]
    columns["reward_is_derived"] = ["turn_rewards" in row for row in rows]
    columns["advantage_override"] = _floats([row.get("advantage_override") for row in rows])
    columns["turn_rewards"] = _float_lists([row.get("turn_rewards") for row in rows])
    columns["metrics"] = _metrics([row.get("metrics", {}) for row in rows])
    columns["num_turns"] = [len(row.get("turns", ())) for row in rows]
    columns["turns"] = [[_turn(turn) for turn in row.get("turns", ())] for row in rows]
    columns |= {name: [_versions(row.get(name)) for row in rows] for name in _VERSIONS}
    versions = [[span[2] for span in row.get("policy_versions") or ()] for row in rows]
    columns["oldest_policy_version"] = [min(found, default=None) for found in versions]
    columns["newest_policy_version"] = [max(found, default=None) for found in versions]
    columns["prompt_hash"] = _prompt_hashes(lean, rows, blobs)
    columns["arrays"] = [_arrays(row, found) for row, found in zip(rows, blobs, strict=True)]
    columns["irregular_turns"] = _irregular(rows, kinds, blobs)
    columns["extra"] = [_text(row.get("extra")) for row in rows]
    columns["group_extra"] = [_text(row.get("group_extra")) for row in rows]
    return pa.Table.from_arrays([_column(columns[field.name], field) for field in ROW_SCHEMA], schema=ROW_SCHEMA)


def narrow(wide: pa.Table) -> pa.Table:
    """Return whole rows as lean ones, as they were in their segment."""
    wide = wide.select(ROW_SCHEMA.names).combine_chunks()
    light = [field.name for field in ROW_SCHEMA if field.name not in {"tokens", "generation_mask", "logprobs", "text"}]
    kept = wide.select([name for name in light if name not in {"arrays", "irregular_turns"}])
    kept = kept.set_column(
        kept.schema.get_field_index("started_at"), "started_at", kept["started_at"].cast(pa.int64())
    ).drop_columns(["completed_at"])
    texts, blobs = [], []
    sources = zip(kept.to_pylist(), wide["arrays"], wide["irregular_turns"], _exact_floats(wide), strict=True)
    for row, arrays, irregular, exact in sources:
        found, parts = _details(row, arrays, irregular, exact)
        texts.append(details.dump(found))
        blobs.append(parts)
    columns: dict[str, Any] = {name: wide[name] for name in SEGMENT_SCHEMA.names if name not in {"details", "arrays"}}
    columns |= {"details": texts, "arrays": blobs}
    return pa.Table.from_arrays(
        [_column(columns[field.name], field) for field in SEGMENT_SCHEMA], schema=SEGMENT_SCHEMA
    )


def group_slices(rows: pa.Table) -> Iterator[tuple[int, int]]:
    """Yield where each group starts and ends, in rows in which each group's stand together."""
    uids = rows["group_uid"].to_numpy()
    yield from pairwise([0, *(np.flatnonzero(uids[1:] != uids[:-1]) + 1).tolist(), len(uids)] if len(uids) else [0])


def head_of(rows: pa.Table) -> dict[str, Any]:
    """Make the head that a group's record had again, of the group's whole rows, with the session that appended it."""
    row = rows.select(_HEAD_COLUMNS).slice(0, 1).to_pylist()[0]
    problems = set(rows["problem_id"].to_pylist()) if row["group_size"] else set()
    envs = [env for env in rows["env_id"].to_pylist() if env]
    head: dict[str, Any] = {
        "uid": row["group_uid"],
        "iteration": row["collected_iteration"],
        "env": envs[0] if envs else "",
        "split": row["split"],
        "size": row["group_size"],
        "problem": problems.pop() if len(problems) == 1 else None,
    }
    head |= {name: row[name] for name in ("batch_id", "index_in_batch") if row[name]}
    if row["group_extra"] is not None:
        head["extra"] = details.load(row["group_extra"])
    if row["source_index"] is not None:
        head["source_index"] = row["source_index"]
    head["at"] = rows["completed_at"][0].cast(pa.int64()).as_py()
    head["session"] = row["session"]
    return head


def _details(
    row: dict[str, Any], arrays: Any, irregular: Any, exact: dict[str, Any]
) -> tuple[dict[str, Any], list[bytes]]:
    """Rebuild a row's details and its binaries."""
    found = {name: row[name] for name in _PLAIN if row[name] is not None}
    if row["rollout_status"] != "ok":
        found["rollout_status"] = row["rollout_status"]
    found |= {name: value for name, value in exact.items() if value is not None}
    for name in _VERSIONS:
        if row[name] is not None:
            found[name] = [[span["turn"], span["start"], span["version"]] for span in row[name]]
    if row["turns"]:
        found["turns"] = [_turn_of(turn, row["kind"]) for turn in row["turns"]]
    found |= {name: details.load(row[name]) for name in ("extra", "group_extra") if row[name] is not None}
    blobs = []
    if len(arrays):
        found["arrays"] = []
    for array in arrays.values if len(arrays) else ():
        found["arrays"].append([array["name"].as_py(), array["dtype"].as_py(), array["shape"].as_py()])
        blobs.append(array["data"].as_py())
    if irregular.is_valid:
        found["irregular"] = []
        for sequence in irregular.values:
            said, parts = _irregular_of(sequence)
            found["irregular"].append(said)
            blobs += parts
    return found, blobs


def _irregular_of(sequence: Any) -> tuple[Any, list[bytes]]:
    if sequence["text"].is_valid:
        return sequence["text"].as_py(), []
    mask, logprobs = sequence["generation_mask"], sequence["logprobs"]
    blobs = [_numbers(sequence["tokens"].values, np.int32).tobytes()]
    if mask.is_valid:
        blobs.append(np.asarray(mask.values.to_numpy(zero_copy_only=False), np.bool_).tobytes())
    if logprobs.is_valid:
        known = np.asarray(logprobs.values.is_valid().to_numpy(zero_copy_only=False), np.bool_)
        values = _numbers(logprobs.values, np.float32).copy()
        values[~known] = 0
        blobs += [values.tobytes(), known.tobytes()]
    return [mask.is_valid, logprobs.is_valid], blobs


def _exact_floats(wide: pa.Table) -> list[dict[str, Any]]:
    """Each row's floats that live in details, as JSON values that keep their bits."""
    overrides = _optional_numbers(wide["advantage_override"])
    rewards = [_list_numbers(scalar) for scalar in wide["turn_rewards"]]
    metrics = [
        {key: details.json_number(value) for key, value in zip(scalar.values.field("key").to_pylist(),
         _numbers(scalar.values.field("value"), np.float64).tolist(), strict=True)}
        for scalar in wide["metrics"]
    ]  # fmt: skip
    return [
        {
            "advantage_override": None if override is None else details.json_number(override),
            "turn_rewards": reward,
            "metrics": metric or None,
        }
        for override, reward, metric in zip(overrides, rewards, metrics, strict=True)
    ]


def _optional_numbers(column: pa.ChunkedArray) -> list[float | None]:
    array = column.combine_chunks()
    values = _numbers(array, np.float64).tolist()
    return [value if valid else None for value, valid in zip(values, array.is_valid().to_pylist(), strict=True)]


def _list_numbers(scalar: Any) -> list[Any] | None:
    if not scalar.is_valid:
        return None
    return [details.json_number(value) for value in _numbers(scalar.values, np.float64).tolist()]


def _numbers(array: pa.Array, dtype: Any) -> NDArray[Any]:
    """A number array's values by their bytes; whatever stands there where it is null."""
    if not len(array):
        return np.zeros(0, dtype)
    return np.frombuffer(array.buffers()[1], dtype, len(array) + array.offset)[array.offset :]


def _floats(values: list[Any]) -> pa.Array:
    numbers = np.array([0.0 if value is None else details.float_of(value) for value in values], np.float64)
    return pa.array(numbers, mask=np.array([value is None for value in values], np.bool_))


def _float_lists(rows: list[list[Any] | None]) -> pa.Array:
    flat = np.array([details.float_of(value) for row in rows for value in row or ()], np.float64)
    return _list_array(pa.array(flat), [None if row is None else len(row) for row in rows], "turn_rewards")


def _metrics(rows: list[dict[str, Any]]) -> pa.Array:
    flat = [(key, details.float_of(value)) for row in rows for key, value in row.items()]
    keys = pa.array([key for key, _ in flat], pa.string())
    values = pa.array(np.array([value for _, value in flat], np.float64))
    kind = ROW_SCHEMA.field("metrics").type
    struct = pa.StructArray.from_arrays([keys, values], fields=list(kind.value_type))
    return _list_array(struct, [len(row) for row in rows], "metrics")


def _list_array(child: pa.Array, lengths: Sequence[int | None], column: str) -> pa.Array:
    offsets = np.cumsum([0, *(length or 0 for length in lengths)]).astype(np.int32)
    null = np.array([length is None for length in lengths], np.bool_)
    kind = ROW_SCHEMA.field(column).type
    return pa.ListArray.from_arrays(pa.array(offsets), child, type=kind, mask=pa.array(null) if null.any() else None)


def _turn(turn: list[int]) -> dict[str, Any]:
    if len(turn) == 2:
        return {"source": turn[0], "end": turn[1]}
    source, end, mask_from, form, count = turn
    return {
        "source": source,
        "end": end,
        "mask_from": None if mask_from == NO_MASK else mask_from,
        "logprobs": _FORMS[form],
        "num_logprobs": None if form == NO_LOGPROBS else count,
    }


def _turn_of(turn: dict[str, Any], kind: str) -> list[int]:
    if kind == "text":
        return [turn["source"], turn["end"]]
    mask_from = NO_MASK if turn["mask_from"] is None else turn["mask_from"]
    return [turn["source"], turn["end"], mask_from, _FORM_NUMBERS[turn["logprobs"]], turn["num_logprobs"] or 0]


def _versions(spans: list[list[int]] | None) -> list[dict[str, int]] | None:
    return None if spans is None else [dict(zip(("turn", "start", "version"), span, strict=True)) for span in spans]


def _arrays(row: dict[str, Any], blobs: list[bytes]) -> list[dict[str, Any]]:
    named = row.get("arrays", ())
    return [
        {"name": name, "dtype": dtype, "shape": shape, "data": data}
        for (name, dtype, shape), data in zip(named, blobs, strict=False)  # the irregular turns' bytes follow
    ]


def _irregular(rows: list[dict[str, Any]], kinds: list[str], blobs: list[list[bytes]]) -> pa.Array:
    """Irregular sequences as structs; null for the rows that have none, which are nearly all."""
    kind = ROW_SCHEMA.field("irregular_turns").type
    if not any("irregular" in row for row in rows):
        return pa.nulls(len(rows), kind)
    sequences: list[tuple[Any, Any, Any, Any, str | None]] = []
    lengths: list[int | None] = []
    for row, row_kind, found in zip(rows, kinds, blobs, strict=True):
        said = row.get("irregular")
        lengths.append(None if said is None else len(said))
        if said is not None and row_kind == "text":
            sequences += [(None, None, None, None, text) for text in said]
        elif said is not None:
            rest = iter(found[len(row.get("arrays", ())) :])
            sequences += [_sequence(rest, *has) for has in said]
    fields = list(kind.value_type)
    struct = pa.StructArray.from_arrays(
        [
            _list_of([tokens for tokens, *_ in sequences], fields[0].type, np.int32),
            _list_of([mask for _, mask, *_ in sequences], fields[1].type, np.bool_),
            _list_of([lps for _, _, lps, *_ in sequences], fields[2].type, np.float32, [s[3] for s in sequences]),
            pa.array([text for *_, text in sequences], pa.string()),
        ],
        fields=fields,
    )
    return _list_array(struct, lengths, "irregular_turns")


def _sequence(blobs: Any, has_mask: bool, has_logprobs: bool) -> tuple[Any, Any, Any, Any, None]:
    tokens = np.frombuffer(next(blobs), np.int32)
    mask = np.frombuffer(next(blobs), np.bool_) if has_mask else None
    logprobs = np.frombuffer(next(blobs), np.float32) if has_logprobs else None
    known = np.frombuffer(next(blobs), np.bool_) if has_logprobs else None
    return tokens, mask, logprobs, known, None


def _list_of(
    parts: list[NDArray[Any] | None], kind: pa.DataType, dtype: Any, known: list[NDArray[Any] | None] | None = None
) -> pa.Array:
    present = [part for part in parts if part is not None]
    flat = np.concatenate(present) if present else np.zeros(0, dtype)
    mask = None
    if known is not None and present:
        mask = ~np.concatenate([part for part in known if part is not None])
    offsets = np.cumsum([0, *(0 if part is None else len(part) for part in parts)]).astype(np.int32)
    null = pa.array(np.array([part is None for part in parts], np.bool_))
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat, mask=mask), type=kind, mask=null)


def _prompt_hashes(lean: pa.Table, rows: list[dict[str, Any]], blobs: list[list[bytes]]) -> list[str | None]:
    """xxh3-64 of the first turn's prompt; None where nothing says where that ends."""
    hashes: list[str | None] = []
    columns = zip(lean["tokens"], lean["generation_mask"], lean["text"].to_pylist(), rows, blobs, strict=True)
    for tokens, mask, text, row, found in columns:
        said = (row.get("prompt_length") or [None])[0]
        if "turns" not in row:
            hashes.append(None)
        elif text is not None:
            hashes.append(None if said is None else _hash(_first_text(text, row)[:said].encode()))
        else:
            prompt = _prompt_tokens(*_first_turn(tokens, mask, row, found), said)
            hashes.append(None if prompt is None else _hash(prompt.tobytes()))
    return hashes


def _first_text(text: str, row: dict[str, Any]) -> str:
    source, end = row["turns"][0]
    first: str = [text, *row.get("irregular", ())][source][:end]
    return first


def _first_turn(
    tokens: Any, mask: Any, row: dict[str, Any], blobs: list[bytes]
) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """The first turn's tokens and mask."""
    source, end, mask_from = row["turns"][0][:3]
    if source:
        rest = iter(blobs[len(row.get("arrays", ())) :])
        sequences = [_sequence(rest, *has) for has in row["irregular"][:source]]
        first, sampled = sequences[-1][:2]
    else:
        first = _numbers(tokens.values, np.int32)
        sampled = mask.values.to_numpy(zero_copy_only=False) if mask.is_valid else None
    if sampled is None:
        return first[:end], None
    return first[:end], sampled[:end] & (np.arange(len(sampled[:end])) >= mask_from)


def _prompt_tokens(tokens: NDArray[Any], mask: NDArray[Any] | None, said: int | None) -> NDArray[Any] | None:
    """What ``prompt_length`` says, else all before the first sampled token."""
    if said is not None:
        return tokens[:said]
    if mask is None:
        return None
    return tokens[: int(mask.argmax())] if mask.any() else tokens


def _hash(data: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(data)


def _text(value: Any) -> str | None:
    return None if value is None else details.dump(value)


def _binaries(column: pa.ChunkedArray) -> list[list[bytes]]:
    """Each row's binaries, copied out."""
    array = column.combine_chunks()
    items = array.values.to_pylist()
    return [items[start:end] for start, end in pairwise(array.offsets.to_pylist())]


def _column(values: Any, field: pa.Field) -> pa.Array:
    if isinstance(values, list):
        return pa.array(values, field.type)
    array = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    return array if array.type.equals(field.type) else array.cast(field.type)
