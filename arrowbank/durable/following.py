"""Segments of the run's other writers, read by the coordinator as they grow."""

from __future__ import annotations

from collections.abc import Iterable

from arrowbank.durable.layout import BankPaths, SegmentName
from arrowbank.durable.message import PREFIX
from arrowbank.durable.stream import Record, follow, map_file
from arrowbank.schema import SEGMENT_SCHEMA

__all__ = ["MAIN", "Follower"]

MAIN = "main"
"""The coordinator's own writer name."""


class Follower:
    """Follows what others write in one session. Not thread-safe."""

    def __init__(self, paths: BankPaths, bank_id: str, session: int) -> None:
        self.sizes: dict[SegmentName, int] = {}
        """Bytes of each of their segments that was seen and is not archived."""
        self.finished: set[SegmentName] = set()
        """Those of them that were closed by their writer, and read to the end."""
        self._gone: set[SegmentName] = set()
        self._paths, self._bank_id, self._session = paths, bank_id, session
        self._places: dict[SegmentName, tuple[int, int]] = {}

    def look(self) -> list[Record]:
        """Return records that were added since the last look, in the order of each file."""
        new: list[Record] = []
        for name in self._paths.segment_names():
            is_theirs = name.session == self._session and name.writer != MAIN and not name.is_carried
            if is_theirs and name not in self.finished and name not in self._gone:
                new += self._read_on(name)
        return new

    def let_go(self, names: Iterable[SegmentName]) -> None:
        """Say that segments are archived: names never recur."""
        for name in names:
            if self.sizes.pop(name, None) is not None:
                self.finished.discard(name)
                self._places.pop(name, None)
                self._gone.add(name)

    def _read_on(self, name: SegmentName) -> list[Record]:
        path = self._paths.segments / str(name)
        place, after = self._places.get(name, (0, -1))
        data = map_file(path)
        found, place = follow(data, str(name), self._bank_id, SEGMENT_SCHEMA, place, after)
        self._places[name] = place, found.records[-1].sequence if found.records else after
        self.sizes[name] = len(data)
        # The first half of a record's prefix looks like the end mark, but then the record stands behind it already.
        if found.closed and path.stat().st_size == place + PREFIX.size:
            self.finished.add(name)
        return found.records
