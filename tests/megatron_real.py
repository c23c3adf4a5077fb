"""The adapter inside Megatron-LM itself: ``python tests/megatron_real.py CHECKOUT`` (CPU; not part of the test run).

1. tests/test_megatron*.py with Megatron's own classes.
2. Megatron's pipeline and trainer functions, killed and resumed: the test at the end of this file.
3. Megatron's tests of its pipeline, with this bank in every pipeline; what was banked is then recovered and compared.
4. Megatron's tests of its own bank, with this one in its place. Ten read or damage that one's files.
5. The same without the statements about files, and without the tests that damage them.

What cannot pass is in ``KNOWN``, with the reason. Needs, besides ``pip install -e '.[test]'``: torch, triton,
pytest-asyncio, tqdm; for 2 also pyyaml, requests, click, tensorboard, wandb, openai, fastapi, uvicorn.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import itertools
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import typing
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typing_extensions

from arrowbank import RolloutBank
from arrowbank.integrations.megatron import MegatronBank, install

INJECT = "ARROWBANK_INJECT"
"""Where, as a pytest plugin, this file puts the adapter: "pipeline" or "bank"."""
ASYNCIO = ["-Wignore::pytest.PytestDeprecationWarning", "-o", "asyncio_default_fixture_loop_scope=function"]
OF_FILES = {"manifest", "generation", "record", "old_generation", "markers", "expected_markers"}
"""Variables of Megatron's tests that hold what was read from files."""
FILES = "is about the files of Megatron's own bank"
KNOWN: dict[str, tuple[type[Exception], str]] = {
    "test_rollout_bank.py::test_rollout_bank_round_trip": (KeyError, FILES),
    "test_rollout_bank.py::test_restore_drops_": (KeyError, FILES),
    "test_rollout_bank.py::test_checkpoint_compacts_at_consumption_boundary": (KeyError, FILES),
    "test_behaviour.py::test_checkpoint_compacts_at_consumption_boundary[consumed-after-checkpoint]": (
        AssertionError,
        "its last lines let a mark count that a restore has rolled back: it takes restore for a look",
    ),
}


def main(checkout: Path) -> int:
    here, theirs = Path(__file__).parent, checkout / "tests/unit_tests/rl"
    failed = 0
    with tempfile.TemporaryDirectory(prefix="arrowbank-") as directory:
        behaviour = Path(directory, "test_behaviour.py")
        behaviour.write_text(without_files((theirs / "test_rollout_bank.py").read_text()))
        own_tests = sorted(here.glob("test_megatron*.py"))
        for what, where, cwd, *paths in [
            ("1. this repository's tests, Megatron's classes", "", here.parent, *own_tests),
            ("2. Megatron's pipeline and trainer functions", "", checkout, here / "megatron_real.py"),
            ("3. Megatron's tests of its pipeline", "pipeline", checkout, theirs / "test_rollout_generation.py"),
            ("4. Megatron's tests of its own bank", "bank", checkout, theirs / "test_rollout_bank.py"),
            ("5. the same, but for files", "bank", checkout, behaviour),
        ]:
            print(f"\n== {what}", flush=True)
            command = [sys.executable, "-m", "pytest", "-q", "-rxXfE", "-pno:cacheprovider", *map(str, paths)]
            if cwd == checkout:
                command += ["--noconftest", "-c", os.devnull, "--disable-warnings"]
                command += ["-pmegatron_real", *ASYNCIO]
            else:
                command += ["-pno:asyncio"]
            imports = os.pathsep.join([str(here), str(checkout)])
            own = {"PYTHONPATH": imports, "MEGATRON_LM": str(checkout), "OMP_NUM_THREADS": "1", INJECT: where}
            own["PYTHONWARNINGS"] = "ignore" if cwd == checkout else "default"
            done = subprocess.run(command, env=os.environ | own, cwd=cwd, check=False)
            failed += done.returncode != 0
    return failed


def without_files(source: str) -> str:
    """Leave out tests and statements about the files of Megatron's own bank."""

    class Remove(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> Any:
            node = super().generic_visit(node)
            damages = isinstance(node, ast.FunctionDef) and node.name.startswith("test_restore_drops_")
            simple = isinstance(node, ast.Assign | ast.Assert | ast.Expr)
            names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)} if simple else set()
            if damages or names & OF_FILES:
                return None
            if isinstance(node, ast.If | ast.With) and not node.body:
                return None
            return node

    return ast.unparse(Remove().visit(ast.parse(source)))


