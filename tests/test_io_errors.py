"""Any one system call that fails, at any moment of a run, from outside: nothing acknowledged is lost.

A child process trains (``small_disks.SCENARIO``); strace makes its n-th call of one kind fail, once in each of its
threads, as the kernel would: also in Arrow's C++, where ``test_commit_failures`` cannot reach. The child tells over a
socket what raised and what was acknowledged; it then closes, or ends without a word. Here the bank is opened anew and
held against that. Of strace's own log: no stream in which a write or a sync has failed is written to again.

Moments are drawn by a seed, which every failure tells and ``ARROWBANK_IO_SEED`` sets; ``ARROWBANK_IO_MOMENTS=2000``
takes them all.

Run as ``test_io_errors.py SOCKET_FD``, this file is the child: a server that has arrowbank imported and forks a trainer
for each job, a JSON line.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import logging
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
from machine import in_memory, missing, require_strace
from runs import archived_rows
from runs import train as train_iterations
from small_disks import SCENARIO, SHORT, WAYS, Model, Trainer, find_problem, insist

from arrowbank import CorruptionError, RolloutBank
from arrowbank.archive import merging

pytestmark = pytest.mark.slow

ERRORS = ("EIO", "ENOSPC", "EDQUOT", "EROFS")
CALLS = ("pwritev", "write", "fdatasync", "fsync", "rename", "link", "unlink", "rmdir", "mkdir", "symlink", "openat")
"""``write`` is Arrow's, of Parquet files. Of ``openat``, those that create."""
MOMENTS = int(os.environ.get("ARROWBANK_IO_MOMENTS", "6"))
"""So many of each kind of call, of all that a run makes."""
SEED = int(os.environ.get("ARROWBANK_IO_SEED", "1"))
SEED_TOLD = f"ARROWBANK_IO_SEED={SEED}"


# -- the child


def serve(descriptor: int) -> None:
    channel = socket.socket(fileno=descriptor)
    jobs = channel.makefile("r")
    merging.FAN_IN = 2
    logging.getLogger("arrowbank").setLevel(logging.CRITICAL)
    with contextlib.suppress(ModuleNotFoundError):
        import pandas  # noqa: F401  # Arrow imports it when it converts times: a thousand system calls to be traced

    for line in jobs:
        job = json.loads(line)
        if os.fork() == 0:
            status = 1
            try:
                ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_long(-1))  # PR_SET_PTRACER: anybody of this user
                if not job["new"]:
                    RolloutBank.open(job["path"]).close()
                tell(channel, ["pid", os.getpid()])
                wait_for_tracer()
                train(channel, **job)
                status = 0
            except BaseException:
                tell(channel, ["fault", traceback.format_exc()])
            finally:
                tell(channel, ["end"])
                os._exit(status)
        os.wait()


def tell(channel: socket.socket, event: list[Any]) -> None:
    channel.sendall(json.dumps(event).encode() + b"\n")  # sendto: not a call that is made to fail


def wait_for_tracer() -> None:
    status = Path("/proc/self/status")
    end = time.monotonic() + 60
    while re.search(r"^TracerPid:\t0$", status.read_text(), re.MULTILINE):
        if time.monotonic() > end:
            raise TimeoutError("strace did not attach")
        time.sleep(0.001)


def train(channel: socket.socket, path: str, code: int, way: str, new: bool) -> None:
    """Run the scenario, or its beginning on a new bank."""
    trainer = Trainer(Path(path), lambda event: tell(channel, event))
    steps = SCENARIO[:4] if new else SHORT
    insist(trainer, steps, way, expected=lambda error: error.errno == code, tell=lambda event: tell(channel, event))


# -- what fails


@dataclass
class Outcome:
    """What became of one run."""

    model: Model = field(default_factory=Model)
    raised: list[tuple[str, int]] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    """Of strace: thread, call, arguments, result."""

    @property
    def injected(self) -> list[str]:
        return [line for line in self.log if line.endswith("(INJECTED)")]


