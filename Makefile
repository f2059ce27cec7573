# Everything happens in .venv, which `make venv` builds with pip from pinned versions.
#
#   make demo    the main job on real weights        make test   all tests
#   make lint    formatter, linter, type checker     make bench  all benchmarks
#
# torch comes from whatever index pip is set up with. Where that index offers a CUDA build of several
# GB and a CPU build would do, point PIP_EXTRA_INDEX_URL at PyTorch's CPU wheels first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
EXTRAS := test,lint,numba

.PHONY: venv test lint format bench clean help

help:
	@sed -n 's/^#   //p' Makefile

venv: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml requirements/constraints.txt
	@echo "==> building $(VENV) (a few minutes the first time)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade pip
	$(PIP) install --quiet --constraint requirements/constraints.txt --editable ".[$(EXTRAS)]"
	@touch $@

test: venv
	$(BIN)/python -m pytest

lint: venv
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

format: venv
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

bench: venv
	$(BIN)/python bench/commit.py --json bench/results/commit.json

clean:
	rm -rf $(VENV) out build .pytest_cache .mypy_cache .ruff_cache .hypothesis
