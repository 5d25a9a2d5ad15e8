# One virtual environment, made on first use. PYTHON chooses the interpreter, CMAKE_ARGS llama.cpp's back end
# (for example CMAKE_ARGS="-DGGML_CUDA=on" make demo).
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
LLAMA_CPP_PYTHON := llama-cpp-python==0.3.36
# Another back end is another build: the stamp is named after it, and pip's cached wheel is not taken.
LLAMA_STAMP := $(VENV)/.llama-$(shell printf '%s' "$(CMAKE_ARGS)" | cksum | cut -d' ' -f1)
PIP_FRESH := $(if $(CMAKE_ARGS),--no-cache-dir --force-reinstall)
# On a processor with AMX, for compilers that spoil it; see there.
AMX_FLAGS := $(shell $(CXX) -march=native -dM -E -x c++ /dev/null 2>/dev/null | grep -q __AMX_INT8__ \
	&& echo "-include $(CURDIR)/scripts/amx_tile_config.h")
# $(call install_llama,PYTHON,CMAKE_ARGS,OPTIONS); -v shows the compiler at work.
define install_llama
CFLAGS="$$CFLAGS $(AMX_FLAGS)" CXXFLAGS="$$CXXFLAGS $(AMX_FLAGS)" CMAKE_ARGS="$(2)" \
	$(1) -m pip install -v $(3) $(LLAMA_CPP_PYTHON) 2>&1 | $(PY) scripts/install_progress.py
endef
# llama.cpp RPC, a peer of the benchmarks, needs a build of its own.
RPC_VENV ?= .venv-rpc
NATIVE_SOURCES := $(wildcard src/ext/*) CMakeLists.txt $(wildcard third_party/llama.cpp/*.cmake) pyproject.toml

.PHONY: help demo test test-models isolation recovery lint format bench certify stubs clean
help:
	@echo "make demo         fetch a small model, split it in two, ask it something"
	@echo "make test         all tests, a real model included"
	@echo "make test-models  tests with further real models (downloads about 250 MB once)"
	@echo "make isolation    random mixes of sessions against each alone, bit for bit (ROUNDS=50, takes long)"
	@echo "make recovery     stages killed at random moments under eight streams (ROUNDS=50, takes long)"
	@echo "make lint         format, types, imports"
	@echo "make bench        benchmarks against llama.cpp, about 30 minutes (compiles llama.cpp once more, with RPC)"
	@echo "make certify MODELS=DIR   prove architectures exact, write docs/architectures.md"

$(VENV)/.python:
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade pip
	@touch $@

# llama.cpp is compiled here, once; pip keeps the wheel.
$(LLAMA_STAMP): $(VENV)/.python
	@echo "== installing $(LLAMA_CPP_PYTHON) (compiles llama.cpp the first time: several minutes) =="
	@$(call install_llama,$(PY),$(CMAKE_ARGS),$(PIP_FRESH))
	@rm -f $(VENV)/.llama-*
	@touch $@

$(VENV)/.package: $(LLAMA_STAMP) $(NATIVE_SOURCES)
	@echo "== installing skippy-zmq =="
	$(PY) -m pip install --quiet "scikit-build-core>=0.10" "nanobind>=2.4" "cmake>=3.26" "ninja>=1.11"
	$(PY) -m pip install --quiet --no-build-isolation --config-settings=editable.mode=redirect -e ".[dev]"
	@$(PY) scripts/kernels_run.py || { echo "== compiling llama.cpp again: pip kept one that was not made by this ==" && \
		{ $(PY) -m pip cache remove --quiet llama_cpp_python || true; } && \
		$(call install_llama,$(PY),$(CMAKE_ARGS),--force-reinstall --no-deps) && $(PY) scripts/kernels_run.py; }
	@touch $@

demo: $(VENV)/.package
	$(PY) -m skippy_zmq.demo

test: $(VENV)/.package
	$(PY) -m pytest -m "not test_models"

test-models: $(VENV)/.package
	$(PY) -m pytest -m test_models

# Every round is a random mix of eight streams, compared bit for bit with each session alone; about 20 s a round.
ROUNDS ?= 50
isolation: $(VENV)/.package
	SKIPPY_ISOLATION_ROUNDS=$(ROUNDS) $(PY) -m pytest tests/test_isolation.py --timeout=7200 -v

# Every round kills one stage or two under eight streams and compares every answer; some seconds a round.
recovery: $(VENV)/.package
	SKIPPY_KILL_ROUNDS=$(ROUNDS) $(PY) -m pytest tests/test_recovery_rounds.py --timeout=7200 -v

lint: $(VENV)/.package
	$(PY) -m ruff format --check skippy_zmq tests bench scripts
	$(PY) -m ruff check skippy_zmq tests bench scripts
	$(PY) -m mypy
	$(VENV)/bin/clang-format --dry-run --Werror src/ext/*.cpp src/ext/*.h
	$(VENV)/bin/lint-imports
	$(PY) scripts/stubs.py --check

format: $(VENV)/.package
	$(PY) -m ruff format skippy_zmq tests bench scripts
	$(PY) -m ruff check --fix skippy_zmq tests bench scripts
	$(VENV)/bin/clang-format -i src/ext/*.cpp src/ext/*.h

stubs: $(VENV)/.package
	$(PY) scripts/stubs.py

$(VENV)/.bench: $(VENV)/.package
	@echo "== installing what the benchmarks need =="
	$(PY) -m pip install --quiet --no-build-isolation --config-settings=editable.mode=redirect -e ".[dev,bench]"
	@touch $@

# --no-cache-dir: pip would take the wheel without RPC that it keeps from above.
$(RPC_VENV)/.llama: | $(VENV)/.python
	@echo "== installing $(LLAMA_CPP_PYTHON) with RPC (compiles llama.cpp once more: several minutes) =="
	$(PYTHON) -m venv $(RPC_VENV)
	@$(call install_llama,$(RPC_VENV)/bin/python,$(CMAKE_ARGS) -DGGML_RPC=ON,--no-cache-dir)
	@touch $@

bench: $(VENV)/.bench $(RPC_VENV)/.llama
	@mkdir -p bench/results
	BENCH_RPC_VENV=$(RPC_VENV) $(PY) -m pytest bench --timeout=900 --benchmark-json=bench/results/pytest-benchmark.json

certify: $(VENV)/.package
	@test -n "$(MODELS)" || { echo "give the models: make certify MODELS=DIR"; exit 2; }
	$(PY) -m skippy_zmq.certify $(MODELS) --table docs/architectures.md --names skippy_zmq/certified.json

clean:
	rm -rf $(VENV) $(RPC_VENV) build
