"""The archive's files: version directories, what is in them, and the commits that change them.

``archive`` points at one version directory, which holds only complete Parquet files. A commit that only adds renames
its file into that directory and then replaces the manifest. A file that the manifest does not name was left by a crash
between the two; its inputs are still live, so it is removed at open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from arrowbank.archive.compaction import write_parquet
from arrowbank.durable import files
from arrowbank.durable.layout import ArchiveName, BankPaths, SegmentName
from arrowbank.durable.manifest import ArchiveFile, Manifest, create_manifest, write_manifest

__all__ = ["ArchiveStore", "create_bank"]


def create_bank(paths: BankPaths, tmp: Path) -> None:
    """Make an archive of one file without rows, then the manifest, which makes it a bank."""
    manifest = create_manifest()
    directory = paths.version(manifest.version)
    files.make_directories([directory])
    name = str(ArchiveName(0, 0))
    write_parquet(tmp / name, [])
    files.publish(tmp / name, directory / name)
    _point(paths, tmp, manifest.version)
    write_manifest(paths, manifest, tmp)


class ArchiveStore:
    """Commits changes of what is archived. Its owner serialises calls."""

    def __init__(self, paths: BankPaths, manifest: Manifest, session: int, check_fence: Callable[[], None]) -> None:
        self.paths = paths
        self.manifest = manifest
        self._session = session
        self._check_fence = check_fence
        self._tmp = paths.session_tmp(session)
        self._unlinked: frozenset[str] = frozenset()
        """Retired segments whose unlinking is durable: the next commit need not name them any more."""

    def target(self) -> Path:
        """Where the next commit's file is to be written."""
        return self._tmp / str(ArchiveName(self.manifest.commit + 1, self._session))

    def settle(self) -> None:
        """At open: finish what a crash cut short. Unlisted files go, the link is set right, retired inputs go."""
        directory = self.paths.version(self.manifest.version)
        listed = {file.name for file in self.manifest.files} | {str(ArchiveName(0, 0))}
        stray = [entry for entry in directory.iterdir() if entry.name not in listed]
        if stray:
            self._check_fence()  # after listing: what a later session adds is not ours to remove
            files.remove(stray, directory)
        if not self.paths.archive.is_symlink() or self.paths.archive.readlink() != _target(self.manifest.version):
            _point(self.paths, self._tmp, self.manifest.version)
        self._unlink_retired(self.manifest.retired)

    def add(self, made: ArchiveFile | None, inputs: Iterable[SegmentName], archived_through: int) -> None:
        """Commit a file made under tmp/ in place of its inputs.

        Durability: on return the file and the manifest that names it survive power loss. Inputs of earlier commits
        are unlinked then, those of this one by the next commit, so that readers holding the old manifest can go on.
        """
        old = self.manifest
        self._check_fence()
        retired = {name: at for name, at in old.retired.items() if name not in self._unlinked}
        if made is not None:
            files.publish(self._tmp / made.name, self.paths.version(old.version) / made.name)
        commit = old.commit + 1
        new = old.model_copy(
            update={
                "commit": commit,
                "files": (*old.files, made) if made else old.files,
                "archived_through": max(archived_through, old.archived_through),
                "retired": retired | dict.fromkeys(map(str, inputs), commit),
            }
        )
        write_manifest(self.paths, new, self._tmp)
        self.manifest = new
        self._unlink_retired(name for name, at in new.retired.items() if at < commit)

    def finish(self) -> None:
        """Commit until nothing retired is left behind: at the end of a run."""
        while self.manifest.retired:
            self.add(None, (), self.manifest.archived_through)

    def _unlink_retired(self, names: Iterable[str]) -> None:
        gone = frozenset(names)
        if gone:
            self._check_fence()
            files.remove([self.paths.segments / name for name in gone], self.paths.segments)
        self._unlinked = gone


def _target(version: int) -> Path:
    return Path(".archive", f"v{version:06d}")


def _point(paths: BankPaths, tmp: Path, version: int) -> None:
    files.repoint(paths.archive, str(_target(version)), tmp)
