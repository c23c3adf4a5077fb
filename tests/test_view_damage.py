"""Damaged archives and strangers' files: a view of them is an error that names the file, and never other rows."""

from __future__ import annotations

import os
import random
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars
import pytest
from builders import token_group
from corruptors import flip_in
from machine import missing
from runs import archive_three, archived_file, train, tree

from arrowbank import BankView, RolloutBank, scan
from arrowbank.durable.layout import BankPaths
from arrowbank.durable.manifest import read_manifest
from arrowbank.errors import CorruptionError
from arrowbank.schema import ARCHIVE_SCHEMA

FORMS: dict[str, Callable[[BankView], Any]] = {
    "arrow": BankView.to_arrow,
    "polars": lambda view: view.to_polars().collect(),
    "polars, streaming": lambda view: view.to_polars().select("reward").collect(engine="streaming"),
    "pandas": BankView.to_pandas,
    "duckdb": BankView.to_duckdb,
    "groups": lambda view: list(view.groups()),
}


def test_a_missing_archive_file_is_an_error_that_names_it(path: Path) -> None:
    with RolloutBank.open(path, keep_checkpoints=1) as bank:
        bank.restore(0)
        train(bank, range(2))
        bank.close(final=True)
    file = archived_file(path)
    file.unlink()
    with pytest.raises(CorruptionError, match=r"is not there.*from a copy") as raised:
        scan(path)
    assert raised.value.path == str(file)
    file.parent.rename(path / "elsewhere")
    with pytest.raises(CorruptionError, match="is not there"):
        scan(path)


def test_links_in_a_strangers_bank_are_not_followed(path: Path, tmp_path: Path) -> None:
    with RolloutBank.open(path) as bank:
        bank.append(token_group(1))
    (path / "segments").rename(tmp_path / "elsewhere")
    (path / "segments").symlink_to(tmp_path / "elsewhere")
    before = tree(tmp_path)
    for attempt in (scan, RolloutBank.open):
        with pytest.raises(CorruptionError, match="symbolic link"):
            attempt(path)
    assert tree(tmp_path) == before


def test_every_bit_flipped_in_an_archived_file_is_an_error_and_never_other_rows(path: Path) -> None:
    archive_three(path)
    file = archived_file(path)
    whole = file.read_bytes()
    rng = random.Random(1)
    forms = [FORMS[name] for name in ("arrow", "polars", "groups")]
    for number in range(300):
        place, bit = rng.randrange(len(whole)), rng.randrange(8)
        flip_in(file, place, bit)
        with pytest.raises(CorruptionError, match=r"digest.*from a copy") as raised:
            pytest.fail(f"bit {bit} of byte {place} passed: {forms[number % 3](scan(path))}")
        assert raised.value.path == str(file)
        file.write_bytes(whole)
    assert scan(path).to_arrow().num_rows == 16


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("damage", ["cut", "longer", "first byte", "last byte"])
def test_no_form_reads_a_damaged_file(path: Path, form: str, damage: str) -> None:
    archive_three(path)
    file = archived_file(path)
    if damage == "cut":
        os.truncate(file, file.stat().st_size - 1)
    elif damage == "longer":
        os.truncate(file, file.stat().st_size + 1)
    else:
        flip_in(file, 0 if damage == "first byte" else -1)
    view = scan(path)
    for _ in range(2):
        with pytest.raises(CorruptionError, match="digest"):
            FORMS[form](view)


def test_a_lazy_frame_says_of_damage_only_when_it_is_collected(path: Path) -> None:
    archive_three(path)
    flip_in(archived_file(path), -9)  # in the length of the footer
    lazy = scan(path).to_polars().filter(polars.col("reward") > 0)
    assert lazy.collect_schema().names() == ARCHIVE_SCHEMA.names
    with pytest.raises(CorruptionError, match="digest"):
        lazy.collect()


def test_groups_of_a_whole_file_come_before_the_error_of_the_next(path: Path) -> None:
    archive_three(path, files=2)
    last = BankPaths(path).version(1) / read_manifest(BankPaths(path)).files[-1].name
    flip_in(last, 100)
    found = scan(path).groups()
    assert [group.uid is not None for group in (next(found), next(found))] == [True, True]
    with pytest.raises(CorruptionError, match=last.name):
        next(found)


def test_a_file_is_verified_once_a_view_and_without_verify_never(path: Path) -> None:
    archive_three(path)
    file = archived_file(path)
    old, unverified = scan(path), scan(path, verify=False)
    rows = old.to_arrow()
    with file.open("r+b") as there:  # the file itself, which the views hold
        there.seek(file.read_bytes().index(b"parquet-cpp-arrow"))
        there.write(b"P")
    for found in (old, unverified):
        assert found.to_arrow() == rows
        assert found.to_polars().collect().height == found.to_pandas().shape[0] == len(list(found.groups())) * 4 == 16
    with pytest.raises(CorruptionError):
        scan(path).to_arrow()


@pytest.mark.parametrize("kind", ["link", "FIFO", "directory", "socket", "device"])
def test_what_is_no_regular_file_is_refused_and_not_waited_for(
    path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    archive_three(path)
    file = archived_file(path)
    file.rename(path / "tmp" / "elsewhere")
    if kind == "link":
        file.symlink_to(path / "tmp" / "elsewhere")
    elif kind == "FIFO":
        os.mkfifo(file)
    elif kind == "directory":
        file.mkdir()
    elif kind == "socket":
        monkeypatch.chdir(file.parent)  # its whole path may be too long
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(file.name)
    else:
        make_device(file)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(CorruptionError, match="not a regular file") as raised:
        scan(path)
    assert raised.value.path == str(file)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def make_device(path: Path) -> None:
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))  # /dev/zero, which never ends
    except PermissionError:
        missing("only root makes devices")
