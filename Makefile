# Commands of the project. Kernels: OXMOE_CUDA_ARCHS="80;90a;100f;120f" (default), "90a" for quick work, "none" for the CPU backend.
PYTHON ?= python3
VENV := $(CURDIR)/.venv-test
DEMO := $(CURDIR)/.venv-demo
LINT := $(CURDIR)/.venv-lint
DOCS := $(CURDIR)/.venv-docs
BIN := $(VENV)/bin
# The older SGLang releases that are tested. Each has a file of the packages that differ, which are installed in a folder of its own. That
# folder goes before the environment's packages on the path. The list of these files is the list of releases, for the workflows too.
OLD_SGLANG := $(shell printf '%s\n' $(patsubst tests/requirements-sglang-%.txt,%,$(wildcard tests/requirements-sglang-*.txt)) | sort -V)
OLD_FOLDERS := $(OLD_SGLANG:%=$(VENV)/sglang-%)
SGLANG_TESTS = $(wildcard tests/sglang/test_*.py)
# Differences of releases, for those between the oldest and the newest.
RELEASE_TESTS := $(addprefix tests/sglang/test_sglang_,capabilities.py check_names.py deepseek_v4_model.py handover.py int4.py loading.py missing.py modelopt.py)
# The torch of `make torch-test`. If it is empty, it is the oldest one that oxmoe takes, which pyproject.toml names.
TORCH ?=
OTHER_TORCH = $(or $(TORCH),$(shell sed -n 's/^test = .*"torch>=\([0-9.]*\)".*/\1/p' pyproject.toml))
TORCH_VENV = $(CURDIR)/.venv-torch-$(OTHER_TORCH)
# Peers whose code the tests of layouts read, in a folder of their own, too.
PEERS := tests/requirements-peers.txt
CUDA_SOURCES = $(shell git ls-files 'csrc/*.cuh' 'csrc/*.cu' 'tests/*.c' 'tests/*.h')

# pip builds in the same folders as cargo, so only what changed is compiled again.
export CARGO_TARGET_DIR := $(CURDIR)/target
export OXMOE_KERNEL_CACHE ?= $(CURDIR)/target/kernels
# Bytecode is kept even if the environment asks for none: hundreds of processes import torch or SGLang, and compiling doubles the time of an
# import.
unexport PYTHONDONTWRITEBYTECODE
WHEELS := $(CURDIR)/target/wheels

# Number of test processes beside each other; each has its share of the cores (tests/conftest.py). It is one more than there are cores,
# because some tests wait.
JOBS ?= $(shell n=$$(nproc); echo $$((n < 8 ? n + 1 : 8)))
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not gpu and not multi_gpu and not server"
# Each class starts servers of its own. It stays in one process, and as many servers start at a time as there are processes.
SERVER_TESTS = $(BIN)/python -m pytest -n $(JOBS) --dist loadscope tests/sglang/test_sglang_server.py

# Options of cargo without kernels: lints and Rust tests need neither nvcc nor a GPU. Tests link Python without calling it. They link
# libpython if it is installed (Debian: python3-dev), otherwise a library of nothing but the names: the module's, and those that pyo3 adds
# without abi3.
LIBPYTHON = $(shell $(PYTHON) -c 'import sysconfig; print(sysconfig.get_config_var("LIBDIR"))')
PYTHON_NAMES := $(CURDIR)/target/python-names
CARGO = OXMOE_CUDA_ARCHS=none CARGO_PROFILE_DEV_DEBUG=0 PYO3_PYTHON=$(PYTHON) LIBRARY_PATH=$(PYTHON_NAMES):$$LIBRARY_PATH \
	LD_LIBRARY_PATH=$(LIBPYTHON):$(PYTHON_NAMES):$$LD_LIBRARY_PATH cargo

.PHONY: help venv built install sglangs sglang-test python-names demo test lint-kept rust-test python-test old-sglang-test server-test core-test torch-test wheel lint types stubs fmt gpu-test upstream bench sanitize kernels-diff docs mutants mutants-rust clean

help:
	@sed -n 's/^\([a-z-]*\):.*## /\1	/p' $(MAKEFILE_LIST)

# A newer pip than Python's own one needs half of the time to choose among a project's files. The installations that follow need no more
# than pip, so that they run beside each other. pip compiles the packages of the newest SGLang: otherwise each of the test processes that
# start at a time would. Of torch, the peers and older releases it compiles nothing, because few processes import a small part. (For pip 0
# means yes here, as for all of its variables whose names begin with NO.)
$(VENV)/.pip:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	touch $@

$(VENV)/.made: tests/requirements.txt tests/requirements-lint.txt tests/requirements-pytest.txt tests/requirements-sglang.txt | $(VENV)/.pip
	PIP_NO_COMPILE=0 $(BIN)/python -m pip install --quiet -r tests/requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps -r tests/requirements-sglang.txt
	touch $@

