# Each target sets up what it needs; `make demo` and `make test` work in a fresh clone.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DEMO   := $(VENV)/.demo
COMMANDS := run verify top report profile plan doctor explain ckpt job init
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help setup demo check docs test test-ci test-slow test-all test-gpu bench bench-all clean

help:
	@echo "make setup     build .venv with the paceline command in it"
	@echo "make demo      train a small net on handwritten digits, on 2 processes"
	@echo "make check     format, lint, types, layering, documentation"
	@echo "make docs      build the documentation site in build/site"
	@echo "make test      unit, dist and e2e tests"
	@echo "make test-ci   further cases, which CI runs too (about 10 minutes)"
	@echo "make test-slow the exhaustive matrices (about an hour)"
	@echo "make test-all  all three"
	@echo "make test-gpu  tests that need a GPU; the others do not use it"
	@echo "make bench     measure speed against hand-written loops and other frameworks"
	@echo "make bench-all that, and checkpoints, restarts, verdicts (hours)"
	@echo "make clean     remove .venv, runs and caches"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@$(PIP) -e '.[dev,examples]'
	@touch $@ $(DEMO)

# What the demo needs, without the tools for development.
$(DEMO): pyproject.toml constraints.txt | $(BIN)/python
	@$(PIP) -e '.[examples]'
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("Paceline needs Python 3.11 or newer, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	@echo "setting up $(VENV) (once; this downloads PyTorch)"; $(PYTHON) -m venv $(VENV)

demo: $(DEMO)
	@$(BIN)/paceline run --nproc-per-node 2 examples/digits.py

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -p no:cacheprovider tests/unit/test_layers.py
	@$(MAKE) --no-print-directory docs

# Strict: a link to a page or heading that does not exist fails. A warm cache would hide warnings, so it is cleared.
docs: $(STAMP)
	@rm -rf build/site && mkdir -p build/help
	@for command in $(COMMANDS); do COLUMNS=92 $(BIN)/paceline $$command --help > build/help/$$command.txt || exit 1; done
	@$(BIN)/paceline explain --all > build/help/messages.md
	PACELINE_SITE_NAME="Paceline $$($(BIN)/python -c 'import paceline; print(paceline.__version__)')" $(BIN)/zensical build --strict --clean

# Two at a time, a file in one process: a test waits for its processes about a third of the time.
test: $(STAMP)
	$(BIN)/python -m pytest -q -m "not slow and not ci" -n 2 --dist loadfile

test-ci: $(STAMP)
	$(BIN)/python -m pytest -q -m "ci and not slow" -n 2 --dist loadfile

test-slow: $(STAMP)
	$(BIN)/python -m pytest -q -m slow

test-all: test test-ci test-slow

test-gpu: $(STAMP)
	$(BIN)/python -m pytest -q tests/gpu

bench bench-all: export BENCHMARK_RESULTS = benchmarks/results
bench: $(STAMP)
	$(PIP) -e '.[bench]'
	$(BIN)/python benchmarks/allreduce.py
	$(BIN)/python benchmarks/steps.py
	$(BIN)/python benchmarks/frameworks.py
	$(BIN)/python benchmarks/precision.py
	$(BIN)/python benchmarks/start.py
	$(BIN)/python benchmarks/several_hosts.py
	$(BIN)/python benchmarks/loader.py
	$(BIN)/python benchmarks/dataloader.py
	$(BIN)/python benchmarks/compression.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/layouts.py
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/clock.py
	$(BIN)/python benchmarks/gpu.py

bench-all: bench
	$(BIN)/python benchmarks/reproducible.py
	$(BIN)/python benchmarks/checkpoint.py
	$(BIN)/python benchmarks/resume.py
	$(BIN)/python benchmarks/faults.py
	$(BIN)/python benchmarks/last_save.py
	$(BIN)/python benchmarks/in_place.py
	$(BIN)/python benchmarks/in_place_faults.py
	$(BIN)/python benchmarks/restarts.py
	$(BIN)/python benchmarks/restarts.py --kinds preempt
	$(BIN)/python benchmarks/restarts.py --kinds moment --count 100
	$(BIN)/python benchmarks/verdicts.py
	$(BIN)/python benchmarks/verdicts.py --what healthy
	$(BIN)/python benchmarks/probe.py
	$(BIN)/python benchmarks/diloco.py

clean:
	rm -rf $(VENV) runs dist build .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis
