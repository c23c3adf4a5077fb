"""How results are shown: commands hand over what they found and never format. Text for people, JSON for programs."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from arrowbank.cli.findings import repair_lines, verify_lines
from arrowbank.demo import progress
from arrowbank.demo.supervisor import DemoResult, DemoSettings, Observer, Rollback
from arrowbank.verification.report import RepairReport, VerifyReport
from arrowbank.verification.verify import Progress

__all__ = ["JsonOutput", "Output", "TextOutput", "output_for"]


class Output(Protocol):
    """Everything that commands have to say."""

    def demo_running(self, settings: DemoSettings) -> AbstractContextManager[Observer]:
        """Show the runs of the demo while they last."""

    def demo(self, result: DemoResult) -> None:
        """Show what came of the demo."""

    def reading(self, command: str) -> AbstractContextManager[Progress]:
        """Show how far the reading of a bank has got."""

    def verified(self, report: VerifyReport) -> None:
        """Show what ``verify`` found."""

    def repaired(self, report: RepairReport) -> None:
        """Show what ``repair`` did."""

    def error(self, message: str) -> None:
        """Say on stderr what went wrong."""


class _Errors:
    def error(self, message: str) -> None:
        """Say on stderr what went wrong."""
        print(f"arrowbank: {message}", file=sys.stderr)


class JsonOutput(_Errors):
    """One JSON object, as the last line of stdout."""

    @contextmanager
    def demo_running(self, settings: DemoSettings) -> Iterator[Observer]:
        """Show nothing."""
        yield _Silence()

    def demo(self, result: DemoResult) -> None:
        """Print the object."""
        print(json.dumps(result.as_json()))

    @contextmanager
    def reading(self, command: str) -> Iterator[Progress]:
        """Show nothing."""
        yield lambda done, total: None

    def verified(self, report: VerifyReport) -> None:
        """Print the object."""
        print(json.dumps(report.as_json()))

    def repaired(self, report: RepairReport) -> None:
        """Print the object."""
        print(json.dumps(report.as_json()))


class TextOutput(_Errors):
    """Progress on stderr, tables on stdout."""

    def __init__(self) -> None:
        self._console = Console()

    @contextmanager
    def demo_running(self, settings: DemoSettings) -> Iterator[Observer]:
        """Show a bar for each run, and a line for each kill and for the rollback."""
        self._print(f"Directory: {settings.directory}")
        bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("reward {task.fields[reward]:.2f}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        )
        with bars:
            yield _Bars(bars, settings)

    def demo(self, result: DemoResult) -> None:
        """Print a table, and how to look at the bank."""
        table = Table("", "", title=_title(result), title_justify="left", show_header=False)
        table.columns[1].justify = "right"
        for name, value in _demo_rows(result):
            table.add_row(name, value)
        self._console.print(table)
        if result.bank:
            self._print(f"The bank: {result.bank}\nLook at it:\n{_polars_line(result.bank)}")

    @contextmanager
    def reading(self, command: str) -> Iterator[Progress]:
        """Show a bar on a terminal, and nothing elsewhere."""
        console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TimeElapsedColumn(),
        )
        with Bars(*columns, console=console, disable=not console.is_terminal, transient=True) as bars:
            task = bars.add_task(command, total=None)
            yield lambda done, total: bars.update(task, completed=done, total=total)

    def verified(self, report: VerifyReport) -> None:
        """Print the verdict, the findings and what to do next."""
        self._print_all(verify_lines(report))

    def repaired(self, report: RepairReport) -> None:
        """Print what was mended, what was lost, what is left and what to do next."""
        self._print_all(repair_lines(report))

    def _print_all(self, lines: Iterable[Text]) -> None:
        for line in lines:
            self._console.print(line, soft_wrap=True, highlight=False)

    def _print(self, text: str) -> None:
        # neither wrapped nor highlighted: lines that people copy
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)


def output_for(*, as_json: bool) -> Output:
    """Return the implementation that ``--json`` asks for."""
    return JsonOutput() if as_json else TextOutput()


class _Silence:
    def advanced(self, run: str, line: progress.Progress) -> None:
        """Ignore it."""

    def killed(self, number: int, moment: str, iteration: int) -> None:
        """Ignore it."""

    def rolled_back(self, from_iteration: int, to_iteration: int) -> None:
        """Ignore it."""


class _Bars:
    """The demo's progress bars. A bar moves back when a resumed run replays."""

    def __init__(self, bars: Bars, settings: DemoSettings) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {
            run: bars.add_task(name, total=settings.iterations, reward=0.0)
            for run, name in (("killed", "killed run"), ("twin", "unkilled twin"))
        }

    def advanced(self, run: str, line: progress.Progress) -> None:
        """Move the run's bar."""
        if line.moment == progress.TRAINED:
            self._bars.update(self._tasks[run], completed=line.iteration, reward=line.value)
        elif line.moment == progress.RESUMED:
            self._bars.update(self._tasks[run], completed=line.iteration)

    def killed(self, number: int, moment: str, iteration: int) -> None:
        """Print the kill above the bars."""
        self._bars.console.print(f"SIGKILL {number} {_WHEN.get(moment, 'in between')}, iteration {iteration}")

    def rolled_back(self, from_iteration: int, to_iteration: int) -> None:
        """Print the rollback above the bars."""
        self._bars.console.print(
            f"Rolled back from iteration {from_iteration} to the model checkpoint at {to_iteration}"
        )


_WHEN = {
    progress.GENERATING: "while generating",
    progress.APPENDING: "while appending",
    progress.CHECKPOINTED: "right after a checkpoint",
}


def _title(result: DemoResult) -> str:
    if result.bank is None:
        return "Without a bank (control): what the kills cost"
    return "Nothing was generated twice" if result.is_right else "A PROMISE WAS BROKEN"


def _demo_rows(result: DemoResult) -> Iterator[tuple[str, str]]:
    when = [_WHEN.get(moment, "in between") for moment in result.moments]
    yield "kills (SIGKILL)", str(result.kills)
    for moment in dict.fromkeys(when):
        yield f"  {moment}", str(when.count(moment))
    if result.bank:
        yield "groups restored", str(result.restored)
        yield "draws replayed", str(result.replayed)
    if result.rolled_back:
        yield from _rollback_rows(result.rolled_back, has_bank=result.bank is not None)
    again = "acknowledged groups" if result.bank else "finished groups"
    yield f"{again} generated again", str(result.regenerated)
    yield "final weights as without kills, bit for bit", "yes" if result.weights_identical else "NO"
    yield "iterations", str(result.iterations)
    yield "groups, rollouts trained on", f"{result.groups:,}, {result.rollouts:,}"
    yield "mean reward, first and last tenth", f"{result.reward_first:.2f}, {result.reward_last:.2f}"
    yield "seconds", f"{result.seconds:.1f}"


def _rollback_rows(rolled_back: Rollback, *, has_bank: bool) -> Iterator[tuple[str, str]]:
    yield "rolled back to an older checkpoint", f"{rolled_back.from_iteration} to {rolled_back.to_iteration}"
    if has_bank:
        yield "  draws replayed from there", str(rolled_back.replayed)
        yield "  groups taken back out of Parquet", str(rolled_back.unarchived)


def _polars_line(bank: Path) -> str:
    query = (
        f"import polars as pl; print(pl.read_parquet('{bank}/archive/*.parquet')"
        ".group_by('env_id').agg(pl.len(), pl.mean('reward', 'num_generated')))"
    )
    is_plain = re.fullmatch(r"[\w./-]+", str(bank))
    return f'  python -c "{query}"' if is_plain else f"  python -c {shlex.quote(query)}"
