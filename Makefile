# Commands of the project. Kernels: OXMOE_CUDA_ARCHS="80;90a;100f;120f" (default), "90a" for quick work, "none" for the CPU backend.
PYTHON ?= python3
VENV := $(CURDIR)/.venv-test
DEMO := $(CURDIR)/.venv-demo
BIN := $(VENV)/bin
# What differs for the older SGLang that is served: a folder before the environment's own packages on the path.
OLD_SGLANG := tests/requirements-sglang-0.5.12.post1.txt
# Peers whose code the tests of layouts read, in a folder too.
PEERS := tests/requirements-peers.txt
CUDA_SOURCES = $(shell git ls-files 'csrc/*.cuh' 'csrc/*.cu' 'tests/*.c')

# pip builds in the same folders as cargo, so only what changed is compiled again.
export CARGO_TARGET_DIR := $(CURDIR)/target
export OXMOE_KERNEL_CACHE ?= $(CURDIR)/target/kernels

# cargo without kernels: lints and Rust tests need neither nvcc nor a GPU. Tests link Python without calling it: with libpython where it is
# installed (Debian: python3-dev), else with a library of nothing but the names: the module's, and those that pyo3 adds without abi3.
LIBPYTHON = $(shell $(PYTHON) -c 'import sysconfig; print(sysconfig.get_config_var("LIBDIR"))')
PYTHON_NAMES := $(CURDIR)/target/python-names
CARGO = OXMOE_CUDA_ARCHS=none PYO3_PYTHON=$(BIN)/python LIBRARY_PATH=$(PYTHON_NAMES):$$LIBRARY_PATH \
	LD_LIBRARY_PATH=$(LIBPYTHON):$(PYTHON_NAMES):$$LD_LIBRARY_PATH cargo

.PHONY: help venv install python-names demo test wheel lint stubs fmt gpu-test bench sanitize mutants mutants-rust clean

help:
	@sed -n 's/^\([a-z-]*\):.*## /\1	/p' $(MAKEFILE_LIST)

$(VENV)/.made: tests/requirements.txt tests/requirements-sglang.txt $(OLD_SGLANG) $(PEERS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -r tests/requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps -r tests/requirements-sglang.txt
	rm -rf $(VENV)/sglang-0.5.12.post1 $(VENV)/peers
	$(BIN)/python -m pip install --quiet --no-deps --target $(VENV)/sglang-0.5.12.post1 -r $(OLD_SGLANG)
	$(BIN)/python -m pip install --quiet --no-deps --target $(VENV)/peers -r $(PEERS)
	touch $@

venv: $(VENV)/.made ## .venv-test with everything that tests and linters need

install: venv ## build and install the package there
	$(BIN)/python -m pip install --quiet --no-deps .

demo: ## one real layer on this machine's GPU or CPU, checked and timed, in .venv-demo
	$(PYTHON) -m venv $(DEMO)
	$(DEMO)/bin/python -m pip install --quiet numpy $(if $(shell command -v nvidia-smi),torch) .
	$(DEMO)/bin/python -m oxmoe demo

python-names: install
	mkdir -p $(PYTHON_NAMES)
	(printf '%s\n' Py_InitializeEx PyType_GetName PyType_GetQualName _Py_Dealloc; nm -D --undefined-only $(VENV)/lib/python3*/site-packages/oxmoe/_oxmoe*.so | awk '$$2 ~ /^_?Py/ {print $$2}') \
		| sort -u | sed 's/.*/char &[64];/' | $(CC) -shared -x c - -o \
		$(PYTHON_NAMES)/libpython$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_config_var("LDVERSION"))').so

test: lint stubs python-names ## lints, stubs, Rust tests, Python tests that need no GPU
	$(CARGO) test
	PYTHONPATH=$(VENV)/sglang-0.5.12.post1 $(BIN)/python -m pytest -m "not gpu and not multi_gpu" $(wildcard tests/test_sglang*.py)
	PYTHONPATH=$(VENV)/peers $(BIN)/python -m pytest -m "not gpu and not multi_gpu" tests/test_quantize.py tests/test_mxfp4_layouts.py
	$(BIN)/python -m pytest -m "not gpu and not multi_gpu"

wheel: ## abi3 wheel in .wheel/
	$(PYTHON) -m pip wheel --no-deps --wheel-dir .wheel .

lint: venv ## formatting and lints of all three languages
	cargo fmt --check
	$(CARGO) clippy --all-targets -- -D warnings
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CUDA_SOURCES)

stubs: install ## _oxmoe.pyi against the module
	$(BIN)/python -m mypy.stubtest oxmoe._oxmoe --concise --allowlist tests/stub_exceptions.txt

fmt: venv ## format everything
	cargo fmt
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CUDA_SOURCES)

gpu-test: install ## tests that need GPUs
	$(BIN)/python -m pytest -m "gpu or multi_gpu"
	OXMOE_PORTABLE=1 $(BIN)/python -m pytest -m gpu tests/test_moe.py tests/test_mxfp4.py tests/test_e4m3_portable_gpu.py

bench: install ## times against the roofline floor and the peers that are installed
	$(BIN)/python -m oxmoe bench

TOOL ?= memcheck
sanitize: install ## GPU tests under compute-sanitizer; TOOL=memcheck, racecheck, initcheck or synccheck
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $(TOOL) --error-exitcode 1 $(BIN)/python -m pytest -m gpu -x

MUTANTS ?=
mutants: install ## changes Python in small ways and lists the changes that no test notices; MUTANTS="oxmoe.masked*" for some of them
	$(BIN)/python -m pip install --quiet --upgrade --target $(VENV)/mutmut -r tests/requirements-mutants.txt
	PYTHONPATH=$(VENV)/mutmut tests/mutants.sh $(BIN)/python $(VENV)/lib/python3*/site-packages/oxmoe/_oxmoe*.so $(MUTANTS)

mutants-rust: python-names ## the same of Rust, with cargo-mutants (cargo install --locked cargo-mutants); MUTANTS="--file src/quant/e2m1.rs"
	env -u CARGO_TARGET_DIR $(CARGO) mutants --output target $(MUTANTS)

clean: ## remove every build result and environment
	cargo clean
	rm -rf $(VENV) $(DEMO) .wheel .pytest_cache .ruff_cache .mypy_cache
