"""Folding turns into sequences, and unfolding them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from builders import chain_rollout
from hypothesis import given, settings
from hypothesis import strategies as st

from arrowbank import turns
from arrowbank.durable.segment import NOT_A_GROUP
from arrowbank.errors import UnrepresentableError
from arrowbank.turns import CUMULATIVE, FULL, SAMPLED, Folded

unhurried = settings(deadline=None)  # a busy machine is no falsifying example


@dataclass
class Episode:
    trajectory: list[Any]
    masks: list[Any] | None
    logprobs: list[Any] | None


def fold(episode: Episode) -> Folded:
    return turns.fold(episode.trajectory, episode.masks, episode.logprobs)


def assert_same(found: list[Any] | None, given: list[Any] | None) -> None:
    if given is None or found is None:
        assert found is None and given is None
        return
    assert [(part.dtype, part.tobytes()) for part in found] == [(part.dtype, part.tobytes()) for part in given]


def assert_comes_back(episode: Episode) -> Folded:
    folded = fold(episode)
    trajectory, masks, logprobs = turns.unfold(folded)
    assert_same(trajectory, episode.trajectory)
    assert_same(masks, episode.masks)
    assert_same(logprobs, episode.logprobs)
    return folded


def bits(draw: Any, size: int) -> Any:
    """Float32s of any bits: NaNs, infinities and negative zeros among them."""
    words = st.sampled_from([0, 1 << 31, 0x7F80_0001, 0x7FC0_0001, 0xFF80_0000]) | st.integers(0, 2**32 - 1)
    return np.array(draw(st.lists(words, min_size=size, max_size=size)), np.uint32).view(np.float32)


@st.composite
def sequences(draw: Any) -> list[Any]:
    """Token turns: a conversation that goes on, and now and then is cut, rewritten or branched."""
    found: list[Any] = []
    conversation: list[int] = []
    for _ in range(draw(st.integers(1, 6))):
        step = draw(st.sampled_from(["on", "on", "on", "cut", "new", "back"]))
        if step == "cut":
            conversation = conversation[: draw(st.integers(0, len(conversation)))]
        elif step == "new":
            conversation = []
        elif step == "back" and found:
            conversation = draw(st.sampled_from(found)).tolist()
        conversation = conversation + draw(st.lists(st.integers(0, 3), max_size=5))
        found.append(np.array(conversation, np.int32))
    return found


@st.composite
def episodes(draw: Any) -> Episode:
    """Any turns, each with any mask, and logprobs for all its tokens, its sampled ones or all of those but the last."""
    trajectory = draw(sequences())
    masks, logprobs = None, None
    if draw(st.booleans()):
        masks = [
            np.array(draw(st.lists(st.booleans(), min_size=len(turn), max_size=len(turn))), np.bool_)
            for turn in trajectory
        ]
    if draw(st.booleans()):
        counts = [len(turn) for turn in trajectory]
        if masks is not None and draw(st.booleans()):
            counts = [max(int(mask.sum()) - draw(st.integers(0, 1)), 0) for mask in masks]
        logprobs = [bits(draw, count) for count in counts]
    return Episode(trajectory, masks, logprobs)


@st.composite
def chains(draw: Any, form: str) -> Episode:
    """A conversation whose turns agree with one another, in one of the forms that trainers use."""
    own, conversation, values = [], np.zeros(0, np.int32), np.zeros(0, np.float32)
    sampled = np.zeros(0, np.bool_)
    trajectory, masks, logprobs = [], [], []
    for _ in range(draw(st.integers(1, 6))):
        prompt = draw(st.integers(0, 3))
        fresh = draw(st.integers(1, 4))
        conversation = np.array(
            [*conversation, *draw(st.lists(st.integers(0, 9), min_size=prompt + fresh, max_size=prompt + fresh))],
            np.int32,
        )
        values = np.concatenate([values, bits(draw, prompt + fresh)])
        sampled = np.concatenate([sampled, np.arange(prompt + fresh) >= prompt])
        own = sampled.copy()
        own[:-fresh] = False
        trajectory.append(conversation)
        masks.append(sampled if form == "cumulative masks" else own)
        shown = {"full": values, "cumulative": values[sampled], "cumulative masks": values[sampled]}.get(
            form, values[own]
        )
        logprobs.append(shown[:-1] if form == "short" else shown)
    return Episode(
        trajectory, None if form == "no masks" else masks, None if form in ("no masks", "none") else logprobs
    )


@unhurried
@given(episodes())
def test_whatever_is_folded_comes_back_bit_for_bit(episode: Episode) -> None:
    assert_comes_back(episode)


@pytest.mark.parametrize("form", ["own", "short", "full", "cumulative", "cumulative masks", "no masks", "none"])
def test_a_conversation_is_stored_once(form: str) -> None:
    @unhurried
    @given(chains(form))
    def check(episode: Episode) -> None:
        folded = assert_comes_back(episode)
        assert folded.final is not None and not folded.irregular
        assert len(folded.final.tokens) == len(episode.trajectory[-1])

    check()


@unhurried
@given(chains("cumulative"), st.data())
def test_cumulative_logprobs_that_change_from_turn_to_turn_come_back(episode: Episode, data: Any) -> None:
    assert episode.logprobs is not None
    episode.logprobs = [bits(data.draw, len(part)) for part in episode.logprobs]
    assert_comes_back(episode)


@unhurried
@given(chains("cumulative"))
def test_a_cumulative_turn_may_lack_its_end_tokens_logprob(episode: Episode) -> None:
    assert episode.logprobs is not None
    episode.logprobs = [part[:-1] for part in episode.logprobs]
    assert_comes_back(episode)


@unhurried
@given(st.lists(st.text("ab", max_size=4) | st.text(max_size=3), max_size=6))
def test_text_turns_come_back(trajectory: list[str]) -> None:
    assert turns.unfold_text(*turns.fold_text(trajectory)) == trajectory


@pytest.mark.parametrize(
    ("masks", "logprobs", "form"),
    [
        ("turn", "sampled", SAMPLED),
        ("turn", "full", FULL),
        ("turn", "cumulative", CUMULATIVE),
        ("all", "cumulative", SAMPLED),
    ],
)
def test_the_form_of_logprobs_is_told_from_their_number(masks: str, logprobs: str, form: int) -> None:
    rollout = chain_rollout(masks=masks, logprobs=logprobs, turns=3)
    folded = turns.fold(rollout.trajectory, rollout.generation_mask, rollout.logprobs)
    assert folded.turns[-1].form == form and not folded.irregular


@pytest.mark.parametrize("without", ["mask", "logprobs"])
def test_turns_that_are_made_of_what_is_not_there_are_an_error_that_readers_expect(without: str) -> None:
    """A record that is sealed, and not arrowbank's, may say so."""
    rollout = chain_rollout(turns=3)
    folded = turns.fold(rollout.trajectory, rollout.generation_mask, rollout.logprobs)
    assert folded.final is not None and folded.turns[0].form == SAMPLED
    folded.irregular.append(replace(folded.final, **{without: None}))
    folded.turns[0] = folded.turns[0]._replace(source=1)
    with pytest.raises(NOT_A_GROUP, match=r"not there|are none"):
        turns.unfold(folded)


