"""The demo: a real training run under SIGKILL, by its command line."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from polars.testing import assert_frame_equal
from typer.testing import CliRunner

from arrowbank import scan
from arrowbank.cli.app import app
from arrowbank.cli.output import TextOutput
from arrowbank.demo.environments import MEMBERS
from arrowbank.demo.progress import Progress
from arrowbank.demo.settings import BANK, GENERATOR_LOG, GROUPS, TWIN, TrainerSettings, checkpoint_every
from arrowbank.demo.supervisor import DemoResult, DemoSettings, Rollback, TrainerFailedError, prepare, run_demo

# -- parent and child


class Nobody:
    def advanced(self, run: str, line: Progress) -> None:
        pass

    def killed(self, number: int, moment: str, iteration: int) -> None:
        pass

    def rolled_back(self, from_iteration: int, to_iteration: int) -> None:
        pass


def test_trainer_settings_survive_the_command_line(tmp_path: Path) -> None:
    for has_bank in (True, False):
        settings = TrainerSettings(tmp_path, 12, 3, 2, has_bank)
        assert TrainerSettings.from_arguments(settings.arguments()) == settings


def test_a_trainer_that_fails_by_itself_is_reported_with_its_own_words(tmp_path: Path) -> None:
    prepare(tmp_path / "run")
    (tmp_path / "run" / GENERATOR_LOG).mkdir()
    with pytest.raises(TrainerFailedError, match=r"ended with exit code 1(.|\n)*IsADirectoryError"):
        run_demo(DemoSettings(tmp_path / "run", iterations=4, kills=0), Nobody())


@pytest.mark.parametrize("as_json", [True, False])
def test_a_rollback_in_too_short_a_run_is_wrong_usage(as_json: bool, tmp_path: Path) -> None:
    arguments = ["demo", "--rollback", "--iterations", "7", "--kills", "1", "--dir", str(tmp_path / "run")]
    found = CliRunner().invoke(app, [*arguments, *["--json"] * as_json])
    assert (found.exit_code, found.stdout) == (2, "")
    assert found.stderr == "arrowbank: --rollback needs at least 8 iterations, not 7\n"
    assert not (tmp_path / "run").exists()


def test_an_earlier_demos_directory_is_refused(tmp_path: Path) -> None:
    prepare(tmp_path)
    (tmp_path / GENERATOR_LOG).touch()
    with pytest.raises(FileExistsError, match="an earlier demo"):
        prepare(tmp_path)


# -- the whole thing


def run_cli(directory: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-c", "from arrowbank.cli import main; main()", "demo", "--json"]
    found = subprocess.run(
        [*command, "--dir", str(directory), *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert found.stdout, found.stderr
    return found.returncode, json.loads(found.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The outcome of a short demo with a bank."""
    directory = tmp_path_factory.mktemp("demo") / "run"
    code, result = run_cli(directory, "--iterations", "12", "--kills", "4")
    return result | {"code": code, "directory": directory}


def test_a_killed_run_generates_nothing_twice_and_ends_with_the_twins_weights(demo: dict[str, Any]) -> None:
    assert (demo["code"], demo["kills"], demo["regenerated"], demo["weights_identical"]) == (0, 4, 0, True)
    assert demo["restored"] > 0 and demo["replayed"] > 0
    assert (demo["iterations"], demo["groups"], demo["rollouts"]) == (12, 12 * 24, 12 * 24 * MEMBERS)
    assert demo["reward_last"] > demo["reward_first"]
    assert set(demo) - {"code", "directory"} == set(DemoResult.__annotations__) - {"moments", "rolled_back"}


def assert_the_archive_holds_the_twins_rollouts_each_once(directory: Path) -> None:
    member = ["env_id", "source_index", "member_index"]
    payload = [
        "reward",
        "tokens",
        "generation_mask",
        "logprobs",
        "num_turns",
        "consumed_iteration",
        "consumed_position",
    ]
    ours, twins = (archived(run / BANK).sort(member) for run in (directory, directory / TWIN))
    assert len(ours) == ours.select(pl.struct(member)).n_unique()
    assert_frame_equal(ours.select(member + payload), twins.select(member + payload), check_exact=True)


def archived(bank: Path) -> pl.DataFrame:
    return pl.read_parquet(f"{bank}/archive/*.parquet")


