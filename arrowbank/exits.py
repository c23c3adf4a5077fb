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
import sys
import threading
from typing import Protocol

__all__ = ["forget", "refuse_inside_a_write", "watch"]

_log = logging.getLogger("arrowbank")


class Closable(Protocol):
    def close(self) -> None: ...


_open: set[Closable] = set()
"""Also those that nobody else refers to any more: they hold their bank until they are closed."""
_WRITING = ("appender.py", "journal.py", "store.py")


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


def refuse_inside_a_write(what: str) -> None:
    """Raise RuntimeError in a signal handler that interrupted a write of this thread, for which it would wait."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        place = frame.f_code.co_filename
        if place.endswith(_WRITING) and f"{os.sep}arrowbank{os.sep}" in place:
            raise RuntimeError(
                f"{what} was called by a signal handler that interrupted a call of the same thread on the bank. Let "
                "the handler raise SystemExit, and close the bank where that arrives, as a with block does"
            )


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _close_all() -> None:
    for bank in list(_open):
        try:
            bank.close()
        except Exception as error:  # whatever it is: the others are closed all the same
            _log.warning("closing a bank at exit: %s", error)


def _restore_sigterm() -> None:
    with contextlib.suppress(ValueError):  # a fork in another thread than the main one
        if signal.getsignal(signal.SIGTERM) is _leave:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


_forking = threading.local()


def _before_fork() -> None:
    """Hold SIGTERM back: one that came to the child before it is as it was would be lost there."""
    is_ours = signal.getsignal(signal.SIGTERM) is _leave
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}) if is_ours else None


def _after_fork() -> None:
    if _forking.mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _in_child() -> None:
    """It has no bank open, and ends by SIGTERM at once, as it did before."""
    _open.clear()
    _restore_sigterm()
    _after_fork()


atexit.register(_close_all)
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