def test_storage_of_a_conversation_is_linear() -> None:
    rollout = chain_rollout(turns=50, step=10)
    folded = turns.fold(rollout.trajectory, rollout.generation_mask, rollout.logprobs)
    assert folded.final is not None and len(folded.final.tokens) == 1000 and folded.irregular == []
    assert all(turn.base is not None for turn in turns.unfold(folded)[0])  # views


def test_two_conversations_in_turns_are_stored_once_each() -> None:
    one, two = chain_rollout(1, turns=4), chain_rollout(2, turns=4)
    trajectory = [turn for pair in zip(one.trajectory, two.trajectory, strict=True) for turn in pair]
    folded = assert_comes_back(Episode(trajectory, None, None))
    assert [len(sequence.tokens) for sequence in folded.irregular] == [len(one.trajectory[-1])]
    _, cut, irregular = turns.fold_text(["a", "x", "ab", "xy", "abc", "xyz"])
    assert irregular == ["abc"] and [turn.source for turn in cut] == [1, 0] * 3


def test_a_rewritten_context_costs_one_sequence() -> None:
    one, two = chain_rollout(1, turns=4), chain_rollout(2, turns=3)
    folded = assert_comes_back(Episode([*one.trajectory, *two.trajectory], None, None))
    assert len(folded.irregular) == 1


