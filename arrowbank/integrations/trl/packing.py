"""A generation as the groups of a bank, and back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arrowbank.integrations.trl.generation import Arrays, Generation, Place, Scored, extra_of
from arrowbank.integrations.trl.prompts import fingerprint
from arrowbank.types import RolloutGroup, TokenRollout, VersionSpan

_TOKENS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
"""What token ids and lengths say already."""


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
    head: Arrays = {f"trl/random/{name}": state for name, state in generation.random_state.items()}
    head["trl/metrics"] = np.array([value for _, _, values in generation.metrics for value in values], np.float64)
    rows: list[Arrays] = [{} for _ in rollouts]
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
        place_in_batch = {"index": index, "groups": len(groups), "source": first_prompt + index}
        extra = extra_of(group) | asdict(place) | place_in_batch
        group.trl = extra | ({} if index else {"batch": batch})  # type: ignore[attr-defined]  # an extra field


def unpack(groups: Sequence[RolloutGroup]) -> Generation:
    """Return the generation that was packed into these groups, bit for bit."""
    batch = extra_of(groups[0])["batch"]
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


def from_tokens(rollouts: Sequence[Any], generation: Generation, widths: Sequence[int] | None = None) -> Arrays:
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


def by_place(groups: Iterable[RolloutGroup]) -> dict[Place, list[RolloutGroup]]:
    """Return generations that no draw was recorded of. What was not banked here is left to whoever banked it."""
    found: dict[Place, list[RolloutGroup]] = {}
    for group in groups:
        extra = extra_of(group)
        if "start" in extra:
            found.setdefault(Place(extra["start"], extra["after"]), []).append(group)
    return found


def _same(one: NDArray[Any], other: NDArray[Any]) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())


def _plain(name: str, value: Any) -> Any:
    if json.loads(json.dumps(value)) != value:
        raise TypeError(f"TRL's output {name!r} is a {type(value).__name__} that cannot be banked")
    return value
