"""Megatron-LM: a RolloutBank behind the methods of Megatron's own (``megatron/rl/rollout_bank.py``, August 2026).

``install()`` puts it in that one's place. What Megatron calls then, all on rank 0:

    recover(T)                        once, before its first collection; T = args.iteration
    set_collection(k)                 at each collection; k = args.curr_iteration
    append(group)                     when a group assembles
    mark_consumed_many(uids, k + 1)   when it has its batch; it says "in checkpoint k + 1"
    checkpoint(T)                     when a model checkpoint is durable; of an async save maybe many steps later

Iterations: T and k are counts, as arrowbank's. A mark at k + 1 is a draw at k. Its span is the number of steps from one
collection to the next (``steps_per_collection``): what Megatron trains on the batch before it asks for another.

Rollouts: Megatron's classes hold lists and take any extra field. Extra floats are kept in ``metrics`` and extra arrays
in ``arrays``, where analysis finds them; a name that means something else in arrowbank is kept in the extra field
``megatron``. Everything comes back by its own name, as it was, except ``completion_ids``: the bank has them, restored
rollouts do not, since Megatron looks them up in its request ledger, which a new process begins empty.

Refused at ``append``, by the field's name: what ``RolloutBank.append`` refuses, as extra fields that JSON would change,
groups of several environments, logprobs that fit neither the turn nor what was sampled of it.

Policy versions are in that ledger, which is merged after ``append``: the bank has none of such groups.
"""

from __future__ import annotations

import functools
import importlib
import logging
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, TypedDict, Unpack

import numpy as np

from arrowbank.bank import RolloutBank
from arrowbank.errors import UnrepresentableError
from arrowbank.restored import Draw, RestoreReport
from arrowbank.types import Rollout, RolloutGroup, TokenRollout

__all__ = ["MegatronBank", "RestoreOptions", "install", "steps_per_collection"]

_log = logging.getLogger("arrowbank")

_BOTH = ("trajectory", "reward", "env_id", "problem_id", "rollout_status", "failure_reason")
_TEXT = (*_BOTH, "prompt_length")
_TOKENS = (*_BOTH, "generation_mask", "logprobs", "completion_ids", "generation_cap")
"""Fields that both sides have with the same meaning."""
_TURNS = ("trajectory", "generation_mask", "logprobs")
_GROUP = ("batch_id", "index_in_batch", "uid")
_APART = "megatron"


class RestoreOptions(TypedDict, total=False):
    """Of ``RolloutBank.restore``."""

    mode: Literal["replay", "requeue", "discard"]
    session: int | None
    accept_damage: bool


class _Cut(NamedTuple):
    """A draw that the restored checkpoint holds a part of."""

    uids: tuple[str, ...]
    end: int


