# Every target sets itself up: `make demo` or `make test` in a fresh clone is enough.
# PYTHON=python3.12 chooses the interpreter of the environment in .venv.

PYTHON ?=
BIN := .venv/bin
RUN := $(BIN)/python -m
PLUGIN_PACKAGES := $(wildcard plugins/*/fastgen_*)

# A process a core (at most four), each with its share of the tests in order, since neighbours share fixtures; who is done
# takes over from the others. One thread each: the matrices are small. Plain `pytest` runs in one process.
PYTEST := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(RUN) pytest -n logical --maxprocesses 4 --dist worksteal --max-worker-restart 0

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup demo test test-quick test-thorough conformance lint format bench clean distclean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## make .venv ready (the other targets do it themselves)
	@PYTHON="$(PYTHON)" goal="$(firstword $(MAKECMDGOALS))" sh scripts/setup.sh

demo: setup ## a real model answers a question, then a batch of 16 prompts
	@$(BIN)/python examples/demo.py

test: setup ## the tests, the plugins' too (under 10 minutes on 2 cores)
	$(PYTEST) -m "not thorough"

test-quick: setup ## the engine, and a prompt through each family: what takes moments and needs no model (under a minute)
	$(PYTEST) tests --ignore tests/cli --ignore tests/docs --ignore tests/testing --ignore tests/test_packaging.py --ignore tests/test_remote_code.py --ignore tests/core/test_hub.py -m "not slow and not thorough and not real_model"

test-thorough: setup ## what `make test` leaves out: sweeps over all families, wheels, the tutorial (some minutes; a browser must be there)
	$(RUN) pip install -qq --disable-pip-version-check --constraint constraints.txt -e '.[clients]'
	$(PYTEST) -m thorough

conformance: setup ## run the kit on our own families and write down what it found, for `fastgen models`
	$(PYTEST) --dist loadfile -p fastgen.testing.plugin --conformance-beside tests/models plugins/fastgen-exaone4 plugins/fastgen-deepseek

lint: setup ## ruff, mypy --strict, import rules
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy
	@set -e; for package in $(PLUGIN_PACKAGES); do echo "mypy $$package"; $(RUN) mypy $$package; done
	$(BIN)/lint-imports

format: setup ## let ruff put the code in order
	$(RUN) ruff check --fix .
	$(RUN) ruff format .

bench: setup ## tokens/s beside transformers' on the demo model (some minutes)
	@model=$$($(RUN) fastgen.testing.demo_model) && $(BIN)/fastgen bench offline "$$model" --workload w1 --workload w2

clean: ## remove what builds, tests and tools left
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -type d -prune -exec rm -rf {} +

distclean: clean ## remove the environment and the downloaded demo model too
	rm -rf .venv .cache
