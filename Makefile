# Everything is set up in .venv on first use; PYTHON names the interpreter that makes it.
PYTHON ?= python3
BENCHMARK ?=
DEVICE ?= cuda
WHEELS ?=
OUT ?=
# Setup compiles nothing: what runs first does, and must be allowed to keep it.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help test test-all demo bench gpu ui dist docs format clean

help:
	@echo "make test     set up, then run the gate: format, lint, types, imports, page, and tests without the slow ones"
	@echo "make test-all the same with every test and case, and with random cases"
	@echo "make demo     set up, then run the main job: train, fork, resume and prove (two minutes)"
	@echo "make ui       set up, then build the page into api/static"
	@echo "make dist     set up, then build the wheel and the source distribution into dist/"
	@echo "make docs     set up, then build the site of the documents into site/"
	@echo "make bench    set up, then run every benchmark, or BENCHMARK=lineage only"
	@echo "make gpu      on a machine with a GPU: tests, probes and figures in nine minutes, and a report; WHEELS=folder: without a network;"
	@echo "              DEVICE=cpu: the same without a GPU; OUT=folder: where the report goes"
	@echo "make format   format the code and fix what ruff can fix"
	@echo "make clean    remove .venv, caches and what was built"

test:
	@PYTHON="$(PYTHON)" scripts/gate

test-all:
	@PYTHON="$(PYTHON)" DATASTATES_THOROUGH=1 scripts/gate

demo:
	@PYTHON="$(PYTHON)" scripts/setup demo
	@.venv/bin/python scripts/ui --install
	@.venv/bin/python -m datastates demo

ui:
	@PYTHON="$(PYTHON)" scripts/setup demo
	@.venv/bin/python scripts/ui --install

dist:
	@PYTHON="$(PYTHON)" scripts/setup dev
	@rm -rf dist
	@.venv/bin/python -m build --outdir dist

docs:
	@PYTHON="$(PYTHON)" scripts/setup docs
	@scripts/docs

bench:
	@PYTHON="$(PYTHON)" scripts/setup dev
	@scripts/bench $(BENCHMARK)

gpu:
	@$(if $(WHEELS),:,PYTHON="$(PYTHON)" scripts/setup dev)
	@PYTHON="$(PYTHON)" WHEELS="$(WHEELS)" scripts/gpu --device $(DEVICE) $(if $(OUT),--out "$(OUT)")

format:
	@PYTHON="$(PYTHON)" scripts/setup dev
	@.venv/bin/python -m ruff format .
	@.venv/bin/python -m ruff check --fix .

clean:
	rm -rf .venv .venv-gpu .swift build dist site api/static api/ui/node_modules api/ui/src/generated *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
