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
test: .venv/test .venv/browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/base: .venv/bin/python pyproject.toml constraints.txt
	$(INSTALL) --editable .
	touch $@

.venv/test: .venv/bin/python pyproject.toml constraints.txt
	$(INSTALL) --editable ".[test]"
	touch $@ .venv/base

# the report is tested in a real Chromium; where none can be had those tests are skipped and say so
.venv/browser: .venv/test
	command -v chromium || command -v google-chrome || \
	{ apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends chromium fonts-dejavu-core; } || \
	$(BIN)/playwright install chromium || echo "no Chromium can be installed here: the tests that need it will be skipped"
	touch $@

clean:
	rm -rf .venv runs .pytest_cache .ruff_cache
