# Each target does its own set-up in .venv. PYTHON=python3.12 chooses another interpreter.

.DEFAULT_GOAL := help
.PHONY: help book test test-all lint sync serve stacks engines observe dist repo clean distclean venv

PORT ?= 8000
ours := environment.py src tests benchmarks examples book/src
python := .venv/bin/python

# What is given on the command line reaches programs as it stands, through the environment: neither
# make nor a shell reads it as code. PYTEST_ARGS are further options of pytest.
override URL := $(value URL)
override PORT := $(value PORT)
override STACKS := $(value STACKS)
override INTERPRETERS := $(value INTERPRETERS)
override PYTHON := $(value PYTHON)
override PYTEST_ARGS := $(value PYTEST_ARGS)
override PYTEST_ADDOPTS := $(value PYTEST_ADDOPTS) $(PYTEST_ARGS)
export URL PORT STACKS INTERPRETERS PYTHON PYTEST_ADDOPTS

# A file's tests share what they have built, so they stay in one process; the longest files come
# first (tests/conftest.py). A process that is killed is not replaced: pytest-xdist would wait for its
# tests for ever.
workers := -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

help:
	@echo "make book      execute the chapters that changed, build the site in _build/html"
	@echo "make test      the tests; no book needed"
	@echo "make test-all  the book, then all tests: the slow ones and the site's too"
	@echo "make lint      ruff, types of public signatures, and every chapter's .ipynb in sync"
	@echo "make sync      write the .ipynb beside each chapter"
	@echo "make serve     the built site on a local port (PORT=8000)"
	@echo "make stacks    chapters and tests on every stack, or on some (STACKS=\"newest colab\")"
	@echo "make engines   the launchers on a real SLURM and a real Ray here; Debian, as root"
	@echo "make observe   what each JAX's TPU compiler makes of the same programs, for the appendix"
	@echo "make dist      sdists and wheels in dist/, from what is installed: no network"
	@echo "make repo URL=https://github.com/owner/name   the address that notebooks install from"
	@echo "make clean     remove the built site and all results; distclean: the environments too"
	@echo "Each does its own set-up in .venv; PYTHON=python3.12 chooses another interpreter."

book: venv
	@$(python) -m shardwise_book

test: venv
	@$(python) -m pytest $(workers) -m "not slow"

test-all: book
	@$(python) -m pytest $(workers)

lint: venv
	@$(python) -m ruff check $(ours)
	@$(python) -m ruff format --check $(ours)
	@$(python) -m pytest -q tests/test_annotations.py
	@$(python) -m shardwise_book.pairs check

sync: venv
	@$(python) -m shardwise_book.pairs sync

serve: venv
	@test -f _build/html/index.html || { echo "No site in _build/html yet: run 'make book'." >&2; exit 1; }
	@echo "http://127.0.0.1:$$PORT/ (stop with Ctrl-C)"
	@$(python) -m http.server --bind 127.0.0.1 --directory _build/html "$$PORT"

stacks: venv
	@$(python) tests/stacks.py

engines: venv
	@$(python) tests/engines.py

observe: venv
	@PYTHONPATH=tests $(python) benchmarks/observatory.py

dist: venv
	@rm -rf dist
	@$(python) -m hatchling build -d dist
	@cd book && ../$(python) -m hatchling build -d ../dist

repo: venv
	@$(python) -m shardwise_book.address

clean:
	@rm -rf _build

distclean: clean
	@rm -rf .venv .stacks .engines

# Any Python 3 runs environment.py, which chooses the one that .venv is made with.
venv:
	@for runner in python3 python3.13 python3.12 python3.11 "$$PYTHON"; do \
	  "$$runner" -c 'import sys; sys.exit(sys.version_info < (3, 6))' 2>/dev/null \
	    && exec "$$runner" environment.py; \
	done; \
	echo "No Python 3 runs here: install Python 3.11, 3.12 or 3.13, or name one, as in 'make PYTHON=/path/to/python3.12'." >&2; \
	exit 1
