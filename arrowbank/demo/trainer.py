"""The training loop that gets killed: ``python -m arrowbank.demo.trainer``, a child of ``arrowbank demo``.

It uses the public API and nothing else. Killed at any moment and started again, it ends with the weights of a run
that was never killed, bit for bit: a batch is made of the same groups in the same order, because source indices go
on where consumed and pending groups end, a group is a function of weights and source index, and each environment
finishes its groups in ascending order.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from functools import partial
from typing import Any

from arrowbank.bank import RolloutBank
from arrowbank.demo import checkpoints, progress
from arrowbank.demo.checkpoints import NO_SESSION, ModelState
from arrowbank.demo.environments import ENVIRONMENTS, Environment, Sampler
from arrowbank.demo.generator_log import GeneratorLog, Resume
from arrowbank.demo.grpo import mean_reward, train_step
from arrowbank.demo.settings import BANK, GENERATOR_LOG, GROUPS, MODEL, TrainerSettings
from arrowbank.pipeline import EnvTask, RolloutPipeline
from arrowbank.restored import Restored
from arrowbank.types import RolloutGroup

__all__ = ["ObservedBank", "SourceIndices", "Trainer", "main"]

LATENCY_S = 0.0005
"""Simulated, for each sampled token."""


class SourceIndices:
    """Which problem of each environment comes next: the prompt cursor.

    Invariant: an index is given out only if no consumed group, no pending one and no earlier call has had it.
    """

    def __init__(self, consumed: dict[str, int], pending: Iterable[RolloutGroup]) -> None:
        self.consumed = dict(consumed)
        """For each environment the index after the last one trained on."""
        self._next = dict(consumed)
        self._held = {(group.env_id, source_index(group)) for group in pending}

    def take(self, env_id: str) -> int:
        """Return the next index to generate."""
        index = self._next.get(env_id, 0)
        while (env_id, index) in self._held:
            index += 1
        self._next[env_id] = index + 1
        return index

    def consume(self, groups: Iterable[RolloutGroup]) -> None:
        """Move past the groups of a batch."""
        for group in groups:
            after = source_index(group) + 1
            self.consumed[group.env_id] = max(after, self.consumed.get(group.env_id, 0))
            self._next[group.env_id] = max(after, self._next.get(group.env_id, 0))


class ObservedBank:
    """The bank as the pipeline sees it, with every acknowledgement written to the generator log."""

    def __init__(self, bank: RolloutBank, log: GeneratorLog) -> None:
        self._bank = bank
        self._log = log
        self._iteration = 0

    def begin_iteration(self, iteration: int) -> None:
        """Begin the iteration in the bank."""
        self._iteration = iteration
        self._bank.begin_iteration(iteration)

    def evict(self, uids: Iterable[str], reason: str) -> None:
        """Evict from the bank."""
        self._bank.evict(uids, reason)

    async def append_async(self, group: RolloutGroup, **options: Any) -> str:
        """Append to the bank; once it has acknowledged, never again is this group to be generated."""
        progress.announce(progress.APPENDING, self._iteration)
        uid = await self._bank.append_async(group, **options)
        self._log.acknowledged(self._iteration, group.env_id, source_index(group))
        progress.announce(progress.ACKNOWLEDGED, self._iteration)
        return uid


class Trainer:
    """One start: from the newest model checkpoint to the end, or to the next kill."""

    def __init__(self, settings: TrainerSettings, log: GeneratorLog, bank: RolloutBank | None) -> None:
        self._settings = settings
        self._log = log
        self._bank = bank
        self._model = checkpoints.load_newest(settings.directory / MODEL) or ModelState.initial(settings.seed)
        archived = bank.stats().archived_groups if bank else 0
        restored = _restore(bank, self._model) if bank else None
        self._indices = _indices_after(restored, self._model)
        self._report(restored, archived)
        self._pipeline = RolloutPipeline(
            [EnvTask(env.env_id, env.weight, partial(self.generate, env)) for env in ENVIRONMENTS],
            bank=ObservedBank(bank, log) if bank else None,
            restored=restored,
        )

    async def run(self) -> None:
        """Train until all iterations are complete."""
        model, settings = self._model, self._settings
        for k in range(model.iteration, settings.iterations):
            batch = await self._pipeline.batch(k, num_groups=GROUPS)
            self._indices.consume(batch.groups)
            if self._bank:
                state = json.dumps(self._indices.consumed).encode()
                self._bank.mark_consumed([group.uid for group in batch.groups if group.uid], k, state=state)
            self._train(batch.groups)
            if model.iteration % settings.checkpoint_every == 0 or model.iteration == settings.iterations:
                self._checkpoint()

    async def generate(self, env: Environment, num_groups: int) -> AsyncIterator[RolloutGroup]:
        """Generate groups of one environment with the weights of this moment, in ascending order."""
        version = self._model.iteration
        for _ in range(num_groups):
            index = self._indices.take(env.env_id)
            self._log.asked(version, env.env_id, index)
            progress.announce(progress.GENERATING, version)
            sampler = Sampler(
                self._model.policy,
                version,
                seed=self._settings.seed,
                env_id=env.env_id,
                source_index=index,
                latency_s=LATENCY_S,
            )
            group = await env.group(sampler)
            if self._bank is None:
                self._log.acknowledged(version, env.env_id, index)
            yield group

    def _train(self, groups: list[RolloutGroup]) -> None:
        model = self._model
        train_step(model.policy, model.adam, groups)
        reward = mean_reward(groups)
        model.rewards.append(reward)
        model.num_groups += len(groups)
        model.num_rollouts += sum(len(group) for group in groups)
        model.cursors = dict(self._indices.consumed)
        model.iteration += 1
        progress.announce(progress.TRAINED, model.iteration, reward)

    def _checkpoint(self) -> None:
        if self._bank:
            self._model.session = self._bank.session
        checkpoints.save(self._settings.directory / MODEL, self._model)
        if self._bank:
            self._bank.checkpoint(self._model.iteration)
        progress.announce(progress.CHECKPOINTED, self._model.iteration)

    def _report(self, restored: Restored | None, archived: int) -> None:
        resume = Resume()
        if restored and self._bank:
            pending = sum(len(queue) for queue in restored.pending.values())
            resume = Resume(pending, len(restored.draws), archived - self._bank.stats().archived_groups)
        self._log.resumed(self._model.iteration, resume)
        progress.announce(progress.RESUMED, self._model.iteration, resume.pending + resume.draws)


def source_index(group: RolloutGroup) -> int:
    """Return which problem of its environment the group is of: an extra field, kept by the bank."""
    return int(getattr(group, "source_index"))  # noqa: B009  # extra fields are unknown to the type checker


def main() -> None:
    """Run one start of the trainer."""
    settings = TrainerSettings.from_arguments()
    log = GeneratorLog(settings.directory / GENERATOR_LOG, settings.attempt)
    if not settings.has_bank:
        asyncio.run(Trainer(settings, log, None).run())
        return
    with RolloutBank.open(settings.directory / BANK) as bank:
        asyncio.run(Trainer(settings, log, bank).run())
        bank.close(final=True)


def _restore(bank: RolloutBank, model: ModelState) -> Restored:
    """Go on with the line that this very model checkpoint was trained on, whatever other sessions recorded since."""
    return bank.restore(model.iteration, session=None if model.session == NO_SESSION else model.session)


def _indices_after(restored: Restored | None, model: ModelState) -> SourceIndices:
    """Go on after the last draw to be replayed, else after the checkpoint; skip what is pending."""
    if restored is None:
        return SourceIndices(model.cursors, ())
    last = restored.draws[-1].state if restored.draws else None
    consumed = model.cursors if last is None else json.loads(last)
    return SourceIndices(consumed, [group for queue in restored.pending.values() for group in queue])


if __name__ == "__main__":
    main()
