"""A manifest that is not as it was written is an error that says so, and nothing is touched."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from builders import token_group
from runs import tree

from arrowbank import RolloutBank, scan
from arrowbank.durable.layout import BankPaths, SegmentName
from arrowbank.durable.manifest import _checksum, create_manifest, read_manifest, write_manifest
from arrowbank.errors import (
    ArrowbankError,
    BankNotFoundError,
    CorruptManifestError,
    FormatVersionError,
    SchemaMismatchError,
)


@pytest.fixture
def paths(tmp_path: Path) -> BankPaths:
    paths = BankPaths(tmp_path / "bank")
    with RolloutBank.open(paths.root) as bank:
        bank.append(token_group(1))
    return paths


def rewrite(paths: BankPaths, **changes: Any) -> None:
    """Write a manifest with a right checksum and these fields."""
    content = json.loads(paths.manifest.read_text()) | changes
    del content["checksum"]
    paths.manifest.write_text(json.dumps(content | {"checksum": _checksum(content)}))


def assert_refused(paths: BankPaths, kind: type[Exception], match: str) -> None:
    before = tree(paths.root)
    for attempt in (RolloutBank.open, scan):
        with pytest.raises(kind, match=match):
            attempt(paths.root)
    assert tree(paths.root) == before


def test_a_manifest_round_trips(tmp_path: Path) -> None:
    paths = BankPaths(tmp_path)
    manifest = create_manifest().model_copy(update={"retired": {str(SegmentName(1, 2, 3, "w")): 4}})
    write_manifest(paths, manifest, tmp_path)
    assert read_manifest(paths) == manifest
    assert json.loads(paths.manifest.read_text())["format_version"] == 1


def test_missing_beside_data_is_an_error_that_names_the_data(paths: BankPaths) -> None:
    paths.manifest.unlink()
    assert_refused(paths, CorruptManifestError, r"missing, but there is journal/s0001.*Restore MANIFEST")


@pytest.mark.parametrize(
    "name", ["journal/s0001-0000.arrows", "notes.txt", "quarantine/x", ".archive/v000001/c000002-s0001.parquet"]
)
def test_any_file_beside_a_missing_manifest_is_data(tmp_path: Path, name: str) -> None:
    paths = BankPaths(tmp_path)
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("x")
    assert_refused(paths, CorruptManifestError, "missing, but there is")


def test_lock_tmp_claims_and_empty_directories_are_not_data(paths: BankPaths) -> None:
    paths.manifest.unlink()
    for directory in (paths.segments, paths.journal):
        shutil.rmtree(directory)
    with pytest.raises(BankNotFoundError, match="no bank here"):
        scan(paths.root)
    with RolloutBank.open(paths.root) as bank:
        assert bank.stats().live_groups == 0
        assert bank.session == 2


def test_nothing_at_all_is_no_bank_to_look_at(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(BankNotFoundError):
            scan(path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"null", b"{}", b"\xff\xfe", b"[" * 100_000, b'{"format_version": "1"}']
)
def test_malformed_is_an_error(paths: BankPaths, text: bytes) -> None:
    paths.manifest.write_bytes(text)
    assert_refused(paths, CorruptManifestError, "MANIFEST")


def test_a_single_changed_bit_anywhere_is_an_error(paths: BankPaths) -> None:
    text = paths.manifest.read_bytes()
    for bit in range(8 * len(text)):
        changed = bytearray(text)
        changed[bit // 8] ^= 1 << bit % 8
        paths.manifest.write_bytes(changed)
        with pytest.raises((CorruptManifestError, FormatVersionError)):
            read_manifest(paths)


def test_a_newer_version_is_told_before_anything_else_is_judged(paths: BankPaths) -> None:
    paths.manifest.write_text('{"format_version": 2, "of": "a later day"}')
    assert_refused(paths, FormatVersionError, "format version 2, this arrowbank knows 1")


def test_another_schema_is_told(paths: BankPaths) -> None:
    rewrite(paths, schema_hash="0" * 32)
    assert_refused(paths, SchemaMismatchError, "made with schema 000")


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "..", "segments/../x", "", "x.arrows"])
def test_hostile_retired_names_are_refused(paths: BankPaths, name: str) -> None:
    rewrite(paths, retired={name: 1})
    assert_refused(paths, CorruptManifestError, "is no segment's name")


@pytest.mark.parametrize("name", ["../c000001-s0001.parquet", "/c000001-s0001.parquet", "x.parquet", ""])
def test_hostile_archive_names_are_refused(paths: BankPaths, name: str) -> None:
    rewrite(paths, files=[{"name": name, "rows": 1, "groups": 1, "nbytes": 1, "last_end": 0, "digest": "0"}])
    assert_refused(paths, CorruptManifestError, "is no archive file's name")


@pytest.mark.parametrize("changes", [{"version": -1}, {"commit": "1"}, {"extra": 1}, {"bank_id": None}])
def test_fields_of_a_wrong_kind_are_refused(paths: BankPaths, changes: dict[str, Any]) -> None:
    rewrite(paths, **changes)
    assert_refused(paths, CorruptManifestError, next(iter(changes)))


def test_every_refusal_is_an_arrowbank_error() -> None:
    for kind in (BankNotFoundError, CorruptManifestError, FormatVersionError, SchemaMismatchError):
        assert issubclass(kind, ArrowbankError)
