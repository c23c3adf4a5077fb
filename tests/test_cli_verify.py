"""``arrowbank verify`` and ``arrowbank repair``: exit codes, JSON, text that says what, where and what next."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from corruptors import flip_in
from runs import archive_three, archived_file, tree
from test_cli import arrowbank

from arrowbank import verify


@pytest.fixture
def damaged(path: Path) -> Path:
    """A bank with a stranger among its segments, a flipped bit in the archive, and a draw that may be hidden."""
    archive_three(path)
    (path / "segments/notes.txt").write_text("not ours")
    return path


def test_exit_codes_are_0_when_healthy_1_for_damage_2_for_wrong_usage(path: Path, tmp_path: Path) -> None:
    archive_three(path)
    assert arrowbank("verify", str(path)).returncode == 0
    assert arrowbank("repair", str(path)).returncode == 0
    (path / "segments/notes.txt").write_text("not ours")
    assert arrowbank("verify", str(path)).returncode == 1
    assert arrowbank("repair", str(path)).returncode == 0
    flip_in(archived_file(path), 200)
    assert arrowbank("verify", str(path)).returncode == 1
    assert arrowbank("repair", str(path)).returncode == 1
    for arguments in (["verify"], ["verify", str(tmp_path / "nothing")], ["repair", str(tmp_path)], ["verify", "--x"]):
        found = arrowbank(*arguments)
        assert (found.returncode, found.stdout) == (2, "")
        assert found.stderr


def test_json_is_one_object_that_says_all_of_it(damaged: Path) -> None:
    found = arrowbank("verify", str(damaged), "--json")
    (line,) = found.stdout.splitlines()
    said = json.loads(line)
    assert found.stderr == ""
    assert list(said) == ["path", "verdict", "findings", "counts", "holder", "seconds"]
    assert said["verdict"] == "damaged"
    assert said["counts"]["groups"] == 4
    (finding,) = (one for one in said["findings"] if one["severity"] == "damage")
    assert (finding["path"], finding["mending"]) == ("segments/notes.txt", "repair")
    dry = json.loads(arrowbank("repair", str(damaged), "--json", "--dry-run").stdout)
    done = json.loads(arrowbank("repair", str(damaged), "--json").stdout)
    assert (dry["dry_run"], done["dry_run"]) == (True, False)
    assert dry["mended"] == done["mended"] == [finding]
    assert done["left"] == []


def test_text_says_what_where_and_what_next(damaged: Path) -> None:
    flip_in(archived_file(damaged), 200)
    shown = arrowbank("verify", str(damaged)).stdout
    assert "DAMAGED, 2 findings" in shown
    assert "segments/notes.txt" in shown and "repair moves it into quarantine/" in shown
    assert "Put it back from a copy" in shown
    assert f"next: arrowbank repair {damaged} --dry-run" in shown
    before = tree(damaged)
    dry = arrowbank("repair", str(damaged), "--dry-run").stdout
    assert tree(damaged) == before
    assert "nothing was changed" in dry and "would be mended" in dry and "next: the same without --dry-run" in dry
    done = arrowbank("repair", str(damaged)).stdout
    assert "1 mended" in done and "left as it is" in done
    assert "nothing was changed" in arrowbank("repair", str(damaged)).stdout


def test_journal_damage_is_mended_only_when_it_is_accepted(path: Path) -> None:
    archive_three(path)
    part = max((path / "journal").iterdir())
    flip_in(part, part.stat().st_size - 300)
    found = arrowbank("repair", str(path))
    assert found.returncode == 1
    assert "may be hidden" in found.stdout and "--accept-damage" in found.stdout
    assert "missing, unless what is left can be put back" in found.stdout and "could not be saved" not in found.stdout
    assert arrowbank("repair", str(path), "--accept-damage").returncode == 0
    assert verify(path).is_healthy


def on_a_terminal(*arguments: str) -> tuple[str, bytes]:
    """Run a command whose stderr is a terminal; return what it prints on stdout, and there."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "arrowbank", *arguments]
    shown = b""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=theirs, env=os.environ | {"TERM": "xterm"}, text=True
    ) as running:
        os.close(theirs)
        try:
            while part := os.read(ours, 4096):
                shown += part
        except OSError:  # how a terminal says that nobody writes to it any more
            pass
        assert running.stdout
        printed = running.stdout.read()
    os.close(ours)
    return printed, shown


def test_a_bar_is_shown_on_a_terminal_only_and_not_with_json(path: Path) -> None:
    archive_three(path)
    assert arrowbank("verify", str(path)).stderr == ""
    printed, shown = on_a_terminal("verify", str(path))
    assert "healthy" in printed and b"verify" in shown
    printed, shown = on_a_terminal("verify", str(path), "--json")
    assert json.loads(printed)["verdict"] == "healthy"
    assert shown == b""
