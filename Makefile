# Every target makes .venv itself, once, with the versions that constraints.txt pins.
PYTHON ?= python3
BIN := .venv/bin
DEMO_ARGS ?=
# The Tritons of the oldest PyTorch that pyproject.toml admits and of the newest there is.
OLDEST := 3.6.0
NEWEST := 3.9.0
# The oldest PyTorch that pyproject.toml admits, and the newest that was tried.
OLDEST_TORCH := 2.11
NEWEST_TORCH := 2.14
# Where pip looks for PyTorch besides the package index: without a GPU, https://download.pytorch.org/whl/cpu has less.
TORCH_INDEX ?=
PIP := $(BIN)/python -m pip install $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
TEST_ARGS ?=
RANDOM_ARGS ?=
# Tests start many processes, each of which would compile PyTorch's modules anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install demo quick test test-transformers test-vllm test-torch test-all random gate gate-all lint types format docs docs-browse dist release-check release clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 26

install: .venv/demo.stamp .venv/dev.stamp  ## everything that the other targets need

# Threads that sleep where they wait: beside other work on the machine, steps are several times as fast for it.
demo: .venv/demo.stamp  ## train a small byte-level model, saccade beside SDPA, and draw train_bytes.png
	OMP_WAIT_POLICY=passive $(BIN)/python examples/train_bytes.py $(DEMO_ARGS)

# Types take about as long as these tests, each on one core. SEED repeats another day's.
quick: .venv/dev.stamp .venv/triton lint  ## lint, types, and the tests of a tenth of the files, others each day
	@seed=$${SEED:-$$(date +%F)}; echo "A tenth of the files of tests, drawn by SEED=$$seed"; \
	$(BIN)/basedpyright & types=$$!; \
	$(BIN)/python -m pytest -q -n 0 --tenth "$$seed" tests $(TEST_ARGS); tests=$$?; wait $$types && exit $$tests

test: .venv/dev.stamp .venv/triton  ## all tests that need no GPU, a sample of the cases of each
	$(BIN)/python -m pytest -q -n logical $(TEST_ARGS)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -q -n logical tests $(TEST_ARGS)

test-transformers: .venv/dev.stamp .venv/transformers-4 .venv/transformers-5  ## tiny models of transformers 4 and 5
	for version in 4 5; do \
	  HF_HUB_OFFLINE=1 PYTHONPATH=.venv/transformers-$$version $(BIN)/python -m pytest -q -n logical \
	    tests/integrations/transformers $(TEST_ARGS) || exit 1; \
	done

# Not in CI: minutes, and hundreds of megabytes.
test-vllm: .venv/dev.stamp .venv/vllm  ## vLLM's engine on a CPU
	HF_HUB_OFFLINE=1 PYTHONPATH=.venv/vllm $(BIN)/python -m pytest -q -n 0 tests/integrations/vllm $(TEST_ARGS)

# On a GPU: RANDOM_ARGS="--device cuda --processes 16 --seed N".
random: .venv/dev.stamp  ## random calls of the whole API against float64 for three minutes, of a new seed
	$(BIN)/python -m tests.random_calls --seconds 180 --seed $$(date +%s) $(RANDOM_ARGS)

# With TEST_ARGS=--everything, of matrices too.
test-all:  ## all cases of all tests that need no GPU, but of matrices a sample
	$(MAKE) test test-transformers TEST_ARGS="--all $(TEST_ARGS)"

# The newest compiler spills most; the oldest timed the tables.
gate: .venv/dev.stamp .venv/triton .venv/triton-$(OLDEST)  ## half of the shipped tile configs and of the features compile for Hopper, others each day
	$(BIN)/python -W ignore -m tests.gate configs sample today
	PYTHONPATH=.venv/triton-$(OLDEST) $(BIN)/python -W ignore -m tests.gate gluon configs others
	PYTHONPATH=.venv/triton-$(OLDEST) $(BIN)/python -W ignore -m tests.gate sample read

gate-all: .venv/dev.stamp .venv/triton .venv/triton-$(OLDEST)  ## the same of all rows, on the oldest and the newest Triton
	$(BIN)/python -W ignore -m tests.gate
	PYTHONPATH=.venv/triton-$(OLDEST) $(BIN)/python -W ignore -m tests.gate gluon configs features
	PYTHONPATH=.venv/triton-$(OLDEST) $(BIN)/python -W ignore -m tests.gate triton configs features read

