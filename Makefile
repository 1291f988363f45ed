# The targets that people and CI call. Anything longer than two lines is a script or a verb of rdt-e2e.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

CONFIG ?= local
# Where the deployment is: local (processes of this machine), compose (its containers), k8s, or bare
# (the hosts of an Ansible inventory).
TARGET ?= local
# What is installed, here or in the image: requirements/$(LOCK).lock, cpu or cuda.
LOCK ?= cpu
# For TARGET=k8s: a folder of k8s/overlays, a context of the kubeconfig, a RayJob of k8s/jobs, and
# where the nodes get the image.
OVERLAY ?=
CONTEXT ?=
JOB ?=
IMAGE ?=
# For TARGET=bare: which hosts.
INVENTORY ?= ansible/inventory/hosts.yml
ARGS ?=

BIN := .venv/bin
SOURCES := rdt_e2e tests setup.py ansible/library ansible/filter_plugins ansible/roles
SHELL_SCRIPTS := $(wildcard scripts/*.sh containers/*.sh) .ci/run

ON_CLUSTER := $(if $(OVERLAY),--overlay $(OVERLAY)) $(if $(CONTEXT),--context $(CONTEXT))
sync.local := sync --config $(CONFIG)
sync.compose := compose sync --lock $(LOCK) --config $(CONFIG)
sync.k8s := k8s sync $(ON_CLUSTER) $(if $(JOB),--job $(JOB))
sync.bare := bare sync --inventory $(INVENTORY) --config $(CONFIG)
deploy.local := deploy --config $(CONFIG)
deploy.compose := compose deploy --lock $(LOCK) --config $(CONFIG)
deploy.k8s := k8s deploy $(ON_CLUSTER) $(if $(IMAGE),--image $(IMAGE))
deploy.bare := bare deploy --inventory $(INVENTORY)
down.local := down
down.compose := compose down --lock $(LOCK)
down.k8s := k8s down $(ON_CLUSTER)
down.bare := bare down --inventory $(INVENTORY)
$(if $(sync.$(TARGET)),,$(error TARGET is '$(TARGET)'; it is local, compose, k8s or bare (LOCK is cpu or cuda)))

.PHONY: help setup lock kubectl sync report bench bench-wire deploy down status doctor test test-unit test-stack test-long test-containers test-network fuzz lint lint-k8s type fmt check clean setup-ansible lint-ansible

##@ Run
sync: setup ## Run the main job (CONFIG, TARGET, ARGS="--iters 3"); the local one deploys by itself
	@$(BIN)/rdt-e2e $(sync.$(TARGET)) $(ARGS)

report: setup ## Make a run's reports again, or compare two (RUNS="runs/a runs/b")
	@$(BIN)/rdt-e2e report $(RUNS)

bench: setup ## Measure a sync against the hardware and vLLM's backends (CONFIG, ARGS="--layers 24")
	@$(BIN)/rdt-e2e bench --config $(CONFIG) $(ARGS)

bench-wire: setup ## Measure syncs over a link of several rates (root; ARGS="--rates 400,100")
	@$(BIN)/rdt-e2e bench wire $(ARGS)

deploy: setup ## Start what `make sync` then uses (TARGET=local, compose, k8s or bare; OVERLAY, CONTEXT, IMAGE, INVENTORY)
	@$(BIN)/rdt-e2e $(deploy.$(TARGET)) $(ARGS)

down: setup ## Stop the deployment of TARGET and remove what it made
	@$(BIN)/rdt-e2e $(down.$(TARGET)) $(ARGS)

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
	$(BIN)/pytest -m "long and not containers" --fault-table=docs/reliability.md $(ARGS)

test-containers: kubectl ## Build the image, sync across its containers, lose each node; the Ansible hosts
	$(BIN)/pytest -m "containers and not long" $(ARGS)

test-network: setup ## Faults of the network between two containers; writes docs/reliability.md's table
	$(BIN)/pytest -m "containers and long" --fault-table=docs/reliability.md $(ARGS)

fuzz: setup ## 100,000 random calls of the serve surface (ARGS="--cases N --seed S")
	$(BIN)/python -m tests.fuzz $(ARGS)

##@ Develop
setup: ## Make .venv hold the lock file LOCK (cpu or cuda) and this package
	@scripts/setup.sh $(if $(filter local,$(TARGET)),$(LOCK),cpu)
	$(if $(filter bare,$(TARGET)),@scripts/setup.sh ansible)

kubectl: setup ## Put a kubectl of a known version into .venv, for tests and for machines without one
	@scripts/kubectl.sh

setup-ansible: ## Make .venv-ansible hold what ansible/ is run and linted with
	@scripts/setup.sh ansible

lint: setup lint-ansible ## ruff, codespell, yamllint, shellcheck, hadolint, ansible-lint
	$(BIN)/ruff check $(SOURCES) && $(BIN)/ruff format --check $(SOURCES) && $(BIN)/codespell
	$(BIN)/yamllint --strict . && $(BIN)/shellcheck $(SHELL_SCRIPTS) && $(BIN)/hadolint Dockerfile

lint-ansible: setup-ansible .venv-ansible/linted ## ansible-lint, profile production

# It takes most of a minute, the syntax of every playbook included: only when one of these is newer
# than its last success.
.venv-ansible/linted: requirements/ansible.lock $(shell find ansible -type f -not -path '*/.ansible/*')
	cd ansible && PATH="$(CURDIR)/.venv-ansible/bin:$$PATH" ansible-lint
	@touch $@

lint-k8s: kubectl ## checkov on every object and pod that k8s/ and its overlays make
	@scripts/lint-k8s.sh

type: setup ## mypy, strict
	$(BIN)/mypy

fmt: setup ## Format, and fix what ruff can fix
	$(BIN)/ruff check --fix $(SOURCES); $(BIN)/ruff format $(SOURCES)

check: lint type test ## Everything that must pass before a commit

lock: setup ## Resolve requirements/*.in into the lock files (UPGRADE=1 moves the pins)
	scripts/lock.sh

clean: ## Remove .venv, caches and build folders; runs/ and the model cache stay
	rm -rf .venv .venv-ansible .setup.lock build ./*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

##@ Help
help: ## Show this list
	@awk 'BEGIN {FS = ":.*## "} /^##@ / {printf "\n%s\n", substr($$0, 5)} \
	  /^[a-z0-9-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
