"""Two things to learn: putting digits in order (one turn), and finding a secret digit by higher/lower answers.

Invariant: a group depends on nothing but the weights, the seed, the environment and the source index, so that an
interrupted run makes the same group as one that was never interrupted. Latency is simulated and changes nothing.
"""

from __future__ import annotations

import asyncio
import zlib
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from arrowbank.demo.policy import Policy
from arrowbank.types import RolloutGroup, TokenRollout, VersionSpan

__all__ = ["ENVIRONMENTS", "MEMBERS", "Environment", "Guess", "Sampler", "Sort"]

MEMBERS = 16
END, SORT, ANSWER, GUESS, HIGHER, LOWER = 1, 2, 3, 4, 5, 6  # 0 pads
FIRST_DIGIT = 8


class Score(NamedTuple):
    """What an episode was worth, and why."""

    reward: float
    """0 … 1."""
    metrics: dict[str, float]
    failure_reason: str | None = None
    is_truncated: bool = False


@dataclass
class Episode:
    """One member while it is being sampled. Turns are cumulative: each repeats the conversation before it."""

    tokens: list[int]
    trajectory: list[NDArray[np.int32]] = field(default_factory=list)
    masks: list[NDArray[np.bool_]] = field(default_factory=list)
    """True where the policy sampled in that very turn."""
    logprobs: list[NDArray[np.float32]] = field(default_factory=list)
    """Of the tokens sampled in that turn."""
    prompt_lengths: list[int] = field(default_factory=list)
    finish_reasons: list[str | None] = field(default_factory=list)
    is_done: bool = False

    def close_turn(self, logprobs: list[np.float32]) -> None:
        """Take the sequence as it is now as one more turn, whose last tokens were sampled."""
        prompt_length = len(self.tokens) - len(logprobs)
        mask = np.zeros(len(self.tokens), np.bool_)
        mask[prompt_length:] = True
        self.trajectory.append(np.array(self.tokens, np.int32))
        self.masks.append(mask)
        self.logprobs.append(np.array(logprobs, np.float32))
        self.prompt_lengths.append(prompt_length)
        self.finish_reasons.append("stop" if self.tokens[-1] == END else "length")

    @property
    def sampled(self) -> list[int]:
        """The last turn's tokens."""
        return self.tokens[self.prompt_lengths[-1] :]


class Sampler:
    """Samples on behalf of one group, a token of every member at a time."""

    def __init__(
        self, policy: Policy, version: int, *, seed: int, env_id: str, source_index: int, latency_s: float
    ) -> None:
        self.version = version
        """Iterations complete in the policy's weights."""
        self.env_id = env_id
        self.source_index = source_index
        self.rng = np.random.Generator(np.random.PCG64([seed, zlib.crc32(env_id.encode()), source_index]))
        self._policy = policy
        self._latency_s = latency_s

    async def turn(self, episodes: list[Episode], cap: int) -> None:
        """Let every unfinished episode sample until END, at most ``cap`` tokens, and close its turn."""
        members = [(episode, list[np.float32]()) for episode in episodes if not episode.is_done]
        active = members
        for _ in range(cap):
            if not active:
                break
            await asyncio.sleep(self._latency_s)
            sequences = [episode.tokens for episode, _ in active]
            tokens, logprobs = self._policy.sample(sequences, self.rng.random(len(active)))
            for (episode, sampled), token, logprob in zip(active, tokens.tolist(), logprobs, strict=True):
                episode.tokens.append(token)
                sampled.append(logprob)
            active = [member for member in active if member[0].tokens[-1] != END]
        for episode, sampled in members:
            episode.close_turn(sampled)


class Environment(Protocol):
    """Something to learn."""

    env_id: ClassVar[str]
    weight: ClassVar[float]

    async def group(self, sampler: Sampler) -> RolloutGroup:
        """Sample the group of the sampler's problem."""


