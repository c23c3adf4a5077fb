"""The README is true: its code runs, and its files and commands exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from arrowbank import RolloutBank

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_first_program_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program = next(block for block in blocks("python") if "RolloutBank.open" in block and "async" not in block)
    exec(compile(program, "README.md", "exec"), {})


def test_the_loop_trains_and_resumes(tmp_path: Path) -> None:
    """The README's loop, given generators and a model, is stopped in the middle and run again."""
    import asyncio
    import itertools

    from arrowbank import RolloutGroup, TokenRollout, scan

    (program,) = [block for block in blocks("python") if "async def train(" in block]
    counter = itertools.count()
    trained: dict[int, list[str]] = {}
    saved: list[int] = []

    def generator(name: str):  # type: ignore[no-untyped-def]
        async def generate(num_groups: int):  # type: ignore[no-untyped-def]
            for _ in range(num_groups):
                member = TokenRollout(trajectory=[[1, next(counter)]], reward=1.0, env_id=name)
                yield RolloutGroup(rollouts=[member])

        return generate

    def train_step(groups: list[RolloutGroup]) -> None:
        trained[groups[0].batch_id] = [str(group.uid) for group in groups]
        if len(trained) == 31 and not restarted:
            raise KeyboardInterrupt

    restarted = False
    names = {
        "generate_math": generator("math"),
        "generate_code": generator("code"),
        "train_step": train_step,
        "save_model": saved.append,
    }
    exec(compile(program, "README.md", "exec"), names)
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(names["train"](tmp_path, 0, 40))
    before, generated = dict(trained), next(counter)
    restarted = True
    asyncio.run(names["train"](tmp_path, saved[-1], 40))
    assert saved == [20, 40]
    assert {k: trained[k] for k in before} == before
    assert next(counter) - generated - 1 == 64 * (40 - 31)
    assert scan(tmp_path / "bank").to_arrow().num_rows == 64 * 40


def test_the_loop_with_a_prompt_cursor_trains_on_every_prompt_once(tmp_path: Path) -> None:
    """The README's recipe, stopped again and again, neither skips nor repeats a prompt, and generates none twice."""
    import asyncio

    from arrowbank import RolloutGroup, TokenRollout

    (program,) = [block for block in blocks("python") if "async def train_ahead" in block]
    saved: dict[str, object] = {"step": 0, "session": None, "cursor": b"[0, []]"}
    steps: list[list[int]] = []
    weights: list[list[int]] = []
    banked: list[int] = []

    async def sample(prompts: list[int]):  # type: ignore[no-untyped-def]
        for prompt in sorted(prompts, key=lambda prompt: prompt % 3):  # in some order of completion
            await asyncio.sleep(0)
            yield RolloutGroup(rollouts=[TokenRollout(trajectory=[[1, prompt]], reward=1.0)], source_index=prompt)
            banked.append(prompt)

    class Stop(Exception):
        pass

    def train_step(groups: list[RolloutGroup]) -> None:
        steps.append([int(group.source_index) for group in groups])  # type: ignore[attr-defined]
        if len(steps) in (3, 9, 11, 18):
            raise Stop

    def save_model(state: dict[str, object]) -> None:
        saved.update(state)
        weights[:] = weights[: int(str(saved["step"])) - 5] + steps[-5:]

    names = {"sample": sample, "train_step": train_step, "save_model": save_model}
    exec(compile(program, "README.md", "exec"), names)
    for _ in range(4):
        with pytest.raises(Stop):
            asyncio.run(names["train_ahead"](tmp_path, 15, saved))  # type: ignore[operator]
    asyncio.run(names["train_ahead"](tmp_path, 15, saved))  # type: ignore[operator]
    trained = [prompt for batch in weights for prompt in batch]
    assert len(trained) == 15 * 8
    assert len(set(trained)) == len(trained) and len(set(banked)) == len(banked)
    assert max(trained) < 15 * 8 + 8  # those that are missing were made ahead of others


