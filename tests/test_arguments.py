"""The flags of a durable rollout bank."""

from __future__ import annotations

import argparse
import importlib.util
import os
from pathlib import Path

import pytest
from machine import require_root
from megatron_standin.pinned import PINNED, STANDIN

from arrowbank import BankLockedError, RolloutBank
from arrowbank.arguments import add_rollout_bank_args, bank_from_args

ENABLE, DIR, MAX_BYTES = "--rl-durable-rollout-bank", "--rl-rollout-bank-dir", "--rl-rollout-bank-max-bytes"


def parse(*arguments: object, save: str | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    if save is not None:
        parser.add_argument("--save")
        arguments = (*arguments, "--save", save)
    return add_rollout_bank_args(parser).parse_args([str(argument) for argument in arguments])


def open_bank(*arguments: object, rank: int = 0, save: str | None = None) -> RolloutBank | None:
    return bank_from_args(parse(*arguments, save=save), rank)


def test_the_parser_is_returned_and_the_flags_are_megatrons() -> None:
    parser = argparse.ArgumentParser()
    assert add_rollout_bank_args(parser) is parser
    flags = {flag for action in parser._actions for flag in action.option_strings} - {"-h", "--help"}
    assert flags == {ENABLE, DIR, MAX_BYTES} <= set(PINNED["flags"])
    assert vars(parser.parse_args([])) == {
        "rl_durable_rollout_bank": False,
        "rl_rollout_bank_dir": None,
        "rl_rollout_bank_max_bytes": 0,
    }
    assert "\nrl:\n" in parser.format_help()


def test_a_parser_that_has_megatrons_flags_learns_the_units_of_sizes(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("standin_arguments", STANDIN / "megatron/training/arguments.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    parser = add_rollout_bank_args(module._add_rl_args(argparse.ArgumentParser()))
    args = parser.parse_args([ENABLE, DIR, str(tmp_path / "bank"), MAX_BYTES, "200GB"])
    assert args.rl_rollout_bank_max_bytes == 200_000_000_000
    bank = bank_from_args(args)
    assert bank is not None
    bank.close()


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("123456789012", 123456789012),
        ("200GB", 200 * 10**9),
        ("200 GB", 200 * 10**9),
        ("1.5TiB", 3 * 2**39),
        ("1kB", 1000),
        ("1KiB", 1024),
        ("0.5mib", 2**19),
        ("2PB", 2 * 10**15),
        ("1PiB", 2**50),
        ("1.1TiB", 1209462790553),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse(MAX_BYTES, text).rl_rollout_bank_max_bytes == size


@pytest.mark.parametrize(
    "text", ["", "-1", "1.5", "200G", "GB", "1e9", "1_000", "200GBit", "1.TB", "nan", "٣GB", "9" * 19, "1 000", "4XB"]
)
def test_anything_else_is_no_size(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(f"{MAX_BYTES}={text}")
    told = capsys.readouterr().err
    assert f"argument {MAX_BYTES}: {text!r} is no size: use a number of bytes, or one with a unit" in told


def test_there_is_no_bank_unless_asked_for_nor_off_rank_0(tmp_path: Path) -> None:
    assert open_bank(DIR, tmp_path / "bank") is None
    assert open_bank(ENABLE, DIR, tmp_path / "bank", rank=1) is None
    assert open_bank(ENABLE, rank=1) is None
    assert bank_from_args(argparse.Namespace()) is None
    assert list(tmp_path.iterdir()) == []


def test_the_bank_is_opened_where_and_as_it_was_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from builders import token_group

    bank = open_bank(ENABLE, DIR, tmp_path / "bank", MAX_BYTES, "1kB")
    assert isinstance(bank, RolloutBank)
    with bank:
        bank.append(token_group())
        assert (tmp_path / "bank" / "MANIFEST.json").exists()
        assert "more than max_bytes 1,000" in caplog.text
        with pytest.raises(BankLockedError):
            open_bank(ENABLE, DIR, tmp_path / "bank")


def test_0_bytes_are_no_limit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from builders import token_group

    bank = open_bank(ENABLE, DIR, tmp_path / "bank", MAX_BYTES, "0")
    assert bank is not None
    with bank:
        bank.append(token_group())
    assert caplog.text == ""


def test_the_directory_is_beside_the_checkpoints_by_default(tmp_path: Path) -> None:
    bank = open_bank(ENABLE, save=str(tmp_path))
    assert bank is not None
    bank.close()
    assert (tmp_path / "rollout_bank" / "MANIFEST.json").exists()


@pytest.mark.parametrize("save", [None, ""])
def test_a_bank_without_a_directory_is_an_error(save: str | None) -> None:
    with pytest.raises(ValueError, match=f"{ENABLE} without {DIR}"):
        open_bank(ENABLE, save=save)


def test_a_file_in_the_place_of_the_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "bank").write_text("")
    with pytest.raises(NotADirectoryError, match=f"{DIR} .*bank: a bank is a directory, and this is none"):
        open_bank(ENABLE, DIR, tmp_path / "bank")
    with pytest.raises(OSError, match=f"{DIR} .*bank/below: "):
        open_bank(ENABLE, DIR, tmp_path / "bank" / "below")


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    require_root("may become a user who may not write")
    (tmp_path / "bank").mkdir()
    tmp_path.chmod(0o755)
    os.seteuid(65534)
    try:
        with pytest.raises(PermissionError, match=f"{DIR} .*bank: Permission denied"):
            open_bank(ENABLE, DIR, tmp_path / "bank")
    finally:
        os.seteuid(0)
    assert list((tmp_path / "bank").iterdir()) == []
