"""The trainer's model checkpoints: one ``.npz`` an iteration, complete or not there at all.

Durability: when ``save`` returns, the checkpoint survives SIGKILL and power loss. A kill in the middle leaves a
``.part`` file that nothing reads.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arrowbank.demo.policy import Adam, Policy

__all__ = ["ModelState", "load_newest", "same_bits", "save"]

KEPT = 2


@dataclass
class ModelState:
    """Everything a resumed trainer needs besides its rollouts."""

    policy: Policy
    adam: Adam
    iteration: int = 0
    """How many iterations are complete."""
    cursors: dict[str, int] = field(default_factory=dict)
    """For each environment the source index after the last one trained on."""
    rewards: list[float] = field(default_factory=list)
    """Mean reward of each iteration."""
    num_groups: int = 0
    """Groups trained on so far, and below their rollouts."""
    num_rollouts: int = 0

    @classmethod
    def initial(cls, seed: int) -> ModelState:
        """Return the state before the first iteration."""
        policy = Policy.initial(seed)
        return cls(policy, Adam.initial(policy.parameters))

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the state as named arrays."""
        counts = [self.iteration, self.num_groups, self.num_rollouts, self.adam.steps]
        return {
            **{f"policy/{name}": value for name, value in self.policy.parameters.items()},
            **{f"mean/{name}": value for name, value in self.adam.mean.items()},
            **{f"square/{name}": value for name, value in self.adam.square.items()},
            **{f"cursor/{env_id}": np.array(cursor, np.int64) for env_id, cursor in self.cursors.items()},
            "rewards": np.array(self.rewards, np.float64),
            "counts": np.array(counts, np.int64),
        }

    @classmethod
    def from_arrays(cls, arrays: dict[str, NDArray[Any]]) -> ModelState:
        """Invert ``arrays``."""

        def part(prefix: str) -> dict[str, NDArray[Any]]:
            return {name.partition("/")[2]: value for name, value in arrays.items() if name.startswith(prefix)}

        iteration, num_groups, num_rollouts, steps = arrays["counts"].tolist()
        return cls(
            Policy(part("policy/")),
            Adam(part("mean/"), part("square/"), steps),
            iteration,
            {env_id: int(cursor) for env_id, cursor in part("cursor/").items()},
            arrays["rewards"].tolist(),
            num_groups,
            num_rollouts,
        )


def save(directory: Path, state: ModelState) -> None:
    """Make the state durable, then remove all but the newest checkpoints."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"iteration-{state.iteration:06d}.npz"
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        arrays: dict[str, Any] = {**state.arrays()}
        np.savez(file, **arrays)
        file.flush()
        os.fsync(file.fileno())
    part.rename(path)
    _sync_directory(directory)
    for old in sorted(directory.glob("iteration-*.npz"))[:-KEPT]:
        old.unlink()


def load_newest(directory: Path) -> ModelState | None:
    """Return the newest checkpoint, None when there is none yet."""
    paths = sorted(directory.glob("iteration-*.npz"))
    if not paths:
        return None
    with np.load(paths[-1], allow_pickle=False) as file:
        return ModelState.from_arrays(dict(file))


def same_bits(one: ModelState, other: ModelState) -> bool:
    """Whether weights, optimizer, cursors and the history of rewards are identical bit for bit."""
    ours, theirs = one.arrays(), other.arrays()
    return ours.keys() == theirs.keys() and all(
        value.dtype == theirs[name].dtype
        and value.shape == theirs[name].shape
        and value.tobytes() == theirs[name].tobytes()
        for name, value in ours.items()
    )


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
