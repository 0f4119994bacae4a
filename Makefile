# Each target sets up what it needs: `make demo` and `make test` work on a fresh machine.
# The table in CONTRIBUTING.md lists the targets.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp

# What `make test` hands to pytest: files or test names, and further options.
#   make test TESTS=tests/test_packaging.py ARGS="-k wheel -x"
TESTS ?=
ARGS ?=
WORKERS ?= 2

# One thread for each of the workers: with more, two of them fight for the cores.
OMP_NUM_THREADS ?= 1
PYTEST := OMP_NUM_THREADS=$(OMP_NUM_THREADS) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help setup demo test browser nightly inductor bench format format-check lint types imports check clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

setup: $(STAMP) ## make .venv with the pinned packages and this project (editable)

demo: $(STAMP) ## run the GLM-5 demo
	$(BIN)/bcg run glm5

test: $(STAMP) ## run the tests
	$(PYTEST) $(ARGS) $(TESTS)

browser: ## install Chromium if there is no browser: tests that look at reports in one skip themselves without it
	@for name in chromium chromium-browser google-chrome google-chrome-stable; do \
	  command -v $$name && exit 0; \
	done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  set -- -qq -y -o Acquire::Retries=1 -o Acquire::http::Timeout=20; \
	  apt-get "$$@" update && DEBIAN_FRONTEND=noninteractive apt-get "$$@" install --no-install-recommends chromium; \
	else \
	  echo "There is no browser. Install Chromium or Chrome, e.g. as root: apt-get install chromium" >&2; exit 1; \
	fi

nightly: $(STAMP) ## run the tests that take minutes
	$(PYTEST) -m nightly $(ARGS) $(TESTS)

inductor: $(STAMP) ## run the tests against eager with segments compiled by Inductor (half an hour)
	$(PYTEST) --segments inductor $(ARGS) $(or $(TESTS),tests/faults tests/runtime tests/models/test_architectures.py tests/test_aot.py tests/test_backend.py tests/test_breaks.py)

bench: $(STAMP) ## run all benchmarks (needs a GPU): JSON files and pictures in build/bench
	mkdir -p build/bench
	$(BIN)/python bench/replay.py --memory --json build/bench/replay.json
	$(BIN)/python bench/overhead.py --json build/bench/overhead.json
	$(BIN)/python bench/ladder.py --json build/bench/ladder.json
	$(BIN)/python bench/exec_update.py --json build/bench/exec_update.json
	$(BIN)/python bench/products.py --json build/bench/products.json
	$(BIN)/python bench/graph_count.py --json build/bench/graph_count.json
	$(BIN)/python bench/models.py --layers 12 24 61 --json build/bench/models.json
	$(BIN)/python bench/plot.py build/bench

format: $(STAMP) ## format the sources and sort their imports
	$(BIN)/ruff check --select I --fix .
	$(BIN)/ruff format .

format-check: $(STAMP) ## say which sources `make format` would change
	$(BIN)/ruff format --check --diff .

lint: $(STAMP) ## run the linter
	$(BIN)/ruff check .

types: $(STAMP) ## run the type checker
	$(BIN)/mypy

imports: $(STAMP) ## check that imports go one way
	$(BIN)/lint-imports

check: format-check lint types imports ## all checks but the tests

clean: ## remove caches and build output, keep .venv
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -path ./$(VENV) -prune -o -path ./.git -prune -o -type d -name __pycache__ -exec rm -rf {} +

# The stamp is written last: a set-up that was broken off starts again. It is redone when what
# to install has changed. --no-build-isolation uses the hatchling of the pinned set.
$(STAMP): pyproject.toml requirements/pinned.txt requirements/constraints.txt
	@test -x $(BIN)/python && python=$(BIN)/python || python=$(PYTHON); \
	  $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "error: bcg_compiler needs Python 3.11 or newer; $$python is: $$($$python --version 2>&1)" >&2; \
	  echo "Name another one: make $(or $(MAKECMDGOALS),setup) PYTHON=python3.12 (remove $(VENV) if it is there)" >&2; \
	  exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
	  echo "error: '$(PYTHON) -m venv' failed. Debian and Ubuntu have it in the package python3-venv." >&2; \
	  rm -rf $(VENV); exit 1; }
	$(BIN)/python -m pip install --disable-pip-version-check -r requirements/pinned.txt
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@
