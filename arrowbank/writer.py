"""BankWriter: appending from other processes of a run, beside its coordinator.

Each writer has segment files of its own, so that nobody appends to another's; the coordinator merges on read. A writer
belongs to one session: when the coordinator changes, or begins another session, its appends raise FencedError.
"""

from __future__ import annotations

import itertools
import operator
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from arrowbank.appending import Appends
from arrowbank.durable import files
from arrowbank.durable.appender import Appender
from arrowbank.durable.following import MAIN
from arrowbank.durable.intake import Intake
from arrowbank.durable.layout import BankPaths, check_writer
from arrowbank.durable.manifest import read_manifest
from arrowbank.durable.session import Membership
from arrowbank.errors import BankClosedError, FencedError, InvalidDrawError

__all__ = ["BankWriter", "WriterToken"]

_PARTS = 10_000
"""Part numbers of each writer of one name, one started after the other."""


@dataclass(frozen=True, slots=True)
class WriterToken:
    """What another process needs to append in the coordinator's session. Picklable; no secret."""

    path: str
    """Of the bank, absolute."""
    bank_id: str
    session: int
    holder: str
    """Tells this claim of the session from any other."""
    iteration: int
    """The one being collected when the token was made."""


class BankWriter(Appends):
    """Appends groups from another process, under the coordinator's session. Thread-safe; a context manager that closes.

    The coordinator's ``mark_consumed`` takes the uids that it returns; nobody need tell the coordinator anything else.
    What was appended and not drawn is pending after the next ``restore``.
    """

    def __init__(self, paths: BankPaths, token: WriterToken, name: str) -> None:
        """Use ``BankWriter.open``."""
        self._pid = os.getpid()
        self._paths, self._session = paths, token.session
        self._member = Membership(paths, token.session, token.holder)
        self._iteration = token.iteration
        self._closed = False
        self._appender = Appender(
            paths,
            token.bank_id,
            token.session,
            name,
            check_fence=self._check_fence,
            abandon=None,
            first_part=_PARTS * _incarnation(paths, token.session, name),
        )
        self._intake = Intake(self._appender, session=token.session, writer=name, on_written=lambda: None)

    @classmethod
    def open(cls, token: WriterToken, name: str, *, path: str | Path | None = None) -> Self:
        """Join the session that made ``token``.

        name: of this writer, in its segments' names and in the ``writer`` column, as "rank-3". Whoever restarts a
        writer may give it the same. path: where the bank lies for this process, if not where it lies for the
        coordinator.

        Raises: FencedError when the coordinator has changed meanwhile; ValueError for a name that no file can have, or
        for another bank; OSError.
        """
        if name == MAIN:
            raise ValueError(f"writer name {name!r} is the coordinator's; choose another")
        paths = BankPaths.at(token.path if path is None else path)
        found = read_manifest(paths).bank_id
        if found != token.bank_id:
            raise ValueError(f"{paths.root}: bank {found}, and the token is of bank {token.bank_id}")
        try:
            return cls(paths, token, check_writer(name))
        except FileNotFoundError:
            Membership(paths, token.session, token.holder).check()
            raise _ended(paths, token.session) from None

    def __enter__(self) -> Self:
        self._require_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def begin_iteration(self, iteration: int) -> None:
        """Say that groups finished from now on are collected at ``iteration``. Iterations only go up."""
        self._require_open()
        iteration = operator.index(iteration)
        if iteration < self._iteration:
            raise InvalidDrawError(f"begin_iteration({iteration}) after {self._iteration}; iterations only go up")
        self._appender.roll(iteration)
        self._iteration = iteration

    def close(self) -> None:
        """Write what waits and finish the segments. Closing twice is no error. Raises OSError."""
        if os.getpid() == self._pid and not self._closed:
            self._closed = True
            self._appender.close()

    def _require_open(self) -> None:
        if self._closed:
            raise BankClosedError(f"{self._paths.root}: this writer was closed; open another")
        if os.getpid() != self._pid:
            raise BankClosedError(
                f"{self._paths.root}: this writer belongs to process {self._pid}, which forked this one; open another"
            )

    def _wait_for_successor(self, intake: Intake) -> None:
        self._require_open()  # nothing but close() closes its intake

    def _check_fence(self) -> None:
        self._member.check()
        if not self._paths.session_tmp(self._session).is_dir():
            raise _ended(self._paths, self._session)


def _ended(paths: BankPaths, session: int) -> FencedError:
    return FencedError(f"{paths.root}: session {session} has ended; take a token of the next one")


def _incarnation(paths: BankPaths, session: int, name: str) -> int:
    """Return how many writers of this name the session has had before: no name of a segment may ever recur."""
    for number in itertools.count():
        try:
            os.close(files.create(paths.session_tmp(session) / f"writer-{name}-{number}"))
        except FileExistsError:
            continue
        return number
    raise AssertionError("unreachable")
