# Everything sets itself up: `make demo` and `make test` work in a fresh clone.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LIGHT := .venv-no-torch
MUTATION := .venv-mutation
MINDSPORE := .venv-mindspore
ORTMODULE := .venv-ortmodule
SEEDS := .venv-seeds
DOCS := .venv-docs

# The tests start hundreds of processes. With compiled modules each starts in two thirds of the time.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: documents corruption bench-gpu test-gpu help demo docs test test-all lint format unit no-torch package mindspore-if-installed \
	test-release test-deepspeed test-browser test-integrations test-scale test-stores test-mindspore test-ortmodule test-campaigns \
	campaigns bench faults zoo mutation seeds clean

help:
	@echo "make demo                train a small GPT three times, record it, and name the first divergence"
	@echo "make format              format the code"
	@echo "make documents           write anew what is made from the code: quotes, rules, glossary, symptoms, messages (minutes)"
	@echo "make docs                build the documentation site in site/, and check its links"
	@echo
	@echo "Before a commit (this is what CI runs):"
	@echo "make test                lint, unit, no-torch, package, docs, and MindSpore if test-mindspore has installed it"
	@echo "make lint                ruff and mypy"
	@echo "make unit                the tests in one environment with torch, without those marked release"
	@echo "make no-torch            the analysis in an environment without torch"
	@echo "make package             build the wheel and the sdist, and check both"
	@echo
	@echo "Before a release:"
	@echo "make test-all            make test, and all of the following (hours)"
	@echo "make test-release        further engines, precisions and ways to compile, all examples, Triton's interpreter (minutes)"
	@echo "make test-deepspeed      trainings under DeepSpeed; compiles its optimizers (minutes)"
	@echo "make test-browser        reports in Chromium, as PNG, and for TensorBoard and Weights & Biases"
	@echo "make test-scale          --workers on a Ray cluster of this machine, and verdicts as OpenTelemetry (minutes)"
	@echo "make test-stores         recordings in emulators of Google's and Azure's stores (needs npm)"
	@echo "make test-integrations   the trainers of transformers and Lightning, and Accelerate, on the CPU"
	@echo "make test-mindspore      trainings under MindSpore, in an environment of its own (3.2 GB)"
	@echo "make test-ortmodule      a training under ORTModule beside one of PyTorch; compiles its extensions (1.5 GB)"
	@echo "make test-gpu            everything that needs a GPU: the kernel, trainings, CUDA graphs, ranks over NCCL, faults, doctor"
	@echo "make test-campaigns      a short run of each campaign (minutes)"
	@echo
	@echo "To measure:"
	@echo "make campaigns           kill, starve and overload trainings, and mutate recordings (hours; see RELIABILITY.md)"
	@echo "make bench               what recording, reading and comparing cost (minutes)"
	@echo "make bench-gpu           what recording costs on a GPU (8 minutes)"
	@echo "make faults              which faults are found, and which legal changes are flagged (minutes)"
	@echo "make zoo                 the same for trainings of other people's design (an hour)"
	@echo "make mutation            how many changes of the judging code the tests notice (half an hour)"
	@echo "make seeds               each replaced tool beside its replacement, in environments of their own (minutes, 8 GB)"

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[torch,deepspeed,dev]'
	touch $@

$(LIGHT)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(LIGHT)
	$(LIGHT)/bin/python -m pip install --quiet --constraint constraints.txt --editable . pytest pytest-timeout
	touch $@

$(DOCS)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --constraint constraints.txt 'mkdocs-material>=9.6'
	touch $@

$(MINDSPORE)/ready: pyproject.toml
	$(PYTHON) -m venv $(MINDSPORE)
	$(MINDSPORE)/bin/python -m pip install --quiet --editable '.[mindspore]' mindspore==2.10.0 pytest pytest-timeout pytest-xdist
	touch $@

# The mutation environment holds the mutation tool; the packages that the tests need come from $(VENV).
$(MUTATION)/ready: $(VENV)/ready
	$(PYTHON) -m venv $(MUTATION)
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
		> "$$($(MUTATION)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/tests-need.pth"
	$(MUTATION)/bin/python -m pip install --quiet cosmic-ray==8.7.0 coverage==7.17.3
	touch $@

# Chromium itself comes from the system, e.g. apt-get install chromium. Without it, its tests are skipped and say so.
$(VENV)/browser-ready: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[browser,png,tensorboard,wandb]'
	touch $@

$(VENV)/integrations-ready: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[integrations]'
	touch $@

$(VENV)/scale-ready: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[ray,otel]'
	touch $@

# Azure's emulator is a package of npm.
$(VENV)/stores-ready: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[gs,az]' gcp-storage-emulator
	npm install --silent --prefix $(VENV) azurite@3.37.0
	touch $@

demo: $(VENV)/ready
	$(BIN)/traindiff demo

# The site works from a file and loads nothing from elsewhere; --strict fails on a link that leads nowhere.
docs: $(VENV)/ready $(DOCS)/ready
	$(BIN)/python docs/reference_pages.py
	$(DOCS)/bin/mkdocs build --strict --quiet
	$(BIN)/python -m tests.documentation_site site

test: lint unit no-torch package docs mindspore-if-installed

test-all: test test-release test-deepspeed test-browser test-integrations test-scale test-stores test-mindspore test-ortmodule test-campaigns

