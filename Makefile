# Everything runs in .venv, made on first use. PYTHON chooses the interpreter (3.11 or newer).
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV ?= .venv
BIN := $(VENV)/bin
PROMPT ?= Give me one good reason to learn to play the piano.
# As it was given: neither make nor the shell reads quotes or $ in it, because the recipe takes it from the
# environment.
override PROMPT := $(value PROMPT)
export PROMPT

.PHONY: help demo test lint bench clean

help:
	@echo "make demo    install, fetch the small default model, answer a prompt (PROMPT='...')"
	@echo "make test    install, run the test suite (TESTS='...': pytest's arguments, such as tests/test_tree.py)"
	@echo "make lint    ruff and pyright"
	@echo "make bench   speed of the default model on this machine"
	@echo "make clean   remove the environments, caches and build files made here"
	@echo "PYTHON=...   the interpreter that makes the environment, 3.11 or newer (now: $(PYTHON))"
	@echo "VENV=...     the environment's folder (now: $(VENV))"

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer found; install one or set PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

# One stamp for what users need, one for what developers need on top; both follow pyproject.toml.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "installing medusa-jax into $(VENV) (a few minutes the first time)"
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	@echo "installing medusa-jax and its test tools into $(VENV) (a few minutes the first time)"
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	@touch $(VENV)/.installed $@

demo: $(VENV)/.installed
	$(BIN)/python -m infer.generate --prompt "$$PROMPT"

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n auto $(TESTS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/cpu.py

clean:
	rm -rf $(VENV) .venv* .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
