"""The trainer that asks its bank before it generates."""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from arrowbank.bank import RolloutBank
from arrowbank.durable import files
from arrowbank.errors import ReplayUnavailableError
from arrowbank.integrations.trl.checkpoints import MARKER, Saved, newest_checkpoint
from arrowbank.integrations.trl.generation import Generation, Place, Scored, extra_of, to_numpy, to_torch
from arrowbank.integrations.trl.packing import by_place, make_groups, pack, unpack
from arrowbank.integrations.trl.prompts import EpochSampler, check_prompts
from arrowbank.integrations.trl.random_states import kept_random_state, random_state, set_random_state
from arrowbank.integrations.trl.schedule import Schedule
from arrowbank.integrations.trl.support import TRIED_WITH, refuse_unsupported
from arrowbank.restored import Draw, RestoreReport
from arrowbank.types import RolloutGroup

_log = logging.getLogger("arrowbank")
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
        refuse_unsupported(self, super())
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
        self._undrawn = by_place(group for queue in restored.pending.values() for group in queue)
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
        with kept_random_state() if is_rebuilt else nullcontext():
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
            check_prompts(groups, inputs, place)
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
        arrays, dtypes = to_numpy(outputs)
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
        arrays, dtypes = to_numpy(outputs)
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
        check_prompts(draw.groups, inputs, place)
        outputs = self._rebuild(draw.groups, inputs)
        self._mark(draw.groups, draw.span, draw.state)
        return outputs

    def _finished(self, place: Place) -> list[RolloutGroup]:
        """Return the generation of this place if it was banked whole, and killed before its draw was recorded."""
        groups = self._undrawn.pop(place, [])
        if not groups:
            return []
        groups.sort(key=lambda group: int(extra_of(group)["index"]))
        if len(groups) == extra_of(groups[0])["groups"]:
            return groups
        # TRL generates and pads all of them together: some alone are not what the run would have trained on.
        self.bank.evict([str(group.uid) for group in groups], "killed while its generation was being banked")
        return []

    def _rebuild(self, groups: list[RolloutGroup], inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a banked generation as TRL had it, and put the trainer where it was after making it."""
        generation = unpack(groups)
        outputs = to_torch(generation, self.accelerator.device)
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
