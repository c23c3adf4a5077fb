"""The seal of a record: a checksum and the record's place, inside the record's own header, as ``layout`` tells it.

A seal holds for one place in one file of one bank: a record copied elsewhere, or a payload that happens to contain a
sealed record, is not taken for one that was written there.
"""

from __future__ import annotations

from typing import NamedTuple

import xxhash

__all__ = ["BLANK", "KEY", "MAGIC", "Seal", "find", "stamp", "verify"]

KEY = b"arrowbank.seal"
MAGIC = b"arrowbank-seal-1:"
_NUMBER = 16
_DIGEST = 32
_ZEROS = b"0" * _DIGEST
_NUMBERS = 4
_BEFORE_DIGEST = len(MAGIC) + _NUMBERS * (_NUMBER + 1)
BLANK = MAGIC + b":".join([b"0" * _NUMBER] * _NUMBERS) + b":" + _ZEROS


class Seal(NamedTuple):
    """A seal as it reads, not yet checked."""

    place: int
    """Of the seal's text, in bytes from the start of what was searched."""
    sequence: int
    offset: int
    first: int
    length: int
    digest: bytes


def find(data: bytes | memoryview, start: int, end: int) -> Seal | None:
    """Return the first well-formed seal whose text lies in data[start:end]."""
    window = bytes(data[start:end])
    place = window.find(MAGIC)
    while place >= 0:
        text = window[place : place + len(BLANK)]
        numbers = text[len(MAGIC) :].split(b":")
        if len(text) == len(BLANK) and [len(part) for part in numbers] == [_NUMBER] * _NUMBERS + [_DIGEST]:
            try:
                sequence, offset, first, length = (int(part, 16) for part in numbers[:_NUMBERS])
            except ValueError:
                pass
            else:
                return Seal(start + place, sequence, offset, first, length, numbers[_NUMBERS])
        place = window.find(MAGIC, place + 1)
    return None


def stamp(message: bytearray, binding: bytes, *, sequence: int, offset: int, first: int | None = None) -> None:
    """Fill in the seal of a message that is about to stand at ``offset``; ``binding`` is ``bank id/file name/``.

    first: where the first record of the same append stands; None when this is it.
    """
    place = message.index(MAGIC)
    text = b"%s%016x:%016x:%016x:%016x:" % (MAGIC, sequence, offset, offset if first is None else first, len(message))
    digest_place = place + _BEFORE_DIGEST
    message[place:digest_place] = text
    message[digest_place : digest_place + _DIGEST] = _ZEROS
    digest = xxhash.xxh3_128(binding)
    digest.update(message)
    message[digest_place : digest_place + _DIGEST] = digest.hexdigest().encode()


def verify(message: memoryview, found: Seal, binding: bytes, place: int) -> bool:
    """Whether ``message``, whose seal's text is at ``place`` in it, is what was sealed under ``binding``."""
    digest_place = place + _BEFORE_DIGEST
    digest = xxhash.xxh3_128(binding)
    digest.update(message[:digest_place])
    digest.update(_ZEROS)
    digest.update(message[digest_place + _DIGEST :])
    return digest.hexdigest().encode() == found.digest
