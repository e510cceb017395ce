# make demo    trains a small GPT on two pipeline stages and draws its bubbles
# make test    runs every check: lint, types, import contract, tests
# make bench   runs every benchmark beside its peers, and writes benchmarks/RESULTS.md: about half an hour, on a quiet machine
# make clean   removes the environments, so that the next command makes new ones
#
# All but the last make .venv when it is missing or when what it must hold has changed. Nothing but Python >= 3.11
# has to be there before; PYTHON=python3.12 chooses one, ARGS="--dim 256" hands options on, RANKS=4 uses more stages.

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PEERS := .venv-peers
EXTRAS := dev,viz
RANKS := 2
ARGS :=

NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
CANDIDATES := python3 python python3.14 python3.13 python3.12 python3.11
PYTHON ?= $(shell for python in $(CANDIDATES); do \
	$$python -c '$(NEW_ENOUGH)' 2>/dev/null && echo $$python && break; done)

# One thread a rank: numbers are promised for a fixed number of threads, and ranks share the cores.
export OMP_NUM_THREADS := 1

.PHONY: demo test bench clean

demo: $(READY)
	$(BIN)/torchrun --standalone --nproc-per-node $(RANKS) examples/train_gpt.py $(ARGS)

test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest --numprocesses auto --maxprocesses 4 --dist worksteal $(ARGS)

bench: $(READY) $(PEERS)/.ready
	$(BIN)/python -m benchmarks $(ARGS)

# DeepSpeed builds against the torch that is there, and needs none of its compiled operators on a CPU.
$(PEERS)/.ready: pyproject.toml constraints.txt benchmarks/peers.txt $(READY)
	$(BIN)/python -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install -c constraints.txt -e . setuptools wheel
	DS_BUILD_OPS=0 $(PEERS)/bin/python -m pip install -c constraints.txt --no-build-isolation -r benchmarks/peers.txt
	@touch $@

$(READY): pyproject.toml constraints.txt
	@$(or $(PYTHON),false) -c '$(NEW_ENOUGH)' 2>/dev/null || { \
		echo "pipeloom needs Python 3.11 or newer (tried: $(or $(PYTHON),$(CANDIDATES)));" \
			"name one: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

clean:
	rm -rf $(VENV) $(PEERS)
