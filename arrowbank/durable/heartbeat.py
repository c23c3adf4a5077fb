"""A holder's sign of life: the modification time of its claim, set anew every second.

Whoever looks on compares it with what it was before, by its own clock: the clocks of two hosts are never compared. A
time stamp needs no space on a full disk, and it is set on a file that nobody else ever changes, so that a holder who
was stopped and goes on cannot disturb the one that took its place. Beats need not survive a power loss.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

from arrowbank.durable import files

__all__ = ["BEAT_S", "Heartbeat", "last_beat"]

_log = logging.getLogger("arrowbank")

BEAT_S = 1.0
"""Seconds from beat to beat. Not a setting: who looks on must know it."""


class Heartbeat:
    """Beats in a thread of its own until it is stopped, or the process ends or is forked from."""

    def __init__(self, path: Path) -> None:
        self._path = os.fspath(path)
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = threading.Thread(
            target=self._run, name="arrowbank-heartbeat", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError:  # the interpreter is on its way out, and starts no threads any more
            self._thread = None

    def stop(self) -> None:
        """Beat no more. Does not wait for a beat that hangs in the file system."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(BEAT_S)

    def _run(self) -> None:
        failed = False
        while not self._stopped.wait(BEAT_S):
            try:
                os.utime(self._path)
                failed = False
            except OSError as error:
                if not failed:
                    _log.warning("%s: the heartbeat failed (%s); a second coordinator may take over", self._path, error)
                failed = True


def last_beat(path: Path) -> int | None:
    """Return when a claim's holder last gave a sign of life, in its own ns; None when the claim is gone.

    Opens the file, since a network file system asks its server only then.
    """
    try:
        with files.reading(path) as descriptor:
            return os.fstat(descriptor).st_mtime_ns
    except FileNotFoundError:
        return None
