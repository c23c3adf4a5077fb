"""What ``test_grpo_resume`` kills: GRPO of a tiny random model, on a CPU and without a network.

Run as ``tiny_grpo.py`` this is a server that has torch and TRL imported, which takes long, and forks a trainer for each
line of its standard input: ``[directory, options]`` as JSON. It answers with the trainer's exit status.

A trainer starts from the newest whole checkpoint in its directory, or from the start, and tells there what it did, each
line synced as it is written:

    calls.jsonl     {"pid", "event": "asked" or "made", "mode", "step", "prompts", "tokens"}: around ``model.generate``,
                    which knows nothing of the bank
    losses.jsonl    {"pid", "step", …}: all that was logged, times left out
    resumes.jsonl   {"pid", "step", "draws", "pending"}: what the bank gave back
    done.json       at the end: sha256 of the weights, counters of the trainer
    output.txt      all that was printed
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import traceback
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

WORDS = [*(str(number) for number in range(30)), "what", "is", "plus"]
TIMES = ("time", "runtime", "per_second")


@dataclass(frozen=True)
class Options:
    """One run."""

    steps_per_generation: int = 1
    num_iterations: int = 1
    accumulation: int = 1
    steps: int = 8
    save_steps: int = 3
    eval_steps: int = 0
    prompts: int = 10
    beta: float = 0.0
    bank: bool = True
    kill: str = ""
    """Where to die: "generate", "torn" (some groups of a generation are banked), "appended" (all), "drawn", "step",
    "saving", "saved" (and the bank does not know) or "evaluate"."""
    kill_at: int = 1
    """At which time that comes by, counted from 1."""
    resume_from: str = ""
    """A particular checkpoint; "" for the newest."""
    log_completions: bool = False
    sampler_logprobs: bool = False


def write(path: Path, record: dict[str, Any]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(descriptor, (json.dumps({"pid": os.getpid()} | record) + "\n").encode())
    os.fsync(descriptor)
    os.close(descriptor)


class Killer:
    """Kills this process at the n-th passing of one place."""

    def __init__(self, place: str, at: int) -> None:
        self._place, self._left = place, at

    def is_next(self, place: str) -> bool:
        return place == self._place and self._left == 1

    def passes(self, place: str) -> None:
        if self.is_next(place):
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= place == self._place


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate(["<unk>", "<pad>", "<eos>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def model(words: Any, directory: Path) -> Any:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(7)
    config = Qwen2Config(
        vocab_size=len(words),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        attention_dropout=0.1,  # so that training draws random numbers, too
        bos_token_id=None,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)  # where TRL looks for the reference model, if it needs one
    return Qwen2ForCausalLM.from_pretrained(directory)


def sum_is_right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [float(right in completion.split()) for completion, right in zip(completions, answer, strict=True)]


def variety(completions: list[str], **_: Any) -> list[float | None]:
    """None for a completion of one word: rewards that are not there are NaN."""
    words = [completion.split() for completion in completions]
    return [len(set(found)) / len(found) if len(found) > 1 else None for found in words]


def sample(words: Any, prompts: list[str], trainer: Any) -> dict[str, Any]:
    """A rollout function, which gives the sampler's logprobs."""
    import torch

    inputs = words(prompts, padding=True, return_tensors="pt")
    made = trainer.model.generate(
        **inputs, max_new_tokens=6, do_sample=True, return_dict_in_generate=True, output_scores=True
    )
    completions = made.sequences[:, inputs["input_ids"].shape[1] :]
    logprobs = torch.stack([torch.log_softmax(score, -1) for score in made.scores], 1)
    chosen = logprobs.gather(2, completions.unsqueeze(-1)).squeeze(-1)
    lengths = [[*row.tolist(), words.eos_token_id].index(words.eos_token_id) + 1 for row in completions]
    return {
        "prompt_ids": [words(prompt)["input_ids"] for prompt in prompts],
        "completion_ids": [row[:size].tolist() for row, size in zip(completions, lengths, strict=True)],
        "logprobs": [row[:size].tolist() for row, size in zip(chosen, lengths, strict=True)],
    }


def questions(count: int, first: int = 0) -> Any:
    from datasets import Dataset

    pairs = [(number % 13, number * 5 % 11) for number in range(first, first + count)]
    return Dataset.from_dict(
        {"prompt": [f"what is {a} plus {b}" for a, b in pairs], "answer": [str(a + b) for a, b in pairs]}
    )


def watched(policy: Any, trainer_of: Any, directory: Path, killer: Killer) -> Any:
    """Have every call of the model's generator written down."""
    generate = policy.generate

    def watch(*args: Any, **kwargs: Any) -> Any:
        trainer = trainer_of()
        mode = "train" if policy.training else "eval"
        prompts = kwargs["input_ids"].tolist()
        call = {"mode": mode, "step": trainer.state.global_step, "prompts": prompts}
        write(directory / "calls.jsonl", call | {"event": "asked"})
        killer.passes("generate" if mode == "train" else "evaluate")
        made = generate(*args, **kwargs)
        tokens = made if hasattr(made, "tolist") else made.sequences
        write(directory / "calls.jsonl", call | {"event": "made", "tokens": tokens.tolist()})
        return made

    policy.generate = watch
    return policy