def test_the_queries_run_as_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import duckdb
    import pandas as pd

    from arrowbank import RolloutGroup, TokenRollout

    monkeypatch.chdir(tmp_path)
    with RolloutBank.open("run/bank") as bank:
        bank.restore(0)
        for k in range(3):
            bank.begin_iteration(k)
            uid = bank.append(RolloutGroup(rollouts=[TokenRollout(trajectory=[[1]], reward=k, env_id="math")]))
            bank.mark_consumed([uid], k)
        bank.checkpoint(3)
        bank.close(final=True)
    polars_block, pandas_block = (block for block in blocks("python") if "archive/*.parquet" in block or "pd." in block)
    lines = polars_block.strip().splitlines()
    names: dict[str, object] = {"Path": Path, "pd": pd}
    exec("\n".join(lines[:-1]), names)
    assert eval(lines[-1], names)["reward"].to_list() == [0.0, 1.0, 2.0]
    assert eval(pandas_block.strip().splitlines()[-1], names)["reward"].sum() == 3.0
    (query,) = blocks("sql")
    assert [row[2] for row in duckdb.sql(query).fetchall()] == [0.0, 1.0, 2.0]


def test_megatron_opens_the_bank_once_the_lines_were_run(tmp_path: Path) -> None:
    (install,) = [block for block in blocks("python") if "integrations.megatron" in block]
    opens = """
from types import SimpleNamespace
from megatron.rl import rl_utils
args = SimpleNamespace(grpo_iterations=1, grpo_prompts_per_step=1, grpo_group_size=2, global_batch_size=2)
args.rl_durable_rollout_bank, args.rl_rollout_bank_dir, args.rl_rollout_bank_max_bytes = True, None, 0
args.save = "save"
sys.modules["megatron.training.global_vars"] = SimpleNamespace(get_args=lambda: args)
bank = rl_utils.maybe_get_rollout_bank(args)
print(type(bank).__module__, bank.bank._paths.root.relative_to(Path.cwd()))
bank.close()
"""
    code = "import sys\nfrom pathlib import Path\n" + install + opens
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "megatron_standin")])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["arrowbank.integrations.megatron", "save/rollout_bank"]


def test_the_flags_open_a_bank_where_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (flags,) = [block for block in blocks("python") if "arrowbank.arguments" in block]
    names: dict[str, object] = {}
    exec(compile(flags, "README.md", "exec"), names)
    bank = names["bank"]
    assert isinstance(bank, RolloutBank)
    assert (tmp_path / "run" / "bank" / "MANIFEST.json").exists()
    bank.close()


def test_lines_fit() -> None:
    assert [line for line in README.splitlines() if len(line) > 120] == []


def test_the_two_commands_are_there() -> None:
    commands = [line for block in blocks("sh") for line in block.splitlines()]
    assert sum("arrowbank demo" in line for line in commands) == 1
    assert sum("pytest" in line for line in commands) == 1


def test_named_source_files_exist() -> None:
    section = README.split("## Reading the source")[1]
    for name in re.findall(r"`([\w/.]+\.(?:py|md))`", section):
        assert (ROOT / "arrowbank" / name).exists() or (ROOT / name).exists(), name


def test_every_module_says_what_it_is_responsible_for() -> None:
    import ast

    for path in (ROOT / "arrowbank").rglob("*.py"):
        assert ast.get_docstring(ast.parse(path.read_text())), path


@pytest.mark.slow
def test_notebooks_run_and_show_their_plots() -> None:

    # The kernel's own threads warn about their event loop; the notebook's code is what is tested here.
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        script = (
            "import sys, nbformat; from nbclient import NotebookClient;"
            "book = nbformat.read(sys.argv[1], as_version=4);"
            "NotebookClient(book, timeout=120, resources={'metadata': {'path': sys.argv[2]}}).execute();"
            "outputs = [o for c in book.cells if c.cell_type == 'code' for o in c.outputs];"
            "assert any('image/png' in o.get('data', {}) for o in outputs), 'no plot'"
        )
        command = [sys.executable, "-c", script, str(path), str(path.parent)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert list((ROOT / "notebooks").glob("*.ipynb"))
