"""What a bank cannot serve is refused."""

from __future__ import annotations

from typing import Any

TRIED_WITH = "1.16"


def refuse_unsupported(trainer: Any, base: Any) -> None:
    """Raise ValueError for what a bank cannot serve, and RuntimeError for a TRL that is not as it was.

    base: the trainer as it is behind ``BankingMixin``.
    """
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
    missing = [name for name in needed if not hasattr(base if name in hooks else trainer, name)]
    if missing:
        raise RuntimeError(f"this TRL has no {', '.join(missing)}: arrowbank was tried with TRL {TRIED_WITH}")
