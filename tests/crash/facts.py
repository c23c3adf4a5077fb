"""What was acknowledged before a crash, as plain models: of all that may be true, one must be.

A call that was not told to have returned may have been made or not; of groups in flight any may be there. Of an append
that raised nothing may be there. Any other call that raised says that it does not count with the next one that returns:
until then a crash may leave it made.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from kill_child import digest, make_group
from plain_model import Group, PlainModel, Resumed

from crash.effects import Fact

__all__ = ["Known", "Violation", "digest_of", "group_of", "known_from"]


class Violation(AssertionError):
    """A promise that was not kept."""


@cache
def digest_of(serial: int) -> str:
    return digest(make_group(serial))


@cache
def _told_of(serial: int) -> tuple[str, int]:
    rollouts = make_group(serial).rollouts
    return str(rollouts[0].env_id), len(rollouts)


def group_of(uid: str, serial: int, split: str = "train") -> Group:
    env, members = _told_of(serial)
    return Group(uid, serial, env, split, members, None)


@dataclass
class Known:
    """What may be true of a bank."""

    worlds: list[PlainModel] = field(default_factory=lambda: [PlainModel()])
    """With and without the call that was being made."""
    in_flight: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Serial numbers of groups that may be there, under any uid → what append was told of them."""
    serials: dict[str, int] = field(default_factory=dict)
    """Acknowledged group → its serial number."""
    session: int = 0
    """The last that was told."""
    checkpoints: list[int] = field(default_factory=lambda: [0])
    """Of the model, which the trainer may load: the last one that was told, and one that was being told."""

    def found(self, uid: str, serial: int) -> None:
        """Take in a group that is there, and was not told."""
        options = self.in_flight.pop(serial, None)
        if options is None:
            raise Violation(f"group {uid} (serial {serial}) is there, and was never acknowledged")
        for world in self.worlds:
            world.append(group_of(uid, serial, options["split"]), options["evicted"])
        self.serials[uid] = serial

    def opened(self, session: int) -> None:
        """Take in that a bank was opened: a restore whose session was not even claimed by then was not made."""
        self.session = session
        self.worlds = [
            world
            for world in self.worlds
            if all(event.session < session for event in world.log if isinstance(event, Resumed))
        ]

    def copy(self) -> Known:
        worlds = [world.copy() for world in self.worlds]
        return Known(worlds, dict(self.in_flight), dict(self.serials), self.session, list(self.checkpoints))


def known_from(facts: Iterable[Fact], before: Known | None = None) -> Known:
    """Return what the facts told before a crash say, on top of what was known before."""
    known = Known() if before is None else before.copy()
    tries: dict[int, tuple[str, dict[str, Any]]] = {}
    raised: list[tuple[str, dict[str, Any]]] = []
    for fact in facts:
        match fact.event:
            case ["open", session]:
                known.opened(session)
            case ["try", number, kind, what]:
                tries[number] = kind, what
            case ["did", number, uids]:
                kind, what = tries.pop(number)
                _did(known, kind, what, uids)
                raised = raised if kind == "append" else []
            case ["raised", number]:
                kind, what = tries.pop(number)
                raised += [(kind, what)] if kind != "append" else []
            case _:
                raise ValueError(f"no fact: {fact.event}")
    for kind, what in [*raised, *tries.values()]:
        if kind == "append":
            known.in_flight |= dict.fromkeys(what["serials"], what)
        else:
            for made in [world.copy() for world in known.worlds]:
                _change(made, kind, what)
                known.worlds.append(made)
            known.checkpoints += [what["iteration"]] if kind in ("restore", "checkpoint") else []
    return known


def _did(known: Known, kind: str, what: dict[str, Any], uids: list[str]) -> None:
    for world in known.worlds:
        if kind == "append":
            for uid, serial in zip(uids, what["serials"], strict=True):
                known.serials[uid] = serial
                world.append(group_of(uid, serial, what["split"]), what["evicted"])
        else:
            _change(world, kind, what)
    if kind in ("restore", "checkpoint"):
        known.checkpoints = [what["iteration"]]
        known.session = what["session"]


def _change(world: PlainModel, kind: str, what: dict[str, Any]) -> None:
    match kind:
        case "draw":
            state = what["state"].encode()
            world.draw(what["session"], what["iteration"], tuple(what["uids"]), what["span"], state)
        case "evict":
            world.evict(what["uids"], what["reason"])
        case "checkpoint":
            world.checkpoint(what["session"], what["iteration"])
        case "restore":
            world.restore(what["session"], what["iteration"], what["mode"], what["named"])
        case _:
            raise ValueError(f"no kind of call: {kind}")
