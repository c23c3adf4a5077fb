"""Banks that somebody made up to do harm: each ends in an error of ours or a sound result, soon, and in the bank only.

Each is tried in a process of its own, which must live. Pytest takes a sample; ``python tests/test_hostile_banks.py
--every-bank`` tries all of them, ``--hostile DIRECTORY CASE…`` some.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import random
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from corruptors import SEED
from damaged_banks import Model, child, contents, copy, make_whole, restore, small
from hostile import HOSTILE
from machine import directory_in_memory

from arrowbank import ArrowbankError, CorruptRecordError, RolloutBank, repair, scan, verify

SAMPLE = 150


LIMIT_S = 10.0
"""For everything that is done with one bank."""
ENDED = "the process ended"


def _steps(root: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What a trainer and an analyst do with a bank."""
    bank: list[RolloutBank] = []

    def opened() -> None:
        bank.append(RolloutBank.open(root, takeover="force", keep_checkpoints=1))

    def used() -> None:
        found = restore(bank[0])
        str(found.report)
        lost = 0
        for uid in found.handed:
            try:
                repr(found.groups[uid].rollouts)
            except CorruptRecordError:
                lost += 1
        if lost:
            return
        for at, uids, span, state, _ in found.draws[:50]:
            bank[0].begin_iteration(at)
            bank[0].mark_consumed(uids, at, span=span, state=state)
        end = bank[0].iteration + 1
        bank[0].begin_iteration(end)
        bank[0].mark_consumed([bank[0].append(small("tokens", 998))], end)
        bank[0].checkpoint(end + 1, wait=True)

    def scanned() -> None:
        view = scan(root)
        view.to_arrow()
        for group in view.groups():
            repr(group.rollouts)

    def scanned_by_polars() -> None:
        scan(root).to_polars().select("group_uid", "reward").collect()

    yield "scan", scanned
    yield "scan by polars", scanned_by_polars
    yield "open", opened
    if not bank:
        return
    yield "use", used
    yield "restore 0", lambda: bank[0].restore(0, accept_damage=True)
    yield "close", lambda: bank[0].close(final=True)
    yield "scan again", scanned
    yield "open again", lambda: RolloutBank.open(root, takeover="force").close()


def _mending_steps(root: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What who doubts a bank does with it."""

    def unchanged(step: Callable[[], object]) -> None:
        before = _stamps(root)
        try:
            step()
        finally:
            if _stamps(root) != before:
                raise AssertionError("something was written")

    yield "verify", lambda: unchanged(lambda: str(verify(root)))
    yield "repair, dry", lambda: unchanged(lambda: str(repair(root, dry_run=True)))
    yield "repair", lambda: repair(root, takeover="force")
    yield "repair and accept", lambda: repair(root, takeover="force", accept_damage=True)
    yield "verify again", lambda: verify(root)
    yield "repair again", lambda: _idle(root)


def _idle(root: Path) -> None:
    before = _stamps(root)
    report = repair(root, takeover="force", accept_damage=True)
    if report.is_healthy and _stamps(root) != before:
        raise AssertionError("the second repair wrote something")


def _stamps(root: Path) -> dict[str, tuple[int, int, int]]:
    """Inode, time and size of everything in a bank: some of it is too large to be read."""
    found = [(path, path.lstat()) for path in (root, *root.rglob("*"))]
    return {str(path): (status.st_ino, status.st_mtime_ns, status.st_size) for path, status in found}


def _tried(step: Callable[[], Any]) -> str | None:
    """Do a step; return what is wrong with how it ended, or None."""
    try:
        step()
    except ArrowbankError:
        return None
    except BaseException as error:
        where = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
        return f"{type(error).__name__}: {str(error)[:200]} ({' '.join(where[-4:])})"
    return None


def _hostile(directory: Path, names: list[str]) -> None:
    """In a child: print, for each case, its name before and what went wrong after it."""
    logging.disable()
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    model = make_whole(directory / "whole", close=True)
    for name in names:
        print(json.dumps({"case": name}), flush=True)
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        shutil.rmtree(directory / "box", ignore_errors=True)
        root = copy(model, directory / "box" / "bank")
        outside = directory / "box" / "outside"
        outside.mkdir()
        (outside / "victim").write_text("not to be touched")
        HOSTILE[name](root, outside)
        before, started = contents(outside), time.monotonic()
        wrong = [f"{step}: {said}" for step, do in _steps(root) if (said := _tried(do))]
        if contents(outside) != before:
            wrong.append("something outside of the bank was touched")
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        wrong += _mended(model, directory / "mended", name)
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps({"wrong": wrong, "seconds": round(time.monotonic() - started, 2)}), flush=True)


def _mended(model: Model, directory: Path, name: str) -> list[str]:
    """Verify and repair another copy; return what was wrong with how that ended."""
    shutil.rmtree(directory, ignore_errors=True)
    root, outside = copy(model, directory / "bank"), directory / "outside"
    outside.mkdir()
    (outside / "victim").write_text("not to be touched")
    HOSTILE[name](root, outside)
    before = contents(outside)
    wrong = [f"{step}: {said}" for step, do in _mending_steps(root) if (said := _tried(do))]
    return wrong if contents(outside) == before else [*wrong, "repair touched something outside of the bank"]


def _outcomes(directory: Path, names: Iterable[str]) -> dict[str, list[str]]:
    """What was wrong with each case; a child does them, and another goes on behind one that killed it."""
    found: dict[str, list[str]] = {}
    left = list(names)
    while left:
        done = child(__file__, "--hostile", str(directory), stdin="\n".join(left))
        said = [json.loads(line) for line in done.stdout.splitlines()]
        assert said, done.stderr
        for case, result in zip(said[::2], said[1::2], strict=False):
            found[case["case"]] = result["wrong"]
        if len(said) % 2:
            found[said[-1]["case"]] = [f"{ENDED} with {done.returncode}: {done.stderr[-1500:]}"]
        left = [name for name in left if name not in found]
    return found


def _family(name: str) -> str:
    return name.split(":")[0] if ":" in name else "places"


@pytest.fixture(scope="module")
def outcomes(shared: Path) -> dict[str, list[str]]:
    sample = set(random.Random(SEED).sample(sorted(HOSTILE), SAMPLE))
    return _outcomes(shared / "hostile", [name for name in HOSTILE if name in sample])


@pytest.mark.parametrize("family", sorted({_family(name) for name in HOSTILE}))
def test_a_hostile_bank_ends_in_an_error_of_ours_or_a_sound_result(outcomes: dict[str, list[str]], family: str) -> None:
    wrong = [(name, *said) for name, said in outcomes.items() if said and _family(name) == family]
    assert not wrong, "\n".join("\n    ".join(lines) for lines in wrong)


def _every_bank() -> int:
    """Print what was wrong; return with how many."""
    started = time.monotonic()
    with directory_in_memory() as directory:
        wrong = {name: said for name, said in _outcomes(directory, HOSTILE).items() if said}
    for name, said in wrong.items():
        print(name, *said, sep="\n    ")
    print(f"{len(HOSTILE):,} hostile banks, {len(wrong):,} wrong, {time.monotonic() - started:.1f} seconds")
    return len(wrong)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--every-bank"]:
            sys.exit(bool(_every_bank()))
        case ["--hostile", directory, *names]:
            _hostile(Path(directory), names or sys.stdin.read().splitlines())
        case _:
            sys.exit("usage: test_hostile_banks.py --every-bank | --hostile DIRECTORY CASE…")
