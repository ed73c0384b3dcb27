# Two commands that need nothing but Python >= 3.11 and make:
#   make run    collects 200,000 frames of Pong into data/pong
#   make test   runs the tests
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Tests start hundreds of processes: without cached bytecode each compiles every module that it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install run test test-all test-peers test-lerobot test-openenv test-jax chaos mutants check bench bench-train gpu bench-operator bench-head docs wire constraints clean

help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# uv installs in a minute what takes pip five; it lives inside the venv and leaves nothing behind.
# Compiled bytecode halves the start of every process that imports torch. The marker holds a digest of what was installed: files
# that are newer but the same, as after a checkout, install nothing.
DIGEST = cat pyproject.toml constraints.txt | cksum
$(INSTALLED): pyproject.toml constraints.txt
	@test "$$(cat $@ 2> /dev/null)" = "$$($(DIGEST))" || $(MAKE) --no-print-directory venv
	@$(DIGEST) > $@

.PHONY: venv
venv:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, $(PYTHON) is " + sys.version.split()[0] + "; try make PYTHON=python3.12 ...")'
	@test -x $(BIN)/python || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt uv
	@echo "installing PyTorch with CUDA, Ray, EnvPool and others: 7 GB on disk, about a minute on a fast connection"
	@VIRTUAL_ENV=$(abspath $(VENV)) $(BIN)/uv pip install --quiet --compile-bytecode --constraint constraints.txt --editable '.[dev]'

install: $(INSTALLED) ## Make the virtual environment

run: $(INSTALLED) ## Collect 200,000 frames of Pong (examples/pong-dataset.yaml)
	@$(BIN)/cormorant run examples/pong-dataset.yaml

# Three processes: most tests wait for other processes. A file stays in one of them, with its fixtures; the long files of
# tests/integration come before those of tests/unit.
test: $(INSTALLED) ## Run the tests, without the slow ones
	@$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not slow and not e2e and not gpu" $(PYTEST_ARGS)

test-all: $(INSTALLED) ## Run all tests that this machine can run
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

test-lerobot: $(INSTALLED) ## Read exports with LeRobot's own loader, in .venv-lerobot
	@test -x .venv-lerobot/bin/python || $(BIN)/uv venv --quiet .venv-lerobot
	@$(BIN)/uv pip install --quiet --python .venv-lerobot/bin/python "lerobot>=0.4.4"
	@$(BIN)/python -m pytest tests/unit/worker/sinks/test_export.py -k lerobot

test-openenv: $(INSTALLED) ## Collect from a server of the openenv package, in .venv-openenv
	@test -x .venv-openenv/bin/python || $(BIN)/uv venv --quiet .venv-openenv
	@$(BIN)/uv pip install --quiet --python .venv-openenv/bin/python "openenv>=0.10"
	@CORMORANT_OPENENV=.venv-openenv/bin/python $(BIN)/python -m pytest tests/integration/worker/envs/test_openenv.py $(PYTEST_ARGS)

test-jax: $(INSTALLED) ## Step environments of gymnax, Brax and jumanji, in .venv-jax
	@test -x .venv-jax/bin/python || $(BIN)/uv venv --quiet --python $(BIN)/python .venv-jax
	@$(BIN)/uv pip install --quiet --python .venv-jax/bin/python --editable '.[worker,jax]' pytest pytest-timeout hypothesis \
		gymnax six brax jumanji
	@.venv-jax/bin/python -m pytest tests/unit/worker/envs/test_functional.py $(PYTEST_ARGS)

test-peers: $(INSTALLED) ## Run the tests against Tianshou and TorchRL, in .venv-peers; PEERS_SOURCES=rl:tianshou: theirs, too
	@benchmarks/peers/setup
	@$(BIN)/uv pip install --quiet --python .venv-peers/bin/python --group peers$(if $(PEERS_SOURCES), --group peers-examples)
	@PYTHONPATH=$(CURDIR)/api:$(CURDIR)/worker:$(CURDIR)/tests/support .venv-peers/bin/python -m pytest -m "not gpu" tests/peers \
		tests/integration/worker/torchrl/test_multi_threaded_env.py tests/integration/worker/torchrl/test_collectors.py \
		tests/integration/worker/torchrl/test_collector_classes.py $(PYTEST_ARGS)

chaos: $(INSTALLED) ## Run random schedules of failures, SCHEDULES=200 of them from FIRST=0 on (tests/chaos)
	@CORMORANT_CHAOS_SCHEDULES=$(or $(SCHEDULES),200) CORMORANT_CHAOS_FIRST=$(or $(FIRST),0) \
		$(BIN)/python -m pytest tests/chaos $(PYTEST_ARGS)

mutants: $(INSTALLED) ## Change lines one after the other and see that tests notice (tests/mutation, 5 minutes)
	@$(BIN)/python tests/mutation/run.py

check: $(INSTALLED) ## Lint, format, types, imports, generated files
	@$(BIN)/ruff check --no-cache .
	@$(BIN)/ruff format --no-cache --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/cormorant crd | diff - charts/cormorant/files/crds/collectorjobs.yaml
	@$(BIN)/python -m charts.monitoring --check
	@$(BIN)/python -m benchmarks.chart --check
	@$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	@if command -v actionlint > /dev/null; then actionlint; else echo "actionlint is not installed: workflows are checked by their schema alone"; fi
	@$(MKDOCS)

bench: $(INSTALLED) ## Compare with the bare loop, TorchRL and Tianshou (about 25 minutes; BENCH_ARGS=--quick: 4)
	@$(BIN)/python -m benchmarks $(BENCH_ARGS)

bench-train: $(INSTALLED) ## Train PPO on three tasks with every library (about 80 minutes; BENCH_ARGS="--only cartpole": 15)
	@$(BIN)/python -m benchmarks.train $(BENCH_ARGS)

gpu: $(INSTALLED) ## Run and measure what needs a CUDA device (under ten minutes; says so where there is none)
	@$(BIN)/python -m benchmarks.gpu $(BENCH_ARGS)

bench-operator: $(INSTALLED) ## Weigh the operator on an API server with fake nodes (about 40 minutes; BENCH_ARGS=--quick: 3)
	@$(BIN)/python -m benchmarks.cluster $(BENCH_ARGS)

bench-head: $(INSTALLED) ## Find out how many workers one head holds (about 5 minutes; BENCH_ARGS="--sizes 1000 --processes")
	@$(BIN)/python -m benchmarks.head $(BENCH_ARGS)

docs: $(INSTALLED) ## Write what is generated (CRD, rules, dashboards, metrics, chart of speed); build site/index.html
	@$(BIN)/cormorant crd > charts/cormorant/files/crds/collectorjobs.yaml
	@$(BIN)/python -m charts.monitoring
	@$(BIN)/python -m benchmarks.chart
	@$(MKDOCS)

wire: $(INSTALLED) ## Compare CRD, metrics, REST, names and files with an earlier revision: BASE=v0.1.0
	@PYTHONPATH=tests/support $(BIN)/python -m cormorant_testing.wire $(BASE)

constraints: ## Pin the versions that pyproject.toml allows today
	@VIRTUAL_ENV=$(abspath $(VENV)) $(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 \
		--no-emit-index-url --no-emit-find-links --no-header --no-annotate --extra dev pyproject.toml --output-file constraints.txt
	@$(BIN)/python images/lock.py

clean: ## Remove the virtual environment and caches
	@rm -rf $(VENV) site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
