"""The plan: draws that the resume rolled back, handed out again before anything else.

Invariant: a draw is handed out whole or not at all, and leaves the plan only then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from arrowbank.errors import ReplayUnavailableError
from arrowbank.pipeline.protocols import PlannedDraw

__all__ = ["Plan"]

_WAY_OUT = 'restore with mode="requeue" to train on the planned groups in new batches'


class Plan:
    """The planned draws that were not handed out yet."""

    def __init__(self, draws: Iterable[PlannedDraw]) -> None:
        self._draws = deque(draws)

    def __bool__(self) -> bool:
        return bool(self._draws)

    def next_draw(self, num_groups: int) -> list[PlannedDraw]:
        """Return the next draw, the whole of a batch of ``num_groups``.

        Raises: ReplayUnavailableError when groups of it are lost; ValueError when its size is another.
        """
        draw = self._draws[0]
        _check_whole(draw)
        if len(draw.groups) != num_groups:
            raise ValueError(
                f"{_name(draw)} has {len(draw.groups)} groups, and the batch was to have {num_groups}: ask for "
                f"{len(draw.groups)}, or {_WAY_OUT}"
            )
        return [draw]

    def next_pieces(self, num_groups: int) -> list[PlannedDraw]:
        """Return the next draws that make up a batch of ``num_groups``: those of one iteration, in order.

        They are fewer groups where the plan ends: the kill came in the middle of that batch.

        Raises: as ``next_draw``.
        """
        first = self._draws[0]
        pieces: list[PlannedDraw] = []
        size = 0
        for draw in self._draws:
            if size >= num_groups or draw.iteration != first.iteration:
                break
            _check_whole(draw)
            pieces.append(draw)
            size += len(draw.groups)
        is_cut_short = size < num_groups and len(pieces) == len(self._draws) and not first.offset
        if size != num_groups and not is_cut_short:
            raise ValueError(
                f"the planned draws of iteration {first.iteration}, from draw {first.index} on, have "
                f"{' + '.join(str(len(draw.groups)) for draw in pieces)} groups, and the batch was to have "
                f"{num_groups}: ask for as many as they have, or {_WAY_OUT}"
            )
        if len({(draw.span, draw.offset) for draw in pieces}) > 1:
            raise ValueError(
                f"the planned draws of iteration {first.iteration} feed different numbers of optimizer steps: "
                f"{[draw.span for draw in pieces]}; {_WAY_OUT}"
            )
        return pieces

    def drop(self, draws: Iterable[PlannedDraw]) -> None:
        """Let go of the first draws: they are handed out."""
        for _ in draws:
            self._draws.popleft()


def _name(draw: PlannedDraw) -> str:
    return f"the planned draw {draw.index} of iteration {draw.iteration}"


def _check_whole(draw: PlannedDraw) -> None:
    if draw.lost:
        raise ReplayUnavailableError(
            f"{_name(draw)} cannot be replayed whole: {len(draw.lost)} of its {len(draw.groups) + len(draw.lost)} "
            f"groups are lost ({', '.join(draw.lost)}); {_WAY_OUT}"
        )
