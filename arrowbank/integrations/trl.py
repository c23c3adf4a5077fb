"""TRL's GRPOTrainer with a bank: killed at any moment and started again, it generates nothing twice.

    with RolloutBank.open("run/bank") as bank:
        trainer = BankedGRPOTrainer(bank=bank, model=…, reward_funcs=…, args=GRPOConfig(…), train_dataset=…)
        trainer.train(resume_from_checkpoint=True)      # the newest whole checkpoint; from the start when there is none
        bank.close(final=True)

TRL generates a batch of groups at a time, shuffles them, and trains on them for several micro-batches. Words here:

    micro-batch   one ``training_step``; TRL counts them in ``_step``, which no checkpoint holds: ``Schedule``
    generation    the groups generated at once, one draw of the bank; feeds ``Schedule.per_generation`` micro-batches
    start         the micro-batch that a generation was made for
    after         the first group of the generation before; so generations name the history they belong to

A generation is banked before TRL shuffles it, whole: token ids, masks, sampler logprobs and rewards where everybody
looks for them, and what else TRL trains on (old logprobs, advantages, random states …) as ``arrays`` called ``trl/…``.
So a generation that was finished is never made again, also when the kill came before its draw was recorded.

Invariant: after a generation was given back, random states, metrics and counts are what they were after it was made;
TRL's own code then shuffles and splits it as it did. torch, transformers and TRL are imported when a trainer is made.

Checkpoint T is ``checkpoint-T``: once all its files are on disk, ``arrowbank.json`` is put beside them, with the bank's
session, and then ``bank.checkpoint(T)`` is called. A checkpoint directory without that file is taken as unfinished.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from arrowbank.bank import RolloutBank
from arrowbank.durable import files
from arrowbank.errors import ReplayUnavailableError
from arrowbank.restored import Draw, RestoreReport
from arrowbank.types import RolloutGroup, TokenRollout, VersionSpan

__all__ = ["BankedGRPOTrainer", "BankingMixin", "Saved", "Schedule", "newest_checkpoint"]

MARKER = "arrowbank.json"
TRIED_WITH = "1.16"
_log = logging.getLogger("arrowbank")
_Arrays = dict[str, NDArray[Any]]
_TOKENS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
"""What token ids and lengths say already."""


# -- when TRL generates and steps


@dataclass(frozen=True)
class Schedule:
    """TRL's counts: all of a run, and all starts, in micro-batches."""

    per_step: int
    """Micro-batches an optimizer step; fewer in the last one of an epoch that they do not divide."""
    per_generation: int
    """steps_per_generation × num_iterations."""
    per_epoch: int
    """A multiple of ``per_generation``: TRL drops prompts that fill no generation."""

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps an epoch."""
        return -(-self.per_epoch // self.per_step)

    def micro_batch(self, step: int) -> int:
        """Return how many micro-batches were run when ``step`` optimizer steps are complete."""
        epochs, steps = divmod(step, self.steps_per_epoch)
        return epochs * self.per_epoch + steps * self.per_step

    def step(self, micro_batch: int) -> int:
        """Return the optimizer step that a micro-batch is part of."""
        epochs, micro_batches = divmod(micro_batch, self.per_epoch)
        return epochs * self.steps_per_epoch + micro_batches // self.per_step

    def start(self, micro_batch: int) -> int:
        """Return the start of the generation that a micro-batch trains on."""
        return micro_batch - micro_batch % self.per_generation

    def span(self, start: int) -> int:
        """Return how many optimizer steps a generation feeds."""
        return self.step(start + self.per_generation - 1) - self.step(start) + 1


class EpochSampler:
    """TRL's order of prompts, the same in a resumed run.

    TRL's sampler shuffles anew each time it is iterated, from a generator that no checkpoint holds: a run resumed in
    its third epoch would see the prompts of the first again.
    """

    def __init__(self, make: Callable[[], Any], epoch: Callable[[], int]) -> None:
        self._make, self._epoch = make, epoch

    def __iter__(self) -> Iterator[int]:
        sampler = self._make()
        for _ in range(self._epoch()):
            next(iter(sampler), None)  # shuffles as a whole epoch does
        yield from sampler

    def __len__(self) -> int:
        return len(self._make())


# -- beside the model checkpoint


@dataclass(frozen=True)
class Saved:
    """What ``arrowbank.json`` says of the checkpoint it lies in."""

    step: int
    session: int | None = None
    after: str | None = None
    """First group of the last generation before the checkpoint, "" when there was none; None: unknown."""
    schedule: dict[str, int] | None = None

    @classmethod
    def of(cls, checkpoint: Path | None) -> Saved | None:
        """Return what a checkpoint says; nothing for one without, or that is not whole."""
        if checkpoint is None:
            return None
        try:
            found = json.loads((checkpoint / MARKER).read_bytes())
            return cls(**{name: found[name] for name in ("step", "session", "after", "schedule")})
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def write(self, checkpoint: Path) -> None:
        """Say that a checkpoint is whole. Durability: it is, with all its files, on return."""
        for directory, _, names in os.walk(checkpoint):
            for path in (Path(directory, name) for name in names):
                if path.is_file() and not path.is_symlink():
                    files.fsync_file(path)
            files.fsync_directory(Path(directory))
        files.replace(checkpoint / MARKER, json.dumps(asdict(self)).encode(), checkpoint)
        files.fsync_directory(checkpoint.parent)


def newest_checkpoint(directory: str | Path) -> Path | None:
    """Return the newest ``checkpoint-N`` that is whole; where none says so, the newest that has a trainer's state.

    A kill while a checkpoint is being saved leaves a part of it.
    """
    found = {}
    for path in Path(directory).glob("checkpoint-*"):
        if re.fullmatch(r"checkpoint-\d+", path.name) and path.is_dir():
            found[int(path.name.rpartition("-")[2])] = path
    newest_first = [found[step] for step in sorted(found, reverse=True)]
    whole = next((path for path in newest_first if Saved.of(path)), None)
    chosen = whole or next((path for path in newest_first if _has_state(path)), None)
    for path in newest_first:
        if path == chosen:
            break
        _log.warning("%s: left out, since saving it was not finished", path)
    return chosen


def _has_state(checkpoint: Path) -> bool:
    try:
        return "global_step" in json.loads((checkpoint / "trainer_state.json").read_bytes())
    except (FileNotFoundError, ValueError, TypeError):
        return False


# -- a generation as groups


@dataclass(frozen=True)
class Place:
    """Where in a run a generation belongs."""

    start: int
    after: str | None

    def state(self) -> bytes:
        """The draw's state."""
        return json.dumps(asdict(self)).encode()


