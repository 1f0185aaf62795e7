# Everything sets itself up: `make demo` and `make test` work in a fresh clone.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LIGHT := .venv-no-torch
MUTATION := .venv-mutation

.PHONY: help demo test test-deepspeed test-browser lint format unit no-torch bench faults mutation clean

help:
	@echo "make demo      train a small GPT three times, record it, name the first divergence"
	@echo "make test      lint, types, every test, and the analysis half without torch"
	@echo "make test-deepspeed   all tests under DeepSpeed; compiles its optimizers (minutes)"
	@echo "make test-browser   reports in Chromium, as PNG, and for TensorBoard and Weights & Biases"
	@echo "make lint      ruff and mypy"
	@echo "make format    ruff format"
	@echo "make bench     measure what recording costs (minutes)"
	@echo "make faults    measure which faults are found, and whether anything legal is flagged (minutes)"
	@echo "make mutation  measure whether the tests notice changes of the code that judges (an hour)"

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[torch,deepspeed,dev]'
	touch $@

$(LIGHT)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(LIGHT)
	$(LIGHT)/bin/python -m pip install --quiet --constraint constraints.txt --editable . pytest pytest-timeout
	touch $@

# What tests need is imported from the other environment, which the tool does not enter.
$(MUTATION)/ready: $(VENV)/ready
	$(PYTHON) -m venv $(MUTATION)
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
		> "$$($(MUTATION)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/tests-need.pth"
	$(MUTATION)/bin/python -m pip install --quiet cosmic-ray==8.7.0 coverage==7.17.3
	touch $@

demo: $(VENV)/ready
	$(BIN)/traindiff demo

test: lint unit no-torch

lint: $(VENV)/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

unit: $(VENV)/ready
	$(BIN)/pytest -n 2 --ignore tests/no_torch -m "not deepspeed"

test-deepspeed: $(VENV)/ready
	$(BIN)/pytest -n 2 tests/engines/test_deepspeed*.py tests/setups/test_deepspeed*.py

# Chromium itself comes from the system, e.g. apt-get install chromium; without it, its tests say so and are skipped.
$(VENV)/browser-ready: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[browser,png,tensorboard,wandb]'
	touch $@

test-browser: $(VENV)/browser-ready
	$(BIN)/pytest -n 2 tests/browser tests/report tests/viewer

no-torch: $(LIGHT)/ready
	! $(LIGHT)/bin/python -c "import torch" 2>/dev/null
	$(LIGHT)/bin/python -m pytest tests/no_torch

bench: $(VENV)/ready
	$(BIN)/python benchmarks/overhead.py

faults: $(VENV)/ready
	$(BIN)/python -m benchmarks.faults

mutation: $(MUTATION)/ready
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/src $(MUTATION)/bin/python -m benchmarks.mutation

clean:
	rm -rf $(VENV) $(LIGHT) $(MUTATION) .pytest_cache .mypy_cache .ruff_cache .hypothesis
