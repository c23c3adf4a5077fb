"""The command line: help, JSON, refusals. What the demo shows is tested in test_demo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from arrowbank import __version__
from arrowbank.cli.app import app
from arrowbank.cli.output import JsonOutput, TextOutput
from arrowbank.demo.supervisor import DemoResult

COMMANDS = sorted(command.callback.__name__ for command in app.registered_commands if command.callback)
RESULT = DemoResult(
    kills=3,
    restored=20,
    replayed=2,
    regenerated=0,
    weights_identical=True,
    iterations=8,
    groups=192,
    rollouts=3072,
    reward_first=0.1,
    reward_last=0.9,
    bank=Path("/runs/a/bank"),
    seconds=2.5,
    moments=["generating", "appending", "checkpointed"],
)
CONTROL = DemoResult(**{**vars(RESULT), "bank": None, "restored": 0, "replayed": 0, "regenerated": 70})


def arrowbank(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from arrowbank.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_there_are_commands() -> None:
    assert "demo" in COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_json(command: str) -> None:
    found = arrowbank(command, "--help")
    assert found.returncode == 0
    assert "--json" in found.stdout
    group = typer.main.get_command(app)
    documented = group.commands[command]  # type: ignore[attr-defined]
    assert documented.help
    assert all(getattr(parameter, "help", None) for parameter in documented.params)


def test_without_a_command_the_help_is_shown_as_wrong_usage() -> None:
    found = arrowbank()
    assert found.returncode == 2
    assert "demo" in found.stdout + found.stderr


def test_version_is_the_packages() -> None:
    assert arrowbank("--version").stdout == f"arrowbank {__version__}\n"


@pytest.mark.parametrize("arguments", [["--kills", "-1"], ["--iterations", "8", "--kills", "5"], ["--nope"]])
def test_wrong_usage_exits_with_2_and_says_so_on_stderr(arguments: list[str], tmp_path: Path) -> None:
    found = arrowbank("demo", "--dir", str(tmp_path / "run"), *arguments)
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr
    assert not (tmp_path / "run").exists()


def test_a_directory_with_somebodys_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    found = arrowbank("demo", "--dir", str(tmp_path), "--json")
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.splitlines() == [
        f"arrowbank: {tmp_path} already holds files that are not a demo's; choose a new or an empty directory"
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = arrowbank("demo", "--dir", str(tmp_path / "file"))
    assert found.returncode == 2
    assert "is not a directory" in found.stderr


def test_json_output_is_one_object_with_the_documented_keys(capsys: pytest.CaptureFixture[str]) -> None:
    JsonOutput().demo(RESULT)
    (line,) = capsys.readouterr().out.splitlines()
    assert list(json.loads(line)) == [
        "kills",
        "restored",
        "replayed",
        "regenerated",
        "weights_identical",
        "iterations",
        "groups",
        "rollouts",
        "reward_first",
        "reward_last",
        "bank",
        "seconds",
    ]


def test_text_output_says_where_the_bank_lies_and_how_to_look_at_it(capsys: pytest.CaptureFixture[str]) -> None:
    TextOutput().demo(RESULT)
    shown = capsys.readouterr().out
    assert "Nothing was generated twice" in shown
    assert "The bank: /runs/a/bank\n" in shown
    assert "polars" in shown and "'/runs/a/bank/archive/*.parquet'" in shown


def test_text_output_of_the_control_shows_no_bank(capsys: pytest.CaptureFixture[str]) -> None:
    TextOutput().demo(CONTROL)
    shown = capsys.readouterr().out
    assert "70" in shown
    assert "restored" not in shown and "polars" not in shown


@pytest.mark.parametrize("broken", [{"regenerated": 1}, {"weights_identical": False}])
def test_a_broken_promise_is_shown_as_one(broken: dict[str, object], capsys: pytest.CaptureFixture[str]) -> None:
    result = DemoResult(**{**vars(RESULT), **broken})
    TextOutput().demo(result)
    assert not result.is_right
    assert "PROMISE WAS BROKEN" in capsys.readouterr().out
