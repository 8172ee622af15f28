# Everything runs in a virtual environment (.venv); nothing is installed outside it.
#
#   make venv     only the environment: packages, torch, the compiled core (minutes the first time)
#   make demo     train on 4 CPU processes with plans streamed from a server, compare with one process
#   make test     lint, types, import contract, and all tests except slow ones
#   make test-slow  the slow tests: full matrices, more seeds, load, Ray, schemathesis
#   make coverage  fast and slow tests with branch coverage, which makes Python twice as slow
#   make test-trainers  the adapters with Hugging Face transformers, Lightning and others, in a separate environment
#   make test-plain  the planner's tests with only numpy installed, without torch
#   make test-docs  every program and command in README and documents, the notebook, the demo
#   make test-browser  pages in headless Chromium, which must be installed; screenshots in build/screenshots
#   make docs     builds the documentation site in site/; a broken link or reference is an error
#   make reference  the generated pages of docs/reference: commands, HTTP, environment variables
#   make picture  the picture of a report for README and site; needs chromium
#   make core     build the compiled core in place (apportion/_core*.so) for PYTHON=...; STRICT=1: warnings are errors
#   make sanitize the core's tests under address and undefined-behaviour sanitizers, with bounds checks
#   make fuzz-core  libFuzzer on the core's decoder and verifier for a minute (SECONDS=3600: an hour); needs clang++
#   make lint     ruff, types, import contract
#   make targets  planning times and quality of every recipe, for docs/benchmarks.md (about ten minutes)
#   make ceilings calls, rows and bytes of planning against the committed ceilings; UPDATE=1 writes them
#   make pictures the pictures of docs/reference/recipes.md
#   make compare  tables of docs/benchmarks.md and docs/papers.md: every recipe, and whole steps against the papers'
#                 (half an hour)
#   make service  the service under load, attacks and kills (benchmarks/service.py); MINUTES=30: per kill case
#   make ci       all checks that a change must pass; called by .ci/run
#   make nightly  test-slow, kernels, fuzz, and the service: half an hour per kill case, and memory over 100,000 plans
#   make fuzz     100,000 mutated plans through decoder and verifier, and 100,000 more that are executed if accepted
#   make kernels  compiles every variant of the stage kernels for three GPU generations, checks them (ten minutes)
#   make replay   some 430 plans against the committed records, step by step; BASE=COMMIT: against that commit's plans
#   make package  sdist and wheel, in dist/; checks that no file is missing and that both can plan in new environments
#   make suite    regenerates the conformance suite of the plan format from its plans
#   make test-gpu the stage kernels on a GPU with every strategy; several processes share the GPU
#   make conformance  every strategy with every mask on the stage kernels, interpreted (half an hour)
#   make clean    remove the environment and every cache

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0

BIN   := $(VENV)/bin
EDITABLE := --no-build-isolation --config-settings=wheel.cmake=false --config-settings=wheel.py-api=py3 --editable
# $(1): environment. Adds the checkout as a path, after PYTHONPATH; the build backend's import hook would precede it
define path
	@echo "$(CURDIR)" >"$$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/_editable_skbc_apportion.pth"
endef
TOOLS := cmake nanobind ninja scikit-build-core
CORE  := $(shell find core -name '*.[ch]pp') core/CMakeLists.txt
READY := $(VENV)/.ready
TRAINERS := $(VENV)-trainers
DOCS := $(VENV)-docs
PLAIN := $(VENV)-plain

# Results and times must not depend on the default thread counts of libraries.
export OMP_NUM_THREADS := 1
# Tests start hundreds of processes, which would compile every module that they import.
unexport PYTHONDONTWRITEBYTECODE
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: venv ci core sanitize fuzz-core docs reference picture help demo plugin test test-docs test-slow coverage test-browser test-trainers test-plain lint targets ceilings pictures compare service nightly fuzz kernels \
  replay package suite test-gpu conformance clean

help:
	@sed -n 's/^#   //p' Makefile

$(READY): $(VENV)/.installed $(CORE)
	@$(MAKE) --no-print-directory core PYTHON=$(BIN)/python
	@touch $@

