"""Crash states: what a power cut may leave of traced runs of a real bank, each opened and held against a plain model.

Proves, of the scenarios in ``scenarios`` and of what follows a crash of theirs: in no state that a disk may be
left in which keeps what fsync promised, and nothing beyond, is anything lost that was acknowledged, or there twice, or
told as damage; and each such bank opens and works on. States of depth 2 are left by a crash while a state is opened,
restored (in one mode or another) and worked on.

Cannot prove anything of other runs, of disks that break fsync's promise, of rot, or of two processes at once; nor that
a real file system has no states beyond these (see the instrument that cuts the power of real ones). Of the states that
are too many to be tried a sample is drawn, by seed; threads may share syncs otherwise in another trace of a scenario,
which then has other numbers.

A state's number is ``scenario.moment.choice``, of depth 2 ``scenario.moment.choice/moment.choice``.
"""

from __future__ import annotations

import itertools
import random
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from machine import directory_in_memory

from crash.check import Checker
from crash.disk import Crashes, State
from crash.facts import Known, Violation, known_from
from crash.scenarios import SCENARIOS
from crash.traced import Tracer, tracing

__all__ = ["Number", "Outcome", "explore", "replay"]

DEEPER = 150
"""So many states of depth 1 are looked at for each one whose open is traced …"""
OF_EACH = 50
"""… and so many states of that open."""
MODES = ("replay", "requeue", "discard")
AT_FIRST = 4
"""Random states of each moment that are looked at together with the systematic ones."""
MOST_VIOLATIONS = 20
"""Then the search ends."""


@dataclass(frozen=True)
class Number:
    """Names a state, for the seed of its search."""

    scenario: str
    moment: int
    choice: int
    deeper: tuple[int, int] | None = None

    def __str__(self) -> str:
        first = f"{self.scenario}.{self.moment}.{self.choice}"
        return first if self.deeper is None else f"{first}/{self.deeper[0]}.{self.deeper[1]}"

    @classmethod
    def parse(cls, text: str) -> Number:
        first, _, rest = text.partition("/")
        scenario, moment, choice = first.split(".")
        deeper = [int(part) for part in rest.split(".")] if rest else None
        return cls(scenario, int(moment), int(choice), None if deeper is None else (deeper[0], deeper[1]))

    @property
    def thorough(self) -> bool:
        """One in four is looked at from all sides."""
        return zlib.crc32(str(self).encode()) % 4 == 0

    @property
    def later(self) -> bool:
        return zlib.crc32(str(self).encode()) % 8 >= 4


@dataclass
class Outcome:
    """What a search found."""

    seed: int
    opened: int = 0
    """Banks that were opened and checked: a state may stand for several moments, with other facts told."""
    unique: set[bytes] = field(default_factory=set)
    deeper: int = 0
    """Of the unique ones, those of depth 2."""
    seconds: float = 0.0
    violations: list[tuple[str, str]] = field(default_factory=list)
    """Number, what was broken."""

    def __str__(self) -> str:
        return f"{len(self.unique)} unique states ({self.deeper} of depth 2), {self.opened} opened, seed {self.seed}"