def after_a_kill(path: str, *, max_bytes: int = 0) -> MegatronBank:
    """Megatron's tests open a bank again without closing it: what a restart after a kill is."""
    return MegatronBank(RolloutBank.open(path, takeover="force", max_bytes=max_bytes or None))


# -- as a plugin


def pytest_configure(config: pytest.Config) -> None:
    logging.getLogger("arrowbank").setLevel(logging.CRITICAL)  # every bank is taken over in the end, and says so
    _allow_python_3_11()
    if os.environ[INJECT] == "bank":
        import megatron.rl.rollout_bank as own

        own.RolloutBank = after_a_kill
    elif os.environ[INJECT] == "pipeline":
        from megatron.rl.agent import rollout_pipeline

        config.pluginmanager.register(EveryPipeline(rollout_pipeline.RolloutPipeline))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for known, (error, reason) in KNOWN.items():
            if known in item.nodeid:
                item.add_marker(pytest.mark.xfail(reason=reason, raises=error, strict=True))


def _allow_python_3_11() -> None:
    if not hasattr(typing, "override"):  # Megatron's trainer asks for 3.12
        typing.override = typing_extensions.override  # type: ignore[attr-defined]


class EveryPipeline:
    """Gives every pipeline a bank, and after each test recovers all that was banked."""

    def __init__(self, pipeline: Any) -> None:
        self.recovered = 0
        self.banks: list[tuple[str, MegatronBank, dict[str, Any]]] = []
        begin = pipeline.__init__

        def with_a_bank(this: Any, *args: Any, bank: Any = None, **options: Any) -> None:
            begin(this, *args, bank=bank or self.open(), **options)

        pipeline.__init__ = with_a_bank

    def open(self) -> MegatronBank:
        path, appended = tempfile.mkdtemp(prefix="arrowbank-"), {}
        bank = MegatronBank.open(path)
        bank.recover(0)
        bank.set_collection(0)
        append = bank.append

        def noting(group: Any) -> str:
            uid = append(group)
            appended[uid] = group.model_dump(exclude={"uid"})
            for rollout in appended[uid]["rollouts"]:
                if "completion_ids" in rollout:
                    rollout["completion_ids"] = []  # as restored ones are
            return uid

        bank.append = noting  # type: ignore[method-assign]
        self.banks.append((path, bank, appended))
        return bank

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        yield
        while self.banks:
            path, killed, appended = self.banks.pop()
            again = after_a_kill(path)
            found = {group.uid: group.model_dump(exclude={"uid"}) for group in again.recover(0)}
            for bank in (again, killed):
                bank.close()
            shutil.rmtree(path)
            assert found == appended
            self.recovered += len(found)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.write_line(f"{self.recovered} groups were banked by these tests, recovered and compared")


# -- as a test

FLAGS = ["--rl-durable-rollout-bank", "--grpo-iterations=1", "--grpo-prompts-per-step=4", "--grpo-group-size=2"]

if not os.environ.get(INJECT) and "pytest" in sys.modules and os.environ.get("MEGATRON_LM"):
    _allow_python_3_11()
    from megatron.rl import rl_utils, rollout_bank
    from megatron.rl.agent.api import GroupedRolloutRequest, GroupRolloutParams, TokenRollout
    from megatron.rl.agent.rollout_pipeline import RolloutPipeline
    from megatron.rl.agent.weighted_multi_task import AgentConfig, WeightedMultiTask
    from megatron.training import global_vars
    from megatron.training.arguments import _add_rl_args
    from tests.unit_tests.rl.test_rollout_generation import MockGenerator, MockInferenceInterface

    COUNTER = itertools.count()
    SAMPLED = SimpleNamespace(policy_epoch=[(0, 0)], kv_cache_epoch=[(0, 0)], num_evictions=0)

    class Tokens(MockGenerator):  # type: ignore[misc]  # untyped
        """Makes token rollouts with completion ids, as agents over Megatron's engine do."""

        async def prepare_group_rollout(self, request: Any) -> Any:
            params = await super().prepare_group_rollout(request)

            async def build_rollout(_: Any) -> Any:
                number = next(COUNTER)
                rl_utils.get_rl_runtime_state().request_ledger[f"c{number}"] = SAMPLED
                return TokenRollout(
                    trajectory=[[1, 2, number, 0]], reward=float(number), logprobs=[[-0.1, -70000.0]],
                    generation_mask=[[False, False, True, True]], env_id=self.env_id, problem_id=f"p{number}",
                    completion_ids=[f"c{number}"],
                )  # fmt: skip

            return GroupRolloutParams(run_episode=params.run_episode, build_rollout=build_rollout)


