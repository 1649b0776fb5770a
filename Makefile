# Every job of the project, each from a fresh clone: `make demo`, `make test`, `make lint`, ...
#
# Needs: Python 3.11 or newer, a C++20 compiler, PyPI. Everything else goes into .venv, which is
# made on first use. Python sources are used in place (editable install); the C++ extension is
# rebuilt when anything under csrc/ or a build file has changed.
#
#   make test PYTHON=python3.12          another interpreter (.venv is then made anew)
#   make demo ARGS="--steps 100"         arguments for the job
#   make test ARGS="-k hadamard"

VENV := .venv
# Without PYTHON=, an existing .venv keeps its interpreter.
PYTHON ?= $(if $(wildcard $(VENV)/.python-*),$(VENV)/bin/python,python3)
ARGS ?=

PYTHON_VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null)
PYTHON_OK := $(shell $(PYTHON) -c 'import sys; print(1 if sys.version_info >= (3, 11) else "")' 2>/dev/null)
PYTHON_ERROR = PYTHON=$(PYTHON) is \
  $(if $(PYTHON_VERSION),Python $(PYTHON_VERSION),not a working Python), but Python 3.11 or newer is \
  needed. Name one: make $(MAKECMDGOALS) PYTHON=python3.12

BIN := $(VENV)/bin
NATIVE_SOURCES := pyproject.toml CMakeLists.txt $(shell find csrc -type f)
CXX_FILES = $(shell find csrc tests -name '*.h' -o -name '*.cc' -o -name '*.cu')

.PHONY: help demo test test-device test-slow test-kernels test-foreign test-checkpoints test-maxtext test-mutation test-matrix test-asan test-fuzz lint format bench wheel clean
.DEFAULT_GOAL := help

help:
	@sed -n '/^# Every/,/^$$/s/^# \{0,1\}//p' Makefile
	@echo 'Targets: demo test test-device test-slow test-kernels test-foreign test-checkpoints test-maxtext test-mutation test-matrix test-asan test-fuzz lint format bench wheel clean'

demo: $(VENV)/.installed
	$(BIN)/python -m jax_fp4 demo $(ARGS)

# The whole quick suite. A test that cannot run here is an error, not a skip. With ARGS, which may
# choose tests of the first part only, the second is left out.
test: $(VENV)/.test
	JAX_FP4_REQUIRE_ALL=1 $(BIN)/python -m pytest -n 2 $(ARGS)
	$(if $(ARGS),,$(MAKE) test-device)

# The GPU handlers: JAX's CPU platform, with two devices, runs the kernels in the PTX machine.
test-device: $(VENV)/.test
	JAX_FP4_REQUIRE_ALL=1 JAX_FP4_DRIVER=sim XLA_FLAGS=--xla_force_host_platform_device_count=2 \
	  $(BIN)/python -m pytest -n 2 -m device $(ARGS)

test-slow: $(VENV)/.test
	JAX_FP4_REQUIRE_ALL=1 $(BIN)/python -m pytest -m slow --timeout 7200 $(ARGS)

# A million cases of every MMA against MMA-Sim, GEMMs that CuTe-DSL compiles, and whatever else runs long
# against programs of others.
test-foreign: $(VENV)/.foreign
	JAX_FP4_REQUIRE_ALL=1 $(BIN)/python -m pytest -m foreign --timeout 7200 $(ARGS)

# Checkpoints saved by ModelOpt and compressed-tensors, and ours loaded by them and by transformers, in
# an environment of its own.
test-checkpoints:
	$(MAKE) VENV=.venv-checkpoints .venv-checkpoints/.peers
	JAX_FP4_REQUIRE_ALL=1 .venv-checkpoints/bin/python -m pytest -m checkpoints --timeout 7200 $(ARGS)

# MaxText trains on virtual CPU devices, in an environment of its own: make test-maxtext PYTHON=python3.12
test-maxtext:
	$(MAKE) VENV=.venv-maxtext .venv-maxtext/.maxtext
	JAX_FP4_REQUIRE_ALL=1 .venv-maxtext/bin/python -m pytest -m maxtext --timeout 7200 $(ARGS)

