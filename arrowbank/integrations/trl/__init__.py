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

from typing import TYPE_CHECKING, Any

from arrowbank.integrations.trl.checkpoints import Saved, newest_checkpoint
from arrowbank.integrations.trl.schedule import Schedule
from arrowbank.integrations.trl.trainer import BankingMixin

__all__ = ["BankedGRPOTrainer", "BankingMixin", "Saved", "Schedule", "newest_checkpoint"]

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
