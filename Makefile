# Everything sets itself up: `make demo` and `make test` work in a fresh clone.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LIGHT := .venv-no-torch
MUTATION := .venv-mutation
MINDSPORE := .venv-mindspore
ORTMODULE := .venv-ortmodule

.PHONY: help demo test campaigns test-deepspeed test-browser test-integrations test-mindspore mindspore-where-it-is test-ortmodule lint \
	format unit no-torch bench faults mutation clean

help:
	@echo "make demo      train a small GPT three times, record it, name the first divergence"
	@echo "make test      lint, types, every test, and the analysis half without torch"
	@echo "make test-deepspeed   all tests under DeepSpeed; compiles its optimizers (minutes)"
	@echo "make test-browser   reports in Chromium, as PNG, and for TensorBoard and Weights & Biases"
	@echo "make test-integrations   trainers of transformers and Lightning, and Accelerate, on the CPU"
	@echo "make test-mindspore   all tests under MindSpore, in an environment of its own (1.5 GB; make test runs them once it is there)"
	@echo "make test-ortmodule   a training under ORTModule beside one of PyTorch; compiles its extensions (minutes, 1.5 GB)"
	@echo "make lint      ruff and mypy"
	@echo "make format    ruff format"
	@echo "make bench     measure what recording costs (minutes)"
	@echo "make faults    measure which faults are found, and whether anything legal is flagged (minutes)"
	@echo "make campaigns   kill, starve and overload trainings, and mutate recordings (hours; RELIABILITY.md)"
	@echo "make mutation  measure whether the tests notice changes of the code that judges (an hour)"

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[torch,deepspeed,dev]'
	touch $@

$(LIGHT)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(LIGHT)
	$(LIGHT)/bin/python -m pip install --quiet --constraint constraints.txt --editable . pytest pytest-timeout
	touch $@

$(MINDSPORE)/ready: pyproject.toml
	$(PYTHON) -m venv $(MINDSPORE)
	$(MINDSPORE)/bin/python -m pip install --quiet --editable '.[mindspore]' mindspore==2.10.0 pytest pytest-timeout pytest-xdist
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

test: lint unit no-torch mindspore-where-it-is

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
	$(BIN)/pytest -n 2 tests/observe/sharding/test_deepspeed*.py tests/run/config/test_deepspeed*.py

# Chromium itself comes from the system, e.g. apt-get install chromium; without it, its tests say so and are skipped.
$(VENV)/browser-ready: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[browser,png,tensorboard,wandb]'
	touch $@

test-browser: $(VENV)/browser-ready
	$(BIN)/pytest -n 2 tests/present/browser tests/present tests/present/viewer

# ORTModule runs on the CPU with Debian 12's torch 1.13 alone; where that cannot be had, this says why.
test-ortmodule: $(VENV)/ready
	@reason=$$(tests/ortmodule/make_environment.sh $(ORTMODULE) 2>&1 | tail -n 1); \
	if [ -e $(ORTMODULE)/ready ]; then $(BIN)/pytest tests/ortmodule; else echo "skipped: tests/ortmodule: $$reason"; fi

$(VENV)/integrations-ready: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[integrations]'
	touch $@

test-integrations: $(VENV)/integrations-ready
	$(BIN)/pytest -n 2 tests/integrations tests/compat

no-torch: $(LIGHT)/ready
	! $(LIGHT)/bin/python -c "import torch" 2>/dev/null
	$(LIGHT)/bin/python -m pytest tests/no_torch

# In an environment without torch; the trainings that it is compared with run in the other one.
test-mindspore: $(MINDSPORE)/ready $(VENV)/ready
	! $(MINDSPORE)/bin/python -c "import torch" 2>/dev/null
	OMP_NUM_THREADS=1 TRAINDIFF_TORCH_PYTHON=$(CURDIR)/$(BIN)/python \
		$(MINDSPORE)/bin/python -m pytest -n 2 tests/observe/mindspore

mindspore-where-it-is:
	@if [ -e $(MINDSPORE)/ready ]; then $(MAKE) test-mindspore; \
	else echo "skipped: tests/observe/mindspore, $(MINDSPORE) is not there (make test-mindspore makes it)"; fi

bench: $(VENV)/ready
	$(BIN)/python benchmarks/overhead.py

faults: $(VENV)/ready
	$(BIN)/python -m benchmarks.faults

campaigns: $(VENV)/ready
	$(BIN)/python -m tests.campaigns.kills --count 100
	$(BIN)/python -m tests.campaigns.signals --count 100
	$(BIN)/python -m tests.campaigns.disks
	$(BIN)/python -m tests.campaigns.mutants --commands 20000
	$(BIN)/python -m tests.campaigns.mutants --in-process 1000000
	$(BIN)/python -m tests.campaigns.load

mutation: $(MUTATION)/ready
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/src $(MUTATION)/bin/python -m benchmarks.mutation

clean:
	rm -rf $(VENV) $(LIGHT) $(MUTATION) $(MINDSPORE) $(ORTMODULE) .pytest_cache .mypy_cache .ruff_cache .hypothesis