@dataclass
class Generation:
    """What TRL made of one batch of prompts, without torch."""

    outputs: dict[str, Any]
    """What it trains on, by TRL's names, in order: arrays, most of them (completions, …), and plain values."""
    dtypes: dict[str, str]
    """torch's name of each array's dtype, which NumPy may not have."""
    pad: int
    random_state: _Arrays
    metrics: list[tuple[str, bool, list[float]]]
    """What was logged: name, whether that replaced what was there, values."""
    num_tokens: int
    """By which TRL's count of tokens rose."""


@dataclass(frozen=True)
class Scored:
    """What TRL does not hand on: the completions as they were sampled, and each function's rewards."""

    completions: list[list[int]]
    rewards: NDArray[np.float32]
    """Shapes: (completions, functions). NaN where a function had nothing to say."""
    names: list[str]
    weights: NDArray[np.float32]
    stops: frozenset[int]
    """Tokens that end a completion."""
    cap: int | None

    def totals(self) -> NDArray[np.float32]:
        """The weighted sums, as TRL makes them: NaN only where all functions are."""
        sums = np.nansum(self.rewards * self.weights, axis=1)
        return np.where(np.isnan(self.rewards).all(axis=1), np.nan, sums).astype(np.float32)


def make_groups(
    generation: Generation, scored: Scored, inputs: Sequence[Mapping[str, Any]], size: int, version: int, iteration: int
) -> list[RolloutGroup]:
    """Return the groups as they are to be looked at: token ids, masks, logprobs, rewards.

    size: completions a group. version: iteration count of the weights that sampled.
    """
    rollouts = [_rollout(generation, scored, index, example, version) for index, example in enumerate(inputs)]
    groups = []
    for index, first in enumerate(range(0, len(rollouts), size)):
        extra = {"prompt": fingerprint(inputs[first])}
        members: list[Any] = rollouts[first : first + size]
        groups.append(RolloutGroup(rollouts=members, batch_id=iteration, index_in_batch=index, trl=extra))
    return groups


