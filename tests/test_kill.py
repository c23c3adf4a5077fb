"""I1, I3, I4 under SIGKILL from outside: nothing acknowledged is lost, changed, or given out twice."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import test_stream

from arrowbank.durable import seal

LOOP = Path(__file__).parent / "kill_loop.py"
SEED = int(os.environ.get("KILL_SEED", "20261130"))


def kill_loop(directory: Path, cycles: int, *fault: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(LOOP), str(directory / "bank"), str(cycles), str(SEED), *fault]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.slow
def test_nothing_acknowledged_is_lost_or_changed_by_sigkill(tmp_path: Path) -> None:
    done = kill_loop(tmp_path, 44)
    assert done.returncode == 0, f"seed {SEED}\n{done.stdout}\n{done.stderr}"
    found = json.loads(done.stdout)
    assert found["groups"] > 500 and found["draws"] > 20 and found["archived"] >= 1
    assert found["kills"]["in flight"] == 22
    assert found["kills"].get("A", 0) >= 5 and found["kills"].get("C", 0) >= 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "violation"),
    [("acknowledge before write", "acknowledged|plan"), ("publish twice", "stands 2 times")],
)
def test_the_kill_loop_catches_a_planted_fault(tmp_path: Path, fault: str, violation: str) -> None:
    done = kill_loop(tmp_path, 20, fault)
    assert done.returncode != 0
    assert re.search(violation, json.loads(done.stdout.splitlines()[-1])["violation"])


def test_the_bit_flip_check_catches_a_missing_seal_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    stream = test_stream.StreamWriter.create(
        tmp_path / test_stream.NAME, tmp_path / "tmp", "bank", test_stream.SEGMENT_SCHEMA
    )
    for index in range(3):
        stream.append([test_stream.message(index)])
    content = stream.path.read_bytes()
    test_stream.check_flips(content)
    monkeypatch.setattr(seal, "verify", lambda *given: True)
    with pytest.raises((AssertionError, ValueError, OSError)):
        test_stream.check_flips(content)
