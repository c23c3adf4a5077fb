"""The trainer's model checkpoints: one ``.npz`` an iteration, complete or not there at all.

Durability: when ``save`` returns, the checkpoint survives SIGKILL and power loss. A kill in the middle leaves a
``.part`` file that nothing reads. So does ``roll_back``; one that is cut short has removed some of the newer ones.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arrowbank.demo.policy import Adam, Policy

__all__ = ["NO_SESSION", "ModelState", "load_newest", "roll_back", "same_bits", "save"]

KEPT = 4
"""More than a bank keeps replayable at once, so that the oldest one lies below its archive's horizon."""
NO_SESSION = 0
"""Of a state that no bank has a part in; a bank counts its sessions from 1."""


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
    session: int = NO_SESSION
    """The bank's session that trained up to here: it names the line that a resume must go on with."""

    @classmethod
    def initial(cls, seed: int) -> ModelState:
        """Return the state before the first iteration."""
        policy = Policy.initial(seed)
        return cls(policy, Adam.initial(policy.parameters))

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the state as named arrays."""
        counts = [self.iteration, self.num_groups, self.num_rollouts, self.adam.steps, self.session]
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

        iteration, num_groups, num_rollouts, steps, session = arrays["counts"].tolist()
        return cls(
            Policy(part("policy/")),
            Adam(part("mean/"), part("square/"), steps),
            iteration,
            {env_id: int(cursor) for env_id, cursor in part("cursor/").items()},
            arrays["rewards"].tolist(),
            num_groups,
            num_rollouts,
            session,
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
    for old in _saved(directory)[:-KEPT]:
        old.unlink()


def load_newest(directory: Path) -> ModelState | None:
    """Return the newest checkpoint, None when there is none yet."""
    paths = _saved(directory)
    return _load(paths[-1]) if paths else None


def roll_back(directory: Path) -> ModelState | None:
    """Remove all checkpoints but the oldest, which is the newest from then on; return it, None when there is none.

    The newer ones must go: a resume that met one of them later would take it for this run's own.
    """
    paths = _saved(directory)
    if not paths:
        return None
    for path in reversed(paths[1:]):
        path.unlink()
    _sync_directory(directory)
    return _load(paths[0])


def same_bits(one: ModelState, other: ModelState) -> bool:
    """Whether weights, optimizer, cursors and the history of rewards are identical bit for bit.

    The session is none of these: it counts the starts of a run.
    """
    ours, theirs = (replace(state, session=NO_SESSION).arrays() for state in (one, other))
    return ours.keys() == theirs.keys() and all(
        value.dtype == theirs[name].dtype
        and value.shape == theirs[name].shape
        and value.tobytes() == theirs[name].tobytes()
        for name, value in ours.items()
    )


def _saved(directory: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first."""
    return sorted(directory.glob("iteration-*.npz"))


def _load(path: Path) -> ModelState:
    with np.load(path, allow_pickle=False) as file:
        return ModelState.from_arrays(dict(file))


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
