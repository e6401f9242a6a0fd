# Everything a checkout needs, one word each; `make help` lists them. Nothing here needs root, and
# nothing but Python 3.11+ and make must be there. The tests on real links need root and iproute2, and
# skip without; only where CI=true is that installed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ARGS ?=
# What is installed is in constraints*.txt, with its digest; nothing is added, and nothing is built
# with tools that are not in it.
PIP = $(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps
LOCKED = $(PIP) --require-hashes
SITE = build/docs

# A checkout that this user may read but not write is checked without the tools' caches.
ifneq ($(shell test -w . && echo writable),writable)
export RUFF_NO_CACHE := true
export MYPY_CACHE_DIR := /dev/null
LAYERS_CACHE := --no-cache
SITE = $(shell mktemp -d)
endif

.DEFAULT_GOAL := help
.PHONY: help setup train test test-all mutants check lint types layers docs rows audit sbom release format clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16
	@echo "  PYTHON=python3.12 takes another Python; ARGS='--set steps=20' is passed on to train, test and test-all."

setup: $(READY)  ## build .venv from the pinned versions (the second call starts at once)

$(READY): pyproject.toml $(wildcard constraints*.txt)
	@command -v $(PYTHON) >/dev/null || { \
	  echo "raycloud needs Python 3.11 or newer, and there is no '$(PYTHON)' here." >&2; \
	  echo "hint: install one, or name it: make setup PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "raycloud needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) -V 2>&1)." >&2; \
	  echo "hint: name a newer one: make setup PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot build virtual environments." >&2; \
	  echo "hint: Debian and Ubuntu ship that apart, in the package python3-venv" >&2; exit 1; }
	@$(BIN)/python -c 'import pip' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	@echo 'Building $(VENV) from constraints.txt; the first time this fetches PyTorch and Ray.'
	$(LOCKED) -r constraints.txt -r constraints-dev.txt
	@$(LOCKED) -r constraints-cpu.txt 2>/dev/null || { \
	  echo 'pip finds no torch without CUDA here; that of PyPI is larger.'; \
	  $(LOCKED) -r constraints-cuda.txt; }
	$(PIP) --no-build-isolation -e .
	@$(BIN)/python -m pip check
	@touch $@

train: setup  ## train a small GPT on real text with two local workers
	$(BIN)/raycloud train jobs/gpt.yaml $(ARGS)

# What needs no Ray of its own has a process for each core; of the modules with a Ray or a testbed two run
# at a time, in the order of tests/ray/conftest.py, but for those that time the machine or look at all of it,
# which share it with nobody.
# Processes that tests start load compiled modules, whatever the environment says.
test test-all: export PYTHONDONTWRITEBYTECODE :=
test: TIER := not full
test: check  ## every check, and every kind of test, one case per promise; what is not marked `full`
test-all: TIER := full or not full
test: AT_ONCE := 2
test-all: AT_ONCE := 3
test-all: export RAYCLOUD_TESTS := full
test-all: check  ## every check and every test, with twice as many examples of each property
test test-all:
	@.ci/tools
ifeq ($(ARGS),)
	@failed=; \
	$(BIN)/python -m pytest --numprocesses logical --dist worksteal --ignore=tests/ray --ignore=tests/testbed -m 'not ray and not testbed and ($(TIER))' || failed=1; \
	$(BIN)/python -m pytest --numprocesses $(AT_ONCE) --dist loadfile --no-loadscope-reorder tests/ray tests/testbed -m 'not alone and ($(TIER))' || failed=1; \
	$(BIN)/python -m pytest tests/ray tests/testbed -m 'alone and ($(TIER))' || failed=1; \
	test -z "$$failed"
else
	$(BIN)/python -m pytest -m '$(TIER)' $(ARGS)
endif

mutants: setup  ## planted bugs, one at a time: does the fast tier catch them?
	$(BIN)/python -m tests.mutants

check: setup  ## style, types, layers, generated docs, rows of races, advisories
	@$(MAKE) --no-print-directory --jobs 2 --output-sync lint types layers docs rows audit

lint: setup  ## ruff: rules and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: setup  ## mypy, strict
	$(BIN)/mypy

layers: setup  ## import-linter: what may touch what
	$(BIN)/lint-imports --no-logo $(LAYERS_CACHE)

docs: setup  ## generated pages are those of this code; all pages, built into build/docs
	$(BIN)/python docs/generate.py --check
	$(BIN)/sphinx-build -b html -E -q -W --keep-going docs $(SITE)

rows: setup  ## rows of races: their page is theirs, and none is worse than its baseline
	$(BIN)/python -m benchmarks.render --check
	$(BIN)/python -m benchmarks.compare benchmarks/results/S*.json

format: setup  ## put the code into shape, write the generated pages
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/python docs/generate.py

audit: setup  ## known vulnerabilities of the pinned versions, asked for once a day
	@.ci/audit

sbom: setup  ## what a release is made of, as CycloneDX, in build/sbom.json
	@$(PYTHON) -m venv --clear build/sbom
	build/sbom/bin/python -m pip install --disable-pip-version-check --quiet --no-deps \
	  --require-hashes -r .ci/sbom.txt
	build/sbom/bin/cyclonedx-py environment --pyproject pyproject.toml --mc-type library \
	  --output-reproducible --of JSON -o build/sbom.json $(BIN)/python

release: sbom  ## the wheel, and what it is made of, in dist
	rm -rf dist build/lib build/bdist.*
	$(BIN)/python -m pip wheel --disable-pip-version-check --quiet --no-deps --no-build-isolation \
	  --wheel-dir dist .
	cp build/sbom.json dist/raycloud.cdx.json

clean:  ## remove what the tools left, keep .venv and runs/
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