class Tracer:
    """Runs trainers under strace."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._runs = 0

    def __enter__(self) -> Self:
        mine, theirs = socket.socketpair()
        mine.settimeout(60)
        self._channel = mine
        self._lines = mine.makefile("r")
        self._server = subprocess.Popen([sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()])
        theirs.close()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_WR)
        self._lines.close()
        self._channel.close()
        try:
            self._server.wait(60)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()

    def run(
        self,
        path: Path,
        *,
        way: str,
        call: str = "",
        error: str = "EIO",
        at: int = 0,
        fake: int | None = None,
        new: bool = False,
    ) -> Outcome:
        """Train once; with ``at``, let that call of each thread, by number, fail, or do nothing and return ``fake``."""
        outcome = Outcome()
        log = self.directory / "strace.log"
        self._tell({"path": str(path), "code": getattr(errno, error), "way": way, "new": new})
        kind, pid = self._hear()
        assert kind == "pid"
        traced = [*CALLS, "pwritev"] if not at else {call, "pwritev", "fdatasync", "fsync", "rename", "link"}
        command = ["strace", "-f", "-qq", "-y", "-e", "signal=none", "-s", "0", "-o", str(log), "-p", str(pid)]
        command += ["-e", f"trace={','.join(map(_syscalls, traced))}"]
        result = f"error={error}" if fake is None else f"retval={fake}"
        if at:
            command += ["-e", f"inject={_syscalls(call)}:{result}:when={at}"]
        strace = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            self._listen(outcome)
        finally:
            _, said = strace.communicate(timeout=120)
        assert strace.returncode == 0, f"strace: {said}"
        outcome.log = joined(log.read_text().splitlines())
        return outcome

    def _listen(self, outcome: Outcome) -> None:
        fault = ""
        while (event := self._hear()) != ["end"]:
            match event:
                case ["raised", name, code]:
                    outcome.raised.append((name, code))
                case ["fault", text]:
                    fault = text
                case _:
                    outcome.model.take(event)
        assert not fault, fault

    def may_trace(self) -> bool:
        try:
            self.run(self.directory / "tried", way="leave")
        except AssertionError:
            return False
        return True

    def _tell(self, job: dict[str, Any]) -> None:
        self._channel.sendall(json.dumps(job).encode() + b"\n")

    def _hear(self) -> list[Any]:
        line = self._lines.readline()
        assert line, "the child's server has ended"
        event: list[Any] = json.loads(line)
        return event


def _syscalls(call: str) -> str:
    """The names of a call on any machine, as strace takes them."""
    return {"pwritev": "/^pwritev2?$", "write": "write", "fsync": "fsync", "fdatasync": "fdatasync"}.get(
        call, rf"/^{call.removesuffix('at')}(at2?)?$"
    )


def moments(log: list[str]) -> dict[str, list[int]]:
    """Of a run in which nothing failed: which calls of each kind to let fail, counted in each thread by itself."""
    threads: Counter[tuple[str, str]] = Counter()
    found: dict[str, set[int]] = {call: set() for call in CALLS}
    for line in log:
        thread, name = line.split("(")[0].split()[:2]
        call = next(call for call in CALLS if name.removesuffix("2").removesuffix("at") == call.removesuffix("at"))
        threads[thread, call] += 1
        if call != "openat" or "O_CREAT" in line:
            found[call].add(threads[thread, call])
    return {call: sorted(at) for call, at in found.items()}


def joined(log: list[str]) -> list[str]:
    """Put together the lines of calls during which another thread made one."""
    begun: dict[str, str] = {}
    whole = []
    for line in log:
        thread = line.split()[0]
        if line.endswith("<unfinished ...>"):
            begun[thread] = line.removesuffix("<unfinished ...>")
        elif re.match(r"\d+ +<\.\.\. \w+ resumed>", line):
            whole.append(begun.pop(thread) + line.partition("resumed>")[2])
        else:
            whole.append(line)
    return whole


STREAM = r"/([^/>\"]+\.arrows(?:\.[0-9a-f]{8})?)"
"""A stream's name at the end of a path. An open file goes by the one that it had under tmp, even when it was linked."""


def check_nothing_failed_is_trusted(log: list[str]) -> None:
    """A stream in which a write or a sync failed gets no further record once it has its name, and no name before that:
    what a failed creation leaves under tmp/ may be written to, but not published. (``fsync`` of a stream with a name is
    that of a later session, which takes the whole records as they are.)
    """
    failed: set[str] = set()
    published: set[str] = set()
    for line in log:
        if made := re.search(rf"(pwritev2?|fdatasync|fsync)\(\d+<[^>]*{STREAM}>", line):
            call, name = made.groups()
            assert call == "fsync" or name not in failed & published, f"trusted again: {line}"
            if line.endswith("(INJECTED)"):
                failed.add(name)
        if made := re.search(rf"(?:rename|link)\w*\([^\"]*\"[^\"]*{STREAM}\".* = 0$", line):
            assert made[1] not in failed, f"published: {line}"
            published.add(made[1])
    if any("fdatasync(" in line and "INJECTED" not in line for line in log):
        assert published, "no stream was seen to get its name"


# -- the tests


@pytest.fixture(scope="module")
def tracer() -> Iterator[Tracer]:
    require_strace()
    with (
        tempfile.TemporaryDirectory(prefix="arrowbank-", dir=in_memory()) as directory,
        Tracer(Path(directory)) as tracer,
    ):
        if not tracer.may_trace():
            missing("strace may not trace a running process here")
        yield tracer


