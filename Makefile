# Needs Python 3.11 or newer and nothing else; everything goes into .venv beside this file.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
# Wheels alone: what has to be built runs code of its own where it is installed.
LOCKED := install --only-binary :all: --require-hashes

# A process more than there are cores: tests of whole runs mostly wait.
TEST_JOBS ?= $(shell expr 1 + $$(getconf _NPROCESSORS_ONLN))

# Where it is set, each of the tests' thousand processes would compile every module anew.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo test suite slow-machine lint faults engines gateways bench docs site lock release clean

help: ## what can be made
	@sed -n 's/^\([a-z-]*\):.*## /  make \1	/p' $(MAKEFILE_LIST) | expand -t 20

demo: $(VENV)/run ## simulated engine + load + scrape + correlate + report, in about 20 s after set-up
	@$(BIN)/sidelight demo

test: $(VENV)/dev ## lint, types and every test, side by side: types take one core for half a minute
	@$(MAKE) --no-print-directory -j2 lint suite

suite: $(VENV)/dev
	@$(BIN)/python -m pytest -q -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder

slow-machine: $(VENV)/dev ## tests at the lowest priority beside spinning processes, ten times: which fail, how often
	@$(BIN)/python tests/slow_machine.py -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder $(SLOW)

lint: $(VENV)/dev ## ruff, mypy, licences, and whether generated files are up to date
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@MYPYPATH=tests $(BIN)/mypy benchmarks
	@$(BIN)/python dashboards/generate.py --check
	@$(BIN)/python docs/generate/pages.py --check
	@$(BIN)/python release/sbom.py --check
	@$(BIN)/python release/identity.py --check

faults: $(VENV)/dev ## crashes, damaged logs, fuzz, hostile peers and disks; MINUTES=60 for long, CASE=logs/flip/17 for one
	@PYTHONPATH=tests $(BIN)/python -m faults $(if $(MINUTES),--minutes $(MINUTES)) $(if $(CASE),--case $(CASE)) $(FAULTS)

engines: $(VENV)/dev ## load real engines (vLLM, SGLang, llama.cpp: 7 GB, installed outside the tree) and check what we say of them
	@PYTHONPATH=tests $(BIN)/python -m live.engines $(ENGINES)

gateways: $(VENV)/dev ## put real gateways (LiteLLM, Envoy, sglang-router: 1 GB) before a simulated engine and check a known delay
	@PYTHONPATH=tests $(BIN)/python -m live.gateways $(GATEWAYS)

bench: $(VENV)/dev ## what benchmarks/RESULTS.md quotes
	@$(BIN)/python benchmarks/parse.py
	@$(BIN)/python benchmarks/scrape.py


docs: $(VENV)/dev ## write the generated files again: command reference, tables of metrics, dashboard, addresses
	@$(BIN)/python docs/generate/pages.py
	@$(BIN)/python dashboards/generate.py
	@$(BIN)/python release/sbom.py
	@$(BIN)/python release/identity.py

site: $(VENV)/site/done ## the documentation as a site in site/: strict, with search
	@NO_MKDOCS_2_WARNING=1 $(VENV)/site/bin/mkdocs build --strict

release: $(VENV)/dev ## wheel and sdist, each built twice and compared; RELEASE="--image BASE@sha256:..." the image too
	@$(BIN)/python release/build.py $(RELEASE)

lock: ## resolve the lock files again (hashes, no addresses)
	@$(BIN)/pip-compile $(LOCK_FLAGS) -o requirements.lock pyproject.toml
	@$(BIN)/pip-compile $(LOCK_FLAGS) --extra dev -c requirements.lock -o requirements-dev.lock pyproject.toml
	@$(BIN)/pip-compile $(LOCK_FLAGS) --all-build-deps --only-build-deps -c requirements-dev.lock \
	  -o requirements-build.lock pyproject.toml
	@printf 'mike\nmkdocs-material\n' | $(BIN)/pip-compile $(LOCK_FLAGS) -o requirements-site.lock -

LOCK_FLAGS := -q --generate-hashes --no-emit-index-url --no-emit-find-links --no-emit-trusted-host --strip-extras \
  --allow-unsafe --no-header --annotation-style=line

$(VENV)/run: requirements.lock requirements-build.lock pyproject.toml
	@echo "setting up $(VENV) (half a minute, or two where packages come slowly)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) $(LOCKED) -r requirements.lock -r requirements-build.lock
	@$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/dev: $(VENV)/run requirements-dev.lock
	@echo "adding what tests need to $(VENV)"
	@$(PIP) $(LOCKED) -r requirements-dev.lock
	@touch $@

$(VENV)/site/done: requirements-site.lock
	@$(PYTHON) -m venv $(VENV)/site
	@$(VENV)/site/bin/python -m pip --disable-pip-version-check -qq $(LOCKED) -r requirements-site.lock
	@touch $@

clean: ## remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis dist site
