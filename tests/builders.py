"""Small groups of every kind, and a trip through a sealed record, for all tests.

Every builder takes a seed: the same arguments make an equal group. ``EVERY`` names a builder for each kind that a
bank must keep; ``build(name)`` makes one. ``round_trip`` encodes a group as ``append`` does, seals it, checks the seal
as a reader does, parses and validates the record with pyarrow, and decodes it lazily.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow as pa

from arrowbank import codec
from arrowbank.durable import seal
from arrowbank.durable.message import MessageTemplate, read_head
from arrowbank.schema import SEGMENT_SCHEMA
from arrowbank.types import Rollout, RolloutGroup, TokenRollout, VersionSpan

__all__ = [
    "COMPLETED_AT_US", "EVERY", "NAN_32", "NAN_64", "build", "chain_rollout", "empty_group", "lean_table", "parse",
    "round_trip", "sealed", "stored", "stream", "text_group", "text_rollout", "token_group", "token_rollout",
]  # fmt: skip

COMPLETED_AT_US = 1_800_000_000_000_000
NAN_64: float = struct.unpack("<d", struct.pack("<Q", 0xFFF8_0000_DEAD_BEEF))[0]
"""A NaN with a sign and a payload."""
NAN_32 = np.array([0x7FC0_1234, 0xFFC0_ABCD, 0x7F80_0001], np.uint32).view(np.float32)
"""Quiet NaNs with payloads, and a signalling one."""

_BINDING = b"bank/segment/"
_TEMPLATE = MessageTemplate(SEGMENT_SCHEMA)


# -- rollouts


def token_rollout(seed: int = 0, *, prompt: int = 6, generated: int = 5, **fields: Any) -> TokenRollout:
    """One turn, as TRL and verl make it: mask and logprobs for every token. Equal seed // 1000: the same prompt."""
    rng = np.random.default_rng(seed)
    question = np.random.default_rng(seed // 1000).integers(0, 50_000, prompt)
    size = prompt + generated
    given: dict[str, Any] = {
        "trajectory": [np.concatenate([question, rng.integers(0, 50_000, generated)])],
        "generation_mask": [np.arange(size) >= prompt],
        "logprobs": [-rng.random(size, np.float32)],
        "reward": float(rng.random()),
    }
    return TokenRollout(**given | fields)


def chain_rollout(
    seed: int = 0, *, turns: int = 4, step: int = 3, logprobs: str = "sampled", masks: str = "turn", **fields: Any
) -> TokenRollout:
    """Turns that each repeat the conversation before them.

    masks: "turn" (a turn's own tokens, as Megatron makes them), "all" (those of earlier turns too) or "none".
    logprobs: "sampled" (a turn's own), "short" (without the end token's), "full", "cumulative" or "none".
    """
    rng = np.random.default_rng(seed)
    conversation = rng.integers(0, 50_000, 2 * step * turns)
    values = -rng.random(len(conversation), np.float32)
    sampled = np.arange(len(conversation)) // step % 2 == 1
    ends = [2 * step * (turn + 1) for turn in range(turns)]
    own = [sampled[:end] & (np.arange(end) >= end - step) for end in ends]
    given = {
        "sampled": [values[:end][mask] for end, mask in zip(ends, own, strict=True)],
        "short": [values[:end][mask][:-1] for end, mask in zip(ends, own, strict=True)],
        "full": [values[:end] for end in ends],
        "cumulative": [values[:end][sampled[:end]] for end in ends],
        "none": None,
    }
    return TokenRollout(
        trajectory=[conversation[:end] for end in ends],
        generation_mask={"turn": own, "all": [sampled[:end] for end in ends], "none": None}[masks],
        logprobs=given[logprobs],
        **{"reward": float(rng.random())} | fields,
    )


def text_rollout(seed: int = 0, *, turns: int = 2, **fields: Any) -> Rollout:
    """Text turns, each the whole conversation up to it."""
    rng = np.random.default_rng(seed)
    words = [f"Frage {seed // 1000}: π ≈ ?"] + [f" → {number}\n" for number in rng.integers(0, 1000, turns)]
    trajectory = ["".join(words[: turn + 2]) for turn in range(turns)]
    given: dict[str, Any] = {"reward": float(rng.random()), "prompt_length": [len(words[0])] * turns}
    return Rollout(trajectory=trajectory, **given | fields)


# -- groups


def token_group(
    seed: int = 0, *, members: int = 4, prompt: int = 6, generated: int = 5, env_id: str | None = "math", **fields: Any
) -> RolloutGroup:
    """Members of different lengths with the same prompt."""
    rollouts = [
        token_rollout(1000 * seed + member, prompt=prompt, generated=generated + member % 3, env_id=env_id, **fields)
        for member in range(members)
    ]
    return RolloutGroup(rollouts=rollouts)


def text_group(seed: int = 0, *, members: int = 3, turns: int = 2, env_id: str | None = "math") -> RolloutGroup:
    rollouts = [text_rollout(1000 * seed + member, turns=turns, env_id=env_id) for member in range(members)]
    return RolloutGroup(rollouts=rollouts)


def empty_group(seed: int = 0) -> RolloutGroup:
    """A group without rollouts."""
    return RolloutGroup(rollouts=[], batch_id=seed, note="nothing came back")


def _chains(seed: int, **forms: str) -> RolloutGroup:
    return RolloutGroup(
        rollouts=[chain_rollout(seed + turns, turns=turns, env_id="maze", **forms) for turns in (1, 2, 5)]
    )


def _mixed(seed: int) -> RolloutGroup:
    """Text beside tokens, with and without masks and logprobs, and failed members."""
    bare = [[seed, 1, 2, 2**31 - 1], [seed, 1]]
    rollouts = [
        token_rollout(seed, env_id="math"),
        text_rollout(seed, env_id="math"),
        TokenRollout(trajectory=bare),
        TokenRollout(trajectory=bare, logprobs=[[-0.5] * 4, [-0.25, 0.0]]),
        TokenRollout(trajectory=bare, generation_mask=[[0, 0, 1, 1], [False, True]]),
        TokenRollout(trajectory=[[]], generation_mask=[[]], logprobs=[[]]),
        TokenRollout(trajectory=[[5]], generation_mask=[[False]], logprobs=[[]]),
        Rollout(trajectory=[""], env_id="", problem_id=""),
        *_placeholders(seed),
    ]
    return RolloutGroup(rollouts=rollouts)


def _placeholders(seed: int) -> list[TokenRollout | Rollout]:
    failed: dict[str, Any] = {"rollout_status": "placeholder", "failure_reason": f"timeout {seed}"}
    return [
        TokenRollout(trajectory=[], **failed),
        TokenRollout(trajectory=[], generation_mask=[], logprobs=None, reward=0.0, **failed),
        TokenRollout(trajectory=[], generation_mask=None, logprobs=[], completion_ids=[], **failed),
        Rollout(trajectory=[], reward=-0.0, **failed),
    ]


def _rewritten(seed: int) -> RolloutGroup:
    """Contexts that were shortened, branched, sampled again, or are at odds with later turns."""
    one = chain_rollout(seed, turns=3)
    two = chain_rollout(seed + 1, turns=2)
    assert one.generation_mask and two.generation_mask and one.logprobs and two.logprobs
    shortened = TokenRollout(
        trajectory=[*one.trajectory, *two.trajectory],
        generation_mask=[*one.generation_mask, *two.generation_mask],
        logprobs=[*one.logprobs, *two.logprobs],
    )
    order = (0, 3, 1, 4, 2)
    branched = TokenRollout(
        trajectory=[shortened.trajectory[turn] for turn in order],
        generation_mask=[(shortened.generation_mask or [])[turn] for turn in order],
        logprobs=[(shortened.logprobs or [])[turn] for turn in order],
    )
    again = chain_rollout(seed, turns=3)
    again.logprobs = [values - np.float32(turn) for turn, values in enumerate(chain_rollout(seed, logprobs="full",
                      turns=3).logprobs or ())]  # fmt: skip
    at_odds = TokenRollout(
        trajectory=[[1, 2, 3], [1, 2, 3, 4], [1, 2, 3]],
        generation_mask=[[0, 1, 1], [0, 1, 0, 1], [0, 0, 0]],
        logprobs=[[-1, -2], [-3, -4], []],
    )
    texts = Rollout(trajectory=["a", "ab", "x", "abc", "xy", "ac"], reward=1.0)
    return RolloutGroup(rollouts=[shortened, branched, again, at_odds, texts])


def _arrays(seed: int) -> RolloutGroup:
    """Arrays of every plain dtype, order and shape that a trainer may keep."""
    rng = np.random.default_rng(seed)
    wide = rng.random((3, 4))
    found: dict[str, Any] = {
        "float64": wide,
        "fortran": np.asfortranarray(wide),
        "strided": wide[::-2, 1::2],
        "big_endian": wide.astype(">f8"),
        "big_endian_int": np.arange(5, dtype=">i2"),
        "scalar": np.array(NAN_64),
        "empty": np.zeros((0, 7), np.float32),
        "bool": wide > 0.5,
        "experts": rng.integers(0, 255, (2, 3, 2), np.uint8),
        "uint64": np.array([2**64 - 1], np.uint64),
        "float16": wide.astype(np.float16),
        "nan": NAN_32,
        "complex64": (wide + 1j).astype(np.complex64),
        "bfloat16": wide.astype(ml_dtypes.bfloat16),
        "float8_e4m3fn": wide.astype(ml_dtypes.float8_e4m3fn),
        "time": np.array(["2026-01-01T00:00:00.000000001", "NaT"], "datetime64[ns]"),
        "words": np.array(["ä", "\ud800x", ""]),
        "bytes": np.array([b"a", b"bc\xff"]),
        "": np.arange(3),
    }
    rewritten = _rewritten(seed)[0]
    rewritten.arrays = {"teacher": rng.random(5, np.float32)}
    text = text_rollout(seed, arrays={"pixels": rng.integers(0, 255, (2, 2, 3), np.uint8)})
    return RolloutGroup(rollouts=[token_rollout(seed, arrays=found), text, rewritten])


def _extras(seed: int) -> RolloutGroup:
    """Extra fields of every type that JSON keeps, on rollouts and on the group."""
    nested = {"a": [1, 1.0, True, None, "ü\0\u2028"], "b": {"": -0.0, "c": []}, "big": 2**80, "tiny": 5e-324}
    rollouts = [
        token_rollout(seed, note="n", nested=nested, flag=False, nothing=None, model_dump=1),
        text_rollout(seed, completion_ids=[1, 2], generation_cap="none of ours", kind="x"),
    ]
    return RolloutGroup(rollouts=rollouts, batch_id=2**63 - 1, index_in_batch=-(2**63), wave=[seed], kept={"k": 1.5})


def _floats(seed: int) -> RolloutGroup:
    """NaNs with payloads, infinities and negative zeros, wherever a float can be."""
    odd = np.concatenate([NAN_32, np.array([-0.0, 0.0, np.inf, -np.inf, 1e-45, -1.5], np.float32)])
    odds = [NAN_64, -0.0, 0.0, float("inf"), float("-inf"), 5e-324, -1.5]
    rollouts: list[Any] = [
        TokenRollout(trajectory=[range(9)], logprobs=[odd], reward=NAN_64, advantage_override=NAN_64),
        TokenRollout(
            trajectory=[range(9), range(11)],
            generation_mask=[[True] * 9, [False] * 9 + [True] * 2],
            logprobs=[odd, [float("nan"), -0.0]],
            reward=odds,
        ),
        text_rollout(
            seed, reward=-0.0, advantage_override=-0.0, metrics={str(index): x for index, x in enumerate(odds)}
        ),
    ]
    rollouts += [text_rollout(seed, reward=odd_reward) for odd_reward in odds]
    return RolloutGroup(rollouts=rollouts)


def _fields(seed: int) -> RolloutGroup:
    """Every declared field set, and those with lists once more with empty ones."""
    common: dict[str, Any] = {
        "reward": [0.25, -0.5],
        "env_id": "maze",
        "problem_id": f"p{seed}",
        "rollout_status": "graded",
        "failure_reason": "",
        "prompt_length": [3, 9],
        "advantage_override": -1.25,
        "finish_reasons": ["stop", None],
        "is_truncated": False,
        "metrics": {"format": 1.0, "": 0.5},
        "policy_versions": [VersionSpan(0, 0, seed), VersionSpan(1, 4, seed + 1)],
        "kv_versions": [VersionSpan(0, 0, 2**63 - 1)],
        "started_at": datetime(2026, 8, 1, 12, 0, 0, 123456, tzinfo=UTC),
    }
    empty: dict[str, Any] = {"reward": [], "prompt_length": [], "finish_reasons": [], "metrics": {}}
    empty |= {"policy_versions": [], "kv_versions": [], "is_truncated": True, "problem_id": ""}
    rollouts = [
        chain_rollout(seed, turns=2, completion_ids=["a", "b"], generation_cap=2**63 - 1, **common),
        text_rollout(seed, **common),
        chain_rollout(seed, turns=2, completion_ids=[], generation_cap=0, **empty),
        text_rollout(seed, started_at=datetime(1, 1, 1, tzinfo=UTC), **empty),
        text_rollout(seed, started_at=datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC)),
    ]
    return RolloutGroup(rollouts=rollouts, batch_id=7, index_in_batch=3)


