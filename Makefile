# make train: a first run.  make test: the suite.  make parity: everything that is promised.  make bench: side by side.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: train setup test parity bench bench-plan gpu-check lint clean

train: setup
	$(BIN)/shoal train runs/quickstart.toml

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Shoal needs Python 3.11 or newer: make PYTHON=python3.12 ..."; exit 1; }
	@echo "installing into $(VENV): a minute or two"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

test: setup lint
	$(BIN)/pytest -m "not parity and not slow"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

parity: setup
	$(BIN)/pytest

bench: setup
	$(BIN)/python -m bench

# How far the planner is off on published runs, in the folder that SHOAL_PLAN_DATA names.
bench-plan: setup
	$(BIN)/python -m bench.plan

gpu-check: setup
	$(BIN)/python -m bench.gpu_check

clean:
	rm -rf $(VENV) out data/kjv.store