lint: $(VENV)/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# What is made from the code: read the difference, then commit it.
documents: $(VENV)/ready
	$(BIN)/python -m tests.quotes
	$(BIN)/python -m tests.present.glossary_document
	$(BIN)/python -m tests.analyse.check.rules_document
	$(BIN)/python -m tests.examples.symptom_pages
	$(BIN)/python -m tests.messages.generate

format: $(VENV)/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

unit: $(VENV)/ready
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal --ignore tests/no_torch --ignore tests/package \
		-m "not deepspeed and not release"

no-torch: $(LIGHT)/ready
	! $(LIGHT)/bin/python -c "import torch" 2>/dev/null
	$(LIGHT)/bin/python -m pytest tests/no_torch

package: $(VENV)/ready
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*
	$(BIN)/pytest tests/package

# The environment has no torch. The trainings that MindSpore is compared with run in the other environment.
test-mindspore: $(MINDSPORE)/ready $(VENV)/ready
	! $(MINDSPORE)/bin/python -c "import torch" 2>/dev/null
	OMP_NUM_THREADS=1 TRAINDIFF_TORCH_PYTHON=$(CURDIR)/$(BIN)/python \
		$(MINDSPORE)/bin/python -m pytest -n 2 tests/observe/mindspore

mindspore-if-installed:
	@if [ -e $(MINDSPORE)/ready ]; then $(MAKE) test-mindspore; \
	else echo "skipped: tests/observe/mindspore, because there is no $(MINDSPORE) (make test-mindspore makes it)"; fi

test-release: $(VENV)/ready
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m release

test-deepspeed: $(VENV)/ready
	$(BIN)/pytest -n 2 tests/observe/sharding/test_deepspeed*.py tests/run/config/test_deepspeed*.py \
		tests/compat/snippets/test_model_stepper.py tests/state/test_deepspeed.py tests/state/test_zero.py

test-browser: $(VENV)/browser-ready
	$(BIN)/pytest -n 2 tests/present

test-scale: $(VENV)/scale-ready
	$(BIN)/pytest -n 1 tests/analyse/blocks tests/present/test_telemetry.py

test-stores: $(VENV)/stores-ready
	PATH="$(abspath $(VENV))/node_modules/.bin:$$PATH" $(BIN)/pytest -n 1 tests/storage/test_other_stores.py

test-integrations: $(VENV)/integrations-ready
	$(BIN)/pytest -n 2 tests/integrations tests/compat

# ORTModule runs on the CPU only with Debian 12's torch 1.13. Where that cannot be installed, this says why.
test-ortmodule: $(VENV)/ready
	@reason=$$(tests/ortmodule/make_environment.sh $(ORTMODULE) 2>&1 | tail -n 1); \
	if [ -e $(ORTMODULE)/ready ]; then $(BIN)/pytest tests/ortmodule; else echo "skipped: tests/ortmodule: $$reason"; fi

test-gpu: $(VENV)/ready
	@$(BIN)/python -c "import torch; assert torch.cuda.is_available(), 'There is no GPU here.'"
	OMP_NUM_THREADS=1 $(BIN)/pytest -m gpu -W default
	PYTHONPATH=. $(BIN)/traindiff doctor tests/gpu/recipe.py:training --backend inductor

test-campaigns: $(VENV)/ready
	$(BIN)/python -m tests.campaigns.kills --count 8
	$(BIN)/python -m tests.campaigns.signals --count 8
	$(BIN)/python -m tests.campaigns.disks --quick
	$(BIN)/python -m tests.campaigns.mutants --commands 200
	$(BIN)/python -m tests.campaigns.mutants --in-process 10000
	$(BIN)/python -m tests.campaigns.load --parameters 2000 --observations 10000 --micro-steps 3000 --steps 1000

campaigns: $(VENV)/ready
	$(BIN)/python -m tests.campaigns.kills --count 100
	$(BIN)/python -m tests.campaigns.signals --count 100
	$(BIN)/python -m tests.campaigns.disks
	$(BIN)/python -m tests.campaigns.mutants --commands 20000
	$(BIN)/python -m tests.campaigns.mutants --in-process 1000000
	$(BIN)/python -m tests.campaigns.load

bench: $(VENV)/ready
	PYTHONPATH=. $(BIN)/python benchmarks/overhead.py
	PYTHONPATH=. $(BIN)/python benchmarks/host.py
	PYTHONPATH=. $(BIN)/python benchmarks/reading.py

bench-gpu: $(VENV)/ready
	PYTHONPATH=. $(BIN)/python benchmarks/gpu.py

faults: $(VENV)/ready
	$(BIN)/python -m benchmarks.faults

zoo: $(VENV)/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.zoo.measure

corruption: $(VENV)/ready
	OMP_NUM_THREADS=1 PYTHONPATH=. $(BIN)/python -m benchmarks.corruption

mutation: $(MUTATION)/ready
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/src $(MUTATION)/bin/python -m benchmarks.mutation

seeds: $(VENV)/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.seeds

clean:
	rm -rf $(VENV) $(LIGHT) $(MUTATION) $(MINDSPORE) $(ORTMODULE) $(SEEDS) $(DOCS) dist site docs/reference .pytest_cache .mypy_cache .ruff_cache .hypothesis
