"""What strace wrote, as calls: who made them, when each began and ended, with what, and what came of it.

Everything but a few calls that change nothing is traced, so that a way of writing which nobody thought of is seen, and
refused by ``effects``. Strings are traced in hexadecimal, so that no byte of them can be taken for punctuation.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

__all__ = ["COMMAND", "Call", "calls", "hexed", "path_of", "string_of"]

UNTRACED = (
    "futex", "read", "pread64", "readv", "preadv", "preadv2", "mprotect", "munmap", "brk", "madvise", "rt_sigaction",
    "rt_sigprocmask", "newfstatat", "fstat", "stat", "lstat", "statx", "statfs", "fstatfs", "lseek", "getdents64",
    "access", "faccessat", "faccessat2", "readlink", "readlinkat", "clock_nanosleep", "clock_gettime", "getrandom",
    "gettid", "getpid", "poll", "ppoll", "select", "pselect6", "epoll_wait", "epoll_pwait", "sched_yield", "uname",
    "sched_getaffinity", "set_robust_list", "rseq", "mremap", "sysinfo", "getcwd", "prlimit64",
)  # fmt: skip
"""They change no file."""
_LONGEST = 1 << 22
"""Bytes of a string; a longer one is refused, since it would be cut."""
COMMAND = [
    "strace", "-f", "--seccomp-bpf", "-qq", "-y", "-xx", "-s", str(_LONGEST), "-e", "signal=none",
    "-e", f"trace=!{','.join(UNTRACED)}",
]  # fmt: skip

_LINE = re.compile(r"(\d+) +(\w+)\((.*)\) += (-?\d+|\?|0x[0-9a-f]+)(.*)")
_BEGUN = " <unfinished ...>"
_RESUMED = re.compile(r"(\d+) +<\.\.\. (\w+) resumed>(.*)")


@dataclass(frozen=True, slots=True)
class Call:
    """One system call."""

    begin: int
    """The line at which it began …"""
    end: int
    """… and the one at which it had returned."""
    thread: int
    name: str
    arguments: tuple[str, ...]
    result: int
    """-1 where it failed."""


def calls(lines: Iterable[str], about: str) -> list[Call]:
    """Return the calls that name something below a path, by name or by descriptor, in the order in which they began."""
    mark = hexed(about)
    begun: dict[str, tuple[int, str]] = {}
    found = []
    for number, line in enumerate(lines):
        start, text = number, line.rstrip("\n")
        if text.endswith(_BEGUN):
            begun[text.split(maxsplit=1)[0]] = number, text.removesuffix(_BEGUN)
            continue
        if resumed := _RESUMED.fullmatch(text):
            start, first = begun.pop(resumed[1])
            text = first + resumed[3]
        if mark in text:
            found.append(replace(_parse(text, start), end=number))
    found += [_parse(f"{text}) = ?", number) for number, text in begun.values() if mark in text]
    return sorted(found, key=lambda call: call.begin)


def _parse(text: str, number: int) -> Call:
    match = _LINE.fullmatch(text)
    if match is None:
        raise ValueError(f"strace wrote a line of no known form: {text[:300]}")
    if '"...' in text:
        raise ValueError(f"strace has cut a string: {text[:300]}")
    thread, name, arguments, result, _ = match.groups()
    value = -1 if result == "?" else int(result, 0)
    return Call(number, number, int(thread), name, tuple(_split(arguments)), value)


def _split(text: str) -> Iterator[str]:
    """Split at the commas that are in no brackets."""
    depth, start = 0, 0
    for place, sign in enumerate(text):
        if sign in "[{(":
            depth += 1
        elif sign in "]})":
            depth -= 1
        elif sign == "," and not depth:
            yield text[start:place].strip()
            start = place + 1
    if text[start:].strip():
        yield text[start:].strip()


def hexed(text: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(text))


def string_of(argument: str) -> bytes:
    """Return the bytes of a quoted string."""
    return bytes.fromhex(argument.strip('"').replace("\\x", ""))


def path_of(argument: str) -> Path | None:
    """Return the path that strace tells of a descriptor."""
    match = re.search(r"<([^>]*)>", argument)
    return None if match is None else Path(os.fsdecode(bytes.fromhex(match[1].replace("\\x", ""))))