$(VENV)/peers/.made: $(PEERS) | $(VENV)/.pip
	rm -rf $(@D)
	PIP_NO_COMPILE=0 $(BIN)/python -m pip install --quiet --no-deps --target $(@D) -r $<
	touch $@

$(OLD_FOLDERS:=/.made): $(VENV)/sglang-%/.made: tests/requirements-sglang-%.txt | $(VENV)/.pip
	rm -rf $(@D)
	PIP_NO_COMPILE=0 $(BIN)/python -m pip install --quiet --no-deps --target $(@D) -r $<
	touch $@

# `make test` installs once, for all that it starts then.
ifdef INSTALLED
venv built install:
else
venv: $(VENV)/.made $(VENV)/peers/.made ## .venv-test with everything that tests and linters need

built: # the wheel, which needs no environment but pip's own: it is built while .venv-test is made
	rm -rf $(WHEELS)
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir $(WHEELS) .

install: venv $(if $(WHEEL),,built) ## build and install the package there; WHEEL=FILE installs that wheel instead
	$(BIN)/python -m pip install --quiet --no-deps --force-reinstall $(or $(WHEEL),$(WHEELS)/*.whl)
endif

demo: ## one real layer on this machine's GPU or CPU, checked and timed, in .venv-demo
	$(PYTHON) -m venv $(DEMO)
	$(DEMO)/bin/python -m pip install --quiet numpy $(if $(shell command -v nvidia-smi),torch) .
	$(DEMO)/bin/python -m oxmoe demo

python-names: install
	mkdir -p $(PYTHON_NAMES)
	(printf '%s\n' Py_InitializeEx PyType_GetName PyType_GetQualName _Py_Dealloc; nm -D --undefined-only $(VENV)/lib/python3*/site-packages/oxmoe/_oxmoe*.so | awk '$$2 ~ /^_?Py/ {print $$2}') \
		| sort -u | sed 's/.*/char &[64];/' | $(CC) -shared -x c - -o \
		$(PYTHON_NAMES)/libpython$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_config_var("LDVERSION"))').so

sglangs: $(OLD_FOLDERS:=/.made) # the older SGLang releases

# Lints run beside the build and the installations, which wait for the network most of the time. Then types, stubs and Rust tests run beside the
# Python tests. pytest's output is seen as it runs; the output of the others follows in one piece, and a failure of theirs ends it.
test: ## lints, types, stubs, Rust tests, Python tests that need no GPU
	+$(MAKE) --no-print-directory -j 4 install sglangs lint-kept
	+$(MAKE) --no-print-directory -k types stubs rust-test INSTALLED=1 > target/others.log 2>&1 & others=$$!; \
	$(MAKE) --no-print-directory python-test INSTALLED=1; python=$$?; \
	wait $$others; others=$$?; cat target/others.log target/lint.log; exit $$((python != 0 || others != 0 || $$(cat target/lint.status) != 0))

# This keeps the lints' output and status in files, because lints stop no test.
lint-kept:
	mkdir -p target
	$(MAKE) --no-print-directory lint INSTALLED=1 > target/lint.log 2>&1; echo $$? > target/lint.status

rust-test: python-names ## Rust tests
	$(CARGO) test

python-test: install sglangs ## Python tests that need no GPU: the three kinds that follow, one after the other, whatever fails
	$(MAKE) --no-print-directory -k -j 1 old-sglang-test server-test core-test INSTALLED=1

old-sglang-test: install sglangs ## SGLang's tests with its older releases
	PYTHONPATH=$(firstword $(OLD_FOLDERS)) $(PYTEST) $(SGLANG_TESTS)
	printf '%s\n' $(wordlist 2,99,$(OLD_FOLDERS)) | xargs -P $(JOBS) -I{} env PYTHONPATH={} OMP_NUM_THREADS=1 RAYON_NUM_THREADS=1 $(PYTEST) -n 0 $(RELEASE_TESTS)

server-test: install ## whole SGLang servers, on the CPU
	$(SERVER_TESTS)

core-test: install ## all other Python tests, SGLang's with the newest release
	PYTHONPATH=$(VENV)/peers $(PYTEST) tests/formats/test_quantize.py tests/formats/test_mxfp4_layouts.py \
		$(addprefix tests/peers/test_,flashinfer_names.py flashinfer_quantisers.py upstream_layouts.py)
	$(PYTEST)

SGLANG ?=
sglang-test: install $(SGLANG:%=$(VENV)/sglang-%/.made) ## SGLang's tests with one release; SGLANG=0.5.18, empty for the newest
	PYTHONPATH=$(SGLANG:%=$(VENV)/sglang-%) $(PYTEST) $(SGLANG_TESTS)