def _rollout(
    generation: Generation, scored: Scored, index: int, example: Mapping[str, Any], version: int
) -> TokenRollout:
    outputs = generation.outputs
    prompt = outputs["prompt_ids"][index][outputs["prompt_mask"][index] != 0]
    completion = np.asarray(scored.completions[index], np.int64)
    masked = not outputs["completion_mask"][index].any()  # mask_truncated_completions; the tools' mask goes with it
    mask_is_known = not (masked and "tool_mask" in outputs)
    sampled = np.ones(len(completion), np.bool_)
    if "tool_mask" in outputs:  # what tools and environments said was not sampled
        sampled = outputs["tool_mask"][index][: len(completion)] != 0
    logprobs = outputs.get("sampling_per_token_logps")
    if mask_is_known and logprobs is not None and logprobs.dtype == np.float32:
        logprobs = [logprobs[index][: len(completion)][sampled]]
    else:
        logprobs = None
    truncated = not len(completion) or int(completion[-1]) not in scored.stops
    environment = example.get("environment")
    return TokenRollout(
        trajectory=[np.concatenate([prompt, completion])],
        generation_mask=[np.concatenate([np.zeros(len(prompt), np.bool_), sampled])] if mask_is_known else None,
        logprobs=logprobs,
        reward=float(scored.totals()[index]),
        metrics={name: float(value) for name, value in zip(scored.names, scored.rewards[index], strict=True)},
        env_id=environment if isinstance(environment, str) else None,
        rollout_status="masked" if masked else "ok",
        prompt_length=[len(prompt)],
        is_truncated=truncated,
        finish_reasons=["length" if truncated else "stop"],
        generation_cap=scored.cap,
        policy_versions=[VersionSpan(0, len(prompt), version)],
    )


def pack(generation: Generation, groups: Sequence[RolloutGroup], place: Place, first_prompt: int) -> None:
    """Put into the groups what is needed to train on them again: ``unpack`` inverts.

    first_prompt: how many prompts were generated for before.
    """
    rollouts = [rollout for group in groups for rollout in group]
    known = from_tokens(rollouts, generation)
    head: _Arrays = {f"trl/random/{name}": state for name, state in generation.random_state.items()}
    head["trl/metrics"] = np.array([value for _, _, values in generation.metrics for value in values], np.float64)
    rows: list[_Arrays] = [{} for _ in rollouts]
    outputs = []
    for name, value in generation.outputs.items():
        entry: dict[str, Any] = {"name": name, "dtype": generation.dtypes.get(name)}
        if not isinstance(value, np.ndarray):
            entry |= {"form": "value", "value": _plain(name, value)}
        elif name in known and _same(known[name], value):
            entry["form"] = "tokens"
        elif value.ndim and len(value) == len(rollouts):
            entry["form"] = "rows"
            for row, part in zip(rows, value, strict=True):
                row[f"trl/{name}"] = np.array(part)
        else:
            entry["form"] = "whole"
            head[f"trl/whole/{name}"] = value
        outputs.append(entry)
    for rollout, row in zip(rollouts, rows, strict=True):
        rollout.arrays = row
    rollouts[0].arrays = head | rows[0]
    batch = {
        "outputs": outputs,
        "pad": generation.pad,
        "widths": [generation.outputs["prompt_ids"].shape[1], generation.outputs["completion_ids"].shape[1]],
        "metrics": [[name, replaced, len(values)] for name, replaced, values in generation.metrics],
        "num_tokens": generation.num_tokens,
    }
    for index, group in enumerate(groups):
        extra = _extra(group) | asdict(place) | {"index": index, "groups": len(groups), "source": first_prompt + index}
        group.trl = extra | ({} if index else {"batch": batch})  # type: ignore[attr-defined]  # an extra field


