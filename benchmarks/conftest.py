"""Prints each benchmark's ratio to the raw limit that ran interleaved with it."""

from __future__ import annotations

from typing import Any

import pytest

_ratios: list[tuple[str, float, float, float]] = []
_tables: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rounds", type=int, default=200, help="rounds of each benchmark")
    parser.addoption("--revive-mb", default="20", help="megabytes that a restore below the horizon brings back")
    parser.addoption("--history", default="60,600", help="iterations of the runs whose calls are compared")


@pytest.fixture
def rounds(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--rounds"))


@pytest.fixture
def report_ratio(request: pytest.FixtureRequest) -> Any:
    def report(seconds: float, raw_seconds: float) -> float:
        _ratios.append((request.node.name, seconds, raw_seconds, seconds / raw_seconds))
        return seconds / raw_seconds

    return report


@pytest.fixture
def report_table() -> Any:
    return _tables.append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for name, seconds, raw, ratio in _ratios:
        terminalreporter.write_line(
            f"{name}: {seconds * 1e3:.3f} ms, raw {raw * 1e3:.3f} ms, ratio {ratio:.2f} (medians)"
        )
    for table in _tables:
        terminalreporter.write_line(table)
