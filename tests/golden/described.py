"""Groups, rows and reports as JSON that keeps every bit and every type, whatever holds them in some version."""

from __future__ import annotations

import struct
from dataclasses import asdict
from datetime import datetime
from typing import Any

import numpy as np

from arrowbank.restored import Restored
from arrowbank.types import RolloutGroup
from arrowbank.verification.report import VerifyReport

__all__ = ["describe", "describe_group", "describe_restored", "describe_verified"]


def describe(value: Any) -> Any:
    """Return a value as JSON: numbers of floating point by their bits, arrays by dtype, shape and bytes."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return "f64 " + struct.pack(">d", value).hex()
        case bytes():
            return "bytes " + value.hex()
        case datetime():
            return "time " + value.isoformat()
        case np.ndarray():
            data = np.ascontiguousarray(value).tobytes().hex()
            return f"{value.dtype.str} {value.dtype.name} {list(value.shape)} {data}"
        case dict():
            return {str(key): describe(item) for key, item in sorted(value.items())}
        case tuple() | list():
            return [describe(item) for item in value]
    raise TypeError(f"no description of {type(value).__name__}")


def describe_group(group: RolloutGroup) -> Any:
    """Return every field of a group and of its members, declared or extra."""
    members = []
    for rollout in group.rollouts:
        fields = {name: getattr(rollout, name) for name in type(rollout).model_fields}
        members.append({"type": type(rollout).__name__} | describe(fields | (rollout.__pydantic_extra__ or {})))
    own = {"uid": group.uid, "batch_id": group.batch_id, "index_in_batch": group.index_in_batch}
    return describe(own | (group.__pydantic_extra__ or {})) | {"rollouts": members}


def describe_restored(restored: Restored) -> Any:
    """Return what a restore gives back: draws in order, pending groups in order, and what it tells."""
    draws = [
        {
            "iteration": draw.iteration,
            "index": draw.index,
            "span": draw.span,
            "offset": draw.offset,
            "state": describe(draw.state),
            "lost": list(draw.lost),
            "groups": [describe_group(group) for group in draw.groups],
        }
        for draw in restored.draws
    ]
    report = restored.report
    pending = sorted(restored.pending.items(), key=str)
    return {
        "iteration": restored.iteration,
        "draws": draws,
        "pending": {str(env): [describe_group(group) for group in queue] for env, queue in pending},
        "source_indices": sorted(restored.source_indices),
        "torn": list(report.torn),
        "corrupt": list(report.corrupt),
        "lost_records": report.lost_records,
        "lost_groups": report.lost_groups,
        "quarantined": report.quarantined,
        "parent": report.parent,
        "recorded": report.recorded,
    }


def describe_verified(report: VerifyReport) -> Any:
    """Return what was found and where, not in which words: those may become better."""
    found = [[str(one.severity), one.path, one.offset, sorted(one.uids), one.iteration] for one in report.findings]
    return {"verdict": report.verdict, "findings": sorted(found, key=repr), "counts": asdict(report.counts)}
