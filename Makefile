# make serve | make test | make check | make bench | make drill     (PORT= MODEL= ARGS=, PYTHON=)
PYTHON ?= python3.11
PORT ?= 8000
DEMO := smollm2-135m
MODEL ?= $(DEMO)
ARGS ?=

venv := .venv
bin := $(venv)/bin

.PHONY: serve test check nightly bench drill clean

serve: $(venv)/.installed
	@exec $(bin)/orcaserve serve $(MODEL) --port $(PORT) $(ARGS)

test: $(venv)/.installed
	$(bin)/orcaserve pull $(DEMO)
	$(bin)/python -m pytest -m "not nightly" -n 2 --no-loadscope-reorder $(ARGS)

nightly: $(venv)/.installed
	$(bin)/python -m pytest -m nightly $(ARGS)

bench: $(venv)/.installed
	$(bin)/python -m orcaserve.engine.bench
	$(bin)/python -m orcaserve.kernels.bench
	$(bin)/orcaserve loadtest bench $(ARGS)

drill: $(venv)/.installed
	$(bin)/orcaserve loadtest chaos --faults 200 $(ARGS)
	$(bin)/orcaserve loadtest chaos --faults 20 --nodes 2 --kinds node_lost,worker_killed $(ARGS)

check: $(venv)/.installed
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/mypy
	$(bin)/lint-imports

clean:
	rm -rf $(venv) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# pip shows its own progress; torch is the largest download (200 MB).
$(venv)/.installed: pyproject.toml
	$(PYTHON) -m venv $(venv)
	$(bin)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(bin)/python -m pip install --disable-pip-version-check --editable ".[server,dev]"
	@touch $@
