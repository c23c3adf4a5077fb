"""Turns stored once: an episode's turns as slices of its final sequence.

Each turn of a multi-turn rollout repeats the conversation before it, so turns as they come cost quadratic space.
``fold`` keeps the final sequence with its mask (the union of the turns' masks) and logprobs (aligned with the
tokens, unknown where none was given) and a short ``Turn`` for each turn; ``unfold`` gives every turn back bit for
bit. A turn that is not such a slice (a rewritten context, a mask or logprobs that disagree with a later turn's)
starts a sequence of its own, which earlier turns may be slices of again: rewriting costs what it adds.

Invariant: unfold(fold(turns)) == turns, decided while folding by rebuilding and comparing, never assumed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from arrowbank.arrays import BoolArray, Float32Array, TokenArray
from arrowbank.errors import UnrepresentableError

__all__ = [
    "CUMULATIVE",
    "FULL",
    "NO_LOGPROBS",
    "NO_MASK",
    "SAMPLED",
    "Folded",
    "Sequence",
    "Turn",
    "count_sampled",
    "fold",
    "fold_text",
    "unfold",
    "unfold_text",
]

_T = TypeVar("_T", bound=np.generic)

NO_MASK = -1
NO_LOGPROBS, SAMPLED, FULL, CUMULATIVE = range(4)


class Turn(NamedTuple):
    """How one turn is cut out of a sequence."""

    source: int
    """0: the final sequence; k: irregular sequence k−1."""
    end: int
    """The turn is the first ``end`` tokens (or characters) of its source."""
    mask_from: int = NO_MASK
    """The turn's mask is the source's with the first ``mask_from`` cleared; NO_MASK when the rollout has none."""
    form: int = NO_LOGPROBS
    """SAMPLED: a logprob for each True of this turn's mask; FULL: for each token; CUMULATIVE: for each sampled
    token of the source up to ``end``, earlier turns included."""
    given: int = 0
    """Logprobs of this turn; one fewer than SAMPLED or CUMULATIVE says when there is none for the end token."""


@dataclass(slots=True)
class Sequence:
    """Tokens with what is aligned to them. Shapes: all (T,)."""

    tokens: TokenArray
    mask: BoolArray | None
    logprobs: Float32Array | None
    known: BoolArray | None
    """Where a logprob was given; elsewhere ``logprobs`` is 0. The very object ``mask`` where they coincide."""


@dataclass(slots=True)
class Folded:
    final: Sequence | None
    """None when there are no turns."""
    turns: list[Turn]
    irregular: list[Sequence]


def fold(trajectory: list[TokenArray], masks: list[BoolArray] | None, logprobs: list[Float32Array] | None) -> Folded:
    """Fold token turns. Raises UnrepresentableError for ragged lengths, naming the field."""
    _check_turn_counts(len(trajectory), masks, logprobs)
    if len(trajectory) == 1:
        mask = None if masks is None else masks[0]
        values = None if logprobs is None else logprobs[0]
        sequence, turn = _fold_one(trajectory[0], mask, values, index=0, source=0)
        return Folded(sequence, [turn], [])
    if not trajectory:
        return Folded(None, [], [])
    return _fold_many(trajectory, masks, logprobs)


def unfold(
    folded: Folded,
) -> tuple[list[TokenArray], list[BoolArray] | None, list[Float32Array] | None]:
    """Give the turns back; token turns are views of the sequences."""
    if folded.final is None:
        return [], None, None
    sources = [folded.final, *folded.irregular]
    trajectory = [sources[turn.source].tokens[: turn.end] for turn in folded.turns]
    masks = None
    if folded.final.mask is not None:
        masks = [_mask_of(sources[turn.source], turn) for turn in folded.turns]
    if folded.final.logprobs is None:
        return trajectory, masks, None
    return trajectory, masks, [_logprobs_of(sources[turn.source], turn) for turn in folded.turns]


def fold_text(trajectory: list[str]) -> tuple[str | None, list[Turn], list[str]]:
    """Fold text turns into the final text, the turns (ends in characters) and the irregular texts."""
    if not trajectory:
        return None, [], []
    texts, turns = [trajectory[-1]], []
    for text in reversed(trajectory):
        source = next((index for index, longer in enumerate(texts) if longer.startswith(text)), len(texts))
        if source == len(texts):
            texts.append(text)
        turns.append(Turn(source, len(text)))
    return texts[0], turns[::-1], texts[1:]


def unfold_text(final: str | None, turns: list[Turn], irregular: list[str]) -> list[str]:
    """Give text turns back."""
    return [] if final is None else [[final, *irregular][turn.source][: turn.end] for turn in turns]


def count_sampled(folded: Folded) -> int:
    """Count the sampled tokens of all turns; one that a turn repeats from the turn before it counts once."""
    if folded.final is None or folded.final.mask is None:
        return 0
    if not folded.irregular:
        return int(np.count_nonzero(folded.final.mask))
    sources = [folded.final, *folded.irregular]
    total = 0
    before, before_mask = sources[0].tokens[:0], folded.final.mask[:0]
    for turn in folded.turns:
        tokens, mask = sources[turn.source].tokens[: turn.end], _mask_of(sources[turn.source], turn)
        shared = _common_prefix(before, tokens)
        total += int(np.count_nonzero(mask)) - int(np.count_nonzero(mask[:shared] & before_mask[:shared]))
        before, before_mask = tokens, mask
    return total


def _common_prefix(left: TokenArray, right: TokenArray) -> int:
    size = min(len(left), len(right))
    different = left[:size] != right[:size]
    return int(different.argmax()) if different.any() else size


def _check_turn_counts(turns: int, masks: list[BoolArray] | None, logprobs: list[Float32Array] | None) -> None:
    for field, given in (("generation_mask", masks), ("logprobs", logprobs)):
        if given is not None and len(given) != turns:
            raise UnrepresentableError(field, f"{len(given)} turns where trajectory has {turns}")


def _fold_one(
    tokens: TokenArray, mask: BoolArray | None, values: Float32Array | None, *, index: int, source: int
) -> tuple[Sequence, Turn]:
    """Fold a turn that stands alone: any turn fits a sequence of its own, unless it is ragged."""
    size = len(tokens)
    if mask is not None and len(mask) != size:
        raise UnrepresentableError(
            f"generation_mask[{index}]", f"{len(mask)} entries where trajectory[{index}] has {size} tokens"
        )
    mask_from = NO_MASK if mask is None else 0
    if values is None:
        return Sequence(tokens, mask, None, None), Turn(source, size, mask_from)
    count = len(values)
    sampled = -1 if mask is None else int(np.count_nonzero(mask))
    if mask is not None and count in (sampled, sampled - 1):
        known = mask if count == sampled else _first_sampled(mask, count)
        aligned = np.zeros(size, np.float32)
        aligned[known] = values
        return Sequence(tokens, mask, aligned, known), Turn(source, size, mask_from, SAMPLED, count)
    if count == size:
        return Sequence(tokens, mask, values, np.ones(size, np.bool_)), Turn(source, size, mask_from, FULL, count)
    raise UnrepresentableError(f"logprobs[{index}]", _ragged(count, size, sampled))


def _ragged(count: int, size: int, sampled: int) -> str:
    if sampled < 0:
        return f"{count} logprobs for {size} tokens; give generation_mask when only sampled tokens have one"
    return f"{count} logprobs fit neither the {size} tokens nor the {sampled} sampled ones"


def _fold_many(
    trajectory: list[TokenArray], masks: list[BoolArray] | None, logprobs: list[Float32Array] | None
) -> Folded:
    """Take the last turn and those before it that are prefixes of it as one sequence; repeat with what is left.

    A turn that another sequence has already still says which tokens of this one were sampled.
    """
    sequences: list[Sequence] = []
    turns: dict[int, Turn] = {}
    pending = list(range(len(trajectory)))
    while pending:
        anchor = pending[-1]
        chain = _prefix_chain(trajectory, anchor)
        sequence = _union(chain, trajectory, masks, logprobs)
        chain = [index for index in chain if index not in turns]
        cut = _cut(chain, len(sequences), sequence, trajectory, masks, logprobs)
        if anchor not in cut:
            # An earlier turn contradicts the last one, whose values must be the ones that the row shows.
            sequence, turn = _fold_one(
                trajectory[anchor],
                None if masks is None else masks[anchor],
                None if logprobs is None else logprobs[anchor],
                index=anchor,
                source=len(sequences),
            )
            cut = _cut(chain, len(sequences), sequence, trajectory, masks, logprobs) | {anchor: turn}
        sequences.append(sequence)
        turns |= cut
        pending = [index for index in pending if index not in cut]
    return Folded(sequences[0], [turns[index] for index in range(len(trajectory))], sequences[1:])


def _prefix_chain(trajectory: list[TokenArray], anchor: int) -> list[int]:
    """Return, ascending, a turn and those before it that are prefixes of it; other turns may stand between."""
    longest = trajectory[anchor]
    return [index for index in range(anchor) if _is_prefix(trajectory[index], longest)] + [anchor]


def _is_prefix(turn: TokenArray, longest: TokenArray) -> bool:
    size = len(turn)
    if size == 0:
        return True
    if size > len(longest) or turn[-1] != longest[size - 1]:  # tells most that are none without reading them
        return False
    return np.array_equal(longest[:size], turn)


def _union(
    chain: list[int],
    trajectory: list[TokenArray],
    masks: list[BoolArray] | None,
    logprobs: list[Float32Array] | None,
) -> Sequence:
    """Lay the turns' masks and logprobs over one another; what does not fit by its length is left out."""
    size = len(trajectory[chain[-1]])
    mask = None if masks is None else np.zeros(size, np.bool_)
    aligned = None if logprobs is None else np.zeros(size, np.float32)
    known = None if logprobs is None else np.zeros(size, np.bool_)
    for index in chain:
        end = len(trajectory[index])
        own = None if masks is None else masks[index]
        if mask is not None and own is not None and len(own) == end:
            mask[:end] |= own
        if logprobs is not None and aligned is not None and known is not None:
            places = _places(len(logprobs[index]), end, own, mask)
            if places is not None:
                aligned[:end][places] = logprobs[index]
                known[:end] |= places
    return Sequence(trajectory[chain[-1]], mask, aligned, known)


