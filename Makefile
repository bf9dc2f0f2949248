# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
# make run: the main job; make test: the CPU test suite; make test-gpu: what it leaves to
# an NVIDIA GPU; make lint: the linter.
# Each sets up .venv where needed (minutes the first time); ARGS go to the command.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
LINTER := .venv/.linter
SOURCE := .venv/vllm-source

.PHONY: run test test-gpu test-launches test-codegen test-grids test-processes test-patched test-external test-stock mutants lint codegen-latest wheel gpu-report

run: $(INSTALLED)
	$(BIN)/vllm-sparse-mla check $(ARGS)

test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

# On Hopper masked MHA has to be asked for; elsewhere the switch changes no dispatch.
test-gpu: export VLLM_SPARSE_MLA_SM90 = 1
test-gpu: $(INSTALLED)
	$(BIN)/python -m pytest --gpu -rs $(ARGS)

# Each launch of docs/launches.md, stock, patched and opt-in, three launches at a time.
test-launches: $(INSTALLED)
	$(BIN)/python -m pytest --gpu -m extra -rs -n 3 tests/serving/test_launches.py $(ARGS)

# What takes minutes more than `make test` should: what kernels compile to, the whole
# grids of the tests of vllm/, what starts vLLM in processes of its own, and the suite
# on a tree with the exported patches applied.
test-codegen: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "codegen or extra" tests/codegen tests/vllm_flash_attn tests/benchmarks $(ARGS)

test-grids: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m grid tests/v1 $(ARGS)

test-processes: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m processes $(ARGS)

test-patched: export VLLM_SOURCE = $(abspath $(SOURCE))
test-patched: $(INSTALLED) $(SOURCE)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m extra tests/upstream $(ARGS)

# vLLM's own tests of what is replaced, from the same distribution, stock and here.
test-external: export VLLM_SOURCE = $(abspath $(SOURCE))
test-external: $(INSTALLED) $(SOURCE)
	$(BIN)/python tests/external/external.py $(ARGS)

# GPU tests and benchmarks on the GPU that is here, and its page in docs/results.
gpu-report: export VLLM_SPARSE_MLA_SM90 = 1
gpu-report: $(INSTALLED)
	$(BIN)/python benchmarks/gpu_report.py $(ARGS)

# The tests that would run in vLLM's own CI, against vLLM without the overlay.
test-stock: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not extra" --stock tests/v1 $(ARGS)

# Changes that a test has to notice, each tried in a copy of the tree; ARGS names some.
mutants: $(INSTALLED)
	$(BIN)/python tests/mutants/mutants.py $(ARGS)

# What is installed beside vLLM: dist/vllm_sparse_mla-*.whl.
wheel: | $(BIN)/pip
	$(BIN)/python -m pip wheel --no-deps -w dist .

# A look ahead: what the masked kernels compile to with the newest FA4 on PyPI.
codegen-latest: $(INSTALLED)
	$(BIN)/vllm-sparse-mla codegen --fa4-from-pypi $(ARGS)

lint: $(LINTER)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Where Debian splits ensurepip off, the pip that is there installs into .venv.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; make PYTHON=... names one"; exit 1; }
	$(PYTHON) -m venv .venv || { \
		$(PYTHON) -m venv --clear --without-pip .venv && \
		$(PYTHON) -m pip --python $(BIN)/python install pip; }

$(INSTALLED): requirements/common.txt requirements/benchmark.txt requirements/test.txt pyproject.toml setup.py \
		| $(BIN)/pip
	@echo "Installing vLLM and what the tests need into .venv"
	$(BIN)/python -m pip install -r requirements/test.txt
	$(BIN)/python -m pip install --no-deps --no-build-isolation -e .
	touch $@

# vLLM's source distribution. pip asks it for its metadata, for which no compiler is
# needed.
$(SOURCE): export VLLM_TARGET_DEVICE = empty
$(SOURCE): | $(INSTALLED)
	version=$$($(BIN)/python -c 'from vllm_sparse_mla.guard import VLLM_VERSION as v; print(v)') && \
	VLLM_VERSION_OVERRIDE=$$version $(BIN)/python -m pip download --no-deps --no-build-isolation \
		--no-binary vllm -d .venv vllm==$$version && \
	mkdir -p $@.part && tar -xzf .venv/vllm-$$version.tar.gz -C $@.part --strip-components 1 && \
	mv $@.part $@

$(LINTER): requirements/lint.txt | $(BIN)/pip
	$(BIN)/python -m pip install -r requirements/lint.txt
	touch $@
