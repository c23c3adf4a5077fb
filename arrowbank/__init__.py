"""Durable columnar storage, resume and replay for the rollouts of RL post-training."""

from arrowbank.archive.view import BankView, scan
from arrowbank.bank import RolloutBank
from arrowbank.errors import (
    ArrowbankError,
    BankClosedError,
    BankLockedError,
    BankNotFoundError,
    CorruptionError,
    CorruptManifestError,
    CorruptRecordError,
    DuplicateGroupError,
    FencedError,
    FormatVersionError,
    HistoryGoneError,
    InvalidDrawError,
    ReplayUnavailableError,
    SchemaMismatchError,
    UnknownGroupError,
    UnrepresentableError,
)
from arrowbank.pipeline import EnvTask, RolloutPipeline, WeightedMultiTask
from arrowbank.restored import BankStats, Draw, Restored, RestoreReport
from arrowbank.types import Rollout, RolloutGroup, TokenRollout
from arrowbank.verification.repair import repair
from arrowbank.verification.report import Finding, RepairReport, VerifyReport
from arrowbank.verification.verify import verify
from arrowbank.writer import BankWriter, WriterToken

__version__ = "0.1.0"

__all__ = [
    "ArrowbankError",
    "BankClosedError",
    "BankLockedError",
    "BankNotFoundError",
    "BankStats",
    "BankView",
    "BankWriter",
    "CorruptManifestError",
    "CorruptRecordError",
    "CorruptionError",
    "Draw",
    "DuplicateGroupError",
    "EnvTask",
    "FencedError",
    "Finding",
    "FormatVersionError",
    "HistoryGoneError",
    "InvalidDrawError",
    "RepairReport",
    "ReplayUnavailableError",
    "RestoreReport",
    "Restored",
    "Rollout",
    "RolloutBank",
    "RolloutGroup",
    "RolloutPipeline",
    "SchemaMismatchError",
    "TokenRollout",
    "UnknownGroupError",
    "UnrepresentableError",
    "VerifyReport",
    "WeightedMultiTask",
    "WriterToken",
    "repair",
    "scan",
    "verify",
]
