"""Three faults, planted below the public API: the checks that guard against them turn red.

Each check is the one that other tests trust, and each is shown green on the same work without the fault.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
from kill_child import digest, fate_of, make_group, state_of
from kill_loop import KillLoop, a_seed, telling_the_seed
from kill_model import Violation, check_archive_once, check_each_rollout_once

import arrowbank
from arrowbank import RolloutBank
from arrowbank.archive.store import ArchiveStore, Change
from arrowbank.durable import seal
from arrowbank.durable.layout import BankPaths
from arrowbank.errors import ArrowbankError

# -- acknowledge before write: caught by the kill loop


def kill_a_few(directory: Path, cycles: int, fault: str | None = None) -> None:
    seed = a_seed()
    with telling_the_seed(seed), KillLoop(directory, seed, fault=fault) as loop:
        for cycle in range(cycles):
            loop.cycle(("drawn", "in flight")[cycle % 2], in_flight=cycle % 2 == 1)


def test_the_kill_check_is_green_without_a_fault(tmp_path: Path) -> None:
    kill_a_few(tmp_path, 6)


def test_the_kill_check_sees_groups_acknowledged_before_they_are_written(tmp_path: Path) -> None:
    with pytest.raises(Violation, match="acknowledged groups lost"):
        kill_a_few(tmp_path, 30, "acknowledge-before-write")  # the first or second, as a rule


# -- skip the seal check: caught by flipped bits


def check_flipped_bits(path: Path, flips: int, rng: random.Random) -> None:
    """Flip bits of a bank's only segment, one at a time: at most one group is missing, and none is wrong."""
    with RolloutBank.open(path) as bank:
        contents = {bank.append(group): digest(group) for group in map(make_group, (1, 2, 3, 4))}
    [segment] = BankPaths(path).segments.iterdir()
    whole = segment.read_bytes()
    for _ in range(flips):
        place, bit = rng.randrange(len(whole)), rng.randrange(8)
        flipped = bytearray(whole)
        flipped[place] ^= 1 << bit
        # A new file: whoever has the old one mapped is not to see it change.
        fresh = path / "flipped"
        fresh.write_bytes(flipped)
        os.replace(fresh, segment)
        check_groups(path, contents, f"bit {bit} of byte {place}")


def check_groups(path: Path, contents: dict[str, str], what: str) -> None:
    try:
        found = {group.uid: digest(group) for group in arrowbank.scan(path).groups()}
    except (ArrowbankError, ValueError, OSError, LookupError) as error:
        raise Violation(f"{what}: damage was parsed: {error!r}") from error
    wrong = [uid for uid, content in found.items() if uid is None or contents.get(uid) != content]
    if wrong:
        raise Violation(f"{what}: damaged groups given back: {wrong}")
    if len(found) < len(contents) - 1:
        raise Violation(f"{what}: {len(contents) - len(found)} groups lost")


@pytest.mark.parametrize("part", range(4))
def test_no_flipped_bit_gives_a_wrong_group(tmp_path: Path, part: int) -> None:
    check_flipped_bits(tmp_path / "bank", 100, random.Random(part))


def test_the_bit_flip_check_sees_a_missing_seal_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seal, "verify", lambda *_: True)
    with pytest.raises(Violation, match=r"damaged groups given back|damage was parsed"):
        check_flipped_bits(tmp_path / "bank", 100, random.Random(0))


def test_without_the_seal_check_a_flipped_token_is_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with no luck in it: Arrow alone takes any bytes of a body for numbers."""
    path = tmp_path / "bank"
    with RolloutBank.open(path) as bank:
        group = make_group(1)
        contents = {bank.append(group): digest(group)}
    [segment] = BankPaths(path).segments.iterdir()
    tokens = group.rollouts[0].trajectory[-1].tobytes()  # type: ignore[union-attr]
    whole = segment.read_bytes()
    segment.write_bytes(whole.replace(tokens, tokens[:-1] + bytes([tokens[-1] ^ 1])))
    check_groups(path, contents, "a token")
    monkeypatch.setattr(seal, "verify", lambda *_: True)
    with pytest.raises(Violation, match="damaged groups given back"):
        check_groups(path, contents, "a token")


# -- publish the archive twice: caught by counting rollouts


def archive_a_few(path: Path) -> None:
    """Train for some iterations, with compaction at each, in two sessions."""
    for session in range(2):
        with RolloutBank.open(path, keep_checkpoints=1) as bank:
            start = session * 4
            bank.restore(start)
            for iteration in range(start, start + 4):
                bank.begin_iteration(iteration)
                serials = [serial for serial in range(iteration * 9, iteration * 9 + 9) if fate_of(serial) == "train"]
                uids = bank.append_many([make_group(serial) for serial in serials])
                bank.mark_consumed(uids, iteration, state=state_of(iteration, uids))
                bank.begin_iteration(iteration + 1)
                bank.checkpoint(iteration + 1, wait=True)


def check_both_views_once(path: Path) -> None:
    """Check that plain readers and ``scan`` see each rollout once."""
    assert check_archive_once(path) > 50
    check_each_rollout_once(arrowbank.scan(path).to_polars().collect())


def test_the_once_check_is_green_without_a_fault(tmp_path: Path) -> None:
    archive_a_few(tmp_path / "bank")
    check_both_views_once(tmp_path / "bank")


def test_the_once_check_sees_an_archive_file_published_under_two_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = ArchiveStore.commit

    def twice(self: ArchiveStore, change: Change, *rest: object) -> None:
        commit(self, change, *rest)  # type: ignore[arg-type]
        directory = self.paths.version(self.manifest.version)
        if change.file is not None:
            os.link(directory / change.file.name, directory / f"again-{change.file.name}")

    monkeypatch.setattr(ArchiveStore, "commit", twice)
    archive_a_few(tmp_path / "bank")
    with pytest.raises(Violation, match="twice"):
        check_archive_once(tmp_path / "bank")


def test_the_once_check_sees_inputs_that_were_not_retired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = ArchiveStore.commit

    def forgetful(self: ArchiveStore, change: Change, *rest: object) -> None:
        commit(self, replace(change, retired=()), *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(ArchiveStore, "commit", forgetful)
    archive_a_few(tmp_path / "bank")
    with pytest.raises(Violation, match="twice"):
        check_both_views_once(tmp_path / "bank")
