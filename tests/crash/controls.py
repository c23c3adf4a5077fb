"""Faults, planted below the public API of the program that is traced, each of which the search must find."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["FAULTS"]

FAULTS: dict[str, Callable[[], None]] = {}
