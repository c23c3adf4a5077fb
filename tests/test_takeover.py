"""A holder that is stopped, overtaken and goes on: it acknowledges nothing more, and spoils nothing of the new one's.

The test is a sample of the rounds of ``takeovers``, and

    python tests/test_takeover.py --rounds 200 [--seed N]

prints a table. The seed is in every failure; ``ARROWBANK_TAKEOVER_SEED`` sets it for pytest.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from kill_loop import a_seed
from takeovers import SEED, Round, play

SAMPLE = 12


def table(rounds: list[Round]) -> str:
    """Return what happened, a line for each kind of round."""
    lines = [f"{'round':24}{'rounds':>8}{'violations':>12}{'groups':>8}{'late acks':>11}{'refused':>9}{'seconds':>9}"]
    for kind in sorted({round_.kind for round_ in rounds}):
        for at_call in (False, True):
            those = [one for one in rounds if one.kind == kind and bool(one.point) == at_call]
            if those:
                name = f"{kind}, at a call" if at_call else f"{kind}, at random"
                numbers = [len(those), sum(bool(one.violations) for one in those)]
                numbers += [sum(one.acknowledged for one in those), sum(one.late for one in those)]
                numbers += [sum(one.tried for one in those)]
                widths = (8, 12, 8, 11, 9)
                cells = "".join(f"{number:>{width}}" for number, width in zip(numbers, widths, strict=True))
                lines.append(f"{name:24}{cells}{sum(one.seconds for one in those):>9.1f}")
    points = Counter(" ".join(one.point.split(" ")[:2]) for one in rounds if one.point)
    lines.append("stopped at: " + ", ".join(f"{point} {count}" for point, count in sorted(points.items())))
    return "\n".join(lines)


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level("CRITICAL", logger="arrowbank")
    yield


def test_a_holder_that_was_stopped_and_overtaken_does_and_spoils_nothing_more(tmp_path: Path, quiet: None) -> None:
    seed = a_seed(SEED)
    rounds = play(tmp_path, seed, SAMPLE, stop=True)
    print(f"seed {seed}\n{table(rounds)}")
    assert sum(one.acknowledged for one in rounds) > 20
    assert sum(one.tried for one in rounds) > 10


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--stop", action="store_true", help="at the first violation; its bank is kept")
    options = parser.parse_args()
    seed = a_seed(SEED) if options.seed is None else options.seed
    logging.getLogger("arrowbank").setLevel(logging.CRITICAL)
    print(f"seed {seed}", flush=True)
    directory = Path(tempfile.mkdtemp(prefix="takeover-"))
    rounds = play(directory, seed, options.rounds, stop=options.stop)
    print(table(rounds))
    failed = sum(bool(one.violations) for one in rounds)
    print(f"{len(rounds)} rounds, {failed} violations, seed {seed}; banks in {directory}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
