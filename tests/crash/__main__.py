"""The campaign: ``python -m tests.crash --states 100000 --seed 1``, or one ``--instrument``, or one state again."""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the helpers of all tests

from crash import states
from crash.instruments import INSTRUMENTS
from crash.planted import PLANTED, Tracers


def _plant(seed: int) -> int:
    """Print which instrument caught which planted fault, and what it said."""
    missed = 0
    print(f"{'instrument':12} {'seconds':>8}  planted fault, and what was said of it; seed {seed}", flush=True)
    with Tracers() as tracers:
        for planted in PLANTED:
            started = time.monotonic()
            caught = planted.search(tracers, seed)
            missed += not caught
            said = " ".join((caught or "NOT CAUGHT").split())[:140]
            print(
                f"{planted.instrument:12} {time.monotonic() - started:8.1f}  {planted.fault}\n{'':23}{said}", flush=True
            )
    print(f"{len(PLANTED)} planted, {missed} not caught")
    return 1 if missed else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__)
    parser.add_argument("--states", type=int, default=100_000, help="unique crash states to look at")
    parser.add_argument("--faults", type=int, default=None, help="so many faults, drawn by the seed; all of them")
    parser.add_argument("--cuts", type=int, default=2000, help="power cuts, half of them on ext4, half on xfs")
    parser.add_argument("--blocks", type=int, default=1000, help="disks that lost some of what was not flushed")
    parser.add_argument("--kills", type=int, default=2000, help="kills of training runs")
    parser.add_argument("--every", type=int, default=1, help="of so many bits and lengths of a file one is hit")
    parser.add_argument("--mutants", type=int, default=100_000, help="fuzzed files")
    parser.add_argument("--takeovers", type=int, default=200, help="rounds of takeovers")
    parser.add_argument("--seed", type=int, default=None, help="of every choice; drawn and printed when not given")
    parser.add_argument("--instrument", choices=INSTRUMENTS, action="append", help="all of them when not given")
    parser.add_argument("--replay", metavar="NUMBER", help="look at one crash state again, with the seed it came from")
    parser.add_argument("--planted", action="store_true", help="plant faults, and see that each is caught")
    options = parser.parse_args()
    options.seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    logging.getLogger("arrowbank").setLevel(logging.CRITICAL)
    if options.planted:
        return _plant(options.seed)
    if options.replay is not None:
        found = states.replay(options.replay, options.seed)
        print("\n".join(found) or "nothing is broken")
        return 1 if found else 0
    failed = False
    print(f"{'instrument':12} {'cases':>9} {'seconds':>8} {'violations':>10} {'seed':>8}", flush=True)
    for name in options.instrument or INSTRUMENTS:
        started = time.monotonic()
        result = INSTRUMENTS[name](options)
        seconds = time.monotonic() - started
        print(f"{name:12} {result.cases:9} {seconds:8.1f} {len(result.violations):10} {options.seed:8}", flush=True)
        for case, what in result.violations:
            print(f"\n{name} {case}: {what}")
        failed = failed or bool(result.violations)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
