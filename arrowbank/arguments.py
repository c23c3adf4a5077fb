"""Command-line flags of a durable rollout bank, by Megatron-LM's names.

--rl-durable-rollout-bank              have one
--rl-rollout-bank-dir DIR              where; <save>/rollout_bank if not given and the trainer has a --save
--rl-rollout-bank-max-bytes SIZE       warn when live bytes pass it: 200GB, 1.5TiB, a number of bytes; 0 for never
"""

from __future__ import annotations

import argparse
import re
from fractions import Fraction
from pathlib import Path
from typing import TypeVar

from arrowbank.bank import RolloutBank

__all__ = ["add_rollout_bank_args", "bank_from_args"]

_Parser = TypeVar("_Parser", bound=argparse.ArgumentParser)

_SIZE = re.compile(r"([0-9]{1,18})|([0-9]{1,18}(?:\.[0-9]{1,18})?) ?([kmgtp])(i?)b", re.IGNORECASE)
_ENABLE, _DIR, _MAX_BYTES = "--rl-durable-rollout-bank", "--rl-rollout-bank-dir", "--rl-rollout-bank-max-bytes"


def add_rollout_bank_args(parser: _Parser) -> _Parser:
    """Add the flags to the parser, and return it.

    Flags that it has, as Megatron's does, stay what they are, but for the size: that learns its units.
    """
    present = {flag: action for action in parser._actions for flag in action.option_strings}
    group = parser.add_argument_group(title="rl")
    if _ENABLE not in present:
        group.add_argument(
            _ENABLE,
            action="store_true",
            help="Keep finished rollout groups in a durable bank, from which a resumed run takes them again.",
        )
    if _DIR not in present:
        group.add_argument(
            _DIR, type=str, default=None, help="Directory of the bank. Default: <save>/rollout_bank if there is --save."
        )
    if _MAX_BYTES in present:
        present[_MAX_BYTES].type = _size
    else:
        group.add_argument(
            _MAX_BYTES,
            type=_size,
            default=0,
            metavar="SIZE",
            help="Warn when the bank's live bytes pass this: 200GB, 1.5TiB or a number of bytes. Nothing is ever "
            "dropped. 0: never.",
        )
    return parser


def bank_from_args(args: argparse.Namespace, rank: int = 0) -> RolloutBank | None:
    """Open the bank that parsed flags ask for; None when they ask for none, and on every rank but 0.

    Raises: ValueError when no directory is named; OSError naming the directory when it cannot be used; and what
    ``RolloutBank.open`` raises.
    """
    if rank != 0 or not getattr(args, "rl_durable_rollout_bank", False):
        return None
    directory = getattr(args, "rl_rollout_bank_dir", None)
    if not directory and getattr(args, "save", None):
        directory = Path(args.save) / "rollout_bank"
    if not directory:
        raise ValueError(f"{_ENABLE} without {_DIR}: say where the bank is to be")
    try:
        return RolloutBank.open(directory, max_bytes=getattr(args, "rl_rollout_bank_max_bytes", 0) or None)
    except OSError as error:
        if error.errno is None:  # not the system's: it says what it needs to
            raise
        raise OSError(error.errno, f"{_DIR} {directory}: {error.strerror}", error.filename) from error


def _size(text: str) -> int:
    """Parse a number of bytes. Raises ArgumentTypeError, which argparse prints with the flag's name."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size: use a number of bytes, or one with a unit as in 200GB or 1.5TiB (kB, MB, GB, TB, PB "
            "count in thousands, KiB, MiB, GiB, TiB, PiB in 1,024s)"
        )
    plain, number, prefix, binary = found.groups()
    if plain is not None:
        return int(plain)
    return int(Fraction(number) * (1024 if binary else 1000) ** ("kmgtp".index(prefix.lower()) + 1))