def _places(count: int, end: int, own: BoolArray | None, union: BoolArray | None) -> BoolArray | None:
    """Return which of the first ``end`` tokens ``count`` logprobs belong to, or None when no form fits."""
    if own is not None and len(own) == end:
        sampled = int(np.count_nonzero(own))
        if count in (sampled, sampled - 1):
            return own if count == sampled else _first_sampled(own, count)
    if count == end:
        return np.ones(end, np.bool_)
    if union is not None:
        sampled = int(np.count_nonzero(union[:end]))
        if count in (sampled, sampled - 1):
            return union[:end] if count == sampled else _first_sampled(union[:end], count)
    return None


def _cut(
    chain: list[int],
    source: int,
    sequence: Sequence,
    trajectory: list[TokenArray],
    masks: list[BoolArray] | None,
    logprobs: list[Float32Array] | None,
) -> dict[int, Turn]:
    """Describe as cuts of ``sequence`` those turns of the chain that come back exactly."""
    described = {}
    for index in chain:
        mask = None if masks is None else masks[index]
        values = None if logprobs is None else logprobs[index]
        turn = _describe(source, len(trajectory[index]), sequence, mask, values)
        if turn is not None:
            described[index] = turn
    return described


def _describe(
    source: int, end: int, sequence: Sequence, mask: BoolArray | None, values: Float32Array | None
) -> Turn | None:
    """Return the cut that rebuilds this turn's mask and logprobs, or None."""
    turn = Turn(source, end)
    if mask is not None:
        turn = turn._replace(mask_from=int(mask.argmax()) if mask.any() else end)
        if not np.array_equal(_mask_of(sequence, turn), mask):
            return None
    if values is None:
        return turn
    for form in (SAMPLED, FULL, CUMULATIVE) if mask is not None else (FULL,):
        turn = turn._replace(form=form, given=len(values))
        if _all_given(sequence, turn) and _logprobs_of(sequence, turn).tobytes() == values.tobytes():
            return turn
    return None