def unpack(groups: Sequence[RolloutGroup]) -> Generation:
    """Return the generation that was packed into these groups, bit for bit."""
    batch = _extra(groups[0])["batch"]
    rollouts = [rollout for group in groups for rollout in group]
    head = rollouts[0].arrays
    generation = Generation({}, {}, batch["pad"], {}, [], batch["num_tokens"])
    known = from_tokens(rollouts, generation, widths=batch["widths"])
    for entry in batch["outputs"]:
        name = entry["name"]
        match entry["form"]:
            case "value":
                found = entry["value"]
            case "tokens":
                found = known[name]
            case "rows":
                found = np.stack([rollout.arrays[f"trl/{name}"] for rollout in rollouts])
            case _:
                found = head[f"trl/whole/{name}"]
        generation.outputs[name] = found
        if entry["dtype"] is not None:
            generation.dtypes[name] = entry["dtype"]
    at = 0
    for name, replaced, count in batch["metrics"]:
        generation.metrics.append((name, replaced, head["trl/metrics"][at : at + count].tolist()))
        at += count
    prefix = "trl/random/"
    generation.random_state = {
        name.removeprefix(prefix): state for name, state in head.items() if name.startswith(prefix)
    }
    return generation


def from_tokens(rollouts: Sequence[Any], generation: Generation, widths: Sequence[int] | None = None) -> _Arrays:
    """Return the padded batch that token ids and prompt lengths stand for, prompts to the right, completions to the
    left. Shapes: (rollouts, width).
    """
    if widths is None:
        widths = [generation.outputs[name].shape[1] for name in ("prompt_ids", "completion_ids")]
    ids = [np.full((len(rollouts), width), generation.pad, np.int64) for width in widths]
    masks = [np.zeros((len(rollouts), width), np.int64) for width in widths]
    for row, rollout in enumerate(rollouts):
        tokens, length = rollout.trajectory[0], rollout.prompt_length[0]
        prompt, completion = slice(widths[0] - length, None), slice(0, len(tokens) - length)
        ids[0][row, prompt], masks[0][row, prompt] = tokens[:length], 1
        ids[1][row, completion], masks[1][row, completion] = tokens[length:], 1
    return dict(zip(_TOKENS, (ids[0], masks[0], ids[1], masks[1]), strict=True))


def fingerprint(example: Mapping[str, Any]) -> str | None:
    """Return what tells one prompt from another; None for one with images, of which that would cost too much."""
    try:
        return xxhash.xxh3_64_hexdigest(json.dumps(example.get("prompt"), sort_keys=True).encode())
    except (TypeError, ValueError):
        return None


def _extra(group: RolloutGroup) -> dict[str, Any]:
    found = getattr(group, "trl", None)
    return dict(found) if isinstance(found, dict) else {}


def _same(one: NDArray[Any], other: NDArray[Any]) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())


def _plain(name: str, value: Any) -> Any:
    if json.loads(json.dumps(value)) != value:
        raise TypeError(f"TRL's output {name!r} is a {type(value).__name__} that cannot be banked")
    return value


# -- random states


def random_state() -> _Arrays:
    """Return the states that a training run draws from: Python's, NumPy's, torch's where torch is in use."""
    _, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    found: _Arrays = {
        "python": np.array(words, np.uint32),
        "python-gauss": np.array([] if gauss is None else [gauss], np.float64),
        "numpy": np.array(keys, np.uint32),
        "numpy-rest": np.array([position, has_gauss, cached], np.float64),
    }
    if torch := sys.modules.get("torch"):
        found["torch"] = torch.get_rng_state().numpy()
        if torch.cuda.is_available():
            for device, state in enumerate(torch.cuda.get_rng_state_all()):
                found[f"cuda-{device}"] = state.numpy()
    return found


def set_random_state(state: Mapping[str, NDArray[Any]]) -> None:
    """Set what ``random_state`` returned. States of devices that are not there are left out."""
    gauss = state["python-gauss"].tolist()
    random.setstate((3, tuple(state["python"].tolist()), gauss[0] if gauss else None))
    position, has_gauss, cached = state["numpy-rest"].tolist()
    np.random.set_state(("MT19937", state["numpy"], int(position), int(has_gauss), cached))
    if (torch := sys.modules.get("torch")) and "torch" in state:
        torch.set_rng_state(torch.from_numpy(np.array(state["torch"])))
        for device in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            if f"cuda-{device}" in state:
                torch.cuda.set_rng_state(torch.from_numpy(np.array(state[f"cuda-{device}"])), device)


