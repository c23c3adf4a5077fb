"""Traced calls as ordered effects on files: bytes written, names given and taken, syncs; and facts told in between.

The volatile tree is followed as the kernel sees it, so that every effect names inodes and directories, not paths. A
call on a path of the bank that is not modelled here (a shared writable mapping, ftruncate, fallocate, sendfile,
copy_file_range, chmod …) raises ``Unmodelled``: a trace that is only half understood proves nothing.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from crash.trace import Call, path_of, string_of

__all__ = ["FACTS", "ROOT", "Change", "Effect", "Fact", "Inode", "Sync", "Trace", "Tree", "Unmodelled", "Write"]

FACTS = "facts"
"""The file beside the bank to which the traced program tells what was acknowledged."""
ROOT = 0
"""The inode of the directory that the bank lies in, which is there and durable."""


class Unmodelled(Exception):
    """A call on the bank's files that this model does not know."""


@dataclass(slots=True)
class Inode:
    """A file, a directory or a link, as the running system sees it."""

    kind: str
    """ "file", "directory" or "link"."""
    target: str = ""
    base: bytes = b""
    """What a file held, durably, before the trace began."""
    entries: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Write:
    begin: int
    end: int
    inode: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Change:
    """Names given or taken in one step: (directory, name, inode or None)."""

    begin: int
    end: int
    entries: tuple[tuple[int, str, int | None], ...]
    home: int
    """The directory whose sync makes it durable: of a rename the one of the new name."""


@dataclass(frozen=True, slots=True)
class Sync:
    begin: int
    end: int
    inode: int
    failed: bool = False
    """Then what was waiting for it is never promised any more, whatever a later sync says."""


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that the program told: see ``facts``."""

    begin: int
    end: int
    event: list[Any]


Effect: TypeAlias = Write | Change | Sync | Fact


class Tree:
    """Inodes by number; ``ROOT`` is the directory that the bank lies in."""

    def __init__(self) -> None:
        self.inodes: list[Inode] = [Inode("directory")]

    @classmethod
    def of(cls, root: Path) -> Tree:
        """Read a directory."""
        tree = cls()
        tree._read(ROOT, root)
        return tree

    def _read(self, directory: int, path: Path) -> None:
        for entry in sorted(path.iterdir()):
            if entry.is_symlink():
                made = self.add(Inode("link", target=os.readlink(entry)))
            elif entry.is_dir():
                made = self.add(Inode("directory"))
                self._read(made, entry)
            else:
                made = self.add(Inode("file", base=entry.read_bytes()))
            self.inodes[directory].entries[entry.name] = made

    def add(self, inode: Inode) -> int:
        self.inodes.append(inode)
        return len(self.inodes) - 1

    def find(self, start: int, path: str) -> int | None:
        """Return the inode that a path leads to, through links but for its last part."""
        at: int | None = start
        parts = [part for part in path.split("/") if part not in ("", ".")]
        while parts:
            if at is None or ".." in parts:
                return None
            name = parts.pop(0)
            before, at = at, self.inodes[at].entries.get(name)
            if at is not None and parts and self.inodes[at].kind == "link":
                at = self.find(before, self.inodes[at].target)
        return at


@dataclass(slots=True)
class Trace:
    """A run's effects, on top of a tree that was durable when it began."""

    base: dict[int, dict[str, int]]
    """Directory → its entries before the run."""
    inodes: list[Inode]
    effects: list[Effect]

    @classmethod
    def of(cls, calls: Iterable[Call], root: Path, tree: Tree | None = None) -> Trace:
        """Follow the calls of a run in ``root``, where at first there was what ``tree`` holds."""
        tree = tree or Tree()
        base = {at: dict(inode.entries) for at, inode in enumerate(tree.inodes) if inode.kind == "directory"}
        follower = _Follower(root, tree)
        # A descriptor is there when the open has returned, and free for another one as soon as a close began.
        for call in sorted(calls, key=lambda call: call.end if call.name in ("openat", "fcntl") else call.begin):
            follower.follow(call)
        follower.effects.sort(key=lambda effect: effect.begin)
        return cls(base, tree.inodes, follower.effects)


