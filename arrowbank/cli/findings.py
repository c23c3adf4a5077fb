"""Findings as lines for people: what, where, what next."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict

from rich.text import Text

from arrowbank.verification.report import Finding, Mending, RepairReport, VerifyReport, counted, printable

__all__ = ["repair_lines", "verify_lines"]

_MOST = 20
"""Of each kind; ``--json`` has all of them."""


def verify_lines(report: VerifyReport) -> Iterator[Text]:
    """Yield what ``verify`` shows."""
    yield _verdict(report.path, len(report.damage))
    counts = ", ".join(f"{count:,} {name}" for name, count in asdict(report.counts).items())
    yield Text(f"read: {counts} in {report.seconds:.2f} s")
    yield Text(f"held by: {report.holder}")
    yield from _section("damage", report.damage, "bold red")
    yield from _section("for information", report.notes, "yellow")
    yield from _next(report.path, report.damage)


def repair_lines(report: RepairReport) -> Iterator[Text]:
    """Yield what ``repair`` shows."""
    if report.dry_run:
        yield Text.assemble((printable(report.path), "bold"), ": a dry run, nothing was changed")
    elif report.mended:
        yield Text.assemble((printable(report.path), "bold"), ": ", (f"{len(report.mended)} mended", "bold green"))
    else:
        yield Text.assemble((printable(report.path), "bold"), ": nothing was changed")
    yield from _section("would be mended" if report.dry_run else "mended", report.mended, "green")
    yield from _lost(report)
    yield from _section("left as it is", report.left, "bold red")
    if report.quarantined:
        yield Text(f"\nquarantine/ tells of {counted(report.quarantined, 'place')} of damage")
    if not report.mended and not report.left:
        yield Text("there is nothing to mend")
    if report.dry_run:
        yield Text(f"held by: {report.holder}")
    if report.dry_run and report.mended:
        yield Text("\nnext: the same without --dry-run")
    else:
        yield from _next(report.path, report.left)


def _verdict(path: str, damaged: int) -> Text:
    if not damaged:
        return Text.assemble((printable(path), "bold"), ": ", ("healthy", "bold green"))
    return Text.assemble((printable(path), "bold"), ": ", (f"DAMAGED, {counted(damaged, 'finding')}", "bold red"))


def _section(title: str, findings: Sequence[Finding], style: str) -> Iterator[Text]:
    if not findings:
        return
    yield Text()
    yield Text(f"{title}:", style)
    for found in findings[:_MOST]:
        where = found.path if found.offset is None else f"{found.path} at byte {found.offset:,}"
        yield Text.assemble("  ", (where, "bold"))
        yield Text(f"    {found.reason}")
        if found.advice:
            yield Text(f"    → {found.advice}", "dim")
    if len(findings) > _MOST:
        yield Text(f"  … and {len(findings) - _MOST:,} more; --json has all of them")


def _lost(report: RepairReport) -> Iterator[Text]:
    if report.lost_records or report.lost_draws or report.lost_journals:
        verb = "cannot be saved" if report.dry_run else "could not be saved"
        if any(found.mending is Mending.ACCEPT for found in report.left):
            verb = "missing, unless what is left can be put back"
        yield Text()
        yield Text(f"{verb}:", "bold red")
    if report.lost_records:
        yield Text(f"  {counted(report.lost_records, 'record')} that had been acknowledged")
    for name in report.lost_journals[:_MOST]:
        yield Text(f"  draws, evictions and checkpoints that journal/{name} may have told of")
    for iteration, uids in list(report.lost_draws.items())[:_MOST]:
        yield Text(f"  {counted(len(uids), 'group')} drawn at iteration {iteration}: {' '.join(uids[:3])}{_more(uids)}")


def _more(uids: Sequence[str]) -> str:
    return f" … and {len(uids) - 3} more" if len(uids) > 3 else ""


def _next(path: str, damage: Iterable[Finding]) -> Iterator[Text]:
    """Say which command comes next."""
    mendings = {found.mending for found in damage}
    quoted = shlex.quote(path)
    if Mending.REPAIR in mendings:
        yield from (Text(), Text(f"next: arrowbank repair {quoted} --dry-run"))
    elif Mending.ACCEPT in mendings:
        yield from (Text(), Text(f"next: put copies back, or arrowbank repair {quoted} --accept-damage --dry-run"))
