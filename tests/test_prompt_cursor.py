"""Prompts and random numbers go on where they were: trainers killed at random calls, against twins that never were.

One trainer owns its loop and takes restored groups by ``Restored.take``; the other uses the pipeline,
``source_indices`` and each draw's ``state``.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import random
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from arrowbank import Rollout, RolloutBank, RolloutGroup
from arrowbank.pipeline import EnvTask, RolloutPipeline

ITERATIONS, SIZE, EVERY = 10, 4, 3


class Killed(BaseException):
    """The process ends here."""


class Tripwire:
    """Lets so many steps pass; then each raises, as in a process that is dead."""

    def __init__(self, steps: float) -> None:
        self.left = steps

    def step(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed


@dataclass
class Disk:
    """What outlives a process, beside the bank: the model checkpoint. And what the test has seen."""

    model: dict[str, Any] = field(default_factory=lambda: {"step": 0, "session": None, "weights": "w", "state": None})
    trained: list[list[str]] = field(default_factory=list)
    """The prompts of each batch that the weights hold, in order."""
    acknowledged: list[str] = field(default_factory=list)
    """Prompts whose groups the bank has acknowledged, by any life."""
    bank: RolloutBank | None = None
    """Of the last life."""

    def reopened(self, path: Path) -> RolloutBank:
        """Open the bank as after a kill; the handle of the life before is only then let go of."""
        bank = RolloutBank.open(path, takeover="force")
        if self.bank is not None:
            self.bank.close()
        self.bank = bank
        return bank


class MortalBank:
    """The bank of a process that may be killed before each call, and after it, before its result is seen."""

    def __init__(self, bank: RolloutBank, wire: Tripwire, disk: Disk) -> None:
        self._bank, self._wire, self._disk = bank, wire, disk
        self.session = bank.session

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._bank, name)

        def mortal(*args: Any, **options: Any) -> Any:
            self._wire.step()
            result = call(*args, **options)
            if name == "append":
                self._disk.acknowledged.append(prompt_of(args[0]))
            self._wire.step()
            return result

        return mortal

    async def append_async(self, group: RolloutGroup, **options: Any) -> str:
        self._wire.step()
        uid = await self._bank.append_async(group, **options)
        self._disk.acknowledged.append(prompt_of(group))
        self._wire.step()
        return uid


def prompt_of(group: RolloutGroup) -> str:
    return str(group[0].problem_id)


def sampled(prompt: str, weights: str, **fields: Any) -> RolloutGroup:
    """The group that these weights make of a prompt."""
    text = hashlib.sha256(f"{prompt} {weights}".encode()).hexdigest()
    return RolloutGroup(rollouts=[Rollout(trajectory=[text], problem_id=prompt, reward=1.0)], **fields)


def trained_on(weights: str, groups: Iterable[RolloutGroup]) -> str:
    """The weights after a batch, which are another for every other order of groups."""
    return hashlib.sha256("".join([weights, *(str(group[0].trajectory) for group in groups)]).encode()).hexdigest()


# -- a trainer with its own loop: a shuffled data set, and groups asked for by their prompts


class ShuffledPrompts:
    """Epochs over seven prompts, each shuffled by a random generator whose state goes on: a cursor."""

    def __init__(self, state: bytes | None) -> None:
        self.rng = random.Random(7)
        self.epoch: list[str] = []
        if state is not None:
            self.epoch, (version, internal, gauss) = json.loads(state)
            self.rng.setstate((version, tuple(internal), gauss))

    def next(self) -> str:
        if not self.epoch:
            self.epoch = [f"p{number}" for number in range(7)]
            self.rng.shuffle(self.epoch)
        return self.epoch.pop(0)

    @property
    def state(self) -> bytes:
        return json.dumps([self.epoch, self.rng.getstate()]).encode()


def own_loop(path: Path, disk: Disk, wire: Tripwire) -> None:
    """One life, from the model checkpoint on."""
    model = disk.model
    weights, step = model["weights"], model["step"]
    del disk.trained[step:]
    bank = MortalBank(disk.reopened(path), wire, disk)
    restored = bank.restore(step, session=model["session"])
    plan = list(restored.draws)
    prompts = ShuffledPrompts(model["state"])
    for k in range(step, ITERATIONS):
        bank.begin_iteration(k)
        if plan:
            draw = plan.pop(0)
            groups, state = draw.groups, draw.state
            prompts = ShuffledPrompts(state)
        else:
            groups = []
            for prompt in [prompts.next() for _ in range(SIZE)]:
                found = restored.take(problem_id=prompt)
                if not found:
                    found = [sampled(prompt, weights)]
                    wire.step()
                    bank.append(found[0])
                groups += found
            state = prompts.state
        bank.mark_consumed([group.uid for group in groups], k, state=state)
        weights = trained_on(weights, groups)
        disk.trained.append([prompt_of(group) for group in groups])
        wire.step()
        if (k + 1) % EVERY == 0 or k + 1 == ITERATIONS:
            disk.model = {"step": k + 1, "session": bank.session, "weights": weights, "state": prompts.state}
            wire.step()
            bank.checkpoint(k + 1)
    assert not any(restored.pending.values())
    bank.close()


def test_a_trainer_that_asks_for_its_prompts_neither_skips_nor_repeats_any(path: Path) -> None:
    twin = Disk()
    own_loop(path / "twin", twin, Tripwire(10**9))
    assert len(twin.acknowledged) == ITERATIONS * SIZE
    for seed in range(15):
        rng, disk = random.Random(seed), Disk()
        for _ in range(rng.randint(1, 6)):
            try:
                own_loop(path / str(seed), disk, Tripwire(rng.randrange(120)))
            except Killed:
                continue
            break
        else:
            own_loop(path / str(seed), disk, Tripwire(10**9))
        assert disk.trained == twin.trained, seed
        assert disk.model["weights"] == twin.model["weights"], seed
        assert disk.acknowledged == twin.acknowledged, seed  # each once, and in that order


@pytest.mark.parametrize("killed_at", range(0, 150, 3))
def test_it_may_be_killed_at_every_call_of_its_first_iterations(killed_at: int, path: Path) -> None:
    disk = Disk()
    with pytest.raises(Killed):
        own_loop(path, disk, Tripwire(killed_at))
    own_loop(path, disk, Tripwire(10**9))
    prompts = ShuffledPrompts(None)
    assert disk.trained == [[prompts.next() for _ in range(SIZE)] for _ in range(ITERATIONS)]
    assert len(disk.acknowledged) == ITERATIONS * SIZE


# -- a trainer with a pipeline: numbered prompts of two environments, finished in any order


class NumberedPrompts:
    """Which prompts are done with: ``state`` has them. The others come in ascending order, but for those held back."""

    def __init__(self, state: bytes | None, held: frozenset[int]) -> None:
        below, above = json.loads(state) if state is not None else (0, [])
        self.done = {*range(below), *above}
        self._numbers = {env: (n for n in itertools.count(env, 2) if n not in self.done | held) for env in (0, 1)}

    def next(self, env: int) -> int:
        return next(self._numbers[env])

    @property
    def state(self) -> bytes:
        below = next(n for n in itertools.count() if n not in self.done)
        return json.dumps([below, sorted(n for n in self.done if n > below)]).encode()


class PipelineTrainer:
    """One life of a trainer whose generators work on all their prompts at once, and finish them in any order."""

    def __init__(self, path: Path, disk: Disk, wire: Tripwire, rng: random.Random, **options: Any) -> None:
        self.disk, self.wire, self.rng = disk, wire, rng
        self.weights = disk.model["weights"]
        self.step = disk.model["step"]
        del disk.trained[self.step :]
        self.bank = MortalBank(disk.reopened(path), wire, disk)
        self.restored = self.bank.restore(self.step, session=disk.model["session"])
        state = self.restored.draws[-1].state if self.restored.draws else disk.model["state"]
        self.prompts = NumberedPrompts(state, self.restored.source_indices)
        self.num_planned = len(self.restored.draws)
        tasks = [EnvTask(f"E{env}", 3 - 2 * env, self.generator(env)) for env in (0, 1)]
        self.pipeline = RolloutPipeline(tasks, self.bank, self.restored, **options)

    def generator(self, env: int):  # type: ignore[no-untyped-def]
        async def generate(num_groups: int) -> AsyncIterator[RolloutGroup]:
            assert len(self.disk.trained) >= self.step + self.num_planned, "a generator was called during the replay"
            numbers = [self.prompts.next(env) for _ in range(num_groups)]
            weights = self.weights
            self.rng.shuffle(numbers)
            for number in numbers:
                for _ in range(self.rng.randrange(3)):
                    await asyncio.sleep(0)
                self.wire.step()
                yield sampled(str(number), weights, source_index=number)

        return generate

    async def run(self) -> None:
        async with self.pipeline:
            for k in range(self.step, ITERATIONS):
                batch = await self.pipeline.batch(k, SIZE)
                self.prompts.done.update(group.source_index for group in batch.groups)  # type: ignore[attr-defined]
                state = batch.state if batch.replayed else self.prompts.state
                self.bank.mark_consumed([group.uid for group in batch.groups], k, state=state)
                groups = sorted(batch.groups, key=prompt_of)
                self.weights = trained_on(self.weights, groups)
                self.disk.trained.append([prompt_of(group) for group in groups])
                self.wire.step()
                if (k + 1) % EVERY == 0 or k + 1 == ITERATIONS:
                    model = {"step": k + 1, "session": self.bank.session, "weights": self.weights}
                    self.disk.model = model | {"state": state}
                    self.wire.step()
                    self.bank.checkpoint(k + 1)


def lives(path: Path, seed: int, **options: Any) -> tuple[Disk, PipelineTrainer]:
    """Train to the end, killed some times."""
    rng, disk = random.Random(seed), Disk()
    for life in itertools.count():
        steps = rng.randrange(150) if life < 4 else 10**9
        try:
            trainer = PipelineTrainer(path, disk, Tripwire(steps), rng, **options)
            asyncio.run(trainer.run())
        except Killed:
            continue
        return disk, trainer
    raise AssertionError


@pytest.mark.parametrize("consumption", ["batch", "group"])
def test_a_pipeline_killed_at_random_calls_ends_with_the_weights_of_its_twin(consumption: str, path: Path) -> None:
    twin = Disk()
    trainer = PipelineTrainer(path / "twin", twin, Tripwire(10**9), random.Random(0), consumption=consumption)
    asyncio.run(trainer.run())
    assert sorted(map(int, twin.acknowledged)) == sorted(
        [*range(0, 2 * 3 * ITERATIONS, 2), *range(1, 2 * ITERATIONS, 2)]
    )
    for seed in range(12):
        disk, _ = lives(path / str(seed), seed, consumption=consumption)
        assert disk.trained == twin.trained, seed
        assert disk.model["weights"] == twin.model["weights"], seed
        assert sorted(disk.acknowledged) == sorted(twin.acknowledged), seed


@pytest.mark.parametrize("lag", [1, 2])
def test_generating_ahead_no_prompt_is_skipped_or_made_twice(lag: int, path: Path) -> None:
    for seed in range(8):
        disk, trainer = lives(path / str(seed), seed, lag=lag, max_lag=None)
        trained = [int(prompt) for batch in disk.trained for prompt in batch]
        assert len(trained) == len(set(trained)) == ITERATIONS * SIZE, seed
        assert len(disk.acknowledged) == len(set(disk.acknowledged)), seed
        trainer.bank._bank.close()  # where the wire has met only what was made ahead, the run is complete
        with RolloutBank.open(path / str(seed)) as bank:
            waiting = bank.restore(ITERATIONS, session=disk.model["session"]).source_indices
        assert set(map(int, disk.acknowledged)) <= {*trained, *waiting}, seed
        assert waiting.isdisjoint(trained), seed
        for env in (0, 1):  # what is missing below the last one was under way when the run ended, and no more than that
            numbers = {number for number in {*trained, *waiting} if number % 2 == env}
            missing = set(range(env, max(numbers), 2)) - numbers
            assert len(missing) < (3 - 2 * env) * (lag + 1), seed
