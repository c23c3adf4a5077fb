"""When the trainer is killed: seeded moments, spread over the run, each kind of moment in turn.

A rollback is one more stop, in the middle of a batch, and one of the kills is moved into the replay that it causes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from arrowbank.demo import progress
from arrowbank.demo.checkpoints import KEPT
from arrowbank.demo.progress import Progress

__all__ = ["ANYTIME", "FEWEST_CHECKPOINTS", "Kill", "KillSchedule", "plan_kills", "with_rollback"]

ANYTIME = "anytime"
LONGEST_DELAY_S = 0.1
"""Of a kill at any time: a part of one iteration."""
FEWEST_CHECKPOINTS = KEPT - 1
"""Before a rollback. By default a bank archives what the second newest holds, so the oldest one is below that."""


@dataclass(frozen=True)
class Kill:
    """One SIGKILL to come."""

    moment: str
    """``GENERATING``, ``APPENDING``, ``CHECKPOINTED`` or ``ANYTIME``."""
    iteration: int
    """Not before this one."""
    skip: int
    """How many such moments of the iteration to let pass."""
    delay_s: float
    """0 kills within the moment."""
    is_rollback: bool = False
    """Whether the start after it goes back to an older model checkpoint."""


def plan_kills(
    kills: int, *, iterations: int, checkpoint_every: int, groups: int, seed: int, has_bank: bool
) -> list[Kill]:
    """Divide the run into equal parts with one kill each; the first three kinds of moment come at least once.

    Without a bank there are no appends: those kills come while generating.
    """
    rng = np.random.Generator(np.random.PCG64([seed, 0x4B111]))
    kinds = [progress.GENERATING, progress.APPENDING, progress.CHECKPOINTED][:kills]
    kinds += [ANYTIME] * (kills - len(kinds))
    bounds = np.linspace(1, iterations - checkpoint_every, kills + 1).astype(int).tolist()
    planned = []
    for part, kind in enumerate(rng.permutation(kinds).tolist()):
        iteration = int(rng.integers(bounds[part], max(bounds[part + 1], bounds[part] + 1)))
        if kind != progress.CHECKPOINTED and iteration % checkpoint_every == 0:
            iteration += 1  # right after a checkpoint there is nothing to replay
        skip = int(rng.integers(groups // 3, 2 * groups // 3)) if kind in _MANY_AN_ITERATION else 0
        delay_s = float(rng.uniform(0, LONGEST_DELAY_S)) if kind == ANYTIME else 0.0
        if kind == progress.APPENDING and not has_bank:
            kind = progress.GENERATING
        planned.append(Kill(kind, iteration, skip, delay_s))
    return planned


_MANY_AN_ITERATION = {progress.GENERATING, progress.APPENDING}


def with_rollback(kills: list[Kill], *, iterations: int, checkpoint_every: int, groups: int) -> list[Kill]:
    """Add the stop of a rollback, and move one kill into the replay after it.

    That is the last one whose moment comes in a replay too, where nothing is generated. The others stay where they are.
    Raises ValueError when the run is too short for a rollback below what the bank has archived.
    """
    earliest = FEWEST_CHECKPOINTS * checkpoint_every + 1  # one later: by then the last of them is archived, too
    if earliest >= iterations:
        raise ValueError(f"a rollback needs {earliest + 1} iterations with {checkpoint_every} to a checkpoint")
    moved = [kill for kill in kills if kill.moment not in _MANY_AN_ITERATION][-1:]
    iteration = max([earliest, *(min(kill.iteration, iterations - 1) for kill in moved)])
    stop = Kill(progress.GENERATING, iteration, skip=groups // 2, delay_s=0.0, is_rollback=True)
    back = max(checkpoint_every, (iteration // checkpoint_every - FEWEST_CHECKPOINTS) * checkpoint_every)
    in_replay = [replace(kill, iteration=back + 1, delay_s=0.0) for kill in moved]
    others = [kill for kill in kills if kill not in moved]
    before, after = ([kill for kill in others if (kill.iteration < iteration) is early] for early in (True, False))
    return [*before, stop, *in_replay, *after]


class KillSchedule:
    """Watches the progress of a run and says when it is time."""

    def __init__(self, kills: list[Kill]) -> None:
        self._coming = list(kills)
        self.landed: list[str] = []
        """The moment in which each kill so far was seen to land."""
        self.begin_attempt()

    @property
    def is_due(self) -> bool:
        """Whether the next kill's moment has come in this attempt."""
        return bool(self._coming) and self._passed > self._coming[0].skip

    @property
    def is_rollback_due(self) -> bool:
        """Whether that next kill is the stop of a rollback."""
        return self.is_due and self._coming[0].is_rollback

    def begin_attempt(self) -> None:
        """Forget what the trainer that is gone was doing."""
        self._passed = 0
        self._in_flight = 0
        self._last = ""

    def is_time(self, line: Progress) -> float | None:
        """Take note of a line. Return the seconds to wait before the kill, None when none is due."""
        self._last = line.moment
        self._in_flight += {progress.APPENDING: 1, progress.ACKNOWLEDGED: -1}.get(line.moment, 0)
        if not self._coming or not self._matches(line, self._coming[0]):
            return None
        self._passed += 1
        return self._coming[0].delay_s if self._passed == self._coming[0].skip + 1 else None

    def rolled_back(self) -> None:
        """Take note of the stop before a rollback, which is not counted among the kills."""
        self._coming.pop(0)

    def killed(self) -> str:
        """Take note of a kill, and return the moment in which it landed, as far as the lines tell.

        A kill that came too late for the append it was meant for is tried again in place of one at any time.
        """
        due = self._coming.pop(0)
        moment = due.moment
        if due.moment == progress.APPENDING and not self._in_flight:
            moment = progress.GENERATING
            self._retry(due)
        elif due.moment == ANYTIME:
            moment = progress.APPENDING if self._in_flight else self._last
        self.landed.append(moment)
        return moment

    def _matches(self, line: Progress, kill: Kill) -> bool:
        moment = progress.TRAINED if kill.moment == ANYTIME else kill.moment
        return line.moment == moment and line.iteration >= kill.iteration

    def _retry(self, missed: Kill) -> None:
        for place, kill in enumerate(self._coming):
            if kill.moment == ANYTIME:
                self._coming[place] = replace(missed, iteration=kill.iteration)
                return
