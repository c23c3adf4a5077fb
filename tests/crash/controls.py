"""Faults, planted below the public API of the program that is traced: a search that does not find each proves nothing.

Each is a mistake that a bank could make about the disk, and breaks a promise only when the power goes at the wrong
moment: no test that merely kills a process can see it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from arrowbank.archive.store import ArchiveStore, Change
from arrowbank.durable import files
from arrowbank.durable.journal import Journal
from arrowbank.durable.manifest import Manifest

__all__ = ["FAULTS"]


def no_directory_sync() -> None:
    """Names are not made durable."""
    files.fsync_directory = lambda path: None


def no_data_sync() -> None:
    """Records are not made durable."""
    files.sync_data = lambda descriptor: None


def acknowledged_before_the_sync() -> None:
    """A record is synced together with the next one."""
    waiting: list[int] = []

    def late(descriptor: int) -> None:
        for one in waiting:
            os.fdatasync(one)
        waiting[:] = [os.dup(descriptor)]

    files.sync_data = late


def parquet_published_unsynced() -> None:
    """A file of the archive gets its name before its bytes are durable."""

    def unsynced(path: Path) -> int:
        return path.stat().st_size

    files.fsync_file = unsynced


def manifest_replaced_unsynced() -> None:
    """What is renamed to its name has no bytes yet."""

    def write_new(path: Path, data: bytes | memoryview) -> None:
        descriptor = files.create(path)
        files.write_at(descriptor, [data], 0)
        os.close(descriptor)

    files._write_new = write_new


def manifest_written_in_place() -> None:
    """A small file is overwritten rather than replaced."""

    def overwrite(path: Path, data: bytes | memoryview, tmp: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
        size = os.fstat(descriptor).st_size
        files.write_at(descriptor, [data, b" " * max(size - len(data), 0)], 0)
        os.fsync(descriptor)
        os.close(descriptor)
        original_sync(path.parent)

    original_sync = files.fsync_directory
    files.replace = overwrite


def inputs_removed_before_the_manifest() -> None:
    """Segments are unlinked once their rows are in a Parquet file, and only then does the manifest say so."""
    replace_manifest = ArchiveStore._replace_manifest

    def early(self: ArchiveStore, new: Manifest) -> OSError | None:
        files.remove([self.paths.segments / name for name in new.retired], self.paths.segments)
        return replace_manifest(self, new)

    ArchiveStore._replace_manifest = early  # type: ignore[method-assign]  # planted


def manifest_before_what_it_names() -> None:
    """The manifest is replaced first, and the files that it names are published behind it."""
    publish = files.publish
    held: list[tuple[Path, Path]] = []
    replace_manifest = ArchiveStore._replace_manifest

    def hold(unfinished: Path, path: Path) -> None:
        if path.suffix == ".parquet" and path.name != "c000000-s0000.parquet":
            held.append((unfinished, path))
        else:
            publish(unfinished, path)

    def first(self: ArchiveStore, new: Manifest) -> OSError | None:
        failure = replace_manifest(self, new)
        for names in held:
            publish(*names)
        held.clear()
        return failure

    files.publish = hold
    ArchiveStore._replace_manifest = first  # type: ignore[method-assign]  # planted


def failed_syncs_tried_again() -> None:
    """After a sync that failed, another one is believed."""

    def again(descriptor: int) -> None:
        try:
            os.fdatasync(descriptor)
        except OSError:
            os.fdatasync(descriptor)

    files.sync_data = again


def abandonment_not_told() -> None:
    """That an append failed is kept for oneself."""
    Journal.abandon = lambda self, name, first, count: None  # type: ignore[method-assign]  # planted


def inputs_not_retired() -> None:
    """What is archived stays in the segments as well."""
    commit = ArchiveStore.commit

    def forgetful(self: ArchiveStore, change: Change, *rest: Any) -> None:
        commit(self, Change(**{**_fields(change), "retired": ()}), *rest)

    ArchiveStore.commit = forgetful  # type: ignore[method-assign, assignment]  # called as the original is


def _fields(change: Change) -> dict[str, Any]:
    return {name: getattr(change, name) for name in Change.__dataclass_fields__}


FAULTS: dict[str, Callable[[], None]] = {
    fault.__name__: fault
    for fault in (
        no_directory_sync, no_data_sync, acknowledged_before_the_sync, parquet_published_unsynced,
        manifest_replaced_unsynced, manifest_written_in_place, inputs_removed_before_the_manifest,
        manifest_before_what_it_names, failed_syncs_tried_again, abandonment_not_told, inputs_not_retired,
    )
}  # fmt: skip
