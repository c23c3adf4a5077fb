"""What the integration of TRL does without TRL: counts, generations through a bank, checkpoints, refusals.

Real runs of TRL are in ``trl/``.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from arrowbank import RolloutBank, RolloutGroup
from arrowbank.integrations.trl import BankingMixin, Saved, Schedule, newest_checkpoint
from arrowbank.integrations.trl.checkpoints import MARKER
from arrowbank.integrations.trl.generation import Generation, Place, Scored
from arrowbank.integrations.trl.packing import make_groups, pack, unpack
from arrowbank.integrations.trl.prompts import EpochSampler
from arrowbank.integrations.trl.random_states import random_state, set_random_state
from arrowbank.integrations.trl.support import refuse_unsupported

# -- counts


@pytest.mark.parametrize("per_step", range(1, 8))
@pytest.mark.parametrize("per_generation", range(1, 8))
@pytest.mark.parametrize("generations", range(1, 4))
def test_the_schedule_counts_as_a_loop_does(per_step: int, per_generation: int, generations: int) -> None:
    """The loop is that of transformers: an epoch's last step takes the micro-batches that are left."""
    schedule = Schedule(per_step, per_generation, per_epoch=generations * per_generation)
    steps: list[int] = []
    complete = 0
    for _ in range(3):
        for micro_batch in range(schedule.per_epoch):
            if micro_batch % per_step == 0:
                assert schedule.micro_batch(complete) == len(steps)
            steps.append(complete)
            complete += (micro_batch + 1) % per_step == 0 or micro_batch + 1 == schedule.per_epoch
    assert [schedule.step(index) for index in range(len(steps))] == steps
    for index in range(len(steps)):
        start = schedule.start(index)
        assert start % per_generation == 0
        assert 0 <= index - start < per_generation
        assert schedule.span(start) == len(set(steps[start : start + per_generation]))


class ShufflingSampler:
    """Shuffles anew each time, as TRL's does."""

    def __init__(self) -> None:
        self._random = random.Random(5)

    def __iter__(self) -> Iterator[int]:
        yield from self._random.sample(range(50), 50)

    def __len__(self) -> int:
        return 50


def test_a_resumed_epoch_has_the_prompts_that_it_had() -> None:
    epoch = 0
    unkilled = ShufflingSampler()
    epochs = [list(unkilled) for _ in range(4)]
    sampler = EpochSampler(ShufflingSampler, lambda: epoch)
    for epoch in (0, 1, 2, 3, 1):
        assert list(sampler) == epochs[epoch]
    assert len(sampler) == 50


# -- a generation through the bank


def generation(*, tools: bool = False, masked: bool = False) -> tuple[Generation, Scored]:
    """Four completions of two prompts, as TRL pads them."""
    completion_ids = np.array([[7, 8, 2], [9, 2, 1], [7, 7, 7], [2, 1, 1]])
    completion_mask = np.array([[1, 1, 1], [1, 1, 0], [0, 0, 0] if masked else [1, 1, 1], [1, 0, 0]])
    outputs: dict[str, Any] = {
        "prompt_ids": np.array([[1, 5], [1, 5], [6, 5], [6, 5]]),
        "prompt_mask": np.array([[0, 1], [0, 1], [1, 1], [1, 1]]),
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": np.array([0.5, -0.5, np.nan, -0.0], np.float32),
        "num_items_in_batch": np.array(9),
        "old_per_token_logps": np.array([[-1, -2, -3]] * 4, np.int16),
        "sampling_per_token_logps": -np.arange(12, dtype=np.float32).reshape(4, 3),
        "pixel_values": np.ones((5, 2), np.float32),
        "num_images": [2, 0, 1, 2],
        "ref_per_token_logps": None,
    }
    if tools:
        outputs["tool_mask"] = np.array([[1, 0, 1], [1, 1, 1], [0, 0, 0] if masked else [1, 1, 0], [1, 1, 1]])
    dtypes = {name: str(value.dtype) for name, value in outputs.items() if isinstance(value, np.ndarray)}
    dtypes["old_per_token_logps"] = "bfloat16"
    metrics = [("reward", False, [0.5, float("nan")]), ("num_tokens", True, [17.0])]
    scored = Scored(
        [[7, 8, 2], [9, 2], [7, 7, 7], [2]],
        np.array([[1, np.nan], [0, 0.5], [np.nan, np.nan], [0.25, 1]], np.float32),
        ["right", "short"],
        np.array([1, 2], np.float32),
        frozenset([1, 2]),
        cap=3,
    )
    return Generation(outputs, dtypes, 1, random_state(), metrics, 17), scored


INPUTS: list[dict[str, Any]] = [{"prompt": "b", "environment": "math"}] * 2 + [{"prompt": "ab"}] * 2


def groups_of(made: Generation, scored: Scored, place: Place) -> list[RolloutGroup]:
    groups = make_groups(made, scored, INPUTS, 2, version=3, iteration=3)
    pack(made, groups, place, first_prompt=6)
    return groups


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("tools", [False, True])
def test_a_generation_comes_back_bit_for_bit(bank: RolloutBank, tools: bool, masked: bool) -> None:
    made, scored = generation(tools=tools, masked=masked)
    place = Place(8, "u")
    uids = bank.append_many(groups_of(made, scored, place))
    bank.mark_consumed(uids, 0, state=place.state())
    (draw,) = bank.restore(0).draws
    found = unpack(draw.groups)
    assert Place(**json.loads(draw.state or b"")) == place
    assert list(found.outputs) == list(made.outputs)
    assert found.dtypes == made.dtypes
    assert (found.pad, found.num_tokens) == (made.pad, made.num_tokens)
    assert repr(found.metrics) == repr(made.metrics)
    for one, other in ((found.outputs, made.outputs), (found.random_state, made.random_state)):
        for name, value in other.items():
            if isinstance(value, np.ndarray):
                assert (one[name].dtype, one[name].shape) == (value.dtype, value.shape), name
                assert one[name].tobytes() == value.tobytes(), name
            else:
                assert one[name] == value


