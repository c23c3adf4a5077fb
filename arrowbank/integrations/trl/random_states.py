"""The random states that a training run draws from."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arrowbank.integrations.trl.generation import Arrays


def random_state() -> Arrays:
    """Return the states that a training run draws from: Python's, NumPy's, torch's where torch is in use."""
    _, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    found: Arrays = {
        "python": np.array(words, np.uint32),
        "python-gauss": np.array([] if gauss is None else [gauss], np.float64),
        "numpy": np.array(keys, np.uint32),
        "numpy-rest": np.array([position, has_gauss, cached], np.float64),
    }
    if torch := sys.modules.get("torch"):
        found["torch"] = torch.get_rng_state().numpy()
        if torch.cuda.is_available():
            for device, state in enumerate(torch.cuda.get_rng_state_all()):
                found[f"cuda-{device}"] = state.numpy()
    return found


def set_random_state(state: Mapping[str, NDArray[Any]]) -> None:
    """Set what ``random_state`` returned. States of devices that are not there are left out."""
    gauss = state["python-gauss"].tolist()
    random.setstate((3, tuple(state["python"].tolist()), gauss[0] if gauss else None))
    position, has_gauss, cached = state["numpy-rest"].tolist()
    np.random.set_state(("MT19937", state["numpy"], int(position), int(has_gauss), cached))
    if (torch := sys.modules.get("torch")) and "torch" in state:
        torch.set_rng_state(torch.from_numpy(np.array(state["torch"])))
        for device in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            if f"cuda-{device}" in state:
                torch.cuda.set_rng_state(torch.from_numpy(np.array(state[f"cuda-{device}"])), device)


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Put the states back at the end."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)
