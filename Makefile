# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

.PHONY: setup demo test test-slow test-gpu lint dist notebook clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# Less text and fewer steps than the defaults, so that it ends in a few minutes on two slow cores. Threads that wait
# for work sleep instead of spinning, which takes a fifth less core-time on a busy machine.
demo: setup
	OMP_WAIT_POLICY=passive $(BIN)/rco quantize tiny-llama --bits 2.5 --sequences 64 --evaluation 16 --steps 16 --refine 9 \
		--tune scales --tune-tokens 4608 --resume

# Files of tests are spread over the cores; a file stays on one, so that what its tests share is made once.
test: setup
	$(BIN)/python -m pytest -q --numprocesses auto --dist loadfile

# Single tests are spread over the cores: the longest take minutes, and one file may hold several of them.
test-slow: setup
	$(BIN)/python -m pytest -q -m slow --timeout 3600 --numprocesses auto --dist load

# On a machine without a CUDA GPU this is an error, not a success with nothing run.
test-gpu: setup
	$(BIN)/python -m pytest -q -m gpu --timeout 600 tests/gpu

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The source archive, and the wheel that is built from it, as they would be published.
dist: setup
	$(BIN)/python -m pip install --quiet build
	$(BIN)/python -m build

# The example notebook, with its outputs.
notebook: setup
	$(BIN)/python -m pip install --quiet nbclient ipykernel ipywidgets
	$(BIN)/jupyter execute --inplace --timeout=3600 examples/quantize_a_model.ipynb

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