def test_the_killed_runs_archive_holds_the_twins_rollouts_each_once(demo: dict[str, Any]) -> None:
    assert demo["bank"] == str(demo["directory"] / "bank")
    assert len(archived(demo["directory"] / "bank")) == demo["rollouts"]
    assert_the_archive_holds_the_twins_rollouts_each_once(demo["directory"])


def test_the_same_kills_without_a_bank_cost_finished_groups(tmp_path: Path) -> None:
    code, result = run_cli(tmp_path / "run", "--iterations", "12", "--kills", "4", "--no-bank")
    assert code == 0
    assert result["regenerated"] > 20
    assert (result["kills"], result["restored"], result["replayed"], result["bank"]) == (4, 0, 0, None)
    assert result["weights_identical"]


# -- the whole thing, rolled back


class ArchiveWatcher(Nobody):
    """Looks at the bank while the run to be killed is down: at the rollback, and at the kill that follows."""

    def __init__(self, directory: Path) -> None:
        self._bank = directory / BANK
        self.older = 0
        self.at_rollback: pl.DataFrame | None = None
        self.at_next_kill: pl.DataFrame | None = None
        self.scanned: pl.DataFrame | None = None

    def rolled_back(self, from_iteration: int, to_iteration: int) -> None:
        self.older = to_iteration
        self.at_rollback = archived(self._bank)

    def killed(self, number: int, moment: str, iteration: int) -> None:
        if self.at_rollback is not None and self.at_next_kill is None:
            self.at_next_kill = archived(self._bank)
            self.scanned = scan(self._bank).to_polars().select("group_uid", "member_index").collect()


RolledBack = tuple[DemoResult, ArchiveWatcher, Path]


@pytest.fixture(scope="module")
def rolled_back(tmp_path_factory: pytest.TempPathFactory) -> RolledBack:
    """The outcome of a short demo that goes back to an older model checkpoint, and what was seen on the way."""
    directory = tmp_path_factory.mktemp("rollback") / "run"
    prepare(directory)
    watcher = ArchiveWatcher(directory)
    settings = DemoSettings(directory, iterations=12, kills=4, has_rollback=True)
    return run_demo(settings, watcher), watcher, directory


def test_a_rollback_replays_and_generates_nothing_twice(rolled_back: RolledBack) -> None:
    result, _, directory = rolled_back
    assert (result.kills, result.regenerated, result.weights_identical) == (4, 0, True)
    assert result.rolled_back is not None
    went_back = result.rolled_back.from_iteration - result.rolled_back.to_iteration
    assert went_back > 2 * checkpoint_every(12)
    # one more where the stop came between a draw and the news of its training
    assert result.rolled_back.replayed in (went_back, went_back + 1)
    assert (result.groups, result.rollouts) == (12 * GROUPS, 12 * GROUPS * MEMBERS)
    assert_the_archive_holds_the_twins_rollouts_each_once(directory)


def test_a_rollback_takes_archived_groups_back(rolled_back: RolledBack) -> None:
    result, watcher, _ = rolled_back
    assert result.rolled_back is not None and result.rolled_back.unarchived > 0
    assert watcher.at_rollback is not None and watcher.at_next_kill is not None and watcher.scanned is not None
    before, after = (
        seen.filter(pl.col("consumed_iteration") >= watcher.older)
        for seen in (watcher.at_rollback, watcher.at_next_kill)
    )
    taken_back = before.join(after, on=["group_uid", "member_index"], how="anti").select("group_uid", "member_index")
    assert len(before) > 0 and len(taken_back) > 0
    assert len(taken_back.join(watcher.scanned, on=["group_uid", "member_index"], how="anti")) == 0
    assert watcher.scanned.is_unique().all()


def test_a_rollback_is_told_in_json_and_in_text(rolled_back: RolledBack, capsys: pytest.CaptureFixture[str]) -> None:
    result = replace(rolled_back[0], rolled_back=Rollback(36, 20, replayed=16, unarchived=240))
    assert result.as_json()["rolled_back"] == {"from": 36, "to": 20, "replayed": 16, "unarchived": 240}
    TextOutput().demo(result)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert ["rolled back to an older checkpoint", "36 to 20"] in rows
    assert ["draws replayed from there", "16"] in rows
    assert ["groups taken back out of Parquet", "240"] in rows
