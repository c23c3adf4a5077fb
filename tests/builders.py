"""Groups for tests, and a group's way through a sealed record and back."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow as pa

from arrowbank.codec import decode_group, encode_group
from arrowbank.durable import seal
from arrowbank.durable.message import MessageTemplate
from arrowbank.schema import SEGMENT_SCHEMA
from arrowbank.types import Rollout, RolloutGroup, TokenRollout, VersionSpan

TEMPLATE = MessageTemplate(SEGMENT_SCHEMA)
BINDING = b"bank/file/"


def token_rollout(seed: int = 0, tokens: int = 32, prompt: int = 8, **fields: Any) -> TokenRollout:
    """A single turn; logprobs of the sampled tokens only."""
    rng = np.random.default_rng(seed)
    return TokenRollout(
        trajectory=[rng.integers(0, 2**31 - 1, tokens, np.int32)],
        generation_mask=[np.arange(tokens) >= prompt],
        logprobs=[-rng.exponential(size=tokens - prompt).astype(np.float32)],
        **({"reward": float(seed), "env_id": "math", "problem_id": "p"} | fields),
    )


def token_group(seed: int = 0, members: int = 4, tokens: int = 32, **fields: Any) -> RolloutGroup:
    return RolloutGroup(rollouts=[token_rollout(seed * 100 + i, tokens, **fields) for i in range(members)])


def conversation(turns: int = 4, seed: int = 0, *, own_masks: bool = True, full: bool = False) -> TokenRollout:
    """Cumulative turns. own_masks: as Megatron makes them, each turn's mask marks that turn's sampled tokens only."""
    rng = np.random.default_rng(seed)
    sequence, mask = np.zeros(0, np.int32), np.zeros(0, np.bool_)
    trajectory, masks, logprobs = [], [], []
    for _ in range(turns):
        before, prompt, sampled = len(sequence), int(rng.integers(1, 6)), int(rng.integers(1, 9))
        sequence = np.concatenate([sequence, rng.integers(0, 99, prompt + sampled).astype(np.int32)])
        mask = np.concatenate([mask, np.zeros(prompt, np.bool_), np.ones(sampled, np.bool_)])
        own = mask.copy()
        own[:before] = False
        trajectory.append(sequence)
        masks.append(own if own_masks else mask)
        given = len(sequence) if full else int(masks[-1].sum())
        logprobs.append(-np.arange(given, dtype=np.float32) if not own_masks else -rng.random(given).astype(np.float32))
    return TokenRollout(trajectory=trajectory, generation_mask=masks, logprobs=logprobs, reward=[0.5] * turns)


def nan(payload: int) -> float:
    return float(struct.unpack("<d", struct.pack("<Q", 0x7FF8_0000_0000_0000 | payload))[0])


def groups() -> dict[str, RolloutGroup]:
    """One group for each kind of thing that must come back bit for bit, by name."""
    text = Rollout(trajectory=["question", "question answer"], prompt_length=[8], reward=1, env_id="chat")
    rewritten = conversation(3)
    rewritten.trajectory = [np.flip(rewritten.trajectory[0]), *rewritten.trajectory[1:]]
    short = conversation(3)
    short.logprobs = [*short.logprobs[:-1], short.logprobs[-1][:-1]] if short.logprobs else None
    odd = np.array([np.nan, -0.0, np.inf, -np.inf, 0.0], np.float32)
    odd.view(np.uint32)[0] |= 0x1234
    arrays = {
        "bfloat16": np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "big endian": np.arange(3, dtype=">i4"),
        "scalar": np.array(3.5),
        "empty": np.zeros((0, 4), np.uint8),
        "bool": np.array([True, False]),
        "minus ones": np.full(64, -1, np.int32),
    }
    everything = token_rollout(
        7,
        metrics={"a": nan(5), "b": -0.0, "c": 1e300},
        advantage_override=nan(9),
        finish_reasons=["stop", None],
        is_truncated=False,
        policy_versions=[VersionSpan(0, 0, 3), VersionSpan(0, 5, 4)],
        kv_versions=[],
        prompt_length=8,
        completion_ids=["c1"],
        generation_cap=2**40,
        started_at=datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC),
        failure_reason="none, “really”",
        rollout_status="graded",
        arrays=arrays,
        note={"nested": [1, 2.5, None, True, "ü"], "empty": {}},
    )
    members = {
        "plain": token_group().rollouts,
        "text": [text, text],
        "mixed": [text, token_rollout(env_id="chat"), conversation()],
        "no logprobs": [token_rollout(), TokenRollout(trajectory=[[1, 2]], generation_mask=[[0, 1]], reward=0.0)],
        "no mask": [TokenRollout(trajectory=[[1, 2]], logprobs=[[-1.0, -2.0]])],
        "placeholders": [TokenRollout(trajectory=[]), Rollout(trajectory=[]), token_rollout()],
        "empty lists": [TokenRollout(trajectory=[], generation_mask=[], logprobs=[], completion_ids=[])],
        "empty turn": [TokenRollout(trajectory=[[]], generation_mask=[[]], logprobs=[[]]), Rollout(trajectory=[""])],
        "no members": [],
        "megatron turns": [conversation(4), conversation(2, 1)],
        "cumulative turns": [conversation(4, own_masks=False)],
        "full-length logprobs": [conversation(3, full=True)],
        "rewritten context": [rewritten, Rollout(trajectory=["one", "two", "two three"])],
        "one logprob short": [short],
        "odd floats": [TokenRollout(trajectory=[[1] * 5], logprobs=[odd], reward=nan(77))],
        "odd reward lists": [
            TokenRollout(trajectory=[[1]], reward=[nan(3), -0.0]),
            Rollout(trajectory=["a"], reward=[]),
        ],
        "everything": [everything, token_rollout(8, reward=-0.0)],
    }
    made = {
        name: RolloutGroup(rollouts=list(rollouts), batch_id=3, index_in_batch=1) for name, rollouts in members.items()
    }
    made["group extras"] = RolloutGroup(rollouts=[token_rollout()], origin={"shard": 3})
    return made


def message_of(group: RolloutGroup, uid: str = "u", **given: Any) -> bytearray:
    """The sealed record of a group at offset 0."""
    fields = {"iteration": 5, "session": 2, "writer": "main", "completed_at_us": 1_000_000} | given
    encoded = encode_group(group, uid=uid, **fields)
    message = TEMPLATE.build(encoded.columns, encoded.head)
    seal.stamp(message, BINDING, sequence=0, offset=0)
    return message


def batch_of(message: bytearray) -> pa.RecordBatch:
    batch = pa.ipc.read_record_batch(pa.py_buffer(message), SEGMENT_SCHEMA)
    batch.validate(full=True)
    return batch


def round_trip(group: RolloutGroup) -> RolloutGroup:
    return group.model_copy(update={"rollouts": decode_group(batch_of(message_of(group)))})


def lean_table(made: Sequence[RolloutGroup]) -> pa.Table:
    return pa.Table.from_batches([batch_of(message_of(group, f"u{i}")) for i, group in enumerate(made)])