EVERY: dict[str, Callable[[int], RolloutGroup]] = {
    "tokens": token_group,
    "texts": text_group,
    "megatron": partial(_chains, logprobs="sampled"),
    "megatron-cumulative": partial(_chains, logprobs="cumulative", masks="all"),
    "cumulative-logprobs-of-turn-masks": partial(_chains, logprobs="cumulative"),
    "one-logprob-short": partial(_chains, logprobs="short"),
    "full-logprobs": partial(_chains, logprobs="full"),
    "no-logprobs": partial(_chains, logprobs="none"),
    "no-masks": partial(_chains, logprobs="full", masks="none"),
    "tokens-only": partial(_chains, logprobs="none", masks="none"),
    "mixed": _mixed,
    "placeholders": lambda seed: RolloutGroup(rollouts=_placeholders(seed)),
    "empty": empty_group,
    "rewritten": _rewritten,
    "arrays": _arrays,
    "extras": _extras,
    "floats": _floats,
    "fields": _fields,
    "many": partial(token_group, members=70, generated=1),
}
"""A builder, taking a seed, for each kind of group that comes back bit for bit."""


def build(name: str, seed: int = 1) -> RolloutGroup:
    return EVERY[name](seed)


# -- through a record


def sealed(group: RolloutGroup, *, uid: str = "u", sequence: int = 0, offset: int = 0, **options: Any) -> bytearray:
    """Encode and seal a group as ``append`` does. Options: those of ``encode_group``."""
    given: dict[str, Any] = {"iteration": 3, "session": 1, "writer": "main", "completed_at_us": COMPLETED_AT_US}
    encoded = codec.encode_group(group, uid=uid, **given | options)
    message = _TEMPLATE.build(encoded.columns, encoded.head)
    seal.stamp(message, _BINDING, sequence=sequence, offset=offset)
    return message


