# Every target sets itself up. Needs Rust >= 1.89, Python >= 3.10 with venv, and a C++ compiler; the rest comes from PyPI.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NVCC_ENV := .venv-nvcc
EXTRAS := dev,serve
PROMPT ?= class Stack:
NVCC = $$(echo $(CURDIR)/$(NVCC_ENV)/lib/python3*/site-packages/nvidia/cu13/bin/nvcc)
# Processes of pytest in `make test`, a thread each: the models of most tests are too small to gain from more.
JOBS ?= 2
# What the wheel's extension asks of a Linux: glibc 2.34. `make wheel COMPATIBILITY=off` builds for this machine alone.
COMPATIBILITY ?= manylinux_2_34
SOURCES := $(shell find src cuda python/specrs -type f \( -name '*.rs' -o -name '*.cu' -o -name '*.cuh' \)) Cargo.toml Cargo.lock build.rs pyproject.toml

.PHONY: demo dev test test-long test-blocks gpu-test bench lint stubs backends-table options-table figures screenshot wheel clean

demo: $(VENV)/.built
	@if [ -t 1 ] && [ -z "$$NO_COLOR" ]; then mark=color; else mark=brackets; fi; \
	$(BIN)/specrs generate "$(PROMPT)" --greedy --max-tokens 160 --compare --mark $$mark

# A quick build: incremental, without link-time optimisation. What the other targets run, they build anew.
dev: $(BIN)/python $(NVCC_ENV)/.installed
	rm -f $(VENV)/.built
	NVCC="$(NVCC)" VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/maturin develop --profile quick --extras $(EXTRAS)

test: $(VENV)/.built
	cargo test --no-default-features
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile -m "not long" tests/python

test-long: $(VENV)/.built
	SPECRS_TEST_LONG=1 cargo test --no-default-features
	$(BIN)/python -m pytest -q tests/python
	$(BIN)/python tests/mutants.py

# The blocks of README and docs in a new environment, which has the wheel in dist with the extras that they name.
test-blocks:
	$(PYTHON) tests/python/blocks.py dist/specrs-*.whl

# On a machine with a GPU; the build is the checkout's own. `tests/gpu/run.sh WHEEL` needs neither cargo nor a network.
gpu-test: $(VENV)/.built
	PYTHON=$(CURDIR)/$(BIN)/python tests/gpu/run.sh

bench: $(VENV)/.built
	cargo bench
	$(BIN)/python benches/run.py

# Tests, benches and examples have no features of their own: clippy reads them once, and the library as it is built with
# each set. No lint needs a compiled kernel.
lint: $(VENV)/.built
	cargo fmt --check
	SPECRS_NO_CUDA=1 cargo clippy --all-targets --features python,cuda -- -D warnings
	cargo clippy --features python -- -D warnings
	cargo clippy --no-default-features -- -D warnings
	SPECRS_NO_CUDA=1 RUSTDOCFLAGS="-D warnings" cargo doc --no-deps --features cuda
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The docstrings of python/specrs/_specrs.pyi, from the built module.
stubs: $(VENV)/.built
	$(BIN)/python tests/python/stub.py

# The table of attention backends in the README, from their classes.
backends-table: $(VENV)/.built
	$(BIN)/python -m specrs.backends README.md

# The table of engine options in docs/options.md, from python/specrs/engine_options.py.
options-table: $(VENV)/.built
	$(BIN)/python -m specrs.engine_options docs/options.md

# The tables of draft heads in docs/models.md, from python/specrs/models/head_forms.py.
heads-table: $(VENV)/.built
	$(BIN)/python -m specrs.models.head_table docs/models.md

# The drawings of docs/faults.md.
figures: $(VENV)/.built
	for id in 27338 27360 23037 26972 26738; do $(BIN)/specrs layout --fault $$id -o docs/faults/$$id.svg || exit 1; done

# The playground in docs/playground.md; needs Chromium (see CONTRIBUTING).
screenshot: $(VENV)/.built
	$(BIN)/python tests/python/screenshot.py docs/playground.png

# The build requirements bring nvcc; a wheel without kernels is refused. maturin's PEP 517 half checks no compatibility
# unless it is told to, whatever pyproject.toml says.
wheel:
	SPECRS_REQUIRE_CUDA=1 MATURIN_PEP517_ARGS="--compatibility $(COMPATIBILITY)" $(PYTHON) -m pip wheel --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) $(NVCC_ENV) target dist

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip "maturin>=1.9,<2"

# nvcc stands apart: torch's own CUDA packages must not meet it (see CONTRIBUTING).
$(NVCC_ENV)/.installed:
	$(PYTHON) -m venv $(NVCC_ENV)
	$(NVCC_ENV)/bin/python -m pip install --quiet "cuda-toolkit[nvcc,cccl]==13.0.*"
	touch $@

$(VENV)/.built: $(BIN)/python $(NVCC_ENV)/.installed $(SOURCES)
	NVCC="$(NVCC)" VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/maturin develop --release --extras $(EXTRAS)
	touch $@
