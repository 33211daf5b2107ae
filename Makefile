# The commands of the project. Each target makes what it needs; `make` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NATIVE := $(wildcard $(addsuffix /native/*.[ch],adapters journal))
DEMO_JOURNAL := build/demo.db
# A demo that reads like the thing: four characters speak at once, every event in a journal.
DEMO_PROMPTS := "ROMEO." "JULIET." "KING HENRY." "HAMLET. To be"

.PHONY: help setup demo test lint types docs wheel native clean

help:
	@echo "make setup   environment with the package and the test tools"
	@echo "make demo    several prompts at once on the simulated board, then the journal's proof"
	@echo "make test    the default test suite"
	@echo "make lint    ruff and import directions"
	@echo "make types   mypy --strict"
	@echo "make native  the C code under the sanitizers"
	@echo "make docs    regenerate specs/machines.md"
	@echo "make wheel   build a wheel into dist/"
	@echo "make clean   remove what was built"

setup: $(STAMP)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

# Reinstalled when the package's definition or the C sources change: they are built by the install.
$(STAMP): pyproject.toml $(NATIVE) | $(BIN)/python
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --editable '.[test]'
	@touch $(STAMP)

demo: $(STAMP)
	@mkdir -p $(dir $(DEMO_JOURNAL))
	@rm -f $(DEMO_JOURNAL) $(DEMO_JOURNAL)-wal $(DEMO_JOURNAL)-shm
	$(BIN)/laneway run $(DEMO_PROMPTS) --max-tokens 48 --temperature 0.8 --seed 11 --journal $(DEMO_JOURNAL)
	$(BIN)/laneway journal stats $(DEMO_JOURNAL)
	$(BIN)/laneway journal verify $(DEMO_JOURNAL)

# Processes that tests start find bytecode, and tests of a file stay in one process until it has none left.
test: $(STAMP)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n 2 --dist worksteal

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYTHONPATH=src $(BIN)/lint-imports

types: $(STAMP)
	$(BIN)/mypy

native: $(STAMP)
	$(MAKE) -C adapters/native check
	$(MAKE) -C journal/native check PYTHON=$(abspath $(BIN)/python)

docs: $(STAMP)
	$(BIN)/laneway machines --markdown > specs/machines.md

wheel: $(BIN)/python
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean:
	rm -rf build dist *.egg-info adapters/native/build journal/native/build adapters/*.so journal/*.so