@pytest.fixture(scope="module")
def chosen(tracer: Tracer) -> dict[str, list[int]]:
    """The moments to try, of each kind of call: the same for the same seed."""
    path = tracer.directory / "untouched"
    outcome = tracer.run(path, way="retry")
    assert (outcome.raised, outcome.injected) == ([], [])
    find_problem(path, outcome.model)
    every = moments(outcome.log)
    assert all(every.values()), every
    rng = random.Random(SEED)
    return {call: sorted(rng.sample(at, min(MOMENTS, len(at)))) for call, at in every.items()}


@pytest.mark.parametrize("kind", CALLS)
def test_any_system_call_that_fails_costs_nothing_acknowledged(
    tracer: Tracer, chosen: dict[str, list[int]], kind: str
) -> None:
    failed = raised = 0
    for number, at in enumerate(chosen[kind]):
        error, way = ERRORS[number % len(ERRORS)], WAYS[(number // 2 + CALLS.index(kind)) % len(WAYS)]
        outcome = check_one(tracer, kind, at, error, way)
        failed += bool(outcome.injected)
        raised += bool(outcome.raised)
    print(f"{kind}: {len(chosen[kind])} runs, in {failed} of them it failed, in {raised} a call of the bank raised")
    assert raised and failed >= len(chosen[kind]) * 3 // 4  # how many appends share a sync differs


def test_any_system_call_that_fails_while_a_bank_is_made_leaves_nothing_in_the_way(tracer: Tracer) -> None:
    every = moments(tracer.run(tracer.directory / "made", way="retry", new=True).log)
    rng = random.Random(SEED)
    for kind, at in every.items():
        for number in rng.sample(at, min(MOMENTS // 2, len(at))):
            check_one(tracer, kind, number, rng.choice(ERRORS), "retry", new=True)


def test_a_stream_that_is_trusted_after_a_failed_sync_would_be_seen() -> None:
    unfinished = str(Path("bank", "tmp", "s0001", "s0001-0000.arrows.0123abcd"))
    named = f'7 linkat(AT_FDCWD, "{unfinished}", AT_FDCWD, "bank/journal/s0001-0000.arrows", 0) = 0'
    failed = f"7 fdatasync(3<{unfinished}>(deleted)) = -1 EIO (Input/output error) (INJECTED)"
    with pytest.raises(AssertionError, match="trusted again"):
        check_nothing_failed_is_trusted([named, failed, failed.partition(" = ")[0] + " = 0"])
    with pytest.raises(AssertionError, match="published"):
        check_nothing_failed_is_trusted([failed, named])
    with pytest.raises(AssertionError, match="no stream was seen"):
        check_nothing_failed_is_trusted([failed.partition(" = ")[0] + " = 0"])


def check_one(tracer: Tracer, kind: str, at: int, error: str, way: str, *, new: bool = False) -> Outcome:
    path = tracer.directory / f"{kind}-{at}"
    try:
        outcome = tracer.run(path, way=way, call=kind, error=error, at=at, new=new)
        check_nothing_failed_is_trusted(outcome.log)
        find_problem(path, outcome.model)
    except BaseException as failure:
        failure.add_note(f"{kind} number {at} failed with {error}, the trainer's way: {way}; {SEED_TOLD}")
        raise
    shutil.rmtree(path)
    return outcome


def test_a_restore_that_could_not_point_the_archive_elsewhere_says_so_and_closing_tries_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(source: Any, target: Any, **options: Any) -> None:
        if os.path.basename(target) == "archive":
            raise OSError(errno.EIO, "planted")
        rename(source, target, **options)

    rename = os.rename
    bank = RolloutBank.open(path, keep_checkpoints=1)
    bank.restore(0)
    train_iterations(bank, range(4))
    bank.checkpoint(4, wait=True)
    before = len(archived_rows(path))
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fails)
        bank.restore(2)
        assert "planted" in str(bank.stats().compaction_error)
        with pytest.raises(OSError, match="planted"):
            bank.checkpoint(2, wait=True)
        assert len(archived_rows(path)) == before
    bank.close()
    assert len(archived_rows(path)) < before


def test_a_write_that_only_seems_to_succeed_is_found(tracer: Tracer) -> None:
    """That these tests can fail: eight bytes of one write are not there, and nobody is told."""
    found = 0
    for at in range(40, 46):
        path = tracer.directory / f"faked-{at}"
        try:
            find_problem(path, tracer.run(path, way="leave", call="pwritev", fake=8, at=at).model)
        except (AssertionError, CorruptionError):
            found += 1
    assert found


if __name__ == "__main__":
    serve(int(sys.argv[1]))
