"""No crash state of the traced runs breaks a promise. That planted faults make some that do, ``test_planted`` shows.

The seed is ARROWBANK_CRASH_SEED or 1; ``python -m tests.crash`` searches further, and with ``--replay`` looks at one
state again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from machine import require_strace

from crash.disk import Crashes
from crash.effects import Trace, Tree, Unmodelled
from crash.scenarios import SCENARIOS
from crash.states import Number, explore
from crash.trace import Call, hexed
from crash.traced import Tracer, tracing

pytestmark = pytest.mark.slow

SEED = int(os.environ.get("ARROWBANK_CRASH_SEED", "1"))
STATES = 5_000


@pytest.fixture(scope="module")
def tracer(quiet: None) -> Iterator[Tracer]:
    require_strace()
    with tracing() as one:
        yield one


def test_no_crash_state_breaks_a_promise(tracer: Tracer) -> None:
    outcome = explore(STATES, SEED, tracer)
    print(outcome)
    told = "\n".join(f"--replay {number} --seed {SEED}: {what}" for number, what in outcome.violations)
    assert not outcome.violations, told
    assert len(outcome.unique) >= STATES
    assert outcome.deeper >= STATES // 10


def test_a_state_comes_back_by_its_number(tracer: Tracer) -> None:
    first, second = (Crashes(tracer.run(scenario="takeovers"), "7") for _ in range(2))
    assert len(first.moments) == len(second.moments)
    for moment in range(0, len(first.moments), 17):
        for choice in range(first.systematic(moment) + 3):
            state = first.state(moment, choice)
            assert first.state(moment, choice).digest == state.digest
            assert _shape(state.told) == _shape(second.state(moment, choice).told)
    for number in ("appends.3.14", "appends.3.14/15.9"):
        assert str(Number.parse(number)) == number


def _shape(told: str) -> list[str]:
    """What was left out or cut, without the process numbers that are in names."""
    return [part.rpartition("(inode")[2] or part for part in told.split("; ")]


def test_scenarios_make_every_kind_of_file(tracer: Tracer) -> None:
    trace = tracer.run(scenario="checkpoints")
    nodes = Crashes(trace, "1").state(-1, 1).nodes
    assert {"bank/MANIFEST.json", "bank/LOCK", "bank/archive", "bank/sessions/0001"} <= nodes.keys()
    assert sum(path.endswith(".parquet") for path in nodes) >= 2
    assert len(SCENARIOS) >= 8


# -- what is not modelled is refused


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("ftruncate", "{fd}, 5"),
        ("fallocate", "{fd}, 0, 0, 5"),
        ("sendfile", "{fd}, {fd}, NULL, 5"),
        ("copy_file_range", "{fd}, NULL, {fd}, NULL, 5, 0"),
        ("fchmod", "{fd}, 0600"),
        ("mmap", "NULL, 5, PROT_READ|PROT_WRITE, MAP_SHARED, {fd}, 0"),
        ("ioctl", "{fd}, FICLONE, {fd}"),
        ("pwritev2", "{fd}, [], 0, 0, RWF_DSYNC"),
        ("chmod", "{path}, 0600"),
        ("openat", "AT_FDCWD, {path}, O_WRONLY|O_APPEND"),
        ("renameat2", "AT_FDCWD, {path}, AT_FDCWD, {path}, RENAME_EXCHANGE"),
    ],
)
def test_a_call_that_is_not_modelled_is_refused(tmp_path: Path, name: str, arguments: str) -> None:
    (tmp_path / "file").write_bytes(b"held")
    path = f'"{hexed(str(tmp_path / "file"))}"'
    opened = Call(0, 0, 1, "openat", ("AT_FDCWD", path, "O_RDWR"), 3)
    given = tuple(part.strip() for part in arguments.format(fd="3<>", path=path).split(","))
    Trace.of([opened], tmp_path, Tree.of(tmp_path))
    with pytest.raises(Unmodelled):
        Trace.of([opened, Call(1, 1, 1, name, given, 4)], tmp_path, Tree.of(tmp_path))
