"""A bank to try things on, and places for more."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from machine import directory_in_memory

from arrowbank import FencedError, RolloutBank, exits

# Of children that these tests start: a heart beats in a thread, and Python 3.12 warns of forks beside any thread.
os.environ["PYTHONWARNINGS"] = "ignore:This process:DeprecationWarning"
pytest.register_assert_rewrite(
    "damaged_banks", "disk_model", "exit_scripts", "forked", "kill_loop", "kill_model", "small_disks", "takeovers"
)  # their failed asserts then tell values

from damaged_banks import Model, copy, make_whole  # noqa: E402  # only now: its asserts are to be rewritten


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a bank may be made."""
    return tmp_path / "bank"


@pytest.fixture
def bank(path: Path) -> Iterator[RolloutBank]:
    """A new bank, restored at 0."""
    with RolloutBank.open(path) as bank:
        bank.restore(0)
        yield bank


@pytest.fixture(scope="module")
def shared() -> Iterator[Path]:
    """A directory for all tests of a file, in memory where there is one: thousands of copies are made in it."""
    with directory_in_memory() as directory:
        yield directory


@pytest.fixture(scope="module", params=["closed", "killed"])
def model(request: pytest.FixtureRequest, shared: Path) -> Model:
    """A bank with everything in it, to be damaged: as it was closed, and as a kill left it."""
    return make_whole(shared / f"whole-{request.param}", close=request.param == "closed")


@pytest.fixture(scope="module")
def other(shared: Path) -> Model:
    """Another bank."""
    return make_whole(shared / "other", close=True)


@pytest.fixture
def root(shared: Path, model: Model) -> Path:
    """Where a copy of the bank to be damaged lies."""
    return copy(model, shared / "copy")


@pytest.fixture(autouse=True)
def given_up() -> Iterator[None]:
    """Give up what a test has left open, as a kill does: the hearts stop, and nobody closes it at exit."""
    before = set(exits._open)
    yield
    give_up(exits._open - before)


@pytest.fixture(autouse=True, scope="module")
def all_given_up() -> Iterator[None]:
    """The same for what the fixtures of a file have left open."""
    yield
    give_up(set(exits._open))


@pytest.fixture
def closed_in_the_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close what a test has opened, those that it has "killed" among them."""
    opened: list[RolloutBank] = []
    opener = RolloutBank.open

    def opening(*args: Any, **options: Any) -> RolloutBank:
        opened.append(opener(*args, **options))
        return opened[-1]

    monkeypatch.setattr(RolloutBank, "open", opening)
    yield
    for bank in opened:
        with contextlib.suppress(FencedError):  # raised by a background compaction that was overtaken
            bank.close()


def give_up(banks: Iterable[object]) -> None:
    for bank in banks:
        assert isinstance(bank, RolloutBank)
        bank._claim.forget()
        exits.forget(bank)
