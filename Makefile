# Two commands: make demo, make check.
PYTHON ?= python3
BIN := .venv/bin
# torch comes as the build that constraints.txt names; with your own torch, leave the file off
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo check lint types test clean

demo: .venv/base
	$(BIN)/prunus demo

check: lint types test

lint: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/test
	$(BIN)/pyrefly check --summarize-errors

# one thread a worker: two workers on two cores would otherwise fight over them
test: .venv/test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/base: .venv/bin/python pyproject.toml constraints.txt
	$(INSTALL) --editable .
	touch $@

.venv/test: .venv/bin/python pyproject.toml constraints.txt
	$(INSTALL) --editable ".[test]"
	touch $@ .venv/base

clean:
	rm -rf .venv runs .pytest_cache .ruff_cache
