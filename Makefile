# GENBA_PYTHON chooses the interpreter (3.11 or later) that VENV is made from.
GENBA_PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Tests wait more than they compute, so two processes for each core; those of one file share what they start.
WORKERS ?= $(shell expr $$(nproc) '*' 2)

# Thousands of processes start in the tests: Python should compile our modules once, whatever the surroundings say.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv demo test quick check lint types layers bench guard house soak audit clean

help:             ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

$(READY): pyproject.toml
	@echo "installing into $(VENV)"
	@$(GENBA_PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

venv: $(READY)    ## .venv with genba (editable) and the tools
	@:

demo: $(READY)    ## genba at work, on a database that is thrown away
	@$(BIN)/genba demo

test: $(READY)    ## the tests, on SQLite and PostgreSQL; ARGS="-k sqlite" goes to pytest, WORKERS=0 is one by one
	@$(BIN)/python -m pytest --numprocesses=$(WORKERS) --dist=loadfile --no-loadscope-reorder $(ARGS)

quick: lint types   ## lint, types, and the tests that need neither a node nor PostgreSQL; under 90 s
	@$(BIN)/python -m pytest -m "quick and not soak" --numprocesses=$(WORKERS) $(ARGS)

check: lint types layers test guard demo   ## what CI runs

lint: $(READY)    ## ruff
	@$(BIN)/ruff check --output-format=concise

types: $(READY)   ## mypy
	@$(BIN)/mypy

layers: $(READY)  ## who may import whom
	@$(BIN)/lint-imports

bench: $(READY)   ## genba beside its peers, which it installs; ARGS=--quick shows that it works
	@$(BIN)/python benchmarks/compare.py $(ARGS)

guard: $(READY)   ## has the drain become slower? beside the limit of the same minute
	@$(BIN)/python benchmarks/guard.py $(ARGS)

house: $(READY)   ## figures about the code: files, functions, complexity, words, cycles
	@$(BIN)/python benchmarks/house.py $(ARGS)

soak: $(READY)    ## the tests that take minutes or hours
	@$(BIN)/python -m pytest -m soak -o faulthandler_timeout=0 $(ARGS)

audit: $(READY)   ## known vulnerabilities of what we stand on; needs PyPI's own service, a mirror does not do
	@test -x $(VENV)-audit/bin/pip-audit || { $(GENBA_PYTHON) -m venv $(VENV)-audit && $(VENV)-audit/bin/pip install --quiet pip-audit; }
	@$(BIN)/python -m pip freeze --exclude-editable --disable-pip-version-check > $(VENV)-audit/installed.txt
	@$(VENV)-audit/bin/pip-audit --strict --no-deps --disable-pip -r $(VENV)-audit/installed.txt

clean:            ## removes .venv and what the tools left
	@rm -rf $(VENV) $(VENV)-audit build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find src tests -name __pycache__ -prune -exec rm -rf {} +