class Sort:
    """Put two or three different digits in order and stop. One turn; half the reward is for the right places."""

    env_id: ClassVar[str] = "sort"
    weight: ClassVar[float] = 2.0
    cap: ClassVar[int] = 4

    async def group(self, sampler: Sampler) -> RolloutGroup:
        """Sample the answers to one row of digits."""
        started_at = datetime.now(UTC)
        size = int(sampler.rng.integers(2, 4))
        digits = sampler.rng.permutation(6)[:size].tolist()
        episodes = [Episode([SORT, *_digits(digits), ANSWER]) for _ in range(MEMBERS)]
        await sampler.turn(episodes, self.cap)
        scores = [self._score(episode.sampled, [*_digits(sorted(digits)), END]) for episode in episodes]
        problem = "sort-" + "".join(map(str, digits))
        return _group(sampler, episodes, scores, problem, f"{size} digits", started_at, self.cap)

    def _score(self, answer: list[int], wanted: list[int]) -> Score:
        places = sum(given == due for given, due in zip(answer, wanted, strict=False)) / len(wanted)
        is_exact = answer == wanted
        has_stopped = END in answer
        return Score(
            (places + is_exact) / 2,
            {"right_places": places, "exact": float(is_exact)},
            failure_reason=None if has_stopped else "did not stop",
            is_truncated=not has_stopped,
        )


class Guess:
    """Find a secret digit in three turns, told higher or lower after each. Sooner is better, near counts a little."""

    env_id: ClassVar[str] = "guess"
    weight: ClassVar[float] = 1.0
    turns: ClassVar[int] = 3

    async def group(self, sampler: Sampler) -> RolloutGroup:
        """Sample the searches for one secret, 1 … 7."""
        started_at = datetime.now(UTC)
        secret = int(sampler.rng.integers(1, 8))
        episodes = [Episode([GUESS]) for _ in range(MEMBERS)]
        for turn in range(self.turns):
            await sampler.turn(episodes, cap=1)
            for episode in episodes:
                if not episode.is_done:
                    _answer(episode, secret, is_last=turn == self.turns - 1)
        scores = [self._score(episode, secret) for episode in episodes]
        depth = "one question" if secret == 4 else "two questions" if secret % 2 == 0 else "three questions"
        return _group(sampler, episodes, scores, f"guess-{secret}", depth, started_at, cap=1)

    def _score(self, episode: Episode, secret: int) -> Score:
        guess = episode.tokens[-1] - FIRST_DIGIT
        turns = len(episode.trajectory)
        if guess < 0:
            return Score(0.0, {"found": 0.0, "nearness": 0.0}, failure_reason="not a digit")
        is_found, nearness = guess == secret, 1 - abs(guess - secret) / 7
        reward = 1 - 0.1 * (turns - 1) if is_found else 0.3 * nearness
        return Score(reward, {"found": float(is_found), "nearness": nearness})


ENVIRONMENTS: tuple[Environment, ...] = (Sort(), Guess())


def _digits(values: list[int]) -> list[int]:
    return [FIRST_DIGIT + value for value in values]


def _answer(episode: Episode, secret: int, *, is_last: bool) -> None:
    """Say higher or lower, unless the episode is over."""
    guess = episode.tokens[-1] - FIRST_DIGIT
    if is_last or guess == secret or guess < 0:
        episode.is_done = True
    else:
        episode.tokens.append(HIGHER if secret > guess else LOWER)


def _group(
    sampler: Sampler,
    episodes: list[Episode],
    scores: list[Score],
    problem_id: str,
    difficulty: str,
    started_at: datetime,
    cap: int,
) -> RolloutGroup:
    rollouts = [
        TokenRollout(
            trajectory=episode.trajectory,
            generation_mask=episode.masks,
            logprobs=episode.logprobs,
            reward=score.reward,
            env_id=sampler.env_id,
            problem_id=problem_id,
            prompt_length=episode.prompt_lengths,
            finish_reasons=episode.finish_reasons,
            is_truncated=score.is_truncated,
            metrics=score.metrics,
            failure_reason=score.failure_reason,
            generation_cap=cap,
            policy_versions=[VersionSpan(turn, 0, sampler.version) for turn in range(len(episode.trajectory))],
            started_at=started_at,
            difficulty=difficulty,
        )
        for episode, score in zip(episodes, scores, strict=True)
    ]
    return RolloutGroup(rollouts=rollouts, source_index=sampler.source_index)
