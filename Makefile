# Everything runs in a virtual environment of its own (.venv); nothing is installed outside it.
#
#   make demo     train on 4 CPU processes whose plans a server streams, compare with one process
#   make test     lint, types, import contract, and the tests but for the slow ones (at most 8 minutes on two idle cores)
#   make test-slow  the others: whole matrices, more seeds, load, Ray, schemathesis
#   make coverage  all of these tests with branch coverage, which makes Python twice as slow
#   make test-trainers  the adapters with Hugging Face transformers, Lightning and others, in an environment of its own
#   make test-plain  the core's tests where only numpy is, without torch; NUMBA=1: with numba
#   make test-browser  pages in a headless Chromium, which must be installed; pictures in build/screenshots
#   make docs     the documents as a site, in site/; a broken link or reference is an error
#   make picture  the picture of a report in README and site; needs chromium
#   make lint     the first three of these
#   make bench    the planning benchmark, one core
#   make targets  planning times and quality of every recipe, into docs/performance.md (about ten minutes)
#   make history  what planning cost from commit to commit, as a picture in docs/
#   make ceilings calls, rows and bytes of planning against what is committed; UPDATE=1 writes them
#   make auto     what `auto` is worth beside every single recipe, simulated
#   make pictures the pictures of docs/recipes.md
#   make execution  launches and host time of every recipe, into docs/performance.md
#   make compare  the tables of docs/comparison.md: every recipe, simulated, and whole steps beside the papers (about half
#                 an hour)
#   make service  the service under load, attacks and kills (benchmarks/service.py); MINUTES=30: of each case that kills
#   make nightly  the service, with half an hour of each case that kills and 100,000 plans, and fuzz
#   make fuzz     100,000 mutated plans through decoder and verifier, and as many of which what is accepted is executed
#   make kernels  every variant of the stage kernels, compiled for three GPU generations and looked at (ten minutes)
#   make replay   some 400 plans against those that are committed, step by step; BASE=COMMIT: against that commit's
#   make wheel    a wheel with compiled loops, for this Python, numba and kind of CPU, in dist/; RECIPES=fcp CHECK=1: of
#                 one recipe, installed and started in a new environment
#   make package  sdist and pure wheel, in dist/: nothing is missing, and both plan in new environments
#   make suite    the conformance suite of the plan format, made anew from its plans
#   make test-gpu the stage kernels on a GPU, every strategy, ranks of several processes on the same one
#   make conformance  every strategy with every mask on the stage kernels, interpreted (half an hour)
#   make clean    remove the environment and every cache

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0

BIN   := $(VENV)/bin
READY := $(VENV)/.ready
TRAINERS := $(VENV)-trainers
DOCS := $(VENV)-docs
PLAIN := $(VENV)-plain$(if $(NUMBA),-numba)

# Numbers and times must not depend on how many threads a library likes to start.
export OMP_NUM_THREADS := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: docs picture help demo warm test test-slow coverage test-browser test-trainers test-plain lint bench targets history ceilings auto pictures compare execution service nightly fuzz kernels \
  replay wheel package suite test-gpu conformance clean

help:
	@sed -n 's/^#   //p' Makefile

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
	  echo "Apportion needs Python 3.11 to 3.13, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1 | head -n 1)." \
	       "Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "Setting up $(VENV) (a few minutes the first time) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet "$(TORCH)"
	@$(BIN)/pip install --quiet --editable ".[dev]"
	@touch $@

demo: $(READY)
	@$(BIN)/apportion demo

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Loops are compiled once, beside lint, and not by each of the tests' processes that needs them first.
warm: $(READY)
	@$(BIN)/pip install --quiet --no-deps --editable tests/plugin
	@$(BIN)/apportion warmup

TESTS := $(BIN)/pytest $(addprefix tests/,service executor trainer planner backends cli ir project) -n 2 --dist loadfile

test: $(READY)
	@$(MAKE) --no-print-directory -j 2 lint warm
	$(TESTS) -m "not slow"

test-slow: warm $(TRAINERS)/.ready
	$(TRAINERS)/bin/pytest tests/adapters/test_hf_configs.py  # alone: examples of Megatron keep tensors on the CPU
	$(TESTS) -m slow

coverage: warm
	$(TESTS) --cov --cov-report=term:skip-covered

