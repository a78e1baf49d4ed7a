# Two commands to know: `make quickstart` and `make test`. PYTHON chooses the interpreter (3.11 to 3.13).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed

.PHONY: quickstart test docs install check lint types wheel-check clean

quickstart: $(STAMP)
	$(BIN)/bo-tuner tune bert-tiny --seq-len 128 --max-global-batch 64 --budget "12 trials, 4m" --out bo_tuner_export
	@echo; cat bo_tuner_export/ds_config.json

test: $(STAMP)
	$(BIN)/pytest -n auto --dist loadfile --no-loadscope-reorder

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $(STAMP)

check: lint types test wheel-check

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy
	$(BIN)/pyright

wheel-check: $(STAMP)
	BIN=$(abspath $(BIN)) tests/wheel_check.sh

clean:
	rm -rf $(VENV) build dist *.egg-info
