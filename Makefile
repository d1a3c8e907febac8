# Each target does its own set-up in .venv. PYTHON=python3.12 chooses another interpreter.
#
#   make book    execute the chapters that changed, build the site in _build/html
#   make test    the same, then the tests; test-all: the slow ones too
#   make lint    ruff, and every chapter's .ipynb in sync
#   make sync    write the .ipynb beside each chapter
#   make serve   the built site on a local port (PORT=8000)
#   make stacks  chapters and tests on the three stacks (STACKS="newest python3.11 colab")
#   make repo URL=https://github.com/owner/name   the address that notebooks install from
#   make clean   remove the built site and all results; distclean: the environments too

.DEFAULT_GOAL := book
.PHONY: book test test-all lint sync serve stacks repo clean distclean venv

PORT ?= 8000
STACKS ?= newest python3.11 colab
ours := src tests benchmarks book/_ext
python := .venv/bin/python
# A file's tests share what they have built, so they stay in one process.
workers := -n auto --maxprocesses 4 --dist loadfile
export PYTHONPATH := book/_ext

book: venv
	@$(python) -m shardwise_book

test: book
	@$(python) -m pytest $(workers) -m "not slow" $(PYTEST_ARGS)

test-all: book
	@$(python) -m pytest $(workers) $(PYTEST_ARGS)

lint: venv
	@$(python) -m ruff check $(ours)
	@$(python) -m ruff format --check $(ours)
	@$(python) -m shardwise_book.pairs check

sync: venv
	@$(python) -m shardwise_book.pairs sync

serve: venv
	@test -f _build/html/index.html || { echo "No site in _build/html yet: run 'make book'." >&2; exit 1; }
	@echo "http://127.0.0.1:$(PORT)/ (stop with Ctrl-C)"
	@$(python) -m http.server --bind 127.0.0.1 --directory _build/html $(PORT)

stacks: venv
	@$(python) tests/stacks.py $(STACKS)

repo: venv
	@$(python) -m shardwise_book.address "$(URL)"

clean:
	@rm -rf _build

distclean: clean
	@rm -rf .venv .stacks

# The environment is ready when its interpreter runs and .venv/ready names this folder and the
# present pins. With other pins it is updated; in any other state it is made anew.
pins = $(CURDIR) $$(cat requirements.txt pyproject.toml | cksum)
identity := import sys; print(sys.version_info[:3], sys.base_prefix)
suits := import sys; from importlib.util import find_spec as found; \
  known = (3, 11) <= sys.version_info[:2] <= (3, 13); \
  sys.exit(0 if known and found("venv") and found("ensurepip") else 4 if known else 3)

venv:
	@pins="$(pins)"; has=$$($(python) -c '$(identity)' 2>/dev/null); \
	if [ -n "$$has" ] && [ -n "$(PYTHON)" ]; then \
	  wants=$$("$(PYTHON)" -c '$(identity)' 2>/dev/null); [ "$$has" = "$$wants" ] || has=; \
	fi; \
	if [ -n "$$has" ] && [ "$$(cat .venv/ready 2>/dev/null)" = "$$pins" ]; then exit 0; fi; \
	case "$$has $$(cat .venv/ready 2>/dev/null)" in \
	  ?*" $(CURDIR) "*) ;; \
	  *) $(choose); \
	     echo "Making .venv with $$chosen"; \
	     rm -rf .venv && "$$chosen" -m venv .venv || exit 1 ;; \
	esac; \
	echo "Installing the pinned set (minutes, the first time)"; \
	rm -f .venv/ready; \
	PYTHONPATH= $(python) -m pip install --quiet --disable-pip-version-check -r requirements.txt \
	  && echo "$$pins" > .venv/ready

# Sets `chosen`, or says in one sentence why nothing suits, and what to do.
define choose
for chosen in $(or $(PYTHON),python3 python3.13 python3.12 python3.11); do \
  "$$chosen" -c '$(suits)' 2>/dev/null; status=$$?; \
  [ $$status = 0 ] && break; \
  [ -n "$$first" ] || first=$$status; \
done; \
if [ $$status != 0 ]; then \
  name=$(or $(PYTHON),python3); version=$$("$$name" --version 2>/dev/null); \
  case $$first in \
    3) echo "$$name is $$version, and Shardwise needs Python 3.11, 3.12 or 3.13: install one of them, then name it, as in 'make PYTHON=python3.12'." >&2 ;; \
    4) echo "$$name ($$version) lacks its venv module: install it ('apt install python3-venv' on Debian and Ubuntu), or name another Python, as in 'make PYTHON=python3.12'." >&2 ;; \
    *) echo "$$name does not run here: install Python 3.11, 3.12 or 3.13, or name one, as in 'make PYTHON=/path/to/python3.12'." >&2 ;; \
  esac; exit 1; \
fi
endef
