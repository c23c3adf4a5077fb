"""The ``arrowbank`` command: one file a command, ``output`` formats for all of them.

Exit codes: 0 fine, 1 damage found or a promise broken, 2 wrong usage. Typer and rich are imported here only.
"""

from __future__ import annotations

from arrowbank.cli.app import main

__all__ = ["main"]