# SGLang is not installed beside another torch, because each of its releases pins one.
$(TORCH_VENV)/.made: tests/requirements-pytest.txt
	$(PYTHON) -m venv $(TORCH_VENV)
	$(TORCH_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(TORCH_VENV)/bin/python -m pip install --quiet -r $< torch==$(OTHER_TORCH)
	touch $@

torch-test: BIN = $(TORCH_VENV)/bin
torch-test: $(TORCH_VENV)/.made $(if $(WHEEL),,built) ## Python tests without SGLang, with another torch; TORCH=2.10.0, empty for the oldest
	$(BIN)/python -m pip install --quiet --no-deps --force-reinstall $(or $(WHEEL),$(WHEELS)/*.whl)
	$(PYTEST) --ignore tests/sglang

# The wheel's files name neither folders of this machine nor the time, except in the bill of materials that maturin adds.
wheel: ## abi3 wheel in .wheel/, with the same module from the same commit
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) \
	RUSTFLAGS="--remap-path-prefix=$${CARGO_HOME:-$$HOME/.cargo}=cargo --remap-path-prefix=$(CURDIR)=." \
	$(PYTHON) -m pip wheel --no-deps --wheel-dir .wheel .

$(LINT)/.made: tests/requirements-lint.txt
	$(PYTHON) -m venv $(LINT)
	$(LINT)/bin/python -m pip install --quiet -r $<
	touch $@

# Lints need neither torch nor the package: they have a small environment of their own.
lint fmt: BIN := $(LINT)/bin

lint: $(LINT)/.made ## formatting and lints of all three languages
	cargo fmt --check
	$(CARGO) clippy --all-targets -- -D warnings
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CUDA_SOURCES)

types: install ## types of the package
	$(BIN)/python -m mypy

stubs: install ## _oxmoe.pyi against the module
	$(BIN)/python -m mypy.stubtest oxmoe._oxmoe --concise --allowlist tests/stub_exceptions.txt

fmt: $(LINT)/.made ## format everything
	cargo fmt
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CUDA_SOURCES)

gpu-test: install ## tests that need GPUs
	$(BIN)/python -m pytest -m "gpu or multi_gpu"
	OXMOE_PORTABLE=1 $(BIN)/python -m pytest -m gpu tests/core/test_moe.py tests/formats/test_mxfp4.py tests/gpu/test_e4m3_portable_gpu.py

FLASHINFER ?=
FILES ?=
upstream: install ## flashinfer's own tests on oxmoe, on a GPU: FLASHINFER=CHECKOUT, FILES="test_mm_mxfp8" for some of them
	$(BIN)/python tests/upstream/run.py $(FLASHINFER) $(FILES)

bench: install ## times against the roofline floor and the peers that are installed
	$(BIN)/python -m oxmoe bench

TOOL ?= memcheck
sanitize: install ## GPU tests under compute-sanitizer; TOOL=memcheck, racecheck, initcheck or synccheck
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $(TOOL) --error-exitcode 1 $(BIN)/python -m pytest -m gpu -x

BASE ?= HEAD
NEW ?=
KERNELS ?= *
kernels-diff: venv ## machine code of all kernels, BASE against NEW: folders of fatbins or git revisions, NEW the working tree; KERNELS='quantize_*' for some
	$(BIN)/python tests/support/kernels_diff.py --kernels '$(KERNELS)' $(BASE) $(NEW)

$(DOCS)/.made: docs/requirements.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --upgrade -r docs/requirements.txt
	touch $@

docs: $(DOCS)/.made ## the documentation as pages in target/site, API reference included; a broken link is an error
	PATH=$(DOCS)/bin:$$PATH NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --clean

MUTANTS ?=
mutants: install ## changes Python in small ways and lists the changes that no test notices; MUTANTS="oxmoe.rows*" for some of them
	$(BIN)/python -m pip install --quiet --upgrade --target $(VENV)/mutmut -r tests/requirements-mutants.txt
	PYTHONPATH=$(VENV)/mutmut tests/mutants.sh $(BIN)/python $(VENV)/lib/python3*/site-packages/oxmoe/_oxmoe*.so $(MUTANTS)

mutants-rust: python-names ## the same of Rust, with cargo-mutants (cargo install --locked cargo-mutants); MUTANTS="--file src/quant/e2m1.rs"
	env -u CARGO_TARGET_DIR $(CARGO) mutants --output target $(MUTANTS)

clean: ## remove every build result and environment
	cargo clean
	rm -rf $(VENV) $(LINT) $(DEMO) $(DOCS) .venv-torch-* .wheel .pytest_cache .ruff_cache .mypy_cache
