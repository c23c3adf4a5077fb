"""The way of a group into the bank: its uid, its encoding, and the wait for the disk, in a thread or an event loop.

A uid is minted once. A group that has one is accepted only as the retry of an append that raised.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

from arrowbank import codec
from arrowbank.durable.appender import Appender, Ticket
from arrowbank.errors import DuplicateGroupError, FencedError
from arrowbank.types import RolloutGroup

__all__ = ["AppendOptions", "Intake"]

_log = logging.getLogger("arrowbank")

_failed: set[str] = set()
"""uids of groups whose append raised in this process: they may be appended again, by another handle, too."""


class AppendOptions(TypedDict):
    """What is said of groups at append."""

    split: str
    evicted: str | None
    source_index: int | None


class Intake:
    """Encodes groups and hands them to an appender. Thread-safe."""

    def __init__(self, appender: Appender, *, session: int, writer: str, on_written: Callable[[], None]) -> None:
        self._appender = appender
        self._session, self._writer = session, writer
        self._on_written = on_written
        self._clock, self._last = threading.Lock(), 0
        self._encoding: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = weakref.WeakKeyDictionary()

    def append(self, groups: Sequence[RolloutGroup], iteration: int, options: AppendOptions) -> list[str]:
        """Make the groups durable with one sync, all or none; return their uids."""
        ticket = self._ticket(groups, iteration, options)
        if ticket.messages:
            try:
                self._appender.commit(ticket)
            finally:
                self._written(ticket)
        return [head["uid"] for head in ticket.heads]

    async def append_async(self, group: RolloutGroup, iteration: Callable[[], int], options: AppendOptions) -> str:
        """Make the group durable without blocking the event loop; appends in flight share a sync."""
        loop = asyncio.get_running_loop()
        async with self._encoding.setdefault(loop, asyncio.Lock()):
            ticket = self._ticket([group], iteration(), options)
            durable = loop.create_future()
            ticket.notify = functools.partial(self._notify, loop, durable)
            try:
                self._appender.commit_soon(ticket)
            except BaseException:
                self._written(ticket)
                raise
            await asyncio.sleep(0)  # many appends in one tick must not stop the loop for all their encodings
        await durable
        uid: str = ticket.heads[0]["uid"]
        return uid

    def _notify(self, loop: asyncio.AbstractEventLoop, durable: asyncio.Future[None], ticket: Ticket) -> None:
        """Tell an append's event loop; called by the thread that wrote."""
        self._written(ticket)
        try:
            loop.call_soon_threadsafe(_resolve, durable, ticket.error)
        except RuntimeError:
            _log.debug("an event loop was closed while an append was in flight")

    def _written(self, ticket: Ticket) -> None:
        """Note how an append went. Of one that was fenced, the new coordinator says what has become: no retry."""
        if isinstance(ticket.error, FencedError):
            return
        if ticket.error is not None or not ticket.done:
            _failed.update(head["uid"] for head in ticket.heads)
        else:
            self._on_written()

    def _ticket(self, groups: Sequence[RolloutGroup], iteration: int, options: AppendOptions) -> Ticket:
        """Encode groups; on any refusal none of them is changed."""
        if not options["split"]:
            raise ValueError('split "": name the split, "train" for groups to train on')
        messages: list[bytearray] = []
        heads: list[dict[str, Any]] = []
        retried: list[str] = []
        try:
            if len({id(group) for group in groups}) < len(groups):
                raise DuplicateGroupError("one append was given the same group twice")
            for group in groups:
                uid = self._uid_for(group, retried)
                encoded = codec.encode_group(
                    group,
                    uid=uid,
                    iteration=iteration,
                    session=self._session,
                    writer=self._writer,
                    completed_at_us=self._now(),
                    **options,
                )
                messages.append(self._appender.template.build(encoded.columns, encoded.head))
                heads.append(encoded.head)
        except BaseException:
            _failed.update(retried)
            raise
        for group, head in zip(groups, heads, strict=True):
            group.uid = head["uid"]
        return Ticket(messages, heads, iteration)

    def _now(self) -> int:
        """Return the time in µs, later than at any call before: groups are ordered by it, whatever the clock does."""
        with self._clock:
            self._last = max(self._last + 1, time.time_ns() // 1000)
            return self._last

    def _uid_for(self, group: RolloutGroup, retried: list[str]) -> str:
        if not isinstance(group, RolloutGroup):
            raise TypeError(f"expected a RolloutGroup, found {type(group).__name__}")
        if group.uid is None:
            return uuid.uuid4().hex
        try:
            _failed.remove(group.uid)  # in one step: of two retries at once, one is a duplicate
        except KeyError:
            raise DuplicateGroupError(
                f"the group has uid {group.uid}: it was appended before, or by somebody who lost the bank meanwhile, "
                "and may be pending. To append a copy, set uid to None"
            ) from None
        retried.append(group.uid)
        return group.uid


def _resolve(durable: asyncio.Future[None], error: Exception | None) -> None:
    if durable.done():
        return  # whoever waited was cancelled
    if error is None:
        durable.set_result(None)
    else:
        durable.set_exception(error)