# Mutants of our kernels and of those that Triton compiles: exactly the derived ones survive.
test-mutation: $(VENV)/.test
	JAX_FP4_REQUIRE_ALL=1 $(BIN)/python -m pytest -m mutation -s --timeout 7200 $(ARGS)

# Every kernel on every chip of the PTX machine, at every size; `make test` takes a sample.
test-kernels: $(VENV)/.test
	JAX_FP4_REQUIRE_ALL=1 $(BIN)/python -m pytest -n 2 -m kernels --timeout 7200 $(ARGS)

# One wheel per Python, tested with the oldest and the newest jax that this Python gets.
test-matrix:
	.ci/matrix $(ARGS)

# The C++ code under AddressSanitizer and UndefinedBehaviorSanitizer.
test-asan: $(VENV)/.python-$(PYTHON_VERSION)
	PYTHON=$(BIN)/python .ci/asan $(ARGS)

# The PTX machine's parser and its execution, 10 minutes each, under the sanitizers.
test-fuzz: $(VENV)/.python-$(PYTHON_VERSION)
	FUZZ_SECONDS=$(or $(SECONDS),600) PYTHON=$(BIN)/python .ci/asan

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)
	$(BIN)/codespell
	PYTHONPATH=python $(BIN)/lint-imports
	$(BIN)/basedpyright --pythonpath $(BIN)/python

# Rewrites the files as `make lint` wants them.
format: $(VENV)/.lint
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

# Beside the implementations of others; table, plots and report.html come to out/bench.
bench: $(VENV)/.bench
	$(BIN)/python -m jax_fp4 bench --report out/bench $(ARGS)

# A wheel with all kernel images, tried in an environment without a compiler.
wheel: $(VENV)/.python-$(PYTHON_VERSION)
	PYTHON=$(BIN)/python .ci/wheel

clean:
	rm -rf $(VENV) .venv-* build dist out .pytest_cache .hypothesis .ruff_cache .import_linter_cache
	find csrc python tests -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# A stamp is written last, so that an interrupted step runs again. The interpreter's version is part
# of the name: another PYTHON makes another environment.
$(VENV)/.python-$(PYTHON_VERSION):
	$(if $(PYTHON_OK),,$(error $(PYTHON_ERROR)))
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.installed: $(VENV)/.python-$(PYTHON_VERSION) $(NATIVE_SOURCES)
	@echo 'Setting up $(VENV) and compiling the CPU backend: a few minutes.'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[demo]'
	touch $@

# What tests need beyond the package; the demo does without.
$(VENV)/.test: $(VENV)/.installed pyproject.toml
	$(BIN)/python .ci/requirements test > $(VENV)/test.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement $(VENV)/test.txt
	touch $@

# The peers that `make bench` measures, and what draws its plots.
$(VENV)/.bench: $(VENV)/.installed pyproject.toml
	$(BIN)/python .ci/requirements bench > $(VENV)/bench.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement $(VENV)/bench.txt
	touch $@

# Compilers and kernels of others that only `make test-foreign` needs.
$(VENV)/.foreign: $(VENV)/.test
	$(BIN)/python .ci/requirements test foreign > $(VENV)/foreign.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement $(VENV)/foreign.txt
	touch $@

# What `make test-checkpoints` needs.
$(VENV)/.peers: $(VENV)/.installed
	$(BIN)/python .ci/requirements checkpoint checkpoint-peers > $(VENV)/peers.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement $(VENV)/peers.txt
	touch $@

# What `make test-maxtext` needs.
$(VENV)/.maxtext: $(VENV)/.installed
	$(if $(filter 3.11.%,$(PYTHON_VERSION)),$(error MaxText needs Python 3.12 or newer, and $(PYTHON) is \
	  $(PYTHON_VERSION). Name one: make test-maxtext PYTHON=python3.12))
	$(BIN)/python .ci/requirements maxtext maxtext-peers > $(VENV)/maxtext.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement $(VENV)/maxtext.txt
	touch $@

# The linters and what the type checker must see, without building the extension.
$(VENV)/.lint: $(VENV)/.python-$(PYTHON_VERSION) pyproject.toml
	$(BIN)/python .ci/requirements demo flax qwix lint > $(VENV)/lint.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement $(VENV)/lint.txt
	touch $@
