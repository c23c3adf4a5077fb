"""A manifest of which one bit is flipped: flipping it back is proven by the checksum.

A bit of a value is one bit of what the checksum is of, too, so that each costs a hash alone. Where a bit of a key is
flipped, or the text is no JSON any more, each candidate is read whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import xxhash

from arrowbank.durable.layout import BankPaths
from arrowbank.durable.manifest import Manifest, canonical, parse_manifest
from arrowbank.errors import ArrowbankError

__all__ = ["content_of", "flipped_back"]

_HASHED_BYTES = 1 << 15
_READ_BYTES = 1 << 12
"""Larger manifests are not tried: the time goes with the square of the size."""
_KEY = re.compile(rb'"([^"]*)" *:')
_NOWHERE = BankPaths(Path("MANIFEST.json"))


@lru_cache(maxsize=1)
def flipped_back(text: bytes) -> Manifest | None:
    """Return the manifest that a text was before one bit of it flipped; None when it was none, or is too large."""
    content = content_of(text)
    candidates: Iterable[bytes] = ()
    if content is not None and len(text) <= _HASHED_BYTES:
        candidates = _flipped_values(content)
    for candidate in candidates:
        manifest = _read(candidate)
        if manifest is not None:
            return manifest
    if len(text) > _READ_BYTES:
        return None
    places = range(len(text)) if content is None else _places_of_keys(text)
    return next((found for one in _flipped_at(text, places) if (found := _read(one)) is not None), None)


def content_of(text: bytes) -> dict[str, Any] | None:
    """Return the JSON object that a text is; None when it is none."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _flipped_values(content: dict[str, Any]) -> Iterator[bytes]:
    """Yield what the manifest may have been, where a bit of a value, or of the checksum, was flipped."""
    said = content.get("checksum")
    rest = {key: value for key, value in content.items() if key != "checksum"}
    try:
        whole = canonical(rest)
    except (ValueError, RecursionError):
        return
    right = xxhash.xxh3_128_hexdigest(whole)
    if isinstance(said, str) and sum(one != other for one, other in zip(said, right, strict=False)) == 1:
        yield json.dumps(rest | {"checksum": right}).encode()
    for candidate in _flipped_at(whole, range(len(whole))):
        if xxhash.xxh3_128_hexdigest(candidate) == said:
            fixed = content_of(candidate)
            yield json.dumps((fixed or {}) | {"checksum": said}).encode()


def _flipped_at(text: bytes, places: Iterable[int]) -> Iterator[bytes]:
    changed = bytearray(text)
    for place in places:
        for bit in range(8):
            changed[place] ^= 1 << bit
            yield bytes(changed)
            changed[place] ^= 1 << bit


def _places_of_keys(text: bytes) -> Iterator[int]:
    for found in _KEY.finditer(text):
        yield from range(*found.span(1))


def _read(text: bytes) -> Manifest | None:
    try:
        return parse_manifest(_NOWHERE, text)
    except ArrowbankError:
        return None
