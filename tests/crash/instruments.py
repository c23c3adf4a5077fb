"""Every instrument under one form: options in, a count of cases and their violations out."""

from __future__ import annotations

import argparse
import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kill_model import Violation
from machine import directory_in_memory
from takeovers import play

from crash import bit_rot, faults, fuzz, states
from crash.block_replay import record, replay
from crash.power_cuts import FILE_SYSTEMS, cut_often
from crash.traced import tracing
from crash.training_kills import kill_trainings, training_server

__all__ = ["INSTRUMENTS", "Result"]

STATES_OF_A_RECORDING = 200


@dataclass(frozen=True)
class Result:
    """One line of the table."""

    cases: int
    violations: Sequence[tuple[str, str]]
    """Number or name of the case, and what it broke."""


def _say(outcome: object) -> None:
    print(outcome, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _collecting(violations: list[tuple[str, str]], name: str) -> Iterator[None]:
    """Note a violation, which ends what is in the block."""
    try:
        yield
    except Violation as violation:
        violations.append((name, "".join(traceback.format_exception_only(violation))))


def _states(options: argparse.Namespace) -> Result:
    with tracing() as tracer:
        outcome = states.explore(options.states, options.seed, tracer, progress=_say)
    _say(outcome)
    return Result(len(outcome.unique), outcome.violations)


def _faults(options: argparse.Namespace) -> Result:
    with faults.preloaded() as one:
        outcome = faults.try_all(one, options.seed, options.faults)
    _say("; ".join(f"{name}: {count}" for name, count in outcome.hit.most_common()))
    return Result(outcome.cases, outcome.violations)


def _cuts(options: argparse.Namespace) -> Result:
    violations: list[tuple[str, str]] = []
    share = -(-options.cuts // len(FILE_SYSTEMS))
    with directory_in_memory() as directory:
        for file_system in FILE_SYSTEMS:
            with _collecting(violations, file_system):
                groups = cut_often(directory, file_system, share, options.seed)
                _say(f"{file_system}: {share:,} cuts, {groups:,} groups acknowledged")
    return Result(share * len(FILE_SYSTEMS), violations)


def _blocks(options: argparse.Namespace) -> Result:
    violations: list[tuple[str, str]] = []
    for number, begun in enumerate(range(0, options.blocks, STATES_OF_A_RECORDING)):
        seed, share = options.seed + number, min(STATES_OF_A_RECORDING, options.blocks - begun)
        with directory_in_memory() as directory, _collecting(violations, f"recording of seed {seed}"):
            recording = record(directory, seed)
            groups = replay(directory, recording, share, seed)
            _say(f"seed {seed}: {len(recording.log):,} writes and flushes, {groups:,} groups looked for")
    return Result(options.blocks, violations)


def _kills(options: argparse.Namespace) -> Result:
    violations: list[tuple[str, str]] = []
    kills = 0
    with (
        directory_in_memory() as directory,
        contextlib.closing(training_server()) as server,
        _collecting(violations, "training"),
    ):
        kills, runs = kill_trainings(directory, options.kills, options.seed, server)
        _say(f"{runs:,} runs")
    return Result(kills, violations)


def _rot(options: argparse.Namespace) -> Result:
    cases, violations = 0, []
    for what, count, wrong, seconds in bit_rot.every_bit(options.every):
        _say(f"{what}: {count:,} in {seconds:.1f} s")
        cases += count
        violations += [(what, said) for said in wrong]
    return Result(cases, violations)


def _fuzz(options: argparse.Namespace) -> Result:
    cases, violations = 0, []
    for target, count, wrong in fuzz.fuzz(options.mutants, options.seed):
        cases += count
        violations += [(target, said) for said in wrong]
    return Result(cases, violations)


def _takeovers(options: argparse.Namespace) -> Result:
    with directory_in_memory() as directory:
        rounds = play(Path(directory), options.seed, options.takeovers, stop=False)
    wrong = [(f"round {at}, {one.kind}", str(one.violations)) for at, one in enumerate(rounds) if one.violations]
    return Result(len(rounds), wrong)


INSTRUMENTS: dict[str, Callable[[argparse.Namespace], Result]] = {
    "states": _states,
    "faults": _faults,
    "cuts": _cuts,
    "blocks": _blocks,
    "kills": _kills,
    "rot": _rot,
    "fuzz": _fuzz,
    "takeovers": _takeovers,
}