class MegatronBank:
    """What Megatron's pipeline and trainer call a bank.

    bank: open, on rank 0. span: optimizer steps that each batch feeds. types: where Rollout, TokenRollout and
    RolloutGroup are found, ``megatron.rl.types`` if not given. restore: how ``recover`` restores.

    Thread-safe. Errors are those of the bank's methods.
    """

    def __init__(
        self, bank: RolloutBank, *, span: int = 1, types: Any = None, **restore: Unpack[RestoreOptions]
    ) -> None:
        if span < 1:
            raise ValueError(f"span {span}: a batch feeds at least one optimizer step")
        self.bank = bank
        self.span = span
        self.report: RestoreReport | None = None
        """Of the last ``recover``."""
        self._given_types = types
        self._restore = restore
        self._cut: list[_Cut] = []
        self._beginning = threading.Lock()

    @classmethod
    def open(
        cls,
        bank_dir: str | Path,
        *,
        max_bytes: int = 0,
        span: int = 1,
        types: Any = None,
        **restore: Unpack[RestoreOptions],
    ) -> Self:
        """Open the bank at ``bank_dir``. max_bytes: 0 for no limit, as Megatron has it."""
        return cls(RolloutBank.open(bank_dir, max_bytes=max_bytes or None), span=span, types=types, **restore)

    # -- resume

    def recover(self, trained_through: int) -> list[Any]:
        """Return the groups that the model checkpoint of so many iterations does not hold, as Megatron's.

        First those of the batches to be replayed, in their order, then the pending ones, oldest first. Megatron hands
        them out in this order within each environment, before it generates any.

        A draw that the checkpoint holds a part of comes back, and Megatron trains all its steps anew; with
        ``mode="requeue"`` or ``"discard"`` it counts as trained on.
        """
        restored = self.bank.restore(trained_through, **self._restore)
        pending = restored.take(sum(len(queue) for queue in restored.pending.values()))
        self.report = restored.report
        self._cut = [_Cut(_uids(draw), draw.iteration + draw.span) for draw in restored.draws if draw.offset]
        told = logging.WARNING if self.report.damage or self.report.lost_groups else logging.INFO
        _log.log(told, "%s", self.report)
        for draw in restored.draws:
            if draw.lost:
                _log.warning("the batch of iteration %s comes back without %s", draw.iteration, ", ".join(draw.lost))
            if draw.offset:
                _log.warning(
                    "checkpoint %s holds %s of the %s steps on the batch of iteration %s, which is trained on again",
                    trained_through,
                    draw.offset,
                    draw.span,
                    draw.iteration,
                )
        kinds = self._types
        return [
            _to_megatron(group, kinds) for group in (*(g for draw in restored.draws for g in draw.groups), *pending)
        ]

    def restore(self, trained_through: int) -> list[Any]:
        """As ``recover``; unlike Megatron's, it is no mere look: what this process has drawn since is rolled back."""
        return self.recover(trained_through)

    # -- collecting

    def set_collection(self, iteration: int) -> None:
        """Say that groups are collected at ``iteration`` from now on. Iterations only go up."""
        with self._beginning:
            self.bank.begin_iteration(iteration)

    def append(self, group: Any) -> str:
        """Make a finished group durable and return its uid, which is the caller's to set on the group.

        Raises: UnrepresentableError, DuplicateGroupError (the group has a uid), FencedError, OSError; after the last
        one the same group may be appended again.
        """
        return self.bank.append(_from_megatron(group, self._types))

    # -- training

    def mark_consumed(self, uid: str | None, iteration: int) -> None:
        """As ``mark_consumed_many``, of one group."""
        self.mark_consumed_many([uid], iteration)

    def mark_consumed_many(self, uids: Iterable[str | None], iteration: int) -> None:
        """Record the batch that is trained on from iteration ``iteration`` − 1 on; durable on return.

        Groups without a uid are passed over.
        """
        at = iteration - 1
        drawn = [uid for uid in uids if uid]
        for cut in self._cut:
            # Part of a cut draw, or all of it too late, is not marked: it stays in its draw, which no other may share.
            if cut.uids and set(cut.uids) <= set(drawn) and at < cut.end:
                self.bank.mark_consumed(cut.uids, at, span=self.span)
            drawn = [uid for uid in drawn if uid not in cut.uids]
        if drawn:
            self.bank.mark_consumed(drawn, at, span=self.span)

    def checkpoint(self, iteration: int) -> None:
        """Record that the model checkpoint of ``iteration`` iterations is durable. Returns at once."""
        with self._beginning:
            # Megatron speaks of collections only; the steps between them, and skipped iterations, are complete too.
            if iteration - 1 > self.bank.iteration:
                self.bank.begin_iteration(iteration - 1)
        self.bank.checkpoint(iteration)

    def close(self, *, final: bool = False) -> None:
        """Give the bank back; the interpreter's exit does so too. final: the run is over, archive what it settles."""
        self.bank.close(final=final)

    @property
    def _types(self) -> Any:
        return self._given_types or importlib.import_module("megatron.rl.types")


