"""A sample of all faults of system calls breaks no promise, and what makes them is shown to see every call.

The seed is ARROWBANK_CRASH_SEED or 1; ``python -m tests.crash --instrument faults`` tries every one.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from machine import require_compiler, require_strace

from crash.effects import ROOT, Change, Sync, Write
from crash.facts import Violation
from crash.faults import Faults, preloaded, try_all
from crash.faulty import Job
from crash.traced import tracing

pytestmark = pytest.mark.slow

SEED = int(os.environ.get("ARROWBANK_CRASH_SEED", "1"))
SAMPLE = 120


@pytest.fixture(scope="module")
def faults() -> Iterator[Faults]:
    require_compiler()
    with preloaded() as one:
        yield one


def test_no_call_that_goes_wrong_breaks_a_promise(faults: Faults) -> None:
    outcome = try_all(faults, SEED, SAMPLE)
    print(f"{outcome.cases} faults, seed {SEED}: {dict(outcome.hit)}")
    assert not outcome.violations, "\n".join(f"{case}: {what}" for case, what in outcome.violations)
    assert outcome.hit.total() > SAMPLE * 3 // 4


def test_every_call_that_strace_sees_can_be_made_to_fail(faults: Faults) -> None:
    """That nothing writes past libc, where no fault could reach it."""
    require_strace()
    _, told = faults.run(Job(str(faults.root), "tell", scenario="discarding"))
    met = Counter(event[2].removesuffix("at") for event in told if event[0] == "call")
    with tracing() as tracer:
        effects = tracer.run(scenario="discarding").effects
    syncs = [effect for effect in effects if isinstance(effect, Sync) and effect.inode != ROOT]
    assert met["fsync"] + met["fdatasync"] == len(syncs)
    assert met["pwritev"] + met["write"] == sum(isinstance(effect, Write) for effect in effects)
    changes = sum(isinstance(effect, Change) for effect in effects)
    # Of the calls that create, some find what is there already, and change nothing.
    assert met["rename"] + met["link"] + met["unlink"] + met["rmdir"] + met["mkdir"] + met["symlink"] <= changes
    assert met.total() >= changes + len(syncs)


def test_a_short_write_is_a_real_one(faults: Faults) -> None:
    """The bank puts the rest behind it; without that, half a record would be there."""
    for at, name in list(faults.calls().items())[40:80]:
        if name == "pwritev":
            assert faults.try_one(Job(str(faults.root), "short", 0, at, True, "leave")) == ["pwritev"]
            return
    raise AssertionError("no write among these calls")


def test_a_run_that_ends_before_its_time_is_a_violation(faults: Faults) -> None:
    """That these checks can fail: the trainer was not told that such errors come."""
    with pytest.raises(Violation, match="could not go on"):
        for at in range(30, 60):
            faults.try_one(Job(str(faults.root), "kill", errno.EIO, at, scenario=""))


def test_a_bank_that_lost_a_group_is_a_violation(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    run = faults.run

    def forgetful(job: Job) -> object:
        outcome = run(job)
        for segment in Path(faults.root, "bank", "segments").iterdir():
            segment.unlink()
        return outcome

    monkeypatch.setattr(faults, "run", forgetful)
    last = max(run(Job(str(faults.root), "tell", scenario="appends"))[1], key=lambda event: event[1:2] or [0])
    with pytest.raises(Violation):
        faults.try_one(Job(str(faults.root), "kill", 0, int(last[1]) - 1, scenario="appends"))