test-browser: $(READY)
	@$(BIN)/pip install --quiet --editable ".[browser]"
	SCREENSHOTS=$${SCREENSHOTS:-build/screenshots} $(BIN)/pytest tests/browser

# The site's packages stay out of the environment of all else, too. It is built into site/, and asks nobody for anything.
docs:
	@test -x $(DOCS)/bin/mkdocs || $(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/pip install --quiet --requirement docs/requirements.txt
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --quiet

picture: $(READY)
	@$(BIN)/pip install --quiet --editable ".[browser]"
	$(BIN)/python docs/report_picture.py

# The trainers' packages stay out of the environment of all else. No package may bring another torch.
$(TRAINERS)/.ready: pyproject.toml tests/adapters/requirements.txt
	@echo "Setting up $(TRAINERS) (a few minutes the first time) ..."
	@$(PYTHON) -m venv $(TRAINERS)
	@$(TRAINERS)/bin/pip install --quiet "$(TORCH)"
	@$(TRAINERS)/bin/pip install --quiet "$(TORCH)" --editable ".[numba,torch]" hypothesis pytest \
	  --requirement tests/adapters/requirements.txt
	@$(TRAINERS)/bin/pip install --quiet --no-deps nemo-automodel==0.7.0  # it pins another transformers
	@touch $@

test-trainers: $(TRAINERS)/.ready
	@$(TRAINERS)/bin/apportion warmup
	$(TRAINERS)/bin/pytest tests/adapters -m "not slow"

$(PLAIN)/.ready: pyproject.toml
	@echo "Setting up $(PLAIN) ..."
	@$(PYTHON) -m venv $(PLAIN)
	@$(PLAIN)/bin/pip install --quiet --editable ".$(if $(NUMBA),[numba])" hypothesis jsonschema msgpack pytest
	@touch $@

# What takes minutes without numba is left to `make test`, which hides numba where bytes are compared.
test-plain: $(PLAIN)/.ready
	$(PLAIN)/bin/pytest $(patsubst %,tests/%.py,$(addprefix ir/test_,bands masks batch codec text verify hf_config config forest format) \
	  $(addprefix planner/,test_checks test_cost solvers/test_lpt solvers/test_matching simulate/test_launches) \
	  backends/test_numpy cli/test_conformance)

bench: $(READY)
	@$(BIN)/python benchmarks/planning.py

targets: $(READY)
	@$(BIN)/python benchmarks/targets.py

history: $(READY)
	@$(BIN)/python -m benchmarks.history

ceilings: $(READY)
	@$(BIN)/python -m benchmarks.ceilings $(if $(UPDATE),--update)

auto: $(READY)
	@$(BIN)/python benchmarks/auto.py

pictures: $(READY)
	@$(BIN)/python benchmarks/pictures.py

compare: $(READY)
	@$(BIN)/python benchmarks/comparison.py
	@$(BIN)/python -m benchmarks.papers

execution: $(READY)
	@$(BIN)/python -m benchmarks.execution

service: $(READY)
	@$(BIN)/python -m benchmarks.service $(if $(MINUTES),--minutes $(MINUTES))

nightly: $(READY)
	@$(MAKE) --no-print-directory service MINUTES=30
	@$(BIN)/python -m benchmarks.service memory
	@$(MAKE) --no-print-directory fuzz

fuzz: $(READY)
	@$(BIN)/python benchmarks/fuzz_plans.py --count 100000
	@$(BIN)/python -m benchmarks.fuzz_judge --count 100000

kernels: $(READY)
	@$(BIN)/python -m benchmarks.kernels

replay: $(READY)
	@$(BIN)/python benchmarks/replay.py $(if $(BASE),--base $(BASE)) $(if $(UPDATE),--update)

wheel: $(READY)
	@$(BIN)/python benchmarks/wheel.py $(if $(RECIPES),--recipes $(RECIPES)) $(if $(CHECK),--check)

package: $(READY)
	@$(BIN)/python benchmarks/package.py

suite: $(READY)
	@$(BIN)/python -m tests.support.conformance_suite

test-gpu: $(READY)
	$(BIN)/pytest tests/executor/stage/test_stage.py tests/executor/stage/test_gpu.py --gpu

conformance: $(READY)
	$(BIN)/pytest tests/executor/stage --full -n 2

clean:
	rm -rf $(VENV) $(TRAINERS) $(VENV)-plain $(VENV)-plain-numba *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache \
	  .coverage .coverage.*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