# A CUDA build of torch brings the one Triton that it requires; a CPU build brings none.
.venv/triton: .venv/dev.stamp
	$(BIN)/python -c "import triton" 2>/dev/null || $(BIN)/python -m pip install triton==$(NEWEST)
	@touch $@

.venv/triton-$(OLDEST): | .venv/bin/pip
	$(BIN)/python -m pip install --no-deps --target $@ triton==$(OLDEST)

# Without torch, and beside what is in .venv: the two versions exclude each other.
.venv/transformers-%: tests/integrations/transformers/requirements-%.txt | .venv/bin/pip
	$(BIN)/python -m pip install --no-deps --upgrade --target $@ -r $<
	@touch $@

# A build for CPUs, by others than vLLM's authors, of the PyTorch that constraints.txt pins.
.venv/vllm: tests/integrations/vllm/requirements.txt | .venv/bin/pip
	$(BIN)/python -m pip install --no-deps --upgrade --target $@ -r $<
	@touch $@

lint: .venv/dev.stamp  ## ruff: rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/dev.stamp .venv/triton  ## basedpyright
	$(BIN)/basedpyright

format: .venv/dev.stamp  ## put the code into the form that `make lint` asks for
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: .venv/docs.stamp  ## the site, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

dist: .venv/dev.stamp  ## wheel and sdist, into dist/
	rm -rf dist
	$(BIN)/python -m hatchling build -d dist

# The wheel in environments of its own, which bring gigabytes without TORCH_INDEX.
release-check: dist  ## wheel and sdist, and the wheel on the oldest and on the newest PyTorch
	for torch in $(OLDEST_TORCH) $(NEWEST_TORCH); do \
	  rm -rf .venv/torch && $(PYTHON) -m venv .venv/torch && \
	  .venv/torch/bin/pip install "torch==$$torch.*" "$$(echo dist/*.whl)[cli]" \
	    $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) && \
	  (cd .venv/torch && bin/saccade doctor && bin/python -m saccade.testing.selfcheck) || exit 1; \
	done; rm -rf .venv/torch

# All but a comparison with graphs that torch itself makes, of which newer ones lack a detach(). Gigabytes without TORCH_INDEX.
test-torch:  ## the tests that need no GPU, on the oldest and on the newest PyTorch
	for torch in $(OLDEST_TORCH) $(NEWEST_TORCH); do \
	  rm -rf .venv/torch && $(PYTHON) -m venv .venv/torch && \
	  grep -v "^torch==" constraints.txt >.venv/torch/constraints.txt && \
	  .venv/torch/bin/pip install "torch==$$torch.*" -e ".[dev]" -c .venv/torch/constraints.txt \
	    $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) && \
	  .venv/torch/bin/python -m pytest -q -n logical $(TEST_ARGS) \
	    --deselect tests/scores/test_odd_functions.py::test_graphs_are_those_of_make_fx || exit 1; \
	done; rm -rf .venv/torch

release: release-check  ## everything of a release but the upload
	$(BIN)/python release.py

docs-browse: docs  ## the site in Chromium: links, pictures, errors, screenshots for phone and desktop
	$(BIN)/python -m pip install -q playwright -c constraints.txt
	$(BIN)/python docs/figures/browse.py

clean:  ## remove what the other targets made
	rm -rf .venv .hypothesis .pytest_cache .ruff_cache dist site site-screenshots train_bytes.png

# Modules that are never imported need not be compiled, which takes longer than all the rest.
.venv/%.stamp: pyproject.toml constraints.txt | .venv/bin/pip
	@echo "Set-up: saccade[$*] and PyTorch, into .venv"
	@command -v nvidia-smi >/dev/null || [ "$(TORCH_INDEX)" ] || \
	  echo "No NVIDIA GPU here? TORCH_INDEX=https://download.pytorch.org/whl/cpu spares gigabytes."
	$(PIP) --no-compile -e '.[$*]' -c constraints.txt
	@touch $@

# A half-made environment would pass for a whole one the next time.
.venv/bin/pip:
	@echo "Set-up: a virtual environment in .venv"
	@$(PYTHON) -m venv .venv || { rm -rf .venv; echo "On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