# Builds the core in the source tree. Needs $(TOOLS) in PYTHON's environment, or cmake and ninja on the machine. Without
# a C++ compiler it uses that of the Python package ziglang.
core:
	@scripts=$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("scripts"))'); export PATH="$$scripts:$$PATH"; \
	mkdir -p build/zig; \
	if [ -z "$$CXX" ] && ! command -v c++ >/dev/null && ! command -v g++ >/dev/null && ! command -v clang++ >/dev/null; then \
	  $(PYTHON) -m pip install --quiet ziglang; \
	  for tool in c++ ar ranlib; do \
	    printf '#!/bin/sh\nexec "%s" -I -m ziglang %s "$$@"\n' "$$scripts/python" $$tool >build/zig/$$tool; \
	    chmod +x build/zig/$$tool; \
	  done; \
	  options="-DCMAKE_CXX_COMPILER=$$PWD/build/zig/c++ -DCMAKE_AR=$$PWD/build/zig/ar -DCMAKE_RANLIB=$$PWD/build/zig/ranlib"; \
	fi; \
	folder=$(or $(INTO),build)/core/$$($(PYTHON) -c 'import sys; print(sys.implementation.cache_tag)'); \
	cmake -S core -B $$folder -G Ninja -DPython_EXECUTABLE="$$($(PYTHON) -c 'import sys; print(sys.executable)')" \
	  -DAPPORTION_STRICT=$(if $(STRICT),ON,OFF) $(if $(INTO),-DAPPORTION_SANITIZE=ON -DAPPORTION_OUTPUT=$(INTO)/apportion) $$options >build/core.log && \
	cmake --build $$folder >>build/core.log || { cat build/core.log; exit 1; }

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
	  echo "Apportion needs Python 3.11 to 3.13, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1 | head -n 1)." \
	       "Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "Setting up $(VENV) (a few minutes the first time) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet "$(TORCH)"
	@$(BIN)/pip install --quiet $(TOOLS)
	@$(BIN)/pip install --quiet $(EDITABLE) ".[dev]"
	$(call path,$(VENV))
	@touch $@

venv: $(READY)

demo: $(READY)
	@$(BIN)/apportion demo

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# A package with its own recipe, which tests find through its entry point
plugin: $(READY)
	@$(BIN)/pip install --quiet --no-deps --editable tests/plugin

TESTS := $(BIN)/pytest $(addprefix tests/,service executor trainer planner backends cli ir project) -n 3 --dist loadfile

test: lint plugin
	$(TESTS) -m "not slow"

test-slow: plugin $(TRAINERS)/.ready
	$(TRAINERS)/bin/pytest tests/adapters/test_hf_configs.py  # separately: Megatron's examples keep tensors on the CPU
	$(TESTS) -m slow

coverage: plugin
	$(TESTS) --cov --cov-report=term:skip-covered

# Programs and commands of README and documents, complete examples of the how-to pages, the notebook, the demo
test-docs: plugin
	$(BIN)/pytest $(addprefix tests/,project/test_docs.py project/test_newcomers.py project/test_notebook.py \
	  trainer/test_how_to.py trainer/test_demo.py) -n 2

test-browser: $(READY)
	@$(BIN)/pip install --quiet $(EDITABLE) ".[browser]"
	$(call path,$(VENV))
	SCREENSHOTS=$${SCREENSHOTS:-build/screenshots} $(BIN)/pytest tests/browser

