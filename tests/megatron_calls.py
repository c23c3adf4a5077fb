"""Megatron-LM's classes, and a bank under the adapter, called as Megatron calls its own.

Classes are those of a small stand-in (``megatron_standin``), which ``test_megatron`` holds against a table of names and
calls; with MEGATRON_LM=checkout they are Megatron's own.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import sys
from pathlib import Path
from typing import Any

from megatron_standin.pinned import STANDIN

from arrowbank import RolloutBank
from arrowbank.integrations.megatron import MegatronBank

CHECKOUT = os.environ.get("MEGATRON_LM")
sys.path.insert(0, str(CHECKOUT or STANDIN))
kinds: Any = importlib.import_module("megatron.rl.types")
megatron_bank: Any = importlib.import_module("megatron.rl.rollout_bank")
sys.path.remove(str(CHECKOUT or STANDIN))  # others may look whether there is a megatron


def from_standin(name: str) -> Any:
    """A module of the stand-in, also where the classes are Megatron's own."""
    spec = importlib.util.spec_from_file_location(f"standin_{Path(name).stem}", STANDIN / "megatron/rl" / name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


trainer_module = from_standin("rl_utils.py")
pipeline_module = from_standin("agent/rollout_pipeline.py")


def token_rollout(seed: int = 0, *, turns: int = 2, **fields: Any) -> Any:
    """As an agent packages an episode: logprobs of sampled tokens only, a completion id for each turn."""
    ends = [3 * (turn + 1) for turn in range(turns)]
    given: dict[str, Any] = {
        "trajectory": [[seed % 1000 + token for token in range(end)] for end in ends],
        "reward": float(seed),
        "generation_mask": [[False] * (end - 2) + [True] * 2 for end in ends],
        "logprobs": [[-0.5 - seed, -0.25] for _ in ends],
        "env_id": "math",
        "problem_id": f"p{seed}",
        "completion_ids": [f"c{seed}-{turn}" for turn in range(turns)],
        "generation_cap": 7,
    }
    return kinds.TokenRollout(**given | fields)


def text_rollout(seed: int = 0, **fields: Any) -> Any:
    given: dict[str, Any] = {"trajectory": [f"Q{seed}", f"Q{seed} A"], "prompt_length": [2, 3], "reward": float(seed)}
    return kinds.Rollout(**given | {"env_id": "math"} | fields)


def group_of(*rollouts: Any, **fields: Any) -> Any:
    return kinds.RolloutGroup(rollouts=list(rollouts), **fields)


def token_group(seed: int = 0, **fields: Any) -> Any:
    return group_of(token_rollout(2 * seed, **fields), token_rollout(2 * seed + 1, turns=1, **fields))


def content(group: Any) -> Any:
    """What must come back: everything but the uid and the completion ids of token rollouts."""
    dumped = group.model_dump(exclude={"uid"})
    for rollout, member in zip(dumped["rollouts"], group, strict=True):
        if isinstance(member, kinds.TokenRollout):
            del rollout["completion_ids"]
    return dumped


def kill(path: Path, **options: Any) -> MegatronBank:
    """Open a bank whose last handle is given up, as after a kill."""
    return MegatronBank(RolloutBank.open(path, takeover="force"), **options)


def through_a_kill(path: Path, *groups: Any) -> list[Any]:
    bank = kill(path)
    bank.recover(0)
    for group in groups:
        group.uid = bank.append(group)
    restored = kill(path).recover(0)
    assert [group.uid for group in restored] == [group.uid for group in groups]
    return restored


class Run:
    """Processes of one run, each killed, on one bank."""

    def __init__(self, path: Path, *, steps: int = 1, envs: dict[str, int] | None = None) -> None:
        self.path, self.steps, self.envs = path, steps, envs or {"math": 2, "code": 1}
        self.seeds = itertools.count()

    def start(self, iteration: int, **options: Any) -> Any:
        self.bank = kill(self.path, span=self.steps, **options)
        pipeline = pipeline_module.RolloutPipeline(self.bank, self.envs, self.generate)
        self.trainer = trainer_module.Trainer(self.bank, pipeline, iteration)
        self.restored = self.trainer.resume()
        return self.trainer

    def generate(self, env_id: str, _: int) -> Any:
        group = token_group(next(self.seeds), env_id=env_id)
        for member in group:
            self.trainer.request_ledger |= dict.fromkeys(member.completion_ids, "sampled")
        return group

    def collect(self, *iterations: int) -> list[list[str]]:
        return [[group.uid for group in self.trainer.collect(k)] for k in iterations]

    @property
    def generated(self) -> int:
        return self.trainer.pipeline.generated  # type: ignore[no-any-return]


def run_with_a_cut_batch(path: Path) -> tuple[Run, list[list[str]]]:
    """A run whose second batch of four steps is cut by checkpoint 6, and its batches."""
    run = Run(path, steps=4)
    run.start(0)
    before = run.collect(0, 4)
    run.bank.checkpoint(6)  # saved at a signal, between two collections
    return run, before
