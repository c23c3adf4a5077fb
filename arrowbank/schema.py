"""The two Arrow schemas of a bank, in one place.

``SEGMENT_SCHEMA`` is lean, because every column costs every append: what sorting, counting and training need has a
column, the rest of a row is JSON in ``details``. ``ROW_SCHEMA`` is the whole row, which the archive holds and
``scan`` shows. One row is one rollout; a group without rollouts is one placeholder row with ``group_size`` 0.

Both are frozen for a bank: the manifest keeps ``SCHEMA_HASH``. List elements are declared non-null where they are
(Parquet reads and writes those twice as fast). Counts are int64, since int32 sums wrap in polars.
"""

from __future__ import annotations

import pyarrow as pa
import xxhash

__all__ = ["ARCHIVE_SCHEMA", "ROW_SCHEMA", "SCHEMA_HASH", "SEGMENT_SCHEMA"]

_UTC = pa.timestamp("us", tz="UTC")
_TOKENS = pa.list_(pa.field("element", pa.int32(), nullable=False))
_MASK = pa.list_(pa.field("element", pa.bool_(), nullable=False))
_LOGPROBS = pa.list_(pa.field("element", pa.float32()))
_BINARIES = pa.list_(pa.field("element", pa.large_binary(), nullable=False))


def _required(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


def _records(**fields: pa.DataType) -> pa.DataType:
    """A list of structs whose fields are all there, except those given with a trailing ``_``: nullable."""
    struct = pa.struct([pa.field(name.rstrip("_"), kind, nullable=name.endswith("_")) for name, kind in fields.items()])
    return pa.list_(pa.field("element", struct, nullable=False))


_VERSIONS = _records(turn=pa.int64(), start=pa.int64(), version=pa.int64())

_TOKEN_FIELDS = [
    pa.field("num_tokens", pa.int64()),  # of the final sequence; null for text
    pa.field("num_generated", pa.int64()),  # sampled, all turns; null where no mask says it
    pa.field("tokens", _TOKENS),
    pa.field("generation_mask", _MASK),
    pa.field("logprobs", _LOGPROBS),
    pa.field("text", pa.string()),
]

SEGMENT_SCHEMA = pa.schema(
    [
        _required("group_uid", pa.string()),
        pa.field("env_id", pa.string()),
        _required("split", pa.string()),
        _required("kind", pa.string()),
        _required("member_index", pa.int32()),
        _required("group_size", pa.int32()),
        _required("collected_iteration", pa.int64()),
        _required("completed_at", _UTC),
        pa.field("reward", pa.float64()),
        *_TOKEN_FIELDS,
        _required("details", pa.string()),
        _required("arrays", _BINARIES),
    ]
)

ROW_SCHEMA = pa.schema(
    [
        _required("group_uid", pa.string()),
        pa.field("env_id", pa.string()),
        pa.field("problem_id", pa.string()),
        pa.field("prompt_hash", pa.string()),
        _required("split", pa.string()),
        _required("kind", pa.string()),
        _required("run_id", pa.string()),
        _required("writer", pa.string()),
        _required("member_index", pa.int32()),
        _required("group_size", pa.int32()),
        _required("session", pa.int64()),
        _required("batch_id", pa.int64()),
        _required("index_in_batch", pa.int64()),
        _required("collected_iteration", pa.int64()),
        pa.field("source_index", pa.int64()),
        pa.field("started_at", _UTC),
        _required("completed_at", _UTC),
        pa.field("reward", pa.float64()),
        _required("reward_is_derived", pa.bool_()),
        pa.field("advantage_override", pa.float64()),
        pa.field("turn_rewards", pa.list_(pa.field("element", pa.float64(), nullable=False))),
        _required("metrics", _records(key=pa.string(), value=pa.float64())),
        _required("rollout_status", pa.string()),
        pa.field("failure_reason", pa.string()),
        pa.field("finish_reasons", pa.list_(pa.field("element", pa.string()))),
        pa.field("is_truncated", pa.bool_()),
        _required("num_turns", pa.int64()),
        *_TOKEN_FIELDS[:2],
        pa.field("oldest_policy_version", pa.int64()),
        pa.field("newest_policy_version", pa.int64()),
        pa.field("policy_versions", _VERSIONS),
        pa.field("kv_versions", _VERSIONS),
        *_TOKEN_FIELDS[2:],
        _required(
            "turns",
            _records(
                source=pa.int32(),
                end=pa.int64(),
                mask_from_=pa.int64(),
                logprobs_=pa.string(),
                num_logprobs_=pa.int64(),
            ),
        ),
        pa.field(
            "irregular_turns", _records(tokens_=_TOKENS, generation_mask_=_MASK, logprobs_=_LOGPROBS, text_=pa.string())
        ),
        pa.field("prompt_length", pa.list_(pa.field("element", pa.int64(), nullable=False))),
        pa.field("completion_ids", pa.list_(pa.field("element", pa.string(), nullable=False))),
        pa.field("generation_cap", pa.int64()),
        _required(
            "arrays",
            _records(
                name=pa.string(),
                dtype=pa.string(),
                shape=pa.list_(pa.field("element", pa.int64(), nullable=False)),
                data=pa.large_binary(),
            ),
        ),
        pa.field("extra", pa.string()),
        pa.field("group_extra", pa.string()),
    ]
)

ARCHIVE_SCHEMA = pa.schema(
    [
        *ROW_SCHEMA,
        pa.field("consumed_iteration", pa.int64()),
        pa.field("consumed_draw", pa.int64()),
        pa.field("consumed_position", pa.int64()),
        pa.field("draw_size", pa.int64()),
        pa.field("draw_session", pa.int64()),
        pa.field("draw_state", pa.large_binary()),  # on a draw's first row only
        pa.field("span", pa.int64()),
        pa.field("lag", pa.int64()),
        pa.field("outcome", pa.string()),
        pa.field("evict_reason", pa.string()),
        pa.field("advantage", pa.float64()),
        pa.field("prompt_text", pa.string()),
        pa.field("completion_text", pa.string()),
    ]
)

SCHEMA_HASH = xxhash.xxh3_128_hexdigest(f"{SEGMENT_SCHEMA}\n{ARCHIVE_SCHEMA}".encode())
"""Identifies both schemas; text rather than Arrow's own bytes, which may differ between Arrow versions."""