def install(*, span: int | None = None, **restore: Unpack[RestoreOptions]) -> None:
    """Let Megatron open a MegatronBank where it would open its own bank. Call it before training starts.

    Megatron's flags stay what they are. span: ``steps_per_collection`` of Megatron's arguments if not given.
    """
    importlib.import_module("megatron.rl.rollout_bank").RolloutBank = functools.partial(  # type: ignore[attr-defined]
        _open_for_megatron, span=span, restore=restore
    )


def _open_for_megatron(bank_dir: str, *, max_bytes: int = 0, span: int | None, restore: RestoreOptions) -> MegatronBank:
    if span is None:
        span = steps_per_collection(importlib.import_module("megatron.training.global_vars").get_args())
    return MegatronBank.open(bank_dir, max_bytes=max_bytes, span=span, **restore)


def steps_per_collection(args: Any) -> int:
    """Return how many optimizer steps Megatron makes before it collects again, from its parsed arguments."""
    batches = args.grpo_prompts_per_step * args.grpo_group_size // args.global_batch_size
    return max(int(args.grpo_iterations * batches), 1)


# -- conversions


def _values(model: Any) -> dict[str, Any]:
    """All fields, those that a subclass declares and extra ones among them."""
    return {**model.__dict__, **(model.__pydantic_extra__ or {})}


def _from_megatron(group: Any, types: Any) -> RolloutGroup:
    values = _values(group)
    rollouts = []
    for index, rollout in enumerate(values.pop("rollouts")):
        try:
            rollouts.append(_rollout_from_megatron(rollout, types))
        except UnrepresentableError as error:
            raise error.inside(f"rollouts[{index}]") from None
    return RolloutGroup(rollouts=rollouts, **values)


def _rollout_from_megatron(rollout: Any, types: Any) -> TokenRollout | Rollout:
    kind, shared = (TokenRollout, _TOKENS) if isinstance(rollout, types.TokenRollout) else (Rollout, _TEXT)
    fields: dict[str, Any] = {"metrics": {}, "arrays": {}}
    apart = {}
    for name, value in _values(rollout).items():
        if name in shared:
            fields[name] = value
        elif type(value) is float:
            fields["metrics"][name] = value
        elif type(value) is np.ndarray:
            fields["arrays"][name] = value
        elif name in kind.model_fields or name == _APART:
            apart[name] = value
        else:
            fields[name] = value
    return kind(**fields, **({_APART: apart} if apart else {}))


def _to_megatron(group: RolloutGroup, types: Any) -> Any:
    rollouts = [_rollout_to_megatron(rollout, types) for rollout in group.rollouts]
    fields = {name: getattr(group, name) for name in _GROUP}
    return types.RolloutGroup.model_construct(rollouts=rollouts, **fields, **(group.__pydantic_extra__ or {}))


def _rollout_to_megatron(rollout: TokenRollout | Rollout, types: Any) -> Any:
    """Values need no validation: they are what Megatron's own model held."""
    extra = dict(rollout.__pydantic_extra__ or {})
    extra |= extra.pop(_APART, {})
    extra |= rollout.metrics
    extra |= {name: np.array(array) for name, array in rollout.arrays.items()}  # theirs may be written to
    fields = {name: getattr(rollout, name) for name in (_TOKENS if isinstance(rollout, TokenRollout) else _TEXT)}
    fields["env_id"] = fields["env_id"] or ""
    if not isinstance(rollout, TokenRollout):
        return types.Rollout.model_construct(**fields, **extra)
    for name in _TURNS:
        if fields[name] is not None:
            fields[name] = [turn.tolist() for turn in fields[name]]
    fields["completion_ids"] = []
    return types.TokenRollout.model_construct(**fields, **extra)


def _uids(draw: Draw) -> tuple[str, ...]:
    return tuple(str(group.uid) for group in draw.groups)
