"""Golden banks: made once, each by the version that its name tells, and read alike by every later one."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest
from golden.__main__ import HERE, extract, read

NAMES = sorted(path.name.removesuffix(".tar.xz") for path in HERE.glob("*.tar.xz"))


def test_there_is_one() -> None:
    assert "v1" in NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_golden_bank_gives_what_it_gave_when_it_was_made(tmp_path: Path, name: str) -> None:
    expected = json.loads(lzma.decompress((HERE / f"{name}.json.xz").read_bytes()))
    found = json.loads(json.dumps(read(extract(name, tmp_path))))
    assert found.keys() == expected.keys()
    for part in expected:
        assert found[part] == expected[part], part


@pytest.mark.parametrize("name", NAMES)
def test_a_golden_bank_has_something_of_everything(name: str) -> None:
    content = json.loads(lzma.decompress((HERE / f"{name}.json.xz").read_bytes()))
    restored, verified = content["restored"], content["verified"]
    assert verified["verdict"] == "damaged" and {"damage", "note"} <= {found[0] for found in verified["findings"]}
    assert {row["outcome"] for row in content["rows"]} == {"consumed", "evicted", None}
    assert len(restored["draws"]) == 3
    assert [draw["span"] for draw in restored["draws"]] == [2, 1, 1]
    assert [bool(draw["lost"]) for draw in restored["draws"]] == [False, False, True]
    assert restored["torn"] and restored["corrupt"] and restored["quarantined"]
    assert {"math", "code", ""} <= restored["pending"].keys()
