"""Carried segments: groups that are live, copied out of what a commit takes away.

Written whole under tmp/ and published by the commit whose manifest names them. A record keeps its rows and its head,
with the session that appended it besides, so that groups keep their order of completion.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from arrowbank.durable.layout import BankPaths, SegmentName
from arrowbank.durable.message import build_message
from arrowbank.durable.segment import GroupRef
from arrowbank.durable.stream import StreamWriter
from arrowbank.schema import SEGMENT_SCHEMA

__all__ = ["Carried", "CarryWriter"]

_FLUSH_BYTES = 16 << 20
SEGMENT_BYTES = 64 << 20
"""A segment gets no further iteration's groups once it has this much: later it is taken and rewritten as a whole."""


@dataclass(frozen=True, slots=True)
class Carried:
    """A finished segment under tmp/."""

    name: SegmentName
    nbytes: int
    groups: tuple[GroupRef, ...]


class CarryWriter:
    """Writes groups to carried segments, one after another."""

    def __init__(self, paths: BankPaths, tmp: Path, bank_id: str, new_name: Callable[[int], SegmentName]) -> None:
        self.done: list[Carried] = []
        self._paths, self._tmp, self._bank_id, self._new_name = paths, tmp, bank_id, new_name
        self._stream: StreamWriter | None = None
        self._name: SegmentName | None = None
        self._messages: list[bytearray] = []
        self._waiting_bytes = 0
        self._groups: list[GroupRef] = []

    def add(self, batch: pa.RecordBatch, head: dict[str, Any]) -> None:
        """Write a group's rows, of ``SEGMENT_SCHEMA``. ``head`` says which session appended it."""
        if self._stream is None:
            self._name = self._new_name(head["iteration"])
            path = self._paths.segments / str(self._name)
            self._stream = StreamWriter.create(path, self._tmp, self._bank_id, SEGMENT_SCHEMA, publish=False)
        assert self._name is not None
        self._messages.append(build_message(batch, head))
        self._waiting_bytes += len(self._messages[-1])
        self._groups.append(GroupRef(head["uid"], self._name, len(self._groups), head))
        if self._waiting_bytes >= _FLUSH_BYTES:
            self._flush(self._stream)

    def may_cut(self) -> None:
        """Say that the groups so far may be separated from those to come."""
        if self._stream is not None and self._stream.offset + self._waiting_bytes >= SEGMENT_BYTES:
            self.finish()

    def finish(self) -> None:
        """Finish the segment. Durability: its bytes survive power loss, its name does not matter yet."""
        stream, self._stream = self._stream, None
        if stream is None or self._name is None:
            return
        try:
            self._flush(stream)
            stream.finish()
        finally:
            stream.close()
        self.done.append(Carried(self._name, stream.offset, tuple(self._groups)))
        self._groups = []

    def close(self) -> None:
        """Let go of a segment that was not finished."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _flush(self, stream: StreamWriter) -> None:
        if self._messages:
            stream.append(self._messages)
        self._messages, self._waiting_bytes = [], 0