def parse(message: bytearray) -> pa.RecordBatch:
    """Check the seal as a reader does, then parse and validate."""
    view = memoryview(message)
    found = seal.find(view, 0, len(view))
    assert found is not None and found.length == len(view)
    assert seal.verify(view, found, _BINDING, found.place)
    batch = pa.ipc.read_record_batch(pa.py_buffer(view), SEGMENT_SCHEMA)
    batch.validate(full=True)
    return batch


def stored(group: RolloutGroup, **options: Any) -> codec.StoredGroup:
    """Return the group as a bank hands it back: not decoded yet."""
    message = sealed(group, **options)
    return codec.StoredGroup.of(read_head(memoryview(message)), partial(codec.decode_group, parse(message)))


def round_trip(group: RolloutGroup, **options: Any) -> codec.StoredGroup:
    """As ``stored``, with the uid that the group had, so that it may be compared with it."""
    restored = stored(group, **options)
    restored.uid = group.uid
    return restored


def lean_table(groups: Iterable[RolloutGroup], **options: Any) -> pa.Table:
    """The rows of groups as they stand in a segment; uids are "u0", "u1", …"""
    batches = [parse(sealed(group, uid=f"u{index}", **options)) for index, group in enumerate(groups)]
    return pa.Table.from_batches(batches, SEGMENT_SCHEMA)


def stream(groups: Iterable[RolloutGroup], **options: Any) -> bytes:
    """A segment's bytes: schema, records, eight zeros."""
    data = SEGMENT_SCHEMA.serialize().to_pybytes()
    for index, group in enumerate(groups):
        data += sealed(group, uid=f"u{index}", sequence=index, offset=len(data), **options)
    return data + bytes(8)
