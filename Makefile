# Every target makes .venv by itself when it is missing or older than the project's requirements.
#
#   make setup      install the project with every extra into .venv
#   make demo       the demonstration: stop half of a run, resume it on other topologies, compare every step
#   make elastic-demo   a small GPT under torchrun, killed and resumed on 2, 3, 8 and 5 ranks, beside a run that is not
#   make test       the whole suite
#   make test-long  the same with 10,000 examples a property: for the night
#   make bench      the measurements
#   make soak-short twelve minutes of text through worker processes: memory must not grow, content must be right
#   make soak       half an hour (--minutes) in which workers, engines and launchers die every second or so
#   make lint       format, lint and types, as checked before a change is merged
#   make clean      remove .venv, caches and what the examples made
#
# PYTHON=python3.12 chooses another interpreter; ARGS="-k mixture -x" goes to pytest or to the bench.

PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-dev.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo elastic-demo test test-long bench soak soak-short lint format clean

help:
	@sed -n 's/^#   //p' Makefile

setup: $(READY)

$(READY): pyproject.toml constraints-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Zephon needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo missing)." >&2; \
	  echo "Name one that is: make $(or $(MAKECMDGOALS),setup) PYTHON=python3.11" >&2; exit 1; }
	@echo "Setting up $(VENV) (once; some minutes where torch must be downloaded) ..."
	@$(PYTHON) -m venv $(VENV) || { \
	  echo "'$(PYTHON) -m venv' failed. On Debian and Ubuntu it is a package of its own: python3-venv." >&2; exit 1; }
	@$(INSTALL) -e '.[all,dev]' || { \
	  echo "" >&2; \
	  echo "NOTICE: not everything could be installed (see above). Trying again without torch:" >&2; \
	  echo "everything else works without it, and its tests are skipped." >&2; \
	  $(INSTALL) -e '.[text,parquet,cli,cloud,tools]'; }
	@touch $@

demo: $(READY)
	@$(BIN)/python examples/demo.py

elastic-demo: $(READY)
	@$(BIN)/python examples/elastic_demo.py --plot examples/elastic.png $(ARGS)

test: $(READY)
	@$(BIN)/python -m pytest -q -n 2 --dist loadscope $(ARGS)

test-long: $(READY)
	@HYPOTHESIS_PROFILE=long $(BIN)/python -m pytest -q -o faulthandler_timeout=0 $(ARGS)

bench: $(READY)
	@$(BIN)/zephon bench $(or $(ARGS),w1)

soak-short: $(READY)
	@$(BIN)/python bench/soak.py $(ARGS)

soak: $(READY)
	@$(BIN)/python bench/soak_faults.py $(ARGS)

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(READY)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis examples/corpus examples/corpus.* bench/out
	rm -rf examples/gpt examples/gpt-fsdp examples/accelerate-gpt examples/jax-loop.npz examples/elastic.png
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
