# The targets that people and CI call. Anything longer than two lines is a script or a verb of rdt-e2e.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

CONFIG ?= local
TARGET ?= cpu
ARGS ?=

BIN := .venv/bin
SOURCES := rdt_e2e tests setup.py ansible/library ansible/filter_plugins ansible/roles
SHELL_SCRIPTS := scripts/setup.sh scripts/lock.sh .ci/run

.PHONY: help setup lock sync bench deploy down status doctor test test-unit test-stack test-long fuzz lint type fmt check clean

##@ Run
sync: setup ## Run the main job (CONFIG=local, ARGS="--iters 3"); deploys by itself
	@$(BIN)/rdt-e2e sync --config $(CONFIG) $(ARGS)

bench: setup ## Measure a sync against the hardware and vLLM's backends (CONFIG, ARGS="--layers 24")
	@$(BIN)/rdt-e2e bench --config $(CONFIG) $(ARGS)

deploy: setup ## Start the deployment that `make sync` then uses
	@$(BIN)/rdt-e2e deploy --config $(CONFIG) $(ARGS)

down: setup ## Stop the deployment
	@$(BIN)/rdt-e2e down

status: setup ## Show the running deployment
	@$(BIN)/rdt-e2e status

doctor: setup ## Check this machine: image, node, GPU, RDMA, NIXL, Ray, vLLM, model files
	@$(BIN)/rdt-e2e doctor --config $(CONFIG) $(ARGS)

##@ Test
test: setup ## Unit tests, then the main job's path on the real Ray, NIXL and vLLM
	$(BIN)/pytest -m "not long and not containers and not gpu and not gpu2 and not cluster" $(ARGS)

test-unit: setup ## Unit tests alone
	$(BIN)/pytest tests/unit $(ARGS)

test-stack: setup ## The real-stack tests alone
	$(BIN)/pytest -m stack $(ARGS)

test-long: setup ## Fleets of other shapes, injected faults, a short soak; writes docs/reliability.md's table
	$(BIN)/pytest -m long --fault-table docs/reliability.md $(ARGS)

fuzz: setup ## 100,000 random calls of the serve surface (ARGS="--cases N --seed S")
	$(BIN)/python -m tests.fuzz $(ARGS)

##@ Develop
setup: ## Make .venv hold the lock file of TARGET (cpu or cuda) and this package
	@scripts/setup.sh $(TARGET)

lint: setup ## ruff, codespell, yamllint, shellcheck
	$(BIN)/ruff check $(SOURCES) && $(BIN)/ruff format --check $(SOURCES) && $(BIN)/codespell
	$(BIN)/yamllint --strict . && $(BIN)/shellcheck $(SHELL_SCRIPTS)

type: setup ## mypy, strict
	$(BIN)/mypy

fmt: setup ## Format, and fix what ruff can fix
	$(BIN)/ruff check --fix $(SOURCES); $(BIN)/ruff format $(SOURCES)

check: lint type test ## Everything that must pass before a commit

lock: setup ## Resolve requirements/*.in into the lock files (UPGRADE=1 moves the pins)
	scripts/lock.sh

clean: ## Remove .venv, caches and build folders; runs/ and the model cache stay
	rm -rf .venv .setup.lock build ./*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

##@ Help
help: ## Show this list
	@awk 'BEGIN {FS = ":.*## "} /^##@ / {printf "\n%s\n", substr($$0, 5)} \
	  /^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