# The site's packages, too, have their own environment. Zensical, the successor of mkdocs-material, is pinned: its
# releases still change how sites are built.
docs:
	@test -x $(DOCS)/bin/zensical || $(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/pip install --quiet zensical==0.0.73 mkdocstrings==1.0.8 mkdocstrings-python==2.0.11 "ruff>=0.5"
	$(DOCS)/bin/zensical build --clean --strict
	@rm -f site/*.py

reference: $(READY)
	@$(BIN)/python docs/reference.py

picture: $(READY)
	@$(BIN)/pip install --quiet $(EDITABLE) ".[browser]"
	$(call path,$(VENV))
	$(BIN)/python docs/report_picture.py

# The trainers' packages have their own environment, of the same Python, and VENV's core. No package may install a
# different torch.
$(TRAINERS)/.ready: pyproject.toml tests/adapters/requirements.txt | $(READY)
	@echo "Setting up $(TRAINERS) (a few minutes the first time) ..."
	@$(PYTHON) -m venv $(TRAINERS)
	@$(TRAINERS)/bin/pip install --quiet "$(TORCH)"
	@$(TRAINERS)/bin/pip install --quiet $(TOOLS)
	@$(TRAINERS)/bin/pip install --quiet "$(TORCH)" $(EDITABLE) ".[torch]" hypothesis pytest \
	  --requirement tests/adapters/requirements.txt
	$(call path,$(TRAINERS))
	@$(TRAINERS)/bin/pip install --quiet --no-deps nemo-automodel==0.7.0  # it pins a different transformers
	@touch $@

test-trainers: $(TRAINERS)/.ready
	$(TRAINERS)/bin/pytest tests/adapters -m "not slow"

$(PLAIN)/.ready: pyproject.toml $(CORE)
	@echo "Setting up $(PLAIN) ..."
	@$(PYTHON) -m venv $(PLAIN)
	@$(PLAIN)/bin/pip install --quiet $(TOOLS)
	@$(PLAIN)/bin/pip install --quiet $(EDITABLE) . hypothesis jsonschema msgpack pytest
	$(call path,$(PLAIN))
	@$(MAKE) --no-print-directory core PYTHON=$(PLAIN)/bin/python
	@touch $@

test-plain: $(PLAIN)/.ready
	$(PLAIN)/bin/pytest $(patsubst %,tests/%.py,$(addprefix ir/test_,bands masks batch codec text verify hf_config config forest format) \
	  $(addprefix planner/,test_checks test_cost solvers/test_lpt solvers/test_matching simulate/test_launches) \
	  backends/test_numpy cli/test_conformance)

targets: $(READY)
	@$(BIN)/python benchmarks/targets.py

ceilings: $(READY)
	@$(BIN)/python -m tests.checks.ceilings $(if $(UPDATE),--update)

pictures: $(READY)
	@$(BIN)/python benchmarks/pictures.py

compare: $(READY)
	@$(BIN)/python benchmarks/comparison.py
	@$(BIN)/python -m benchmarks.papers

service: $(READY)
	@$(BIN)/python -m benchmarks.service $(if $(MINUTES),--minutes $(MINUTES))

# All checks that a change must pass, in environments next to VENV; called by .ci/run. pytest's verdict comes last.
ci: $(READY)
	@$(MAKE) --no-print-directory --jobs 2 package $(TRAINERS)/.ready
	@$(MAKE) --no-print-directory docs test-browser sanitize fuzz-core test-trainers test-docs test

nightly:
	@$(MAKE) --no-print-directory test-slow kernels fuzz
	@$(MAKE) --no-print-directory fuzz-core SECONDS=3600
	@$(MAKE) --no-print-directory service MINUTES=30
	@$(BIN)/python -m benchmarks.service memory

fuzz: $(READY)
	@$(BIN)/python -m tests.checks.fuzz_plans --count 100000
	@$(BIN)/python -m tests.checks.fuzz_judge --count 100000

kernels: $(READY)
	@$(BIN)/python -m tests.checks.kernels

replay: $(READY)
	@$(BIN)/python -m tests.checks.replay $(if $(BASE),--base $(BASE)) $(if $(UPDATE),--update)

package: $(READY)
	@$(BIN)/python -m tests.checks.package

# In a copy of the tree, to keep the normal build of the core. No leak detection: Python itself leaks.
sanitize: $(READY)
	@rm -rf $(addprefix build/sanitize/,apportion core tests) && mkdir -p build/sanitize
	@cp -r apportion core tests pyproject.toml build/sanitize && rm -f build/sanitize/apportion/_core*.so
	@$(MAKE) --no-print-directory core STRICT=1 INTO=$(abspath build/sanitize) PYTHON=$(abspath $(BIN))/python
	cd build/sanitize && LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=$$PWD $(abspath $(BIN))/python \
	  -m pytest $(patsubst %,tests/ir/test_%.py,core tables_by_hand table_bytes fusion messages verify) tests/planner/test_openers.py tests/planner/test_checks.py \
	    tests/planner/simulate/test_launches.py

# Needs clang++ with libFuzzer. Findings are in build/fuzz; SECONDS=3600 for an hour.
fuzz-core:
	@mkdir -p build/fuzz/corpus
	@$(or $(CLANG),clang++) -std=c++20 -O1 -g -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined -DAPPORTION_CHECKED \
	  -I core core/fuzz/program.cpp core/ir/tables.cpp core/ir/wellformed.cpp $(filter-out %/bind.cpp,$(wildcard core/ir/verify/*.cpp)) \
	  -o build/fuzz/program
	build/fuzz/program -max_total_time=$(or $(SECONDS),60) -max_len=4096 -timeout=10 -rss_limit_mb=1024 -print_final_stats=1 -print_funcs=0 \
	  -verbosity=0 -artifact_prefix=build/fuzz/ build/fuzz/corpus core/fuzz/corpus

suite: $(READY)
	@$(BIN)/python -m tests.support.conformance_suite

test-gpu: $(READY)
	$(BIN)/pytest tests/executor/stage/test_stage.py tests/executor/stage/test_gpu.py --gpu

conformance: $(READY)
	$(BIN)/pytest tests/executor/stage --full -n 2

clean:
	rm -rf $(VENV) $(TRAINERS) $(VENV)-plain *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache \
	  .coverage .coverage.*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
