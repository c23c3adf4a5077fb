"""Any group, as hypothesis draws it."""

from __future__ import annotations

import struct
from datetime import UTC
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from arrowbank.types import Rollout, RolloutGroup, TokenRollout, VersionSpan

__all__ = ["groups"]

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
whole = st.integers(-(2**63), 2**63 - 1)
doubles = (
    st.integers(0, 2**64 - 1).map(lambda bits: float(struct.unpack("<d", struct.pack("<Q", bits))[0])) | st.floats()
)
finite = st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | finite | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=5,
)
spans = st.lists(st.builds(VersionSpan, whole, whole, whole), max_size=3)
plain_arrays = npst.arrays(
    npst.boolean_dtypes() | npst.integer_dtypes() | npst.floating_dtypes() | npst.complex_number_dtypes()
    | npst.unicode_string_dtypes(max_len=3) | npst.byte_string_dtypes(max_len=3) | npst.datetime64_dtypes(),
    npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
)  # fmt: skip
common: dict[str, Any] = {
    "reward": st.none() | doubles | st.lists(doubles, max_size=3),
    "env_id": st.sampled_from([None, "", "maze"]),
    "problem_id": st.none() | words,
    "rollout_status": words,
    "failure_reason": st.none() | words,
    "prompt_length": st.none() | st.lists(st.integers(0, 2**63 - 1), max_size=3),
    "advantage_override": st.none() | doubles,
    "finish_reasons": st.none() | st.lists(st.none() | words, max_size=3),
    "is_truncated": st.none() | st.booleans(),
    "metrics": st.dictionaries(words, doubles, max_size=3),
    "policy_versions": st.none() | spans,
    "kv_versions": st.none() | spans,
    "arrays": st.dictionaries(words, plain_arrays, max_size=2),
    "started_at": st.none() | st.datetimes(timezones=st.just(UTC)),
}
extras = st.dictionaries(words.filter(lambda name: name.startswith("x")), json_values, max_size=2)


@st.composite
def rollouts(draw: Any) -> Rollout | TokenRollout:
    fields = draw(st.fixed_dictionaries({}, optional=common)) | draw(extras)
    if draw(st.booleans()):
        return Rollout(trajectory=draw(st.lists(words, max_size=3)), **fields)
    turns = draw(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=4), max_size=3))
    masks = draw(st.none() | st.just([[draw(st.booleans()) for _ in turn] for turn in turns]))
    counts = map(len, turns) if masks is None or draw(st.booleans()) else map(sum, masks)
    values = [np.array([draw(st.integers(0, 2**32 - 1)) for _ in range(n)], np.uint32).view(np.float32) for n in counts]
    return TokenRollout(
        trajectory=turns,
        generation_mask=masks,
        logprobs=draw(st.sampled_from([None, values])),
        completion_ids=draw(st.none() | st.lists(words, max_size=2)),
        generation_cap=draw(st.none() | whole),
        **fields,
    )


groups = st.builds(
    lambda members, extra, **order: RolloutGroup(rollouts=members, **order, **extra),
    st.lists(rollouts(), max_size=3), extras, batch_id=whole, index_in_batch=whole,
)  # fmt: skip
