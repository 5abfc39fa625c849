# Everything a fresh machine needs is python3 (3.11 or newer) and make:
#   make demo   install Trimtab into .venv and run the whole job on a tiny model
#   make test   install the development tools too, then lint, type-check and test
# PYTHON chooses the interpreter, VENV the place of the virtual environment, PIP_ARGS is handed to
# pip (`PIP_ARGS="--index-url ..."` for another source of torch), PYTEST_ARGS to pytest.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
BIN := $(VENV)/bin
INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt $(PIP_ARGS)

.PHONY: help demo test check lint types imports pytest docs clean

help:
	@sed -n '1,5s/^# \{0,1\}//p' Makefile

demo: $(VENV)/runtime.stamp
	$(BIN)/trimtab demo

test: check pytest

check: lint types imports

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .

types: $(VENV)/dev.stamp
	$(BIN)/mypy

imports: $(VENV)/dev.stamp
	$(BIN)/lint-imports

pytest: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -q -n $(WORKERS) $(PYTEST_ARGS)

# The pages that are written by the code they describe; tests hold them to it.
docs: $(VENV)/dev.stamp
	$(BIN)/python scripts/write_docs.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find src tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Trimtab needs Python 3.11 or newer: make PYTHON=python3.12 ..." >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "python3 cannot make a virtual environment; on Debian: apt-get install python3-venv" >&2; exit 2; }

# The stamps depend on the two files that say what is installed, so a changed pin installs anew.
$(VENV)/runtime.stamp: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing Trimtab into $(VENV)"
	$(INSTALL) -e .
	@touch $@

$(VENV)/dev.stamp: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing Trimtab and the development tools into $(VENV)"
	$(INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/runtime.stamp
