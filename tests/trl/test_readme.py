"""The README's TRL program runs, and goes on after a kill, with a tiny model in the place of the one that it names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from machine import REQUIRE
from test_grpo_resume import _is_installed

from arrowbank import scan

ROOT = Path(__file__).parents[2]
(PROGRAM,) = [
    block
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    if "BankedGRPOTrainer" in block
]
SMALL = """
import os, sys
sys.path.insert(0, {trl!r})
os.environ["HF_HUB_OFFLINE"] = "1"
import tiny_grpo
from pathlib import Path
if not Path("base").exists():
    words = tiny_grpo.tokenizer()
    tiny_grpo.model(words, Path("base"))
    words.save_pretrained("base")
"""


def test_its_names_are_there() -> None:
    compile(PROGRAM, "README.md", "exec")
    assert "from arrowbank.integrations.trl import BankedGRPOTrainer" in PROGRAM


@pytest.mark.trl
@pytest.mark.slow
def test_the_program_goes_on_after_a_kill(tmp_path: Path) -> None:
    if not all(map(_is_installed, ("torch", "transformers", "trl", "datasets"))):
        if "trl" in os.environ.get(REQUIRE, "").split(","):
            pytest.fail("pip install 'arrowbank[trl]'")
        pytest.skip("no TRL here: pip install 'arrowbank[trl]'")
    program = re.sub(r'model="[^"]*"', 'model="base"', PROGRAM)
    small = 'GRPOConfig("run", use_cpu=True, bf16=False, max_completion_length=6, report_to="none", disable_tqdm=True, '
    program = SMALL.format(trl=str(Path(__file__).parent)) + program.replace('GRPOConfig("run", ', small)
    command = [sys.executable, "-c", program]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with (tmp_path / "output.txt").open("w") as output:
        first = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=output, stderr=output)
        while not (tmp_path / "run/checkpoint-10/arrowbank.json").exists():
            assert first.poll() is None, (tmp_path / "output.txt").read_text()[-4000:]
            time.sleep(0.01)
        first.kill()
        assert first.wait() == -9
        done = subprocess.run(command, cwd=tmp_path, env=environment, stdout=output, stderr=output)
    assert done.returncode == 0, (tmp_path / "output.txt").read_text()[-4000:]
    rows = scan(tmp_path / "run/bank").to_arrow().to_pylist()
    assert {row["outcome"] for row in rows} == {"consumed"}
    assert {row["consumed_iteration"] for row in rows} == set(range(0, 40, 4))
    assert len(rows) == 10 * 4 * 8
