# The commands a contributor needs; .ci/run does the same on a clean machine.
default: lint test

lint:
    ruff check .
    ruff format --check .
    mypy

format:
    ruff check --fix .
    ruff format .

test *args:
    python -m pytest {{args}}

coverage:
    python -m pytest --cov --cov-report=term-missing

crash *args:
    python -m tests.crash {{args}}

bench *args:
    python -m pytest benchmarks {{args}}

ci:
    .ci/run
