"""Watches how many live bytes a bank has."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

__all__ = ["Gauge"]

_log = logging.getLogger("arrowbank")


class Gauge:
    """Warns of too many live bytes, once until compaction has brought them down. Takes no lock but its own."""

    def __init__(self, root: Path, max_bytes: int | None, live_bytes: Callable[[], int]) -> None:
        self._root, self._max_bytes, self._live_bytes = root, max_bytes, live_bytes
        self._warned = False
        self._lock = threading.Lock()

    def rose(self) -> None:
        """Say that something was appended."""
        if self._max_bytes is None or self._warned or self._live_bytes() <= self._max_bytes:
            return
        with self._lock:
            if self._warned:
                return
            self._warned = True
        _log.warning(
            "%s: %s live bytes are more than max_bytes %s. Nothing is dropped; record checkpoints more often, or let "
            "generation run less far ahead (lag), so that compaction can archive more",
            self._root,
            f"{self._live_bytes():,}",
            f"{self._max_bytes:,}",
        )

    def fell(self) -> None:
        """Say that something was archived."""
        if self._max_bytes is not None and self._live_bytes() <= self._max_bytes:
            self._warned = False
