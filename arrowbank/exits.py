"""Closing banks when the interpreter exits, or SIGTERM asks it to.

Nothing depends on it, since all that was acknowledged is durable: a bank that was closed is only free at once, and its
last segments say how many records they have.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import threading
import weakref
from typing import Protocol

__all__ = ["forget", "watch"]

_log = logging.getLogger("arrowbank")


class Closable(Protocol):
    def close(self) -> None: ...


_open: weakref.WeakSet[Closable] = weakref.WeakSet()


def watch(bank: Closable) -> None:
    """Close ``bank`` when the interpreter exits.

    SIGTERM, where nobody has set a handler of his own, becomes SystemExit(143) in the main thread while a bank is open:
    ``with`` blocks are left, and what is open still is closed. Only the main thread can set that up; opened in another
    one, a bank leaves SIGTERM as it is.
    """
    _open.add(bank)
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _leave)


def forget(bank: Closable) -> None:
    """Say that ``bank`` was closed."""
    _open.discard(bank)
    if not _open and threading.current_thread() is threading.main_thread():
        _restore_sigterm()


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _close_all() -> None:
    for bank in list(_open):
        try:
            bank.close()
        except Exception as error:  # whatever it is: the others are closed all the same
            _log.warning("closing a bank at exit: %s", error)


def _restore_sigterm() -> None:
    """Also in a forked child, which has no bank open: it ends at once, as it did before."""
    with contextlib.suppress(ValueError):  # a fork in another thread than the main one
        if signal.getsignal(signal.SIGTERM) is _leave:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


atexit.register(_close_all)
os.register_at_fork(after_in_child=_restore_sigterm)