def _all_given(sequence: Sequence, turn: Turn) -> bool:
    """Whether this form allows for so many logprobs, and every one that it would give back was given."""
    assert sequence.known is not None
    places = turn.end if turn.form == FULL else int(np.count_nonzero(_sampled_places(sequence, turn)))
    allowed = turn.given == places or (turn.form != FULL and turn.given == places - 1)
    return allowed and bool(_pick(sequence.known, sequence, turn).all())


def _mask_of(sequence: Sequence, turn: Turn) -> BoolArray:
    if sequence.mask is None:
        raise ValueError("a turn takes its sampled tokens from a mask that is not there")
    if turn.mask_from <= 0:
        return sequence.mask[: turn.end]
    mask = sequence.mask[: turn.end].copy()
    mask[: turn.mask_from] = False
    return mask


def _logprobs_of(sequence: Sequence, turn: Turn) -> Float32Array:
    if sequence.logprobs is None:
        raise ValueError("a turn takes its logprobs from where there are none")
    return _pick(sequence.logprobs, sequence, turn)


def _pick(values: NDArray[_T], sequence: Sequence, turn: Turn) -> NDArray[_T]:
    """The values at the places where this turn has a logprob: a view where those are one run, else a copy."""
    values = values[: turn.end]
    if turn.form == FULL:
        return values
    places = _sampled_places(sequence, turn)
    count = int(np.count_nonzero(places))
    start = int(places.argmax()) if count else 0
    run = places[start : start + count].all()
    return (values[start : start + count] if run else values[places])[: turn.given]


def _sampled_places(sequence: Sequence, turn: Turn) -> BoolArray:
    return _mask_of(sequence, turn if turn.form == SAMPLED else turn._replace(mask_from=0))


def _first_sampled(mask: BoolArray, count: int) -> BoolArray:
    """The mask with only its first ``count`` True places kept."""
    kept = mask.copy()
    kept[np.flatnonzero(mask)[count:]] = False
    return kept
