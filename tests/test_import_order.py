"""Imports run one way, and importing arrowbank stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import arrowbank

PACKAGE = Path(arrowbank.__file__).parent

LAYERS = [
    ["errors"],
    ["arrays", "exits"],
    ["types"],
    ["schema", "columns", "turns", "details"],
    ["codec"],
    ["durable"],
    ["archive"],
    ["restored", "appending"],
    ["writer"],
    ["bank"],
    ["verification"],
    ["pipeline"],
    ["arguments", "integrations"],
    ["demo"],
    ["cli"],
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def imports_of(path: Path) -> set[str]:
    """Top-level parts of arrowbank that a module imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "arrowbank":
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("arrowbank.")}
    return found


def test_imports_run_one_way() -> None:
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        layer = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if layer.startswith("__"):
            continue
        for imported in imports_of(path) & RANK.keys():
            if RANK[imported] > RANK[layer]:
                wrong.append(f"{path.relative_to(PACKAGE)} imports {imported}")
    assert wrong == []


def test_every_part_has_a_layer() -> None:
    parts = {path.name.removesuffix(".py") for path in PACKAGE.iterdir() if not path.name.startswith(("_", "."))}
    assert parts - {"py.typed"} == RANK.keys()


def test_importing_arrowbank_loads_no_optional_package() -> None:
    heavy = {"pandas", "polars", "duckdb", "matplotlib", "typer", "rich", "torch", "ml_dtypes"}
    code = f"import sys, arrowbank; print(sorted({heavy!r} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
