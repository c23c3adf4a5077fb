"""Arrow arrays written straight into their buffers.

Building a batch through ``pa.array`` and serialising it costs more than the disk does. ``Columns`` lays down field
nodes and buffers in the order of the Arrow columnar format; ``durable.message`` puts them behind a header.
Source: https://arrow.apache.org/docs/format/Columnar.html (validity bits, offsets, data; lists before their child).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["Buffer", "Columns"]

Buffer: TypeAlias = "bytes | bytearray | memoryview | array[Any] | NDArray[Any]"

_NONE = b""


class Columns:
    """Field nodes and buffers of one record batch, gathered column by column."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.nodes: list[int] = []
        """Length and null count of each field, depth first."""
        self.buffers: list[Buffer] = []
        """An empty one stands for a validity bitmap that is not needed."""

    @property
    def nbytes(self) -> int:
        return sum(_nbytes(buffer) for buffer in self.buffers)

    def strings(self, values: Sequence[bytes | None]) -> None:
        """A string or binary column with 32-bit offsets, from UTF-8 bytes."""
        validity = self._node(values)
        self.buffers += (validity, _offsets(len(value) if value else 0 for value in values))
        self.buffers.append(_NONE.join(value for value in values if value))

    def constant(self, value: bytes | None) -> None:
        """A string column with the same value in every row."""
        self.strings([value] * self.rows)

    def numbers(self, code: str, values: Sequence[Any]) -> None:
        """A fixed-width column; ``code`` as of ``array.array``: "i", "q", "d"."""
        validity = self._node(values)
        if validity:
            values = [0 if value is None else value for value in values]
        self.buffers += (validity, array(code, values))

    def lists(self, lengths: Sequence[int | None]) -> None:
        """A list column's own part; its child must follow."""
        validity = self._node(lengths)
        self.buffers += (validity, _offsets(length or 0 for length in lengths))

    def child(
        self, parts: Sequence[NDArray[Any]], dtype: Any, known: Sequence[NDArray[np.bool_]] | None = None
    ) -> None:
        """A list's number elements, one array a list; ``known`` tells which elements are not null."""
        count = sum(map(len, parts))
        nulls = 0 if known is None else count - sum(int(np.count_nonzero(part)) for part in known)
        self.nodes += (count, nulls)
        self.buffers.append(_bits(known, count) if known is not None and nulls else _NONE)
        self.buffers.append(_joined(parts, dtype))

    def bits_child(self, parts: Sequence[NDArray[np.bool_]]) -> None:
        """A list's bool elements."""
        count = sum(map(len, parts))
        self.nodes += (count, 0)
        self.buffers += (_NONE, _bits(parts, count))

    def strings_child(self, values: Sequence[bytes]) -> None:
        """A list's string elements."""
        self.nodes += (len(values), 0)
        self.buffers += (_NONE, _offsets(map(len, values)), _NONE.join(values))

    def large_binaries_child(self, values: Sequence[Buffer]) -> None:
        """A list's binary elements with 64-bit offsets."""
        self.nodes += (len(values), 0)
        offsets = array("q", accumulate(map(_nbytes, values), initial=0))
        self.buffers += (_NONE, offsets, _NONE.join(values))  # type: ignore[arg-type]  # NumPy arrays are buffers

    def large_binaries(self, values: Sequence[bytes | None]) -> None:
        """A binary column with 64-bit offsets."""
        validity = self._node(values)
        offsets = array("q", accumulate((len(value) if value else 0 for value in values), initial=0))
        self.buffers += (validity, offsets, _NONE.join(value for value in values if value))

    def _node(self, values: Sequence[Any]) -> bytes:
        """Put down the field node of a column with these values; return its validity bitmap, or nothing."""
        nulls = values.count(None)
        self.nodes += (len(values), nulls)
        if not nulls:
            return _NONE
        if nulls == len(values):
            return bytes((nulls + 7) // 8)
        return np.packbits([value is not None for value in values], bitorder="little").tobytes()


def _offsets(lengths: Iterable[int]) -> array[int]:
    return array("i", accumulate(lengths, initial=0))


def _bits(parts: Sequence[NDArray[np.bool_]], count: int) -> NDArray[Any]:
    return np.packbits(_joined(parts, np.bool_), bitorder="little") if count else np.zeros(0, np.uint8)


def _joined(parts: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    if len(parts) == 1:
        return np.ascontiguousarray(parts[0])
    return np.concatenate(parts) if parts else np.zeros(0, dtype)


def _nbytes(buffer: Buffer) -> int:
    return (
        buffer.nbytes if isinstance(buffer, np.ndarray | memoryview) else len(buffer) * getattr(buffer, "itemsize", 1)
    )