def train(directory: Path, options: Options) -> None:
    import torch
    from transformers import TrainerCallback
    from transformers.trainer_utils import get_last_checkpoint
    from trl import GRPOConfig, GRPOTrainer

    from arrowbank import RolloutBank
    from arrowbank.integrations.trl import BankedGRPOTrainer

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    killer = Killer(options.kill, options.kill_at)
    run = directory / "run"

    class Watch(TrainerCallback):
        def on_epoch_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if options.bank and not trainer.told:
                trainer.told = True
                found = {"draws": trainer.report.draws, "pending": trainer.report.pending_groups}
                write(directory / "resumes.jsonl", {"step": state.global_step} | found)

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
            kept = {name: value for name, value in logs.items() if not any(part in name for part in TIMES)}
            write(directory / "losses.jsonl", {"step": state.global_step} | kept)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            killer.passes("step")

    words = tokenizer()
    trainer: Any = None
    policy = watched(model(words, directory / "base"), lambda: trainer, directory, killer)
    args = GRPOConfig(
        output_dir=str(run),
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=options.accumulation,
        steps_per_generation=options.steps_per_generation,
        num_iterations=options.num_iterations,
        num_generations=2,
        max_completion_length=6,
        max_steps=options.steps,
        save_strategy="steps",
        save_steps=options.save_steps,
        eval_strategy="steps" if options.eval_steps else "no",
        eval_steps=options.eval_steps or None,
        logging_steps=1,
        learning_rate=3e-2,
        beta=options.beta,
        seed=3,
        use_cpu=True,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
        log_completions=options.log_completions,
    )
    given = {
        "model": policy,
        "reward_funcs": [sum_is_right, variety],
        "args": args,
        "train_dataset": questions(options.prompts),
        "eval_dataset": questions(4, first=100) if options.eval_steps else None,
        "processing_class": words,
        "callbacks": [Watch()],
        "rollout_func": partial(sample, words) if options.sampler_logprobs else None,
    }
    if not options.bank:
        trainer = GRPOTrainer(**given)
        die_saving(trainer, killer)
        trainer.train(resume_from_checkpoint=get_last_checkpoint(run) if run.exists() else None)
        finish(directory, trainer, {})
        return
    with RolloutBank.open(directory / "bank") as bank:
        die_in(bank, killer)
        trainer = BankedGRPOTrainer(bank=bank, **given)
        trainer.told = False
        die_saving(trainer, killer)
        trainer.train(resume_from_checkpoint=options.resume_from or True)
        counters = {name: getattr(trainer, name) for name in ("generator_calls", "eval_generator_calls", "replayed")}
        finish(directory, trainer, counters)
        bank.close(final=True)


def die_in(bank: Any, killer: Killer) -> None:
    append_many, mark_consumed, checkpoint = bank.append_many, bank.mark_consumed, bank.checkpoint

    def append(groups: Any, **options: Any) -> Any:
        if options.get("split") == "eval":
            return append_many(groups, **options)
        if killer.is_next("torn"):
            append_many(groups[:1], **options)
        killer.passes("torn")
        uids = append_many(groups, **options)
        killer.passes("appended")
        return uids

    def mark(*args: Any, **options: Any) -> None:
        mark_consumed(*args, **options)
        killer.passes("drawn")

    def saved(iteration: int) -> None:
        killer.passes("saved")
        checkpoint(iteration)

    bank.append_many, bank.mark_consumed, bank.checkpoint = append, mark, saved


def die_saving(trainer: Any, killer: Killer) -> None:
    """In the middle of saving: the weights are there, and the trainer's state is not."""
    save = trainer._save_rng_state

    def dies(output_dir: str) -> None:
        killer.passes("saving")
        save(output_dir)

    trainer._save_rng_state = dies


def finish(directory: Path, trainer: Any, counters: dict[str, int]) -> None:
    digest = hashlib.sha256()
    for name, tensor in sorted(trainer.model.state_dict().items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    (directory / "done.json").write_text(json.dumps({"weights": digest.hexdigest(), **counters}))


def serve() -> None:
    os.environ.update(
        HF_HUB_OFFLINE="1",
        HF_HUB_DISABLE_TELEMETRY="1",
        TOKENIZERS_PARALLELISM="false",
        TRL_EXPERIMENTAL_SILENCE="1",
        CUDA_VISIBLE_DEVICES="",
        OMP_NUM_THREADS="1",
    )
    from datasets import Dataset  # noqa: F401  each fork has them from here
    from transformers import Qwen2ForCausalLM  # noqa: F401
    from trl import GRPOTrainer  # noqa: F401

    for line in sys.stdin:
        directory, options = json.loads(line)
        pid = os.fork()
        if not pid:
            attempt(Path(directory), Options(**options))
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def attempt(directory: Path, options: Options) -> NoReturn:
    output = os.open(directory / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        train(directory, options)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    serve()