class _Follower:
    """Keeps the volatile tree and the descriptors of the traced process."""

    def __init__(self, root: Path, tree: Tree) -> None:
        self.root = root
        self.tree = tree
        self.effects: list[Effect] = []
        self._open: dict[int, int] = {}
        self._facts: set[int] = set()
        self._said = b""
        names: dict[str, Callable[[Call], None]] = {
            "openat": self._openat, "close": self._close, "fcntl": self._fcntl, "mmap": self._mmap,
            "write": self._write, "pwrite64": self._pwrite, "writev": self._writev, "pwritev": self._pwritev,
            "pwritev2": self._pwritev, "fsync": self._sync, "fdatasync": self._sync, "rename": self._rename,
            "renameat": self._rename, "renameat2": self._rename, "link": self._link, "linkat": self._link,
            "unlink": self._unlink, "unlinkat": self._unlink, "rmdir": self._unlink, "mkdir": self._mkdir,
            "mkdirat": self._mkdir, "symlink": self._symlink, "symlinkat": self._symlink, "ioctl": self._ioctl,
            "utimensat": lambda call: None, "fadvise64": lambda call: None, "chdir": lambda call: None,
        }  # fmt: skip
        self._names = names

    def follow(self, call: Call) -> None:
        handle = self._names.get(call.name)
        if handle is None:
            raise Unmodelled(f"{call.name}({', '.join(call.arguments)[:200]})")
        if call.result != -1:
            handle(call)

    # -- descriptors

    def _openat(self, call: Call) -> None:
        directory, name = self._place(call, 0)
        flags = call.arguments[2]
        if directory == ROOT and name == FACTS:
            self._facts.add(call.result)
            return
        if "O_TMPFILE" in flags:
            raise Unmodelled("a file without a name")
        inode = self.tree.find(directory, name) if name else directory
        if inode is None and "O_CREAT" in flags:
            inode = self.tree.add(Inode("file"))
            self._change(call, (directory, name, inode))
        elif inode is not None and self.tree.inodes[inode].kind == "link":
            inode = self.tree.find(directory, self.tree.inodes[inode].target)
        if inode is None:
            raise Unmodelled(f"open of {name!r}, which nobody made")
        if "O_TRUNC" in flags and not self._is_new(inode):
            raise Unmodelled(f"open of {name!r} with O_TRUNC")
        if "O_APPEND" in flags:
            raise Unmodelled(f"open of {name!r} with O_APPEND")
        self._open[call.result] = inode

    def _is_new(self, inode: int) -> bool:
        written = any(isinstance(effect, Write) and effect.inode == inode for effect in self.effects)
        return not written and not self.tree.inodes[inode].base

    def _close(self, call: Call) -> None:
        self._open.pop(_number(call.arguments[0]), None)
        self._facts.discard(_number(call.arguments[0]))

    def _fcntl(self, call: Call) -> None:
        if call.arguments[1].startswith("F_DUPFD"):
            self._open[call.result] = self._inode(call)
        elif call.arguments[1] not in ("F_GETFL", "F_GETFD", "F_SETFD"):
            raise Unmodelled(f"fcntl {call.arguments[1]}")

    def _ioctl(self, call: Call) -> None:
        if call.arguments[1] != "TCGETS":  # whether it is a terminal
            raise Unmodelled(f"ioctl {call.arguments[1]}")

    def _mmap(self, call: Call) -> None:
        if "PROT_WRITE" in call.arguments[2] and "MAP_PRIVATE" not in call.arguments[3]:
            raise Unmodelled("a shared writable mapping")

    def _inode(self, call: Call) -> int:
        descriptor = _number(call.arguments[0])
        if descriptor not in self._open:
            raise Unmodelled(f"{call.name} on descriptor {descriptor} of {path_of(call.arguments[0])}")
        return self._open[descriptor]

    # -- bytes

    def _write(self, call: Call) -> None:
        data = string_of(call.arguments[1])[: call.result]
        if _number(call.arguments[0]) in self._facts:
            self._tell(call, data)
        else:
            self._append(call, data)

    def _append(self, call: Call, data: bytes) -> None:
        """Write at the descriptor's position: only known of one that has written the whole file, in order."""
        inode = self._inode(call)
        if self.tree.inodes[inode].base:
            raise Unmodelled("write at a position that is not known")
        end = max((one.offset + len(one.data) for one in self._writes(inode)), default=0)
        self.effects.append(Write(call.begin, call.end, inode, end, data))

    def _writes(self, inode: int) -> list[Write]:
        return [effect for effect in self.effects if isinstance(effect, Write) and effect.inode == inode]

    def _writev(self, call: Call) -> None:
        self._append(call, _vector(call))

    def _pwrite(self, call: Call) -> None:
        data = string_of(call.arguments[1])[: call.result]
        self.effects.append(Write(call.begin, call.end, self._inode(call), int(call.arguments[3]), data))

    def _pwritev(self, call: Call) -> None:
        if len(call.arguments) > 4 and call.arguments[4] != "0":
            raise Unmodelled(f"pwritev2 with flags {call.arguments[4]}")
        self.effects.append(Write(call.begin, call.end, self._inode(call), int(call.arguments[3]), _vector(call)))

    def _sync(self, call: Call) -> None:
        self.effects.append(Sync(call.begin, call.end, self._inode(call)))

    def _tell(self, call: Call, data: bytes) -> None:
        *lines, self._said = (self._said + data).split(b"\n")
        for line in lines:
            event = json.loads(line)
            if event[0] == "sync failed":
                self.effects.append(Sync(call.begin, call.end, self._open[event[1]], failed=True))
            else:
                self.effects.append(Fact(call.begin, call.end, event))

    # -- names

    def _place(self, call: Call, at: int) -> tuple[int, str]:
        """Return directory and name of a path: argument ``at``, behind a directory's descriptor or not."""
        first = call.arguments[at]
        if first.startswith('"'):
            return self._parent(os.fsdecode(string_of(first)))
        path = os.fsdecode(string_of(call.arguments[at + 1]))
        if first.startswith("AT_FDCWD"):
            return self._parent(path)
        if "/" in path:
            raise Unmodelled(f"{call.name} of {path!r} below a descriptor")
        return self._open[_number(first)], path

    def _parent(self, path: str) -> tuple[int, str]:
        if not os.path.isabs(path):
            raise Unmodelled(f"the relative path {path!r}")
        inside = os.path.relpath(path, self.root)
        if inside == ".":
            return ROOT, ""
        above, name = os.path.split(inside)
        directory = self.tree.find(ROOT, above)
        if directory is not None and self.tree.inodes[directory].kind == "link":
            directory = self.tree.find(self.tree.find(ROOT, os.path.dirname(above)) or ROOT,
                                       self.tree.inodes[directory].target)  # fmt: skip
        if directory is None or inside.startswith(".."):
            raise Unmodelled(f"the path {path!r}: no directory of it is known")
        return directory, name

    def _pair(self, call: Call) -> tuple[tuple[int, str], tuple[int, str]]:
        """Return both places of a call with two paths."""
        has_descriptors = not call.arguments[0].startswith('"')
        return self._place(call, 0), self._place(call, 2 if has_descriptors else 1)

    def _change(self, call: Call, *entries: tuple[int, str, int | None]) -> None:
        for directory, name, inode in entries:
            if inode is None:
                del self.tree.inodes[directory].entries[name]
            else:
                self.tree.inodes[directory].entries[name] = inode
        self.effects.append(Change(call.begin, call.end, entries, entries[-1][0]))

    def _rename(self, call: Call) -> None:
        if len(call.arguments) == 5 and call.arguments[4] not in ("0", "RENAME_NOREPLACE"):
            raise Unmodelled(f"renameat2 with {call.arguments[4]}")
        (directory, name), (target, new) = self._pair(call)
        self._change(call, (directory, name, None), (target, new, self.tree.inodes[directory].entries[name]))

    def _link(self, call: Call) -> None:
        (directory, name), (target, new) = self._pair(call)
        self._change(call, (target, new, self.tree.inodes[directory].entries[name]))

    def _unlink(self, call: Call) -> None:
        self._change(call, (*self._place(call, 0), None))

    def _mkdir(self, call: Call) -> None:
        self._change(call, (*self._place(call, 0), self.tree.add(Inode("directory"))))

    def _symlink(self, call: Call) -> None:
        target = os.fsdecode(string_of(call.arguments[0]))
        self._change(call, (*self._place(call, 1), self.tree.add(Inode("link", target=target))))


def _number(argument: str) -> int:
    return int(argument.partition("<")[0])


_PART = re.compile(r'iov_base="([^"]*)"')


def _vector(call: Call) -> bytes:
    return b"".join(string_of(part) for part in _PART.findall(call.arguments[1]))[: call.result]
