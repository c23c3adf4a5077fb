"""Segments of the run's other writers, read by the coordinator as they grow."""

from __future__ import annotations

from arrowbank.durable.layout import BankPaths, SegmentName
from arrowbank.durable.stream import Record, follow, map_file
from arrowbank.schema import SEGMENT_SCHEMA

__all__ = ["MAIN", "Follower"]

MAIN = "main"
"""The coordinator's own writer name."""


class Follower:
    """Follows what others write in one session. Not thread-safe."""

    def __init__(self, paths: BankPaths, bank_id: str, session: int) -> None:
        self.sizes: dict[SegmentName, int] = {}
        """Bytes of each of their segments that was seen; its owner takes out those that are archived."""
        self.finished: set[SegmentName] = set()
        """Segments that were closed by their writer, and read to the end."""
        self._paths, self._bank_id, self._session = paths, bank_id, session
        self._places: dict[SegmentName, tuple[int, int]] = {}

    def look(self) -> list[Record]:
        """Return records that were added since the last look, in the order of each file."""
        new: list[Record] = []
        for name in self._paths.segment_names():
            is_theirs = name.session == self._session and name.writer != MAIN and not name.is_carried
            if not is_theirs or name in self.finished:
                continue
            place, after = self._places.get(name, (0, -1))
            data = map_file(self._paths.segments / str(name))
            found, place = follow(data, str(name), self._bank_id, SEGMENT_SCHEMA, place, after)
            new += found.records
            self._places[name] = place, found.records[-1].sequence if found.records else after
            self.sizes[name] = len(data)
            if found.closed:
                self.finished.add(name)
        return new
