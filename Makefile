# make demo        a first look: some minutes on 2 cores
# make check       style, types and the quick tests: 4 to 8 minutes on 2 cores
# make check-slow  the tests that kill, launch, browse or fuzz; CI runs check and check-slow
# make pages       the pages, pictures and figures that are made from records and docstrings
# make site        docs/ as a website in site/
# make sweep       187 families of transformers through everything: 4 minutes on 2 cores, for docs/evidence/support.md
# make torture     an hour of kills, flipped bits, damaged and hostile files (MINUTES=10 for a shorter one), for
#                  docs/evidence/reliability.md; then all tests in random order with random cases; for no CI
PYTHON ?= python3
BIN := .venv/bin
# torch comes as the build that constraints.txt names; with your own torch, leave the file off
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo check check-slow sweep pages site torture lint types test clean

demo: .venv/base
	$(BIN)/prunus demo

check: lint types test

lint: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/test
	$(BIN)/pyrefly check --summarize-errors

# one thread a worker: two workers on two cores would otherwise fight over them; bytecode is kept for the next run
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist worksteal

test: .venv/test .venv/browser
	$(PYTEST)

check-slow: .venv/test .venv/browser
	$(PYTEST) -m slow

pages: .venv/plot
	$(BIN)/python -m benchmarks page
	$(BIN)/python -m benchmarks evidence page
	$(BIN)/python -m benchmarks pictures
	$(BIN)/python -m benchmarks reference

site: .venv/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html is its first page"

# against another version of transformers: pip install --target old transformers==4.56.0 ..., then PYTHONPATH=old:.
sweep: .venv/test
	OMP_NUM_THREADS=1 $(BIN)/python tests/sweep/sweep.py

MINUTES ?= 60

torture: .venv/test
	OMP_NUM_THREADS=1 $(BIN)/python tests/torture/torture.py --minutes $(MINUTES) --out docs/evidence/reliability.json
	$(BIN)/python tests/torture/torture.py --page docs/evidence/reliability.json docs/evidence/reliability.md
	$(PYTEST) --hypothesis-profile torture --shuffle $$(date +%s) -m "slow or not slow"

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/base: .venv/bin/python pyproject.toml constraints.txt
	$(INSTALL) --editable ".[hf]"
	touch $@

.venv/test: .venv/bin/python pyproject.toml constraints.txt
	$(INSTALL) --editable ".[test]"
	touch $@ .venv/base .venv/plot

.venv/plot: .venv/base
	$(INSTALL) --editable ".[plot]"
	touch $@

.venv/site: .venv/base
	$(INSTALL) --editable ".[site]"
	touch $@

# the report is tested in a real Chromium; where none can be had those tests are skipped and say so
.venv/browser: .venv/test
	command -v chromium || command -v google-chrome || \
	{ apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends chromium fonts-dejavu-core; } || \
	$(BIN)/playwright install chromium || echo "no Chromium can be installed here: the tests that need it will be skipped"
	touch $@

clean:
	rm -rf .venv runs site .pytest_cache .ruff_cache
