"""Scripts that use a bank, each in a process of its own, and what is in the bank once they have ended.

What a script says on standard output, a uid a line, was acknowledged.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from arrowbank import RolloutBank

__all__ = ["PRELUDE", "interrupt", "kept", "read_lines", "run", "script", "was_closed"]

PRELUDE = """
import asyncio, multiprocessing, os, signal, sys, threading, time
from arrowbank import BankClosedError, BankLockedError, RolloutBank, RolloutGroup, TokenRollout
path = sys.argv[1]
def group():
    one = TokenRollout(trajectory=[[5, 6, 7]], logprobs=[[-0.5]], generation_mask=[[0, 0, 1]], reward=1.0)
    return RolloutGroup(rollouts=[one])
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
def fork_sleeper():
    there, said = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(said, b"1")  # what is set up at a fork was set up
        time.sleep(60)
        os._exit(1)
    os.read(there, 1)
    return pid
def signalled(pid):
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)
"""


@contextmanager
def script(code: str, path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that runs ``code`` on the bank at ``path``; killed when the block ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + code, str(path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        try:
            yield process
        finally:
            process.kill()


def run(code: str, path: Path, *, status: int = 0) -> tuple[list[str], str]:
    """Run ``code`` to its end; return what it said, and its standard error."""
    with script(code, path) as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == status, err
    return out.split(), err


def read_lines(process: subprocess.Popen[str], count: int) -> list[str]:
    """Read at least so many lines, past Python's own buffer, which ``communicate`` would not look into."""
    assert process.stdout is not None
    data = b""
    while data.count(b"\n") < count or not data.endswith(b"\n"):
        more = os.read(process.stdout.fileno(), 1 << 16)
        assert more, "it ended"
        data += more
    return data.decode().split()


def interrupt(code: str, path: Path, number: int, *, lines: int = 1, times: int = 1) -> tuple[list[str], str, int]:
    """Send a signal when so many lines were said; return all that was said, standard error, and the exit status."""
    with script(code, path) as process:
        said = read_lines(process, lines)
        for _ in range(times):
            process.send_signal(number)
            time.sleep(0.002)
        out, err = process.communicate(timeout=60)
    return [*said, *out.split()], err, process.returncode


def kept(path: Path, *, takeover: str = "never") -> list[str]:
    """Open at once; return what is pending."""
    began = time.monotonic()
    with RolloutBank.open(path, takeover=takeover) as bank:  # type: ignore[arg-type]
        assert time.monotonic() - began < 5  # not a lease of 60
        restored = bank.restore(0)
        assert (restored.report.corrupt, restored.report.lost_records) == ((), 0)  # an interrupted append may be torn
        return [str(group.uid) for queue in restored.pending.values() for group in queue]


def was_closed(path: Path) -> bool:
    lock = json.loads((path / "LOCK").read_bytes())
    newest = max(int(claim.name) for claim in (path / "sessions").iterdir())
    return lock["closed"] is True and lock["holder"]["session"] == newest
