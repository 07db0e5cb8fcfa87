# Everything runs in .venv, made on first use with the versions of constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help demo test parity campaign sweep bench check lint types quick-tests process-tests format schema golden clean

help:
	@echo "make demo    check the shipped plans, then train a tiny Llama on 4 processes and on one, and compare"
	@echo "make test    all tests"
	@echo "make parity  the parity contract in every combination, about an hour; writes docs/parity.md"
	@echo "make campaign  every mutation of the shipped plans against the checker, hours; writes docs/campaign.md"
	@echo "make sweep   every model of transformers with a plan of its own, hours; writes docs/coverage.md"
	@echo "make bench   a step against hand-written collectives and other tools, and other costs, with budgets; writes docs/speed.md"
	@echo "make check   lint, format, types, and the tests that need no processes"
	@echo "make format  rewrite the sources as ruff wants them"
	@echo "make schema  write the two files in schemas anew"
	@echo "make golden  write what plan-compile is expected to print anew, and docs/diagnostics.md"

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test,dev]'
	@touch $@

demo: $(READY)
	$(BIN)/python docs/examples/demo.py

test: $(READY)
	@$(MAKE) --no-print-directory --jobs 2 --output-sync quick-tests process-tests

parity: $(READY)
	$(BIN)/python tests/full_parity.py

campaign: $(READY)
	$(BIN)/python tests/campaign.py --write

sweep: $(READY)
	@mkdir -p build && rm -f build/sweep.jsonl
	$(BIN)/python tests/sweep.py --record build/sweep.jsonl
	$(BIN)/python tests/sweep.py --hf --record build/sweep.jsonl
	$(BIN)/python tests/sweep.py --flags --record build/sweep.jsonl --write

bench: $(READY)
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[bench]'
	@mkdir -p build
	$(BIN)/python tests/benchmarks/speed.py --record build/speed.jsonl
	$(BIN)/python tests/benchmarks/costs.py --record build/costs.jsonl
	$(BIN)/python tests/benchmarks/page.py build/speed.jsonl build/costs.jsonl

check: $(READY)
	@$(MAKE) --no-print-directory --jobs 2 lint types quick-tests

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

quick-tests: $(READY)
	$(BIN)/python -m pytest -q -m "not processes" --numprocesses 2

process-tests: $(READY)
	$(BIN)/python -m pytest -q -m processes

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

schema: $(READY)
	$(BIN)/python -m shardplan.schema

golden: $(READY)
	$(BIN)/python tests/golden.py

clean:
	rm -rf $(VENV)
