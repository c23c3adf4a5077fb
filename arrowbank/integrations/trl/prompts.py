"""Which prompts a generation is of."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import xxhash

from arrowbank.errors import ReplayUnavailableError
from arrowbank.integrations.trl.generation import Place, extra_of
from arrowbank.types import RolloutGroup


class EpochSampler:
    """TRL's order of prompts, the same in a resumed run.

    TRL's sampler shuffles anew each time it is iterated, from a generator that no checkpoint holds: a run resumed in
    its third epoch would see the prompts of the first again.
    """

    def __init__(self, make: Callable[[], Any], epoch: Callable[[], int]) -> None:
        self._make, self._epoch = make, epoch

    def __iter__(self) -> Iterator[int]:
        sampler = self._make()
        for _ in range(self._epoch()):
            next(iter(sampler), None)  # shuffles as a whole epoch does
        yield from sampler

    def __len__(self) -> int:
        return len(self._make())


def fingerprint(example: Mapping[str, Any]) -> str | None:
    """Return what tells one prompt from another; None for one with images, of which that would cost too much."""
    try:
        return xxhash.xxh3_64_hexdigest(json.dumps(example.get("prompt"), sort_keys=True).encode())
    except (TypeError, ValueError):
        return None


def check_prompts(groups: Iterable[RolloutGroup], inputs: Sequence[Mapping[str, Any]], place: Place) -> None:
    """Raise ReplayUnavailableError when a banked generation is not of the prompts that the run is at."""
    found = [(len(group), extra_of(group).get("prompt")) for group in groups]
    expected = [fingerprint(example) for example in inputs]
    at = 0
    for size, prompt in found:
        if any(other != prompt for other in expected[at : at + size]):
            break
        at += size
    if at != len(expected) or at != sum(size for size, _ in found):
        raise ReplayUnavailableError(
            f"the generation of micro-batch {place.start} is of other prompts than the run is at: the data set, its "
            "order (seed, shuffle_dataset) or the batch size have changed, or this is the bank of another run"
        )
