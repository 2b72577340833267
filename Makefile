# make quickstart    set everything up, then train the tiny Beam on the CPU
# make test          lint, then the whole test suite
# make setup         install the locked stack into .venv (STACK=gpu for the CUDA stack)
# make lint          ruff and mypy
# make bench         time and memory of the quickstart, phase by phase
# make parity        both sides against transformers' own Beam
# make lock          resolve requirements/*.txt anew
# make clean         remove what the other targets made, but not the runs

.DEFAULT_GOAL := help
SHELL := /bin/bash
STACK ?= cpu
BIN := .venv/bin
SOURCES := $(shell find beam_rl model trainer rollout evals -name '*.py' -o -name py.typed) pyproject.toml README.md

.PHONY: help quickstart test setup lint bench parity lock clean
help:
	@sed -n 's/^# make/make/p' Makefile

quickstart: setup
	$(BIN)/beam-rl train recipes/quickstart.yaml

test: lint
	$(BIN)/pytest

setup: .venv/installed-$(STACK)
.venv/installed-$(STACK): requirements/$(STACK).txt requirements/setup.sh $(SOURCES)
	@requirements/setup.sh $(STACK)
	@rm -f .venv/installed-*
	@touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cd tests && ../$(BIN)/mypy --config-file ../pyproject.toml -p beam_rl

bench: setup
	$(BIN)/python tests/benchmarks/quickstart.py

COMPILE := pip compile -q pyproject.toml --group dev --python-version 3.12 --generate-hashes --no-emit-index-url --no-annotate --no-header
parity: setup
	$(BIN)/python tests/benchmarks/parity.py

lock: setup
	$(BIN)/uv $(COMPILE) --extra cpu --overrides requirements/cpu.overrides.txt -o requirements/cpu.txt
	$(BIN)/uv $(COMPILE) --extra gpu -o requirements/gpu.txt
	echo transformers==5.24.0 | $(BIN)/uv pip compile -q - --no-deps --python-version 3.12 --generate-hashes \
		--no-emit-index-url --no-annotate --no-header -o requirements/reference.txt

clean:
	rm -rf .venv .uv build dist .pytest_cache .mypy_cache .ruff_cache
