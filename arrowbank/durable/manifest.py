"""MANIFEST.json: what the archive holds, and which segments it has taken the place of.

It changes at open (a new bank), at compaction, and at nothing that happens every iteration. It is replaced in one
step and carries a checksum over its own canonical JSON.
"""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Annotated, Any

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from arrowbank.durable import files
from arrowbank.durable.layout import ArchiveName, BankPaths, JournalName, SegmentName
from arrowbank.errors import BankNotFoundError, CorruptManifestError, FormatVersionError, SchemaMismatchError
from arrowbank.schema import SCHEMA_HASH

__all__ = [
    "FORMAT_VERSION", "ArchiveFile", "Manifest", "canonical", "create_manifest", "data_without_manifest",
    "parse_manifest", "read_manifest", "read_manifest_bytes", "write_manifest",
]  # fmt: skip

FORMAT_VERSION = 1
_RESTORE = "Restore MANIFEST.json from a copy, or move the directory away to start a new bank"


_MAX_BYTES = 1 << 30
_Number = Annotated[int, Field(ge=0, lt=10**12 - 1)]
"""One that a file's name can say, and the next one, too."""
_Count = Annotated[int, Field(ge=0, lt=2**63)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ArchiveFile(_Model):
    """One Parquet file of the archive."""

    name: str
    rows: _Count
    groups: _Count
    nbytes: _Count
    last_end: _Count
    """No row's training ends after this iteration count; 0 when none was trained on."""
    digest: str
    """xxh3-128 of the whole file."""


class Manifest(_Model):
    format_version: int
    bank_id: str
    schema_hash: str
    commit: _Number
    """Counts replacements of this file."""
    version: _Number
    """The archive's directory: .archive/v<version>."""
    files: tuple[ArchiveFile, ...] = ()
    archived_through: _Count = 0
    """Draws settled by this iteration count may be in the archive."""
    journal: str = ""
    """The part of the journal that reading starts with, a snapshot first; empty for the very first part."""
    carried: tuple[str, ...] = ()
    """Segments that compaction wrote. One that is not named here was left by a crash and says nothing."""
    retired: dict[str, _Count] = Field(default_factory=dict)
    """Segments that the archive has taken the place of, with the commit that said so; gone or about to go."""

    @property
    def last_session(self) -> int:
        """The highest session that it names."""
        segments = map(SegmentName.parse, (*self.carried, *self.retired))
        named = [*segments, *(ArchiveName.parse(file.name) for file in self.files), JournalName.parse(self.journal)]
        return max((name.session for name in named if name is not None), default=0)


def create_manifest() -> Manifest:
    """Return the manifest of a new bank."""
    return Manifest(
        format_version=FORMAT_VERSION, bank_id=uuid.uuid4().hex, schema_hash=SCHEMA_HASH, commit=1, version=1
    )


def write_manifest(paths: BankPaths, manifest: Manifest, tmp: Path) -> None:
    """Replace the manifest. Durability: on return the new one survives power loss; before, the old one."""
    content = manifest.model_dump(mode="json")
    content["checksum"] = _checksum(content)
    files.replace(paths.manifest, json.dumps(content, indent=1).encode() + b"\n", tmp)


def read_manifest(paths: BankPaths) -> Manifest:
    """Read and check the manifest.

    Raises: BankNotFoundError where there is no bank; CorruptManifestError when it is missing beside data, malformed
    or altered; FormatVersionError; SchemaMismatchError.
    """
    try:
        text = read_manifest_bytes(paths)
    except FileNotFoundError:
        remains = data_without_manifest(paths)
        if remains is None:
            raise BankNotFoundError(f"{paths.root}: no bank here (no MANIFEST.json)") from None
        raise CorruptManifestError(paths.manifest, f"missing, but there is {remains}", hint=_RESTORE) from None
    return parse_manifest(paths, text)


def read_manifest_bytes(paths: BankPaths) -> bytes:
    """Return what stands in the file. Raises CorruptionError for what is no file, or too large; OSError."""
    return files.read_small(paths.manifest, _MAX_BYTES)


def parse_manifest(paths: BankPaths, text: bytes) -> Manifest:
    """Check what stands in a manifest. Raises CorruptManifestError, FormatVersionError, SchemaMismatchError."""
    content = _parse(paths, text)
    version = content.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise FormatVersionError(
            f"{paths.manifest}: format version {version}, this arrowbank knows {FORMAT_VERSION}. Install a newer one"
        )
    found = content.pop("checksum", None)
    if found != _checksum(content):
        raise CorruptManifestError(paths.manifest, "its checksum does not match its content", hint=_RESTORE)
    manifest = _validate(paths, content)
    if manifest.schema_hash != SCHEMA_HASH:
        raise SchemaMismatchError(
            f"{paths.manifest}: the bank was made with schema {manifest.schema_hash}, this arrowbank writes "
            f"{SCHEMA_HASH}. Open it with the arrowbank that made it, or start a new bank"
        )
    return manifest


def data_without_manifest(paths: BankPaths) -> str | None:
    """Name something under the bank's root that is data; LOCK, tmp/, claims and empty directories are not."""
    if not paths.root.is_dir():
        return None
    for entry in sorted(paths.root.iterdir()):
        if entry.name in {"LOCK", "tmp", "sessions"}:
            continue
        if not entry.is_dir() or entry.is_symlink():
            if entry.is_symlink() and entry.name == "archive":
                continue
            return entry.name
        for inside in sorted(entry.rglob("*")):
            if not inside.is_dir() and not _is_zero_row_file(inside):
                return str(inside.relative_to(paths.root))
    return None


def _is_zero_row_file(path: Path) -> bool:
    """The file that is made before a new bank's first manifest."""
    name = ArchiveName.parse(path.name)
    return name is not None and name.commit == 0


def _parse(paths: BankPaths, text: bytes) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptManifestError(paths.manifest, f"not JSON ({error})", hint=_RESTORE) from None
    if not isinstance(content, dict):
        raise CorruptManifestError(paths.manifest, "not a JSON object", hint=_RESTORE)
    return content


def _validate(paths: BankPaths, content: dict[str, Any]) -> Manifest:
    try:
        manifest = Manifest.model_validate_json(json.dumps(content))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise CorruptManifestError(
            paths.manifest, f"{'.'.join(map(str, first['loc']))}: {first['msg']}", hint=_RESTORE
        ) from None
    for name in manifest.retired:
        if SegmentName.parse(name) is None:
            raise CorruptManifestError(paths.manifest, f"retired: {name!r} is no segment's name", hint=_RESTORE)
    for name in manifest.carried:
        parsed = SegmentName.parse(name)
        if parsed is None or not parsed.is_carried:
            raise CorruptManifestError(paths.manifest, f"carried: {name!r} is no such segment's name", hint=_RESTORE)
    if manifest.journal and JournalName.parse(manifest.journal) is None:
        raise CorruptManifestError(paths.manifest, f"journal: {manifest.journal!r} is no journal's name", hint=_RESTORE)
    for file in manifest.files:
        if ArchiveName.parse(file.name) is None:
            raise CorruptManifestError(paths.manifest, f"files: {file.name!r} is no archive file's name", hint=_RESTORE)
    return manifest


def canonical(content: dict[str, Any]) -> bytes:
    """What the checksum is of: the object without its checksum."""
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def _checksum(content: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(canonical(content))