class _Search:
    """Goes through the states of some scenarios."""

    def __init__(self, seed: int, tracer: Tracer, checker: Checker, fault: str = "") -> None:
        self.seed, self._tracer, self._checker, self._fault = seed, tracer, checker, fault
        self._crashes: dict[str, Crashes] = {}
        self._seen: set[tuple[bytes, int, int]] = set()
        self.outcome = Outcome(seed)

    def crashes(self, scenario: str) -> Crashes:
        if scenario not in self._crashes:
            trace = self._tracer.run(scenario=scenario, fault=self._fault)
            self._crashes[scenario] = Crashes(trace, f"{self.seed}/{scenario}")
        return self._crashes[scenario]

    def look_at(self, number: Number, state: State, known: Known, depth: tuple[int, int]) -> bool:
        """Check a state, unless that was done before; return whether it was new."""
        key = state.digest, *depth
        if key in self._seen:
            return False
        self._seen.add(key)
        outcome = self.outcome
        if state.digest not in outcome.unique:
            outcome.unique.add(state.digest)
            outcome.deeper += number.deeper is not None
        outcome.opened += 1
        try:
            self._checker.check(state, known, thorough=number.thorough, later=number.later)
        except Violation as violation:
            outcome.violations.append((str(number), f"{violation}\n  left out or cut: {state.told or 'nothing'}"))
        return True

    def first(self, number: Number) -> tuple[State, Known]:
        """Return a state of depth 1."""
        crashes = self.crashes(number.scenario)
        moment = crashes.moments[number.moment]
        return crashes.state(number.moment, number.choice), known_from(moment.facts)

    def second(self, number: Number) -> tuple[Crashes, Known]:
        """Have the work on a state taken up, traced; return the states that crashes of this leave."""
        state, known = self.first(replace(number, deeper=None))
        root = self._tracer.next_root
        root.mkdir()
        state.write(root)
        mode = MODES[(number.moment + number.choice) % len(MODES)]
        trace = self._tracer.run(iteration=known.checkpoints[0], mode=mode, fault=self._fault)
        return Crashes(trace, f"{self.seed}/{number.scenario}.{number.moment}.{number.choice}"), known

    def look_deeper(self, number: Number, dice: random.Random, most: int) -> None:
        """Look at crashes of the open of a state."""
        crashes, known = self.second(number)
        places = [
            (moment, choice)
            for moment in range(len(crashes.moments)) for choice in range(crashes.systematic(moment) + 3)
        ]  # fmt: skip
        dice.shuffle(places)
        for moment, choice in places:
            if most <= 0 or len(self.outcome.violations) >= MOST_VIOLATIONS:
                return
            one = replace(number, deeper=(moment, choice))
            facts = crashes.moments[moment].facts
            depth = len(self.crashes(number.scenario).moments[number.moment].facts), 1 + len(facts)
            most -= self.look_at(one, crashes.state(moment, choice), known_from(facts, known), depth)

    def numbers(self, scenarios: Iterable[str], dice: random.Random) -> Iterator[Number]:
        """Name states of depth 1 for ever: of each moment all systematic ones and some random ones, shuffled; then
        more random ones."""
        names = list(scenarios)
        moments = [(name, moment) for name in names for moment in range(len(self.crashes(name).moments))]
        known = {place: self.crashes(place[0]).systematic(place[1]) + AT_FIRST for place in moments}
        first = [Number(*place, choice) for place in moments for choice in range(known[place])]
        dice.shuffle(first)
        yield from first
        for more in itertools.count():
            dice.shuffle(moments)
            for place in moments:
                yield Number(*place, known[place] + more)


def explore(
    count: int,
    seed: int,
    tracer: Tracer,
    *,
    scenarios: Iterable[str] = SCENARIOS,
    fault: str = "",
    deeper: int = DEEPER,
    most_violations: int = MOST_VIOLATIONS,
    progress: Callable[[Outcome], object] = lambda outcome: None,
) -> Outcome:
    """Look at so many unique states. fault: one of ``controls.FAULTS``, in the program that is traced."""
    started = time.monotonic()
    dice = random.Random(f"{seed}")
    with directory_in_memory() as directory:
        search = _Search(seed, tracer, Checker(directory / "state"), fault)
        outcome = search.outcome
        for turn, number in enumerate(search.numbers(scenarios, dice), 1):
            crashes = search.crashes(number.scenario)
            state, known = search.first(number)
            search.look_at(number, state, known, (len(crashes.moments[number.moment].facts), 0))
            if turn % deeper == 0:
                search.look_deeper(number, dice, OF_EACH)
                progress(outcome)
            if len(outcome.unique) >= count or len(outcome.violations) >= most_violations:
                break
    outcome.seconds = time.monotonic() - started
    return outcome


def replay(text: str, seed: int) -> list[str]:
    """Look at one state again, from all sides; return what is broken."""
    number = Number.parse(text)
    with tracing() as tracer, directory_in_memory() as directory:
        checker = Checker(directory / "state")
        search = _Search(seed, tracer, checker)
        state, known = search.first(number)
        if number.deeper is not None:
            crashes, known = search.second(number)
            state = crashes.state(*number.deeper)
            known = known_from(crashes.moments[number.deeper[0]].facts, known)
        print(f"left out or cut: {state.told or 'nothing'}")
        found = []
        for thorough in (False, True):
            for later in (False, True):
                try:
                    checker.check(state, known, thorough=thorough, later=later)
                except Violation as violation:
                    found.append(str(violation))
    return list(dict.fromkeys(found))
