"""TRL trainers are killed with SIGKILL: who resumes generates nothing twice, and ends with the weights of a twin that
was never killed, bit for bit.

The witness is a log of calls of the model's ``generate``, written outside the bank (see ``tiny_grpo``). The trainers
need TRL, torch and transformers, and are skipped without.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from machine import REQUIRE

from arrowbank import scan
from arrowbank.integrations.trl import Saved, newest_checkpoint

CHILD = Path(__file__).with_name("tiny_grpo.py")
KILLED = -9
Run = Callable[..., int]

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"accumulation": 2},
    "four-steps": {"steps_per_generation": 4, "steps": 9},
    "twice": {"num_iterations": 2, "steps": 9},
    "four-steps-twice": {"steps_per_generation": 4, "num_iterations": 2, "steps": 12, "save_steps": 5},
    "four-steps-accumulation": {"steps_per_generation": 4, "accumulation": 2, "steps": 7},
    "twice-accumulation": {"num_iterations": 2, "accumulation": 2},
    "two-in-three": {"steps_per_generation": 2, "accumulation": 3, "steps": 7, "prompts": 12},
    "all-with-eval": {"steps_per_generation": 4, "num_iterations": 2, "accumulation": 2, "eval_steps": 2, "beta": 0.1},
    "eval-logprobs": {"steps_per_generation": 2, "eval_steps": 2, "sampler_logprobs": True, "log_completions": True},
}
KILLS = [("generate", 1), ("generate", 2), ("appended", 1), ("appended", 2), ("drawn", 2), ("step", 2), ("step", 5)]


@pytest.fixture(scope="module")
def libraries() -> None:
    absent = [name for name in ("torch", "transformers", "trl", "datasets") if not _is_installed(name)]
    if not absent:
        return
    what = f"no {', '.join(absent)} here: pip install 'arrowbank[trl]'"
    if "trl" in os.environ.get(REQUIRE, "").split(","):
        pytest.fail(f"{what} ({REQUIRE} names trl)")
    pytest.skip(what)


def _is_installed(name: str) -> bool:
    try:  # not find_spec, which would take this directory for TRL
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@pytest.fixture(scope="module")
def run(libraries: None) -> Iterator[Run]:
    """Run one trainer in a directory; return its exit status, 0 or a kill's."""
    server = subprocess.Popen([sys.executable, str(CHILD)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin and server.stdout

    def run(directory: Path, *, fails: bool = False, finishes: bool = False, **options: Any) -> int:
        assert server.stdin and server.stdout
        directory.mkdir(exist_ok=True)
        print(json.dumps([str(directory), options]), file=server.stdin, flush=True)
        status = int(server.stdout.readline())
        expected = 1 if fails else KILLED if options.get("kill") else 0
        assert status == expected or (finishes and status == 0), output(directory)
        return status

    with server:
        yield run
        server.stdin.close()


@pytest.fixture(scope="module")
def twin(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a run of some variant that nobody killed."""

    @cache
    def twin(variant: str) -> Path:
        directory = tmp_path_factory.mktemp(variant)
        run(directory, **VARIANTS[variant])
        return directory

    return twin


# -- what a run left


def output(directory: Path) -> str:
    return (directory / "output.txt").read_text()[-4000:]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def calls(directory: Path, event: str = "made", mode: str = "train") -> list[dict[str, Any]]:
    """Calls of the generator over all processes: which prompts at which step, and what came of it."""
    found = [call for call in lines(directory / "calls.jsonl") if (call["event"], call["mode"]) == (event, mode)]
    return [{name: value for name, value in call.items() if name not in ("pid", "event")} for call in found]


def losses(directory: Path) -> dict[tuple[int, str], dict[str, Any]]:
    """What was logged of each step and evaluation. One that was run again must have logged the same again."""
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for line in lines(directory / "losses.jsonl"):
        del line["pid"]
        kind = "eval" if "eval_loss" in line else "train" if "loss" in line else ""
        if kind:
            assert found.setdefault((line["step"], kind), line) == line
    return found


def done(directory: Path) -> dict[str, Any]:
    return dict(json.loads((directory / "done.json").read_text()))


def check_same(directory: Path, twin: Path) -> None:
    assert losses(directory) == losses(twin)
    assert done(directory)["weights"] == done(twin)["weights"]


def consumed(directory: Path) -> list[tuple[Any, ...]]:
    """What was trained on, when, in order."""
    names = ("consumed_iteration", "consumed_draw", "consumed_position", "member_index", "span")
    trained = [row for row in rows(directory) if row["split"] == "train"]
    assert {row["outcome"] for row in trained} <= {"consumed", None}
    return sorted((*(row[name] for name in names), tuple(row["tokens"])) for row in trained if row["outcome"])


def rows(directory: Path) -> list[dict[str, Any]]:
    return list(scan(directory / "bank").to_arrow().to_pylist())


@pytest.mark.trl
class TestUnkilled:
    @pytest.mark.parametrize("variant", VARIANTS)
    def test_with_a_bank_trl_does_what_it_does_without(
        self, run: Run, twin: Callable[[str], Path], tmp_path: Path, variant: str
    ) -> None:
        run(tmp_path, **VARIANTS[variant], bank=False)
        check_same(twin(variant), tmp_path)
        for mode in ("train", "eval"):
            assert calls(twin(variant), mode=mode) == calls(tmp_path, mode=mode)
        assert done(twin(variant))["generator_calls"] == len(calls(tmp_path))
        assert done(twin(variant))["eval_generator_calls"] == len(calls(tmp_path, mode="eval"))
        newest = newest_checkpoint(twin(variant) / "run")
        assert (Saved.of(newest) or Saved(0)).session == 1

    def test_everything_generated_is_in_the_bank_once(self, twin: Callable[[str], Path]) -> None:
        directory = twin("eval-logprobs")
        for mode in ("train", "eval"):
            made = [call["tokens"] for call in calls(directory, mode=mode)]
            found = [row for row in rows(directory) if row["split"] == mode]
            assert len(found) == sum(len(batch) for batch in made) > 0
            assert Counter(tuple(row["tokens"]) for row in found) == Counter(
                tuple(tokens) for batch in made for tokens in map(unpadded, batch)
            )
            assert {row["group_size"] for row in found} == {2}
            assert all((row["consumed_iteration"] is None) == (mode == "eval") for row in found)
            for row in found:
                length = row["num_tokens"] - row["num_generated"]
                assert row["generation_mask"] == [False] * length + [True] * row["num_generated"]
                assert None not in row["logprobs"][length:]
                parts = [part["value"] for part in row["metrics"]]
                assert [part["key"] for part in row["metrics"]] == ["sum_is_right", "variety"]
                assert row["reward"] == pytest.approx(np.nansum(parts), abs=1e-6)
                assert row["advantage_override"] is None

    def test_without_a_bank_a_resume_generates_again(
        self, run: Run, twin: Callable[[str], Path], tmp_path: Path
    ) -> None:
        """The witness sees it, and TRL's cycle shifts: other weights come out."""
        options = VARIANTS["four-steps"] | {"bank": False}
        run(tmp_path, **options, kill="step", kill_at=5)
        run(tmp_path, **options)
        assert len(calls(tmp_path)) > len(calls(twin("four-steps")))
        assert done(tmp_path)["weights"] != done(twin("four-steps"))["weights"]


def unpadded(tokens: list[int]) -> list[int]:
    """Without the padding before, and what comes after the first end. (1 pads, 2 ends; the model may sample both.)"""
    start = next(index for index, token in enumerate(tokens) if token != 1)
    prompt = 4
    completion = tokens[start + prompt :]
    end = completion.index(2) + 1 if 2 in completion else len(completion)
    return tokens[start : start + prompt] + completion[:end]


@pytest.mark.trl
@pytest.mark.slow
class TestKilled:
    @pytest.mark.parametrize(("place", "at"), KILLS)
    @pytest.mark.parametrize("variant", ["four-steps-twice", "two-in-three", "all-with-eval"])
    def test_it_goes_on_as_if_nothing_had_been(
        self, run: Run, twin: Callable[[str], Path], tmp_path: Path, variant: str, place: str, at: int
    ) -> None:
        run(tmp_path, **VARIANTS[variant], kill=place, kill_at=at)
        run(tmp_path, **VARIANTS[variant])
        check_same(tmp_path, twin(variant))
        assert calls(tmp_path) == calls(twin(variant))
        assert len(calls(tmp_path, "asked")) == len(calls(tmp_path)) + (place == "generate")

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_again_and_again(self, run: Run, twin: Callable[[str], Path], tmp_path: Path, variant: str) -> None:
        for place, at in [("drawn", 1), ("step", 2), ("appended", 1), ("step", 4), ("generate", 1), ("step", 2),
                          ("step", 4), ("", 0)]:  # fmt: skip
            if run(tmp_path, finishes=True, **VARIANTS[variant], kill=place, kill_at=at) == 0:
                break
        assert len(lines(tmp_path / "resumes.jsonl")) > 4
        assert consumed(tmp_path) == consumed(twin(variant))
        check_same(tmp_path, twin(variant))
        assert calls(tmp_path) == calls(twin(variant))
        assert max(resume["step"] for resume in lines(tmp_path / "resumes.jsonl")) > 0
        begun, unkilled = len(calls(tmp_path, "asked")), len(calls(twin(variant)))
        print(
            f"{variant}: {len(lines(tmp_path / 'resumes.jsonl')) - 1} kills, {begun} generator calls begun, "
            f"{len(calls(tmp_path))} made; unkilled {unkilled}; {len(losses(tmp_path))} logged losses and the weights "
            f"equal, {done(tmp_path)['weights'][:16]}"
        )

    def test_while_a_checkpoint_is_saved(self, run: Run, twin: Callable[[str], Path], tmp_path: Path) -> None:
        options = VARIANTS["four-steps"]
        for place, at in (("saving", 1), ("saving", 2), ("saved", 1)):
            run(tmp_path, **options, kill=place, kill_at=at)
        assert "left out, since saving it was not finished" in output(tmp_path)
        run(tmp_path, **options)
        assert [resume["step"] for resume in lines(tmp_path / "resumes.jsonl")] == [0, 0, 3, 6]
        check_same(tmp_path, twin("four-steps"))
        assert calls(tmp_path) == calls(twin("four-steps"))

    def test_while_a_generation_is_banked(self, run: Run, twin: Callable[[str], Path], tmp_path: Path) -> None:
        """One group of it is durable. It is made again, whole, as TRL would have it: the same again."""
        run(tmp_path, **VARIANTS["four-steps"], kill="torn", kill_at=2)
        run(tmp_path, **VARIANTS["four-steps"])
        check_same(tmp_path, twin("four-steps"))
        made, again = calls(twin("four-steps")), calls(tmp_path)
        assert again == [*made[:2], *made[1:]]
        evicted = [row for row in rows(tmp_path) if row["outcome"] == "evicted" and row["split"] == "train"]
        assert {row["evict_reason"] for row in evicted} == {"killed while its generation was being banked"}
        assert len({row["group_uid"] for row in evicted}) == 1

    def test_while_evaluating(self, run: Run, twin: Callable[[str], Path], tmp_path: Path) -> None:
        """What is rolled back is evaluated again, to the same end; training generates nothing twice."""
        options = VARIANTS["all-with-eval"]
        run(tmp_path, **options, kill="evaluate", kill_at=4)
        run(tmp_path, **options)
        check_same(tmp_path, twin("all-with-eval"))
        assert calls(tmp_path) == calls(twin("all-with-eval"))
        evaluations = {json.dumps(call) for call in calls(tmp_path, mode="eval")}
        assert evaluations == {json.dumps(call) for call in calls(twin("all-with-eval"), mode="eval")}

    def test_an_older_checkpoint_is_trained_on_from_the_bank(
        self, run: Run, twin: Callable[[str], Path], tmp_path: Path
    ) -> None:
        options = VARIANTS["four-steps-accumulation"]
        run(tmp_path, **options)
        run(tmp_path, **options, resume_from=str(tmp_path / "run" / "checkpoint-3"))
        check_same(tmp_path, twin("four-steps-accumulation"))
        assert calls(tmp_path) == calls(twin("four-steps-accumulation"))
        assert (done(tmp_path)["generator_calls"], done(tmp_path)["replayed"]) == (0, 3)

    @pytest.mark.parametrize(
        ("change", "message"),
        [({"prompts": 9}, "is of other prompts"), ({"steps_per_generation": 2}, "must stay what they were")],
    )
    def test_another_run_is_refused(self, run: Run, tmp_path: Path, change: dict[str, Any], message: str) -> None:
        run(tmp_path, **VARIANTS["four-steps"], kill="step", kill_at=5)
        before = (tmp_path / "calls.jsonl").read_bytes()
        run(tmp_path, fails=True, **VARIANTS["four-steps"] | change)
        assert message in output(tmp_path)
        assert (tmp_path / "calls.jsonl").read_bytes() == before
