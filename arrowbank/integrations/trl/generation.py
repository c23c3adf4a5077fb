"""A generation of TRL without torch, and where it belongs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arrowbank.types import RolloutGroup

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Place:
    """Where in a run a generation belongs."""

    start: int
    after: str | None

    def state(self) -> bytes:
        """The draw's state."""
        return json.dumps(asdict(self)).encode()


@dataclass
class Generation:
    """What TRL made of one batch of prompts, without torch."""

    outputs: dict[str, Any]
    """What it trains on, by TRL's names, in order: arrays, most of them (completions, …), and plain values."""
    dtypes: dict[str, str]
    """torch's name of each array's dtype, which NumPy may not have."""
    pad: int
    random_state: Arrays
    metrics: list[tuple[str, bool, list[float]]]
    """What was logged: name, whether that replaced what was there, values."""
    num_tokens: int
    """By which TRL's count of tokens rose."""


@dataclass(frozen=True)
class Scored:
    """What TRL does not hand on: the completions as they were sampled, and each function's rewards."""

    completions: list[list[int]]
    rewards: NDArray[np.float32]
    """Shapes: (completions, functions). NaN where a function had nothing to say."""
    names: list[str]
    weights: NDArray[np.float32]
    stops: frozenset[int]
    """Tokens that end a completion."""
    cap: int | None

    def totals(self) -> NDArray[np.float32]:
        """The weighted sums, as TRL makes them: NaN only where all functions are."""
        sums = np.nansum(self.rewards * self.weights, axis=1)
        return np.where(np.isnan(self.rewards).all(axis=1), np.nan, sums).astype(np.float32)


def extra_of(group: RolloutGroup) -> dict[str, Any]:
    """Return what a group says of its generation; nothing when it was banked by others."""
    found = getattr(group, "trl", None)
    return dict(found) if isinstance(found, dict) else {}


# -- torch


def to_numpy(outputs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return tensors as arrays of the same bits, and their dtypes; other values as they are."""
    import torch

    arrays: dict[str, Any] = {}
    dtypes = {}
    for name, value in outputs.items():
        arrays[name] = value
        if isinstance(value, torch.Tensor):
            tensor = value.detach().cpu().contiguous()
            dtypes[name] = str(value.dtype).removeprefix("torch.")
            try:
                arrays[name] = tensor.numpy()
            except TypeError:  # bfloat16 and narrower, which NumPy has not got
                arrays[name] = tensor.view({1: torch.uint8, 2: torch.int16}[tensor.element_size()]).numpy()
    return arrays, dtypes


def to_torch(generation: Generation, device: Any) -> dict[str, Any]:
    """Invert ``to_numpy``."""
    import torch

    outputs = dict(generation.outputs)
    for name, dtype in generation.dtypes.items():
        array = outputs[name]
        tensor = torch.from_numpy(np.array(array))
        kind = getattr(torch, dtype)
        outputs[name] = (tensor if tensor.dtype == kind else tensor.view(kind)).to(device)
    return outputs