class Process:
    """What Megatron's trainer does about rollouts in one process, with its own functions."""

    def __init__(self, args: Any, granularity: str) -> None:
        self.args, self.granularity = args, granularity
        rl_utils._ROLLOUT_BANK = None
        rl_utils.get_rl_runtime_state().request_ledger.clear()
        configs = [AgentConfig(agent_type=Tokens, agent_args={"env_id": name}, weight=1.0) for name in ("a", "b")]
        self.agent = WeightedMultiTask(configs)
        self.bank = rl_utils.maybe_get_rollout_bank(args)
        assert isinstance(self.bank, MegatronBank)
        self.restored = self.bank.recover(args.iteration)
        assert self.agent.set_restored_groups(self.restored) == len(self.restored)

    def train(self, iterations: range, checkpoints: tuple[int, ...] = ()) -> list[list[str]]:
        return asyncio.run(self._train(iterations, checkpoints))

    async def _train(self, iterations: range, checkpoints: tuple[int, ...]) -> list[list[str]]:
        request = GroupedRolloutRequest(
            num_groups=4,
            rollouts_per_group=2,
            inference_interface=MockInferenceInterface(),
            submission_granularity=self.granularity,
            consumption_granularity=self.granularity,
        )
        pipeline, batches = None, []
        ledger = rl_utils.get_rl_runtime_state().request_ledger
        tokenizer = SimpleNamespace(eod=0, detokenize=str)
        for k in iterations:
            self.bank.set_collection(k)
            if pipeline is None:
                pipeline = RolloutPipeline(
                    self.agent,
                    request,
                    parallel_generation_tasks=1,
                    bank=rl_utils.get_rollout_bank(),
                    initial_batch_id=k,
                )
                groups = pipeline.run()
            batch = [await asyncio.wait_for(anext(groups), timeout=10) for _ in range(4)]
            self.bank.mark_consumed_many((group.uid for group in batch), k + 1)
            rl_utils.compute_group_stats(batch, tokenizer, 16, ledger)  # joins them with the ledger
            batches.append([group.uid for group in batch])
            if k + 1 in checkpoints:
                rl_utils.maybe_compact_rollout_bank(k + 1)
        async with aclosing(groups):
            return batches

    @property
    def prepared(self) -> int:
        """Groups that were asked of a generator."""
        return sum(agent.prepare_group_rollout_calls for agent in self.agent.agents)


@pytest.mark.parametrize("granularity", ["B", "G"])
def test_batches_are_replayed_by_megatrons_pipeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, granularity: str
) -> None:
    parser = argparse.ArgumentParser()
    _add_rl_args(parser)
    args = parser.parse_args([*FLAGS, "--rl-rollout-bank-dir", str(tmp_path)])
    args.global_batch_size, args.iteration = 8, 0
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", args)
    install()
    first = Process(args, granularity)
    before = first.train(range(4), checkpoints=(2,))
    banked = first.bank.bank.stats().appended_groups
    waiting = banked - 16
    del first
    monkeypatch.setattr(rollout_bank, "RolloutBank", after_a_kill)  # the same process goes on in another's place
    args.iteration = 2
    again = Process(args, granularity)
    uids = [group.uid for group in again.restored]
    assert uids[:8] == [*before[2], *before[3]] and len(uids) == 8 + waiting
    replayed = again.train(range(2, 4))
    if granularity == "B":
        assert replayed == before[2:]
    else:  # within a batch the order is that of completion
        assert [sorted(batch) for batch in replayed] == [sorted(batch) for batch in before[2:]]
    fresh = set(uids) ^ {uid for batch in replayed for uid in batch}
    assert len(fresh) == waiting


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute()))
