"""The names that users may rely on. A change here is a change of the contract."""

import inspect

import arrowbank
import arrowbank.pipeline
import arrowbank.types


def test_top_level_names_are_pinned() -> None:
    assert sorted(arrowbank.__all__) == [
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


def test_type_names_are_pinned() -> None:
    assert set(arrowbank.types.__all__) == {
        "AgentBaseModel",
        "EnvId",
        "GroupQueuesPerEnv",
        "GroupedRollouts",
        "GroupsPerEnv",
        "Rollout",
        "RolloutGroup",
        "Rollouts",
        "TokenRollout",
        "VersionSpan",
    }


def test_rollout_fields_keep_megatrons_names() -> None:
    text = {"trajectory", "prompt_length", "reward", "env_id", "problem_id", "rollout_status", "failure_reason"}
    tokens = text | {"generation_mask", "logprobs", "completion_ids", "generation_cap"}
    assert text <= set(arrowbank.Rollout.model_fields)
    assert tokens <= set(arrowbank.TokenRollout.model_fields)
    assert set(arrowbank.RolloutGroup.model_fields) == {"rollouts", "batch_id", "index_in_batch", "uid"}


def test_bank_methods_are_pinned() -> None:
    public = {name for name in dir(arrowbank.RolloutBank) if not name.startswith("_")}
    assert public == {
        "append",
        "append_async",
        "append_many",
        "begin_iteration",
        "checkpoint",
        "close",
        "evict",
        "iteration",
        "live_bytes",
        "mark_consumed",
        "open",
        "restore",
        "session",
        "stats",
        "writer_token",
    }


def test_everything_public_has_a_docstring() -> None:
    for name in arrowbank.__all__:
        thing = getattr(arrowbank, name)
        assert inspect.getdoc(thing), name
        for member, value in vars(thing).items() if inspect.isclass(thing) else ():
            if not member.startswith("_") and callable(value):
                assert inspect.getdoc(value), f"{name}.{member}"


def test_every_error_has_the_one_base_and_survives_pickling() -> None:
    import pickle

    from arrowbank import errors

    made = {
        errors.CorruptionError: ("file", "reason"),
        errors.CorruptRecordError: ("file", "reason"),
        errors.CorruptManifestError: ("file", "reason"),
        errors.UnrepresentableError: ("field", "reason"),
    }
    for name in errors.__all__:
        kind = getattr(errors, name)
        assert issubclass(kind, errors.ArrowbankError)
        error = kind(*made.get(kind, ("message",)))
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), vars(again)) == (kind, str(error), vars(error))
    located = errors.CorruptRecordError("file", "reason", offset=8, hint="do this")
    assert vars(pickle.loads(pickle.dumps(located))) == vars(located)
