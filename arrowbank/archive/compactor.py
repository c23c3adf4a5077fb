"""The background thread that compacts behind the trainer's back."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from arrowbank.archive import merging
from arrowbank.archive.compaction import Made, Task, execute
from arrowbank.archive.store import ArchiveStore, Change
from arrowbank.durable import quarantine
from arrowbank.durable.layout import JournalName
from arrowbank.durable.manifest import Manifest
from arrowbank.errors import CorruptionError, FencedError

__all__ = ["Compactor"]

_log = logging.getLogger("arrowbank")


class Compactor:
    """Runs plan → execute → commit, one at a time. What it meets is kept in ``error`` until a run succeeds."""

    def __init__(
        self,
        store: ArchiveStore,
        *,
        plan: Callable[[int], Task | None],
        roll: Callable[[Task, Made], JournalName],
        forget: Callable[[Task, Made], None],
        check_fence: Callable[[], None],
    ) -> None:
        self.error: Exception | None = None
        self._store, self._root = store, store.paths.root
        self._plan, self._roll, self._forget, self._check_fence = plan, roll, forget, check_fence
        self._damaged: dict[str, CorruptionError] = {}
        """Files that cannot be merged: they are left as they are, and told."""
        self._executor: ThreadPoolExecutor | None = None
        self._running: Future[None] | None = None

    def start(self, settled_by: int, *, last: bool = False) -> None:
        """Archive what checkpoint ``settled_by`` settles, soon. last: leave nothing retired behind."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="arrowbank-compact")
        try:
            self._running = self._executor.submit(self._run, settled_by, last)
        except RuntimeError:  # the interpreter is on its way out, and starts no threads any more
            self._run(settled_by, last)

    @property
    def is_running(self) -> bool:
        """Whether something that was started has not run yet."""
        return self._running is not None and not self._running.done()

    def wait(self) -> None:
        """Wait until all that was started has run."""
        if self._running is not None:
            self._running.result()

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Wait, and end the thread."""
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None

    def _run(self, settled_by: int, last: bool) -> None:
        try:
            if self._store.unfinished is not None:
                self._store.tidy()
            task = self._plan(settled_by)
            if task is not None:
                made = execute(task)
                quarantine.keep(self._store.paths, task.target.parent, task.torn)
                self._store.commit(_change(task, made, self._store.manifest), partial(self._roll, task, made))
                self._forget(task, made)
            self._merge()
            if last:
                self._store.finish()
            self.error = self._store.unfinished or next(iter(self._damaged.values()), None)
            if self._store.unfinished is not None:
                _log.warning("%s: tidying up failed; the next checkpoint tries again: %s", self._root, self.error)
        except Exception as error:  # whatever it is: it must not fail an append, and is told by stats() and close()
            self.error = self._fenced() or error
            self._store.discard_unfinished()
            _log.warning("%s: compaction failed; the next checkpoint tries again: %s", self._root, self.error)

    def _merge(self) -> None:
        """Merge small files while there are too many. Damaged ones are left alone."""
        store = self._store
        while chosen := merging.choose([file for file in store.manifest.files if file.name not in self._damaged]):
            sources = []
            for file in chosen:
                try:
                    sources.append(merging.Source.checked(store.paths.version(store.manifest.version), file))
                except CorruptionError as error:
                    _log.warning("%s", error)
                    self._damaged[file.name] = error
            if len(sources) == len(chosen):
                made = merging.merge(sources, store.target())
                store.commit(Change(file=made, replaced=tuple(file.name for file in chosen)))

    def _fenced(self) -> FencedError | None:
        """Tell a takeover from what it looks like: tmp/ is gone, so no such file."""
        try:
            self._check_fence()
        except FencedError as error:
            return error
        return None


def _change(task: Task, made: Made, manifest: Manifest) -> Change:
    return Change(
        file=made.file,
        retired=task.segments,
        carried=tuple(carried.name for carried in made.carried),
        archived_through=max(task.settled_by, manifest.archived_through),
    )
