# make demo    trains a small GPT on two pipeline stages and draws its bubbles
# make test    runs every check: lint, types, import contract, tests
# make clean   removes the environment, so that the next command makes a new one
#
# Both of the first make .venv when it is missing or when what it must hold has changed. Nothing but Python >= 3.11
# has to be there before; PYTHON=python3.12 chooses one, ARGS="--dim 256" hands options on, RANKS=4 uses more stages.

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
EXTRAS := dev,viz
RANKS := 2
ARGS :=

NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
CANDIDATES := python3 python python3.14 python3.13 python3.12 python3.11
PYTHON ?= $(shell for python in $(CANDIDATES); do \
	$$python -c '$(NEW_ENOUGH)' 2>/dev/null && echo $$python && break; done)

# One thread a rank: numbers are promised for a fixed number of threads, and ranks share the cores.
export OMP_NUM_THREADS := 1

.PHONY: demo test clean

demo: $(READY)
	$(BIN)/torchrun --standalone --nproc-per-node $(RANKS) examples/train_gpt.py $(ARGS)

test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest $(ARGS)

$(READY): pyproject.toml constraints.txt
	@$(or $(PYTHON),false) -c '$(NEW_ENOUGH)' 2>/dev/null || { \
		echo "pipeloom needs Python 3.11 or newer (tried: $(or $(PYTHON),$(CANDIDATES)));" \
			"name one: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

clean:
	rm -rf $(VENV)
