# `make help` lists what there is. Set-up needs Rust, Python ≥ 3.11 and a network, and is done by whichever target
# needs it; stamps in .venv make the second run quick.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

VENV := $(CURDIR)/.venv
PY := $(VENV)/bin/python
STAMPS := $(VENV)/.stamps
SITE := $(CURDIR)/.out/site
STAGE := scripts/stage
ARGS ?=

RUST_SOURCES := Cargo.toml $(wildcard Cargo.lock) $(shell find rust -name '*.rs' -o -name Cargo.toml)
PYTHON_SOURCES := $(shell find python -name '*.py' -o -name '*.pyi' -o -name py.typed)

# One interpreter for all that builds against Python: another one would compile the binding again at every change.
export PYO3_PYTHON := $(PY)
export VIRTUAL_ENV := $(VENV)
unexport CONDA_PREFIX PYTHONPATH PYTHONHOME
# On a build machine the lock file must fit as it is, nothing is compiled twice, and every failure is wanted at once.
LOCKED := $(if $(CI),--locked)
NEXTEST_PROFILE := $(if $(CI),ci,default)
ifdef CI
export CARGO_INCREMENTAL := 0
endif

.PHONY: help setup develop demo test chaos lint fuzz bench wheel clean distclean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: develop ## Train two models with four unequal workers beside a single process (ARGS="--json FILE" and others)
	@$(VENV)/bin/offbeat demo $(ARGS)

test: lint $(STAMPS)/nextest ## Run everything that is checked, cheap things first
	@if cargo nextest --version >/dev/null 2>&1; then \
		$(STAGE) "Rust tests" cargo nextest run $(LOCKED) --workspace --profile $(NEXTEST_PROFILE); \
	else \
		$(STAGE) "Rust tests" cargo test $(LOCKED) --workspace --lib --bins --tests; \
	fi
	@$(STAGE) "Rust documentation's examples" cargo test $(LOCKED) --workspace --doc --quiet
	@$(STAGE) "interleavings (loom)" scripts/loom $(LOCKED)
	@$(STAGE) "build the extension and the wheel" $(MAKE) --no-print-directory develop wheel
	@$(STAGE) "stub against extension (stubtest)" $(PY) -m mypy.stubtest offbeat._offbeat --mypy-config-file pyproject.toml
	@$(STAGE) "Python tests that watch the clock" $(PY) -m pytest -m alone
	@# Three for two cores: many wait for a lease or for another process, and not for a processor.
	@$(STAGE) "Python tests, three at a time" \
		$(PY) -m pytest -m "not alone" --numprocesses 3 --dist loadfile --max-worker-restart 0

chaos: develop ## Break networks, workers, servers and disks in every way that is known; `make test` tries some
	@OFFBEAT_SEEDS=$${OFFBEAT_SEEDS:-2000} $(STAGE) "runs that break by seeds" \
		cargo test $(LOCKED) --package offbeat-net --test chaos -- --nocapture
	@OFFBEAT_SEEDS=$${OFFBEAT_SEEDS:-20000} $(STAGE) "simulated runs by seeds" \
		cargo test $(LOCKED) --package offbeat-core --test simulation -- --nocapture
	@$(STAGE) "faults of networks, processes and disks" $(PY) -m pytest tests/python/chaos tests/python/integration/test_recovery.py --every-fault -raP $(ARGS)

lint: $(STAMPS)/tools ## Formats, lints, types and layers; builds no wheel
	@$(STAGE) "Rust format" cargo fmt --all --check
	@$(STAGE) "Rust format of the fuzz targets" cargo fmt --manifest-path fuzz/Cargo.toml --check
	@$(STAGE) "Python format" $(VENV)/bin/ruff format --check .
	@$(STAGE) "Python lints (ruff)" $(VENV)/bin/ruff check .
	@PYTHONPATH=python $(STAGE) "Python layers (import-linter)" $(VENV)/bin/lint-imports --no-cache --no-logo
	@$(STAGE) "types of the package (mypy)" $(VENV)/bin/mypy
	@$(STAGE) "types of the examples (mypy)" $(VENV)/bin/mypy examples
	@$(STAGE) "types of the examples (pyright)" $(VENV)/bin/basedpyright
	@$(STAGE) "Rust lints (clippy)" cargo clippy $(LOCKED) --workspace --all-targets -- -D warnings

fuzz: $(STAMPS)/fuzz ## Run every fuzz target for FUZZ_SECONDS (60) each; a crash fails
	@$(STAGE) "fuzzing" scripts/fuzz $(ARGS)

bench: wheel ## Measure the crates, then the release wheel as installed, beside its peers
	@rm -rf $(SITE) && $(PY) -m pip install --quiet --no-deps --target $(SITE) dist/offbeat-*.whl
	@$(STAGE) "crates (criterion)" cargo bench $(LOCKED) --workspace
	@PYTHONPATH=$(SITE) $(STAGE) "wheel and peers" $(PY) benches/run.py $(ARGS)

wheel: $(STAMPS)/wheel ## Build the release wheel into dist/

setup: $(STAMPS)/tools ## Make .venv and install the tools, nothing more

develop: $(STAMPS)/extension ## Build the release extension and install the package, editable, into .venv

clean: ## Remove what was built
	rm -rf target dist .out python/offbeat/*.so .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -f $(STAMPS)/extension $(STAMPS)/wheel

distclean: clean ## And the virtual environment
	rm -rf .venv

$(STAMPS)/tools: pyproject.toml scripts/make-venv scripts/setup-machine
	@$(STAGE) "set up the machine" scripts/setup-machine
	@$(STAGE) "set up .venv" scripts/make-venv
	@mkdir -p $(@D) && touch $@

$(STAMPS)/nextest: scripts/setup-nextest $(STAMPS)/tools
	@$(STAGE) "set up cargo-nextest" scripts/setup-nextest
	@touch $@

$(STAMPS)/fuzz: scripts/setup-fuzz $(STAMPS)/tools
	@$(STAGE) "set up cargo-fuzz" scripts/setup-fuzz
	@touch $@

# Python's own files are used where they lie, so only Rust's make this stale.
$(STAMPS)/extension: $(STAMPS)/tools $(RUST_SOURCES)
	@PIP_QUIET=1 $(STAGE) "build the Rust core (takes minutes where nothing is built yet)" \
		$(VENV)/bin/maturin develop --release --quiet $(LOCKED)
	@touch $@

$(STAMPS)/wheel: $(STAMPS)/tools $(RUST_SOURCES) $(PYTHON_SOURCES) README.md LICENSE
	@rm -f dist/offbeat-*.whl
	$(VENV)/bin/maturin build --release --quiet --out dist $(LOCKED)
	@touch $@
