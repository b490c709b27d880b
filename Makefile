# Everything runs in a virtual environment of its own, .venv in this checkout; the first target makes it.
#   PYTHON       the interpreter that makes it (3.11 or newer)
#   TORCH_INDEX  where torch comes from, if not from pip's usual index. The usual index serves the CUDA build: on a
#                machine without a GPU, save 3 GB with
#                make test TORCH_INDEX=https://download.pytorch.org/whl/cpu
#   WORKERS      processes that run the tests, one thread each
PYTHON ?= python3
TORCH_INDEX ?=
WORKERS ?= 2

TORCH := torch==2.13.0
# Tests compare with these. They ask for more than their parts need that we compare with: OpenCV with windows, a cluster.
PUBLISHERS := mmpretrain mmengine mmcv-lite kserve
# ExecuTorch with what its exporter and runtime import; the rest that it asks for is for other devices' exporters.
EXECUTORCH := executorch torchao ruamel.yaml tabulate
BIN := .venv/bin
STAMP := .venv/.installed
PUBLISHING := .venv/.publishing
PYTEST := OMP_NUM_THREADS=1 MAKEFLAGS= $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# pip compiles no module: most are never imported.
PIP := $(BIN)/python -m pip install --no-compile --disable-pip-version-check --constraint constraints.txt
# Keep compiled modules whatever the environment says: else each worker and each command compiles all of them again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test test-all nightly quick-tests all-tests slow-tests kernels dry-run faults releases fuzz test-cpus lint pins dist site clean
.DEFAULT_GOAL := help

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1	/p' Makefile

demo: $(STAMP)  ## train, calibrate and score a micro Swin on handwritten digits (results in out/demo)
	$(BIN)/swin-quant demo --output out/demo

# mypy runs on one core, so tests run beside it.
test: $(STAMP)  ## lint, and every test but slow ones: a few minutes
	@$(MAKE) --no-print-directory --jobs 2 lint quick-tests

test-all: $(STAMP)  ## lint, and every test but nightly ones: what CI runs
	@$(MAKE) --no-print-directory --jobs 2 lint all-tests

quick-tests:
	$(PYTEST) -m "not slow and not kernels and not nightly"

slow-tests: $(STAMP)  ## measure which tests are slow, and list them in tests/slow.txt
	$(PYTEST) -m "not nightly" --durations=0 --durations-min=0.4 | $(BIN)/python tools/slow_tests.py

all-tests:
	$(PYTEST) -m "not nightly"

kernels: $(STAMP)  ## every test of the CUDA engine, its kernels with more random operands: after a change of them
	KERNEL_DRAWS=10 $(PYTEST) tests/backends/cuda

dry-run: $(STAMP)  ## every step of scripts/gpu_check.sh without a GPU, a quarter of an hour
	PYTHON=$(BIN)/python scripts/gpu_check.sh --device cpu --seconds 1700

faults: CASES ?= 96
faults: $(STAMP)  ## CASES random faults of ranks under every launcher, and of disks (docs/results/faults.md); an hour
	OMP_NUM_THREADS=1 FAULT_CASES=$(CASES) FAULT_TABLE=docs/results/faults.md $(BIN)/python -m pytest tests/nightly/faults

releases: FORM ?= whole
releases: $(STAMP)  ## our files on the releases of ONNX Runtime and OpenVINO of three years, an hour; FORM=short: oldest, middle, newest
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/releases.py --form $(FORM) $(if $(filter short,$(FORM)),--output out/releases/short.md)

fuzz: CASES ?= 5000
fuzz: $(STAMP)  ## CASES damaged files for every parser (docs/results/reliability.md); half an hour
	OMP_NUM_THREADS=1 $(BIN)/python tests/nightly/fuzz/run.py --cases $(CASES) --table docs/results/reliability.md

test-cpus: $(STAMP)  ## the arithmetic tests on imitated CPUs: other makers, older ones; FORM=short: a minute of it, FORM=demo: the demo
	WORKERS=$(WORKERS) $(BIN)/python tests/nightly/cpus.py $(FORM)

lint: $(STAMP)  ## ruff: style and format; mypy: types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

HASHED := --universal --python-version 3.11 --generate-hashes --no-annotate --no-header --quiet \
	$(addprefix --extra ,demo onnx openvino executorch cuda data serve) --constraint constraints.txt
pins:  ## requirements.txt, the pins with hashes, from constraints.txt; needs uv
	echo hatchling | uv pip compile pyproject.toml - $(HASHED) > .requirements.tmp
	{ sed -n 's/^# requirements.txt: /# /p' Makefile; cat .requirements.tmp; } > requirements.txt
	rm .requirements.tmp
# requirements.txt: The versions of constraints.txt with the hashes of their files, for all extras but those of tests.
# requirements.txt: `make pins` writes it. It covers all that PyPI has of them: Python 3.11 and newer, Linux, macOS and Windows.
# requirements.txt: torch is PyPI's, which on Linux is for CUDA; builds of download.pytorch.org have other hashes.
# requirements.txt: Use it by
# requirements.txt:     pip install --require-hashes -r requirements.txt
# requirements.txt:     pip install --no-deps --no-build-isolation -e .

clean:  ## remove builds, caches and the demo's output; delete .venv by hand for a fresh start
	rm -rf build dist out/demo .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +

# torch comes first and alone (--no-deps): TORCH_INDEX need not hold our pins of what torch needs, and no later
# requirement can drag in another build of it.
$(STAMP): pyproject.toml constraints.txt swin_quant/base/__init__.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
		"swin-quant needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) --no-deps $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	$(PIP) hatchling
	$(PIP) --no-build-isolation --editable '.[dev]'
	$(PIP) --no-deps $(PUBLISHERS) $(EXECUTORCH)
	rm -rf $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tests  # model-index's, which hide ours
	touch $@

nightly: $(STAMP)  ## what is too slow for CI (faults, damaged files, other CPUs, all kernels), or needs ray
	$(PIP) --quiet --no-build-isolation --editable '.[ray]'
	$(PYTEST) tests/nightly
	$(PYTEST) -m nightly
	@$(MAKE) --no-print-directory kernels test-cpus releases FORM=short

# One installation for both, which may run side by side.
$(PUBLISHING): $(STAMP)
	$(PIP) --quiet --no-build-isolation --editable '.[docs,release]'
	touch $@

dist: $(PUBLISHING)  ## sdist and wheel, checked, in dist/
	rm -rf dist
	$(BIN)/python -m hatchling build -d dist
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl

site: $(PUBLISHING)  ## the documents as a site, links checked, in build/site
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(BIN)/python -m mkdocs build --quiet
