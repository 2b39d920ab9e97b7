# Two commands, each doing all of its own set-up on a fresh Debian 12 with Python: `make demo`, `make test`.
# PYTHON=python3.12 make test      another interpreter
# PIP_ARGS="..." make demo         extra arguments for pip (a CPU wheel index, a proxy ...)

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
# three processes on two cores: half of the suite is waiting (docs/decisions.md)
PYTEST_ARGS ?= -n 3 --dist worksteal
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test lint diagnose-report search fuzz format clean system-packages

help:
	@echo "make demo     train the bundled tiny drafter on this machine and measure its acceptance length"
	@echo "make test     install what the tests need and run them (node tests need root on Debian)"
	@echo "make lint     ruff and mypy"
	@echo "make format   ruff format"
	@echo "make diagnose-report   how often the diagnosis is right, by class, and what it takes for what"
	@echo "make search   all property tests with new examples, SEARCH_TIMES=20 times as many as in make test"
	@echo "make fuzz     FUZZ_SECONDS=300 of coverage-guided fuzzing of what reads logs (installs atheris: Python 3.11 to 3.13)"

$(INSTALLED): pyproject.toml constraints.txt tools/make_venv.sh
	@PIP_ARGS="$(PIP_ARGS)" sh tools/make_venv.sh "$(PYTHON)" "$(VENV)"

demo: RUN := demo-$(shell date +%m%d-%H%M%S)
demo: $(INSTALLED)
	@echo "To type dflashctl yourself:  . $(BIN)/activate"
	$(BIN)/dflashctl launch --host local --name $(RUN) --wait 300
	$(BIN)/dflashctl logs $(RUN) --host local -f
	$(BIN)/dflashctl status $(RUN) --host local

system-packages:
	@sh tools/system_packages.sh

test: $(INSTALLED) system-packages
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

diagnose-report: $(INSTALLED)
	@$(BIN)/python -m tests.diagnose.report

SEARCH_TIMES ?= 20
search: $(INSTALLED)
	SEARCH_TIMES=$(SEARCH_TIMES) $(BIN)/python -m pytest $(PYTEST_ARGS) -m hypothesis --hypothesis-profile search --timeout 0

FUZZ_SECONDS ?= 300
fuzz: $(INSTALLED)
	$(BIN)/python -m pip install -q $(PIP_ARGS) atheris
	$(BIN)/python -m tests.diagnose.fuzz -max_total_time=$(FUZZ_SECONDS)

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