def test_the_final_sequence_shows_the_last_turns_own_values_where_turns_disagree() -> None:
    masks = [np.array([0, 1, 1], np.bool_), np.array([0, 1, 0, 1], np.bool_)]
    values = [np.array([-1, -2], np.float32), np.array([-3, -4], np.float32)]
    folded = assert_comes_back(Episode([np.arange(3, dtype=np.int32), np.arange(4, dtype=np.int32)], masks, values))
    assert folded.final is not None and folded.final.mask is not None and folded.final.logprobs is not None
    assert folded.final.mask.tolist() == [False, True, False, True]
    assert folded.final.logprobs.tolist() == [0, -3, 0, -4]


@pytest.mark.parametrize(
    ("masks", "logprobs", "irregular"),
    [("turn", "sampled", 0), ("all", "cumulative", 0), ("turn", "full", 2), ("all", "full", 2)],
)
def test_sampled_tokens_are_counted_once(masks: str, logprobs: str, irregular: int) -> None:
    rollout = chain_rollout(turns=3, step=5, masks=masks, logprobs=logprobs)
    values = rollout.logprobs
    if irregular:  # each turn's logprobs were computed anew
        values = [part - np.float32(turn + 1) for turn, part in enumerate(rollout.logprobs or ())]
    folded = turns.fold(rollout.trajectory, rollout.generation_mask, values)
    assert len(folded.irregular) == irregular
    assert turns.count_sampled(folded) == 15


def test_no_turns_fold_to_nothing() -> None:
    assert turns.fold([], None, None) == Folded(None, [], [])
    assert turns.count_sampled(Folded(None, [], [])) == 0
    assert turns.fold_text([]) == (None, [], [])


def _arrays(parts: list[list[int]] | None, dtype: Any) -> Any:
    return None if parts is None else [np.array(part, dtype) for part in parts]


@pytest.mark.parametrize(
    ("masks", "logprobs", "field"),
    [
        ([[0, 1]], None, "generation_mask"),
        ([], None, "generation_mask"),
        (None, [[1, 2]], "logprobs"),
        ([[0, 1], [0, 0, 1]], None, "generation_mask[1]"),
        ([[0], [0, 0, 0, 1]], None, "generation_mask[0]"),
        (None, [[1, 2], [1, 2, 3]], "logprobs[1]"),
        (None, [[1], [1, 2, 3, 4]], "logprobs[0]"),
        ([[1, 1], [0, 0, 1, 1]], [[1, 2], []], "logprobs[1]"),
        ([[1, 1], [0, 0, 1, 1]], [[], [1, 2]], "logprobs[0]"),
        ([[1, 1], [1, 1, 1, 1]], [[1, 2], [1, 2]], "logprobs[1]"),
        ([[0, 0], [0, 0, 0, 1]], [[1], [1]], "logprobs[0]"),
    ],
)
def test_ragged_lengths_are_refused(masks: Any, logprobs: Any, field: str) -> None:
    trajectory = _arrays([[1, 2], [1, 2, 3, 4]], np.int32)
    with pytest.raises(UnrepresentableError) as refusal:
        turns.fold(trajectory, _arrays(masks, np.bool_), _arrays(logprobs, np.float32))
    assert refusal.value.field == field


@pytest.mark.parametrize(
    ("mask", "logprobs", "field"),
    [
        ([1], None, "generation_mask[0]"),
        ([0, 1, 1], [1, 2, 3, 4], "logprobs[0]"),
        ([1, 1, 1], [1], "logprobs[0]"),
        (None, [], "logprobs[0]"),
    ],
)
def test_a_ragged_single_turn_is_refused(mask: Any, logprobs: Any, field: str) -> None:
    trajectory = [np.array([1, 2, 3], np.int32)]
    masks = None if mask is None else _arrays([mask], np.bool_)
    with pytest.raises(UnrepresentableError) as refusal:
        turns.fold(trajectory, masks, None if logprobs is None else _arrays([logprobs], np.float32))
    assert refusal.value.field == field
