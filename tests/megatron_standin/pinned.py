"""What the adapter relies on of Megatron-LM (main of August 2026): names, fields, calls, flags.

``facts`` reads the same off a source tree without importing it: off a checkout, or off the stand-in beside this file.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

__all__ = ["PINNED", "STANDIN", "facts"]

STANDIN = Path(__file__).parent

PINNED: dict[str, Any] = {
    "fields": {
        "AgentBaseModel": {"extra": "'allow'"},
        "Rollout": {
            "trajectory": "list[str]",
            "prompt_length": "list[int] | None = None",
            "reward": "float | None = None",
            "env_id": "str = ''",
            "problem_id": "str | None = None",
            "rollout_status": "str = 'ok'",
            "failure_reason": "str | None = None",
        },
        "TokenRollout": {
            "trajectory": "list[list[int]]",
            "reward": "list[float] | float",
            "generation_mask": "list[list[bool]] | None = None",
            "logprobs": "list[list[float]] | None = None",
            "env_id": "str = ''",
            "problem_id": "str | None = None",
            "completion_ids": "list[str] = []",
            "generation_cap": "int | None = None",
            "rollout_status": "str = 'ok'",
            "failure_reason": "str | None = None",
        },
        "RolloutGroup": {
            "rollouts": "Rollouts",
            "batch_id": "int = 0",
            "index_in_batch": "int = 0",
            "uid": "str | None = None",
        },
    },
    "methods": {
        "__init__": "self, bank_dir, *, max_bytes=0",
        "set_collection": "self, iteration",
        "append": "self, group, uid=None",
        "mark_consumed": "self, uid, iteration",
        "mark_consumed_many": "self, uids, iteration",
        "restore": "self, trained_through",
        "recover": "self, trained_through",
        "checkpoint": "self, iteration",
        "close": "self",
    },
    "calls": {  # file: (object, method, arguments)
        "rl/agent/rollout_pipeline.py": {("bank", "append", 1)},
        "rl/rl_utils.py": {
            ("bank", "recover", 1),
            ("bank", "set_collection", 1),
            ("bank", "mark_consumed_many", 2),
            ("bank", "checkpoint", 1),
            ("request_ledger", "pop", 1),  # raises for ids that it does not know
        },
    },
    "opened as": ["bank_dir, max_bytes=args.rl_rollout_bank_max_bytes"],
    "flags": {
        "group": "title='rl'",
        "--rl-durable-rollout-bank": "action='store_true'",
        "--rl-rollout-bank-dir": "default=None, type=str",
        "--rl-rollout-bank-max-bytes": "default=0, type=int",
        "--grpo-iterations": "default=2, type=int",
        "--grpo-prompts-per-step": "default=32, type=int",
        "--grpo-group-size": "default=2, type=int",
    },
}


def facts(root: Path) -> dict[str, Any]:
    """Read what ``PINNED`` says off the tree that has ``megatron/`` in it."""
    package = root / "megatron"
    found: dict[str, Any] = {"fields": {}, "methods": {}, "calls": {}, "opened as": [], "flags": {}}
    for node in _parse(package / "rl/types/rollout.py").body:
        if isinstance(node, ast.ClassDef):
            found["fields"][node.name] = {key.arg: ast.unparse(key.value) for key in node.keywords} | _fields(node)
    (bank,) = [node for node in _parse(package / "rl/rollout_bank.py").body
               if isinstance(node, ast.ClassDef) and node.name == "RolloutBank"]  # fmt: skip
    for node in bank.body:
        if isinstance(node, ast.FunctionDef) and (node.name == "__init__" or not node.name.startswith("_")):
            found["methods"][node.name] = _arguments(node.args)
    for path in sorted([*(package / "rl").rglob("*.py"), *(package / "training").rglob("*.py")]):
        name = path.relative_to(package).as_posix()
        text = path.read_text()
        if name != "rl/rollout_bank.py" and ("bank." in text or "RolloutBank(" in text):
            _add_calls(found, name, ast.parse(text))
    (flags,) = [node for node in ast.walk(_parse(package / "training/arguments.py"))
                if isinstance(node, ast.FunctionDef) and node.name == "_add_rl_args"]  # fmt: skip
    for call in _calls(flags):
        flag = "group" if _name(call.func) == "add_argument_group" else call.args and ast.literal_eval(call.args[0])
        if flag in PINNED["flags"]:
            said = {str(key.arg): ast.unparse(key.value) for key in call.keywords if key.arg != "help"}
            found["flags"][flag] = ", ".join(f"{name}={said[name]}" for name in sorted(said))
    return found


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _fields(node: ast.ClassDef) -> dict[str, str]:
    return {
        ast.unparse(field.target): ast.unparse(field.annotation)
        + (f" = {ast.unparse(field.value)}" if field.value is not None else "")
        for field in node.body
        if isinstance(field, ast.AnnAssign)
    }


def _arguments(arguments: ast.arguments) -> str:
    for argument in [*arguments.args, *arguments.kwonlyargs]:
        argument.annotation = None
    return ast.unparse(arguments)


def _calls(tree: ast.AST) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _add_calls(found: dict[str, Any], name: str, tree: ast.Module) -> None:
    for call in _calls(tree):
        if _name(call.func) == "RolloutBank":
            given = [ast.unparse(value) for value in call.args]
            given += [f"{key.arg}={ast.unparse(key.value)}" for key in call.keywords]
            found["opened as"].append(", ".join(given))
        elif isinstance(call.func, ast.Attribute):
            whose, method = _name(call.func.value), call.func.attr
            if whose == "bank" or (whose, method) == ("request_ledger", "pop"):
                found["calls"].setdefault(name, set()).add((whose, method, len(call.args) + len(call.keywords)))