@contextmanager
def _kept_random_state() -> Iterator[None]:
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)


# -- the trainer

_Base: Any = object


class BankingMixin(_Base):  # type: ignore[misc]  # GRPOTrainer, or a subclass of it, comes behind this
    """A bank for ``GRPOTrainer``, or a subclass: ``class MyTrainer(BankingMixin, MyGRPOTrainer)``.

    bank: open, and the trainer's alone. ``train`` restores it at the loaded checkpoint's ``global_step``; closing it is
    yours. Evaluation is banked with split "eval", and never trained on; what a resume rolls back is evaluated again.

    Refused: more than one process, a vLLM server, streamed data sets, ``ignore_data_skip``, hyperparameter search.
    """

    def __init__(self, *args: Any, bank: RolloutBank, **kwargs: Any) -> None:
        self.bank = bank
        self.report: RestoreReport | None = None
        """What the bank had to give back."""
        self.generator_calls = 0
        """Generations made by this process for training, and below for evaluation."""
        self.eval_generator_calls = 0
        self.replayed = 0
        """Generations given back by the bank."""
        self._schedule: Schedule | None = None
        self._plan: deque[Draw] = deque()
        self._undrawn: dict[Place, list[RolloutGroup]] = {}
        self._after: str | None = ""
        self._loaded: Path | None = None
        self._rewards: tuple[list[list[int]], Any] | None = None
        super().__init__(*args, **kwargs)
        _refuse_unsupported(self)
        self.add_callback(_callback(self))

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train, as ``Trainer.train``. True: from the newest whole checkpoint, or from the start when there is none.

        From the start on a bank that has groups, they are trained on again, as far as they go.
        Raises: ReplayUnavailableError when the bank's groups do not fit the run; whatever ``RolloutBank.restore`` does.
        """
        if any(arg is not None for arg in args[:1]) or kwargs.get("trial") is not None:
            raise ValueError("hyperparameter search is many runs, and a bank holds one: train each with its own bank")
        if resume_from_checkpoint is True:
            newest = newest_checkpoint(self.args.output_dir)
            resume_from_checkpoint = None if newest is None else str(newest)
        self._loaded = Path(resume_from_checkpoint) if resume_from_checkpoint else None
        if self._loaded is None and self._schedule is not None:
            raise ValueError(
                "train() from the start, a second time: make a new trainer, whose weights are those of step 0"
            )
        return super().train(resume_from_checkpoint, *args, **kwargs)

    # -- as transformers calls it

    def _begin_training(self) -> None:
        """Take up the loaded checkpoint, before the first step."""
        step = self.state.global_step
        schedule = Schedule(
            per_step=self.args.gradient_accumulation_steps,
            per_generation=self.args.steps_per_generation * self.num_iterations,
            per_epoch=len(self.callback_handler.train_dataloader),
        )
        saved = Saved.of(self._loaded) or Saved(step, after=None if step else "")
        if saved.schedule is not None and saved.schedule != asdict(schedule):
            raise ReplayUnavailableError(
                f"{self._loaded}: saved by a run with {saved.schedule}, micro-batches each, and this one has "
                f"{asdict(schedule)}: batch size, accumulation, steps_per_generation, num_iterations and data set must "
                "stay what they were"
            )
        restored = self.bank.restore(step, session=saved.session)
        self.report = restored.report
        _log.info("%s", self.report)
        self._schedule, self._plan, self._after = schedule, deque(restored.draws), saved.after
        self._undrawn = _by_place(group for queue in restored.pending.values() for group in queue)
        self._step, self._buffered_inputs = schedule.micro_batch(step), None
        if self._is_cut and not self._plan:
            raise ReplayUnavailableError(
                f"checkpoint {step} was saved while a generation was being trained on, and the bank has not got it. Is "
                "this the bank of that run?"
            )

    def _begin_step(self) -> None:
        self.bank.begin_iteration(self.state.global_step)

    def _checkpoint_saved(self) -> None:
        """Say to the bank what is in a checkpoint, once that is on disk."""
        if self._schedule is None:
            return
        step = self.state.global_step
        Saved(step, self.bank.session, self._after, asdict(self._schedule)).write(self._checkpoint)
        self.bank.checkpoint(step)

    @property
    def _checkpoint(self) -> Path:
        return Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        marker = self._checkpoint / MARKER
        if marker.exists():  # of an earlier session: its files are about to be replaced, one after the other
            files.remove([marker], marker.parent)
        super()._save_checkpoint(*args, **kwargs)

    # -- as TRL calls it

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        make = partial(super()._get_train_sampler, *args, **kwargs)
        return EpochSampler(make, self._epoch)

    def _epoch(self) -> int:
        step: int = self.state.global_step
        return 0 if self._schedule is None else step // self._schedule.steps_per_epoch

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        # To rebuild its buffers TRL shuffles; but that draw was made before the checkpoint, whose random state counts.
        is_rebuilt = self.model.training and self._buffered_inputs is None and self._is_cut
        with _kept_random_state() if is_rebuilt else nullcontext():
            return super()._prepare_inputs(generation_batch)

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self._rewards = [list(map(int, ids)) for ids in completion_ids_list], rewards
        return rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if not self.model.training:
            return self._evaluated(inputs)
        if self._schedule is None:
            raise RuntimeError("a generation outside of train(): there is no place for it in the run")
        place = Place(self._schedule.start(self._step), self._after)
        if self._schedule.step(self._step) != self.state.global_step:
            raise RuntimeError(
                f"micro-batch {self._step} in step {self.state.global_step}: this TRL counts otherwise than "
                f"{TRIED_WITH}, which arrowbank was tried with"
            )
        if self._plan:
            return self._replay(self._plan.popleft(), place, inputs)
        groups = self._finished(place)
        if groups:
            _check_prompts(groups, inputs, place)
            outputs = self._rebuild(groups, inputs)
        else:
            groups, outputs = self._fresh(place, inputs)
        self._mark(groups, self._schedule.span(place.start), place.state())
        return outputs

    # -- generations

    def _fresh(self, place: Place, inputs: list[dict[str, Any]]) -> tuple[list[RolloutGroup], dict[str, Any]]:
        """Generate, and bank."""
        examples = [dict(example) for example in inputs]  # TRL writes into them
        before = {name: (values, len(values)) for name, values in self._metrics["train"].items()}
        num_tokens = self.state.num_input_tokens_seen
        self.generator_calls += 1
        outputs = super()._generate_and_score_completions(inputs)
        arrays, dtypes = _to_numpy(outputs)
        generation = Generation(
            arrays,
            dtypes,
            self._tokenizer.pad_token_id,
            random_state(),
            _logged_since(before, self._metrics["train"]),
            self.state.num_input_tokens_seen - num_tokens,
        )
        groups = self._groups(generation, examples, self.num_generations)
        assert self._schedule is not None  # in train()
        pack(generation, groups, place, place.start // self._schedule.per_generation * len(groups))
        self.bank.append_many(groups)
        return groups, outputs

    def _evaluated(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        examples = [dict(example) for example in inputs]
        self.eval_generator_calls += 1
        outputs: dict[str, Any] = super()._generate_and_score_completions(inputs)
        arrays, dtypes = _to_numpy(outputs)
        generation = Generation(arrays, dtypes, self._tokenizer.pad_token_id, {}, [], 0)
        self.bank.append_many(self._groups(generation, examples, self.num_generations_eval), split="eval")
        return outputs

    def _groups(self, generation: Generation, inputs: list[dict[str, Any]], size: int) -> list[RolloutGroup]:
        if self._rewards is None:
            raise RuntimeError(f"TRL gave no rewards: arrowbank was tried with TRL {TRIED_WITH}")
        completions, rewards = self._rewards
        self._rewards = None
        scored = Scored(
            completions,
            rewards.float().cpu().numpy(),
            list(self.reward_func_names),
            self.reward_weights.float().cpu().numpy(),
            frozenset([*self.eos_token_ids, self._tokenizer.pad_token_id]),
            self.max_completion_length,
        )
        step = self.state.global_step
        return make_groups(generation, scored, inputs, size, version=step, iteration=step)

    def _replay(self, draw: Draw, place: Place, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Give back a generation that the loaded checkpoint does not hold, or not all the training on it."""
        if draw.lost:
            raise ReplayUnavailableError(
                f"the generation of step {draw.iteration} cannot be trained on again: the bank has lost groups "
                f"{', '.join(draw.lost)}"
            )
        made = Place(**json.loads(draw.state or b"{}")) if draw.state else None
        uid = str(draw.groups[0].uid)
        follows = place.after is None or place.after == (uid if self._is_cut else made and made.after)
        if made is None or made.start != place.start or not follows:
            raise ReplayUnavailableError(
                f"the next generation to train on again was made at {made}, and the run is at {place}: the checkpoint "
                "belongs to another history of this bank, or the run's batch sizes have changed"
            )
        _check_prompts(draw.groups, inputs, place)
        outputs = self._rebuild(draw.groups, inputs)
        self._mark(draw.groups, draw.span, draw.state)
        return outputs

    def _finished(self, place: Place) -> list[RolloutGroup]:
        """Return the generation of this place if it was banked whole, and killed before its draw was recorded."""
        groups = self._undrawn.pop(place, [])
        if not groups:
            return []
        groups.sort(key=lambda group: int(_extra(group)["index"]))
        if len(groups) == _extra(groups[0])["groups"]:
            return groups
        # TRL generates and pads all of them together: some alone are not what the run would have trained on.
        self.bank.evict([str(group.uid) for group in groups], "killed while its generation was being banked")
        return []

    def _rebuild(self, groups: list[RolloutGroup], inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a banked generation as TRL had it, and put the trainer where it was after making it."""
        generation = unpack(groups)
        outputs = _to_torch(generation, self.accelerator.device)
        if not self._is_cut:  # else the checkpoint has them
            self.state.num_input_tokens_seen += generation.num_tokens
            for name, replaced, values in generation.metrics:
                kept = [] if replaced else self._metrics["train"][name]
                self._metrics["train"][name] = [*kept, *values]
        if self.log_completions:
            self._log_again(groups, inputs, outputs)
        set_random_state(generation.random_state)
        self.replayed += 1
        return outputs

    def _log_again(self, groups: list[RolloutGroup], inputs: list[dict[str, Any]], outputs: Mapping[str, Any]) -> None:
        """Fill TRL's table of completions, with the plain text of each."""
        rollouts: list[Any] = [rollout for group in groups for rollout in group]
        ids = [rollout.trajectory[0][rollout.prompt_length[0] :].tolist() for rollout in rollouts]
        texts = self.processing_class.batch_decode(ids, skip_special_tokens=True)
        for example, text in zip(inputs, texts, strict=True):
            prompt = example.get("prompt")
            self._logs["prompt"].append(prompt)
            self._logs["completion"].append(
                text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            )
        for name in self.reward_func_names:
            self._logs["rewards"][name].extend(rollout.metrics[name] for rollout in rollouts)
        self._logs["advantages"].extend(outputs["advantages"].tolist())

    def _mark(self, groups: list[RolloutGroup], span: int, state: bytes | None) -> None:
        uids = [str(group.uid) for group in groups]
        self.bank.mark_consumed(uids, self.state.global_step, span=span, state=state)
        self._after = uids[0]

    @property
    def _is_cut(self) -> bool:
        """Whether the next micro-batch trains on a generation that was begun."""
        return self._schedule is not None and self._step != self._schedule.start(self._step)


def _check_prompts(groups: Iterable[RolloutGroup], inputs: Sequence[Mapping[str, Any]], place: Place) -> None:
    """Raise ReplayUnavailableError when a banked generation is not of the prompts that the run is at."""
    found = [(len(group), _extra(group).get("prompt")) for group in groups]
    expected = [fingerprint(example) for example in inputs]
    at = 0
    for size, prompt in found:
        if any(other != prompt for other in expected[at : at + size]):
            break
        at += size
    if at != len(expected) or at != sum(size for size, _ in found):
        raise ReplayUnavailableError(
            f"the generation of micro-batch {place.start} is of other prompts than the run is at: the data set, its "
            "order (seed, shuffle_dataset) or the batch size have changed, or this is the bank of another run"
        )


def _by_place(groups: Iterable[RolloutGroup]) -> dict[Place, list[RolloutGroup]]:
    """Return generations that no draw was recorded of. What was not banked here is left to whoever banked it."""
    found: dict[Place, list[RolloutGroup]] = {}
    for group in groups:
        extra = _extra(group)
        if "start" in extra:
            found.setdefault(Place(extra["start"], extra["after"]), []).append(group)
    return found


def _logged_since(
    before: Mapping[str, tuple[list[float], int]], now: Mapping[str, list[float]]
) -> list[tuple[str, bool, list[float]]]:
    found = []
    for name, values in now.items():
        old, count = before.get(name, (values, 0))
        if values is not old:  # a new list in place of the old one
            found.append((name, True, [float(value) for value in values]))
        elif len(values) > count:
            found.append((name, False, [float(value) for value in values[count:]]))
    return found


# -- torch


def _to_numpy(outputs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return tensors as arrays of the same bits, and their dtypes; other values as they are."""
    import torch

    arrays: dict[str, Any] = {}
    dtypes = {}
    for name, value in outputs.items():
        arrays[name] = value
        if isinstance(value, torch.Tensor):
            tensor = value.detach().cpu().contiguous()
            dtypes[name] = str(value.dtype).removeprefix("torch.")
            try:
                arrays[name] = tensor.numpy()
            except TypeError:  # bfloat16 and narrower, which NumPy has not got
                arrays[name] = tensor.view({1: torch.uint8, 2: torch.int16}[tensor.element_size()]).numpy()
    return arrays, dtypes


def _to_torch(generation: Generation, device: Any) -> dict[str, Any]:
    """Invert ``_to_numpy``."""
    import torch

    outputs = dict(generation.outputs)
    for name, dtype in generation.dtypes.items():
        array = outputs[name]
        tensor = torch.from_numpy(np.array(array))
        kind = getattr(torch, dtype)
        outputs[name] = (tensor if tensor.dtype == kind else tensor.view(kind)).to(device)
    return outputs


def _refuse_unsupported(trainer: Any) -> None:
    """Raise ValueError for what a bank cannot serve, and RuntimeError for a TRL that is not as it was."""
    processes = trainer.accelerator.num_processes
    if processes > 1:
        raise ValueError(
            f"{processes} processes: TRL spreads the completions of a group over them, and a bank has one writer. "
            "Train in one process"
        )
    if trainer.use_vllm and trainer.vllm_mode == "server":
        raise ValueError(
            "a vLLM server samples from random states of its own, which nobody can put back: a resumed run would not "
            'be the same. Use vllm_mode="colocate", or transformers'
        )
    if not hasattr(trainer.train_dataset, "__len__"):
        raise ValueError(
            f"a {type(trainer.train_dataset).__name__} has no length: where a resumed run is in it cannot be told"
        )
    if trainer.args.ignore_data_skip:
        raise ValueError("ignore_data_skip: a resumed run would begin with the first prompts again")
    hooks = ("_generate_and_score_completions", "_prepare_inputs", "_calculate_rewards", "_get_train_sampler")
    needed = (*hooks, "_step", "_buffered_inputs", "_metrics", "_logs", "_tokenizer", "eos_token_ids", "reward_weights")
    base = super(BankingMixin, trainer)
    missing = [name for name in needed if not hasattr(base if name in hooks else trainer, name)]
    if missing:
        raise RuntimeError(f"this TRL has no {', '.join(missing)}: arrowbank was tried with TRL {TRIED_WITH}")


def _callback(trainer: BankingMixin) -> Any:
    from transformers import TrainerCallback

    class Bank(TrainerCallback):  # type: ignore[misc]  # transformers may not be there to be checked with
        """Tells the bank where the run is."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            trainer._begin_training()

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            trainer._begin_step()

        def on_save(self, *_: Any, **__: Any) -> None:
            trainer._checkpoint_saved()

    return Bank()


if TYPE_CHECKING:

    class BankedGRPOTrainer(BankingMixin):
        """TRL's ``GRPOTrainer`` with a bank. See ``BankingMixin``."""


def __getattr__(name: str) -> Any:
    if name != "BankedGRPOTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from trl import GRPOTrainer
    except ModuleNotFoundError as error:
        error.add_note("BankedGRPOTrainer needs TRL: pip install 'arrowbank[trl]'")
        raise
    built = type(
        name, (BankingMixin, GRPOTrainer), {"__module__": __name__, "__doc__": "TRL's GRPOTrainer with a bank."}
    )
    globals()[name] = built
    return built
