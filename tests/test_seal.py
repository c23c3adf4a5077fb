"""The seal binds a record to its bytes and to its place."""

from __future__ import annotations

from typing import Any

import pytest

from arrowbank.durable import seal

BOUND = b"bank/file/"


def sealed(body: bytes = b"payload" * 8, *, bound: bytes = BOUND, **place: Any) -> bytearray:
    message = bytearray(b"head" * 4 + seal.BLANK + body)
    seal.stamp(message, bound, **{"sequence": 3, "offset": 1024} | place)
    return message


def holds(message: bytes, bound: bytes = BOUND) -> bool:
    found = seal.find(message, 0, len(message))
    return found is not None and seal.verify(memoryview(message), found, bound, found.place)


def test_a_seal_tells_sequence_offset_first_offset_and_length() -> None:
    message = sealed(first=512)
    found = seal.find(message, 0, len(message))
    assert found is not None
    assert (found.sequence, found.offset, found.first, found.length) == (3, 1024, 512, len(message))
    assert holds(message)


def test_a_record_alone_in_its_append_is_its_first() -> None:
    found = seal.find(sealed(), 0, 10_000)
    assert found is not None
    assert found.first == found.offset


def test_every_single_bit_flip_breaks_it() -> None:
    message = sealed()
    for bit in range(8 * len(message)):
        message[bit // 8] ^= 1 << bit % 8
        assert not holds(message), bit
        message[bit // 8] ^= 1 << bit % 8
    assert holds(message)


@pytest.mark.parametrize("bound", [b"", b"bank/fil/", b"bank/files/", b"other/file/"])
def test_it_holds_for_one_bank_and_file_only(bound: bytes) -> None:
    assert not holds(sealed(), bound)


def test_stamping_again_gives_the_same_bytes() -> None:
    message = sealed()
    again = bytearray(message)
    seal.stamp(again, BOUND, sequence=3, offset=1024)
    assert again == message
    seal.stamp(again, BOUND, sequence=4, offset=1024)
    assert again != message


@pytest.mark.parametrize(
    "text",
    [
        b"",
        seal.MAGIC,
        seal.BLANK[:-1],
        seal.BLANK.replace(b"0" * 16, b"g" * 16, 1),
        seal.BLANK.replace(b":0", b"0:", 3),
        seal.MAGIC * 20,
    ],
)
def test_what_is_not_well_formed_is_no_seal(text: bytes) -> None:
    assert seal.find(text, 0, len(text)) is None
    found = seal.find(text + seal.BLANK, 0, len(text) + len(seal.BLANK))
    assert found is None or found.place >= len(text) - len(seal.BLANK)


def test_a_seal_is_found_only_when_it_lies_wholly_inside() -> None:
    data = b"x" * 10 + seal.BLANK
    assert seal.find(data, 10, len(data)) is not None
    assert seal.find(data, 11, len(data)) is None
    assert seal.find(data, 0, len(data) - 1) is None
