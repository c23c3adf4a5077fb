"""One place creates, publishes, replaces and removes files, so that no other can get the order of syncs wrong."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import arrowbank

PACKAGE = Path(arrowbank.__file__).parent
PLACE = "durable/files.py"
OUTSIDE = ("demo", "cli")
"""Parts that do not write into a bank."""

CHANGING = {
    "open", "write", "writev", "pwrite", "pwritev", "sendfile", "copy_file_range", "fsync", "fdatasync", "sync",
    "rename", "renames", "replace", "link", "symlink", "unlink", "remove", "removedirs", "mkdir", "makedirs", "rmdir",
    "mknod", "mkfifo", "truncate", "ftruncate", "posix_fallocate", "chmod", "chown",
}  # fmt: skip
METHODS = {
    "write_bytes", "write_text", "unlink", "rename", "mkdir", "rmdir", "touch", "symlink_to", "hardlink_to", "rmtree",
    "copyfile", "copytree", "move",
}  # fmt: skip


def changing_calls(source: str) -> list[str]:
    """Return the calls in a module that change the file system by themselves."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Name) and called.id == "open":
            found.append("open")
        elif isinstance(called, ast.Attribute):
            owner = called.value.id if isinstance(called.value, ast.Name) else ""
            if (owner == "os" and called.attr in CHANGING) or (owner != "files" and called.attr in METHODS):
                found.append(f"{owner}.{called.attr}")
    return found


@pytest.mark.parametrize(
    "module",
    [str(path.relative_to(PACKAGE)) for path in sorted(PACKAGE.rglob("*.py")) if path.parent.name not in OUTSIDE],
)
def test_no_module_but_one_changes_the_file_system_by_itself(module: str) -> None:
    calls = changing_calls((PACKAGE / module).read_text())
    if module == PLACE:
        assert {"os.open", "os.fsync", "os.fdatasync", "os.rename", "os.link", "os.unlink"} <= set(calls)
    else:
        assert calls == []


@pytest.mark.parametrize(
    "call", ["os.rename(a, b)", "open(a, 'w')", "a.unlink()", "os.fdatasync(a)", "shutil.rmtree(a)"]
)
def test_such_a_call_would_be_seen(call: str) -> None:
    assert changing_calls(call)


def test_only_the_archive_writes_parquet() -> None:
    """pyarrow opens the file itself; who writes one syncs it before it is published."""
    writers = [path for path in PACKAGE.rglob("*.py") if "ParquetWriter(" in path.read_text()]
    assert [str(path.relative_to(PACKAGE)) for path in writers] == ["archive/parquet.py"]
