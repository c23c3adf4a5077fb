"""What a holder says before and after it is overtaken: it may still acknowledge what the new one was given back."""

from __future__ import annotations

import collections
from dataclasses import dataclass

from forked import Report
from kill_loop import Followed
from kill_model import DrawMade, Model

__all__ = ["Direct", "Known", "Old"]


@dataclass
class Known:
    """What the new holder was given back: only that may the old one still acknowledge."""

    serials: dict[str, int]
    draws: dict[int, DrawMade]
    evicted: dict[str, str]
    checkpoints: set[int]


class Old(Followed):
    """The old holder, as far as its report was read. After ``overtake`` nothing of it changes the model."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.known: Known | None = None
        self.stopped_itself = ""
        self.stopped_at = 0.0
        self.fenced = ""
        self.status: int | None = None
        self.said: collections.deque[str] = collections.deque(maxlen=40)
        self.late = 0
        """Right acknowledgements of calls that were on their way."""
        self.tried = 0
        self.wrong: list[str] = []
        self._called = Model()
        """Only what was called and not acknowledged before the takeover."""

    def overtake(self, known: Known, called: Model) -> None:
        self.known, self._called = known, called

    def take(self, line: str) -> None:
        kind, *words = line.split(" ")
        self.said.append(line[:60])
        match kind:
            case "S":
                self.stopped_itself = " ".join(words)
            case "X":
                self.status, self.gone = int(words[0]), True
            case "f":
                self.fenced = " ".join(words)
            case "n":
                self.tried += 1
            case "v":
                self.wrong.append(" ".join(words))
            case "z":
                pass
            case "!" if self.known is not None:
                self.wrong.append("failed: " + " ".join(words).encode().decode("unicode_escape"))
            case _ if self.known is None or kind in ("B", ">", "<", "F"):
                super().take(line)
            case _:
                self._take_late(kind, words, self.known)

    def _take_late(self, kind: str, words: list[str], known: Known) -> None:
        """Take in what was said after the takeover; calls that begin now can only fail."""
        right: bool | None = None
        match kind:
            case "A":
                right = known.serials.get(words[0]) == int(words[1])
                if right and words[0] not in self.model.serials:  # of a split that is not handed out, or evicted
                    self.model.take(kind, words)
            case "D" | "E" | "C":
                self._called.take(kind, words)
            case "d":
                draw, self._called.maybe_draw = self._called.maybe_draw, None
                right = draw is not None and known.draws.get(draw.iteration) == draw
            case "e":
                right = self._called.maybe_evicted.items() <= known.evicted.items()
            case "c":
                right = self._called.maybe_checkpoint in known.checkpoints
            case "r":  # of a restore that was on its way
                right = not self.fenced
            case _:
                pass
        if right is False:
            self.wrong.append(f"acknowledged after the takeover: {kind} {' '.join(words)[:200]}")
        self.late += bool(right)


class Direct(Report):
    """The report of a holder in this process."""

    def __init__(self, followed: Followed) -> None:
        self.followed = followed

    def say(self, *words: object) -> None:
        self.followed.take(" ".join(map(str, words)))
