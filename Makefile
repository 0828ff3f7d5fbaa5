# Everything is made from here: `make quickstart`, `make test`, `make check`.
# PYTHON picks the interpreter (3.10-3.13); PIP_ARGS goes to pip, such as an index of CPU builds of torch.
PYTHON ?= python3
PIP_ARGS ?=
BIN := .venv/bin
RUN ?= runs/quickstart

.PHONY: quickstart test check format docs clean

quickstart: .venv/installed
	$(BIN)/verl train quickstart trainer.output_dir=$(RUN)

test: .venv/installed-dev
	$(BIN)/python -m pytest -q -n 2 $(PYTEST_ARGS)

check: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/config_reference.py --check
	$(BIN)/python -m pytest -q tests/test_docs.py tests/test_examples.py tests/test_architecture.py tests/test_package.py

format: .venv/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: .venv/installed-dev
	$(BIN)/python scripts/config_reference.py

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13) and "verl needs Python 3.10-3.13, got " + sys.version.split()[0] + ": set PYTHON=")'
	$(PYTHON) -m venv .venv

.venv/installed: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/python -m pip install -q --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[plot]'
	touch $@

.venv/installed-dev: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/python -m pip install -q --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	touch $@ .venv/installed
