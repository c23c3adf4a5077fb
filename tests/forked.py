"""Servers that fork a child for each job, and one pipe for all that the children tell: both of its ends.

A server has arrowbank imported, so that a child is there in no time. Jobs are JSON lines on its standard input; a
report's line is one ``os.write``. Who is told, and of what, is in ``kill_child``.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

__all__ = ["Report", "Server", "be_ready", "run_child", "serve", "serve_silently"]

J = TypeVar("J")

# -- in the children and their server


class Report:
    """Writes whole lines to a pipe, from any thread."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def say(self, *words: object) -> None:
        line = " ".join(map(str, words)) + "\n"
        if len(line) > 4000:  # beyond PIPE_BUF lines of two threads could mix
            raise ValueError(f"a line of {len(line)} characters")
        os.write(self._descriptor, line.encode())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.say(">", name)
        yield
        self.say("<", name)


def be_ready() -> None:
    """Have imported what every child would, and be fit to fork."""
    importlib.import_module("pandas")  # pyarrow would, in every trainer anew: two seconds each
    assert threading.active_count() == 1, "forking needs a single thread"


def run_child(report: Report, work: Callable[[], object], most_seconds: int) -> NoReturn:
    """Do the work of a forked child, and end it."""
    signal.alarm(most_seconds)
    report.say("B", os.getpid())
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        report.say("!", repr(traceback.format_exc()[-3000:]))
    os._exit(status)  # whatever threads say


def serve(report: Report, job_type: type[J], work: Callable[[J, Report], object], most_seconds: int) -> None:
    """Fork a child for each job, one after another."""
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            run_child(report, partial(work, job_type(**json.loads(line)), report), most_seconds)
        _, status = os.waitpid(pid, 0)
        report.say("X", status)


def serve_silently(job_type: type[J], work: Callable[[J], object], most_seconds: int = 0) -> None:
    """The same for children who report elsewhere: only how each ended is said, on standard output."""
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            signal.alarm(most_seconds)  # 0: none
            status = 1
            try:
                work(job_type(**json.loads(line)))
                status = 0
            except BaseException:
                traceback.print_exc()
            os._exit(status)
        print(os.waitpid(pid, 0)[1], flush=True)


# -- in who started the server


class Server:
    """A running server, and what its children tell."""

    def __init__(self, script: Path, *arguments: str, **environment: str) -> None:
        self.reports, write_end = os.pipe()
        command = [sys.executable, str(script), str(write_end), *arguments]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, pass_fds=[write_end], text=True, env=os.environ | environment
        )
        os.close(write_end)
        self._unread = b""

    def start(self, job: Any) -> None:
        """Have a child forked for a job, a dataclass."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(job)) + "\n")
        self._process.stdin.flush()

    def read(self, wait: float) -> list[str] | None:
        """Return whole lines that were told, maybe none; None when nothing was told for so many seconds."""
        if not select.select([self.reports], [], [], max(wait, 0))[0]:
            return None
        data = os.read(self.reports, 1 << 20)
        if not data:
            raise AssertionError("the server ended")
        *lines, self._unread = (self._unread + data).split(b"\n")
        return [line.decode() for line in lines]

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        os.close(self.reports)