def test_groups_say_what_everybody_looks_for() -> None:
    made, scored = generation(tools=True)
    first, second = groups_of(made, scored, Place(8, "u"))
    one: Any = first[0]
    assert one.trajectory[0].tolist() == [5, 7, 8, 2]
    assert one.generation_mask[0].tolist() == [False, True, False, True]
    assert one.logprobs[0].tolist() == [0.0, -2.0]
    assert one.metrics["right"] == one.reward == 1.0
    assert np.isnan(one.metrics["short"])
    assert (one.env_id, one.prompt_length, one.finish_reasons, one.is_truncated) == ("math", [1], ["stop"], False)
    assert (one.policy_versions[0].version, one.generation_cap, one.advantage_override) == (3, 3, None)
    assert first[1].reward == 1.0
    three: Any = second[0]
    assert (three.env_id, three.finish_reasons, three.is_truncated) == (None, ["length"], True)
    assert np.isnan(three.reward)
    assert [getattr(group, "trl")["source"] for group in (first, second)] == [6, 7]  # noqa: B009


def test_a_masked_completion_says_so() -> None:
    made, scored = generation(tools=True, masked=True)
    masked: Any = groups_of(made, scored, Place(0, ""))[1][0]
    assert masked.rollout_status == "masked"
    assert masked.generation_mask is masked.logprobs is None  # what tools said of it is not known any more


def test_what_no_bank_can_keep_is_named() -> None:
    made, scored = generation()
    made.outputs["strange"] = (1, 2)
    with pytest.raises(TypeError, match="'strange' is a tuple"):
        groups_of(made, scored, Place(0, ""))


def test_random_states_are_put_back() -> None:
    random.gauss(0, 1)
    np.random.standard_normal(1)
    state = random_state()
    drawn = random.gauss(0, 1), random.random(), np.random.standard_normal(3).tolist()
    set_random_state(state)
    assert (random.gauss(0, 1), random.random(), np.random.standard_normal(3).tolist()) == drawn


# -- checkpoints


def checkpoint(run: Path, step: int, *files: str) -> Path:
    directory = run / f"checkpoint-{step}"
    directory.mkdir(parents=True)
    for name in files:
        (directory / name).write_text(json.dumps({"global_step": step}))
    return directory


def test_the_newest_whole_checkpoint_is_taken(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    checkpoint(tmp_path, 2)
    (tmp_path / "checkpoint-best").mkdir()
    assert newest_checkpoint(tmp_path) is None
    unmarked = checkpoint(tmp_path, 9, "trainer_state.json")
    assert newest_checkpoint(tmp_path) == unmarked
    whole = checkpoint(tmp_path, 10, "trainer_state.json")
    Saved(10, session=3, after="u", schedule={"per_step": 1}).write(whole)
    half = checkpoint(tmp_path, 11, "model.safetensors")
    assert newest_checkpoint(tmp_path) == whole
    assert Saved.of(whole) == Saved(10, 3, "u", {"per_step": 1})
    (half / MARKER).write_text('{"step": 1')
    assert newest_checkpoint(tmp_path) == whole
    assert Saved.of(half) is Saved.of(None) is None


# -- what is refused


class Hooks:
    """As much of a trainer as is looked at."""

    _generate_and_score_completions = _prepare_inputs = _calculate_rewards = _get_train_sampler = None
    _step = _buffered_inputs = _metrics = _logs = _tokenizer = eos_token_ids = reward_weights = None

    def __init__(self, **changes: Any) -> None:
        self.accelerator = SimpleNamespace(num_processes=1)
        self.args = SimpleNamespace(ignore_data_skip=False)
        self.use_vllm, self.vllm_mode, self.train_dataset = False, "server", [1]
        for name, value in changes.items():
            setattr(self, name, value)


REFUSED = {
    "2 processes": {"accelerator": SimpleNamespace(num_processes=2)},
    "vLLM server": {"use_vllm": True},
    "has no length": {"train_dataset": iter([1])},
    "ignore_data_skip": {"args": SimpleNamespace(ignore_data_skip=True)},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_a_bank_cannot_serve_is_refused(message: str) -> None:
    class Trainer(BankingMixin, Hooks):
        add_callback = print

    with pytest.raises(ValueError, match=message):
        Trainer(bank=None, **REFUSED[message])


def test_another_trl_is_told() -> None:
    class Older(BankingMixin):
        def __init__(self) -> None:
            vars(self).update(vars(Hooks()))

    older = Older()
    with pytest.raises(RuntimeError, match=r"this TRL has no _generate_and_score_completions, .*_step.*tried with TRL"):
        refuse_unsupported(older, super(BankingMixin, older))


def test_importing_it_loads_neither_torch_nor_trl() -> None:
    code = "import sys, arrowbank.integrations.trl; print({'torch', 'trl', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
