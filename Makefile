# Everything runs from .venv in this folder, which the first target that needs it makes.
# Nothing needs root. `make help` lists the targets.

# The set-up for GPUs is an environment beside it, .venv-gpu: a machine can have both. Other targets
# run in that one by VENV=.venv-gpu, and `make install-gpu VENV=.venv` makes it where .venv would be.
VENV := .venv
GPU_VENV := $(if $(filter command,$(origin VENV)),$(VENV),.venv-gpu)
BIN := $(VENV)/bin
# What an environment is for: CPUs, unless `make install-gpu` began it.
FOR_GPUS := .for-gpus
KIND := $(if $(wildcard $(VENV)/$(FOR_GPUS)),gpu,cpu)
REQUIREMENTS := $(VENV)/.requirements-installed
INSTALLED := $(VENV)/.installed
# The pinned versions are for Python 3.11, those for GPUs for 3.12 as well; give another interpreter
# of that version with PYTHON=path.
PYTHON ?= $(firstword $(shell command -v python3.11) $(shell command -v python3) python3.11)
VERSIONS := 3.11$(if $(filter gpu,$(KIND)), or 3.12)
# What is given to the program behind a target: make test ARGS='-k recognition -x'
ARGS ?=
# Other people's clients, which tests drive, each in an environment of its own: those that
# `make test` has, and those that bring gigabytes; a peer of the benchmarks; and torchvision, which
# vLLM imports for some models that see.
CLIENTS := .clients
CLIENT_VERSIONS := tests/acceptance/clients/requirements
LIBRARIES := $(patsubst %,$(CLIENTS)/%/.installed,openai-agents langgraph)
PEERS := $(CLIENTS)/vllm-router/.installed
PAGES := $(CLIENTS)/mkdocs/.installed
TORCHVISION := $(CLIENTS)/torchvision/.installed
PROGRAMS := $(patsubst %,$(CLIENTS)/%/.installed,aider claude-code codex mini-swe-agent opencode)
# Of `make test-fuzz`: how many requests, and which; every run prints both.
CASES ?= 10000
SEED ?= $(shell echo $$RANDOM)

# A pipe fails when any part of it does.
SHELL := bash
.SHELLFLAGS := -o pipefail -ec

.DEFAULT_GOAL := help
.PHONY: help install install-gpu demo serve test test-unit test-engines lint lines format bench \
	bench-overhead bench-scale experiment test-agents \
	check-upstream docs hashes image release test-autoscaler test-cancelling test-chaos test-clients \
	test-all test-compatibility test-cpus test-dashboard test-fuzz test-gpu test-gpu-here test-image test-long test-metrics test-models test-next \
	test-peers \
	test-vision test-wheel test-cluster clean
.DELETE_ON_ERROR:

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(INSTALLED) ## Make .venv with the pinned CPU set-up and the embedded model
	@echo "conserve: $(VENV) is ready"

# KIND is said, so that `make -n install-gpu` shows what it would do before there is a .venv-gpu.
install-gpu: ## Make .venv-gpu with the pinned set-up for NVIDIA GPUs (4.3 GB to fetch)
	@test ! -e $(GPU_VENV)/bin/python -o -e $(GPU_VENV)/$(FOR_GPUS) || { \
		echo "conserve: $(GPU_VENV) is for CPUs. Remove it, or leave VENV out: without it," \
			"make install-gpu makes .venv-gpu beside .venv." >&2; exit 1; }
	@mkdir -p $(GPU_VENV) && touch $(GPU_VENV)/$(FOR_GPUS)
	@$(MAKE) --no-print-directory VENV=$(GPU_VENV) KIND=gpu install

demo: $(INSTALLED) ## Have a few agents work and show where each turn ran (ARGS=vision: by screenshots; JSON=path: also as JSON)
# The set-up for CPUs runs on CPUs, whatever else the machine has.
	@$(BIN)/conserve demo $(if $(filter cpu,$(KIND)),device=cpu) $(if $(JSON),--json '$(JSON)') $(ARGS)

serve: $(INSTALLED) ## Serve until interrupted (ARGS='decoders=3 port=9000': settings)
	@$(BIN)/conserve serve $(ARGS)

test: $(INSTALLED) ## Run the tests that every change has to pass, on real engines too: a quarter of an hour on two cores (ARGS=...: only those)
ifneq ($(ARGS),)
	@$(BIN)/python -m pytest $(ARGS)
else
	@$(BIN)/python -m pytest tests/unit -n auto --dist loadfile --hypothesis-profile same
	@$(BIN)/python -m pytest tests/engines tests/acceptance -m 'not long and not full' --hypothesis-profile same
endif

test-all: $(INSTALLED) $(LIBRARIES) ## Run all tests that need nothing but this machine (an hour on two cores)
	@$(BIN)/python -m pytest tests/unit -n auto --dist loadfile $(ARGS)
	@$(BIN)/python -m pytest tests/engines tests/acceptance $(ARGS)
	@$(MAKE) --no-print-directory test-wheel

test-wheel: $(INSTALLED) ## Build the wheel, install it in a fresh environment, and run it there (5 GB for a while; minutes)
	@scripts/test_wheel.sh $(BIN)/python

test-long: $(INSTALLED) ## Run the tests on engines that `make test` leaves out for their time (minutes)
	@$(BIN)/python -m pytest tests -m long $(ARGS)

test-unit: $(INSTALLED) ## Run the unit tests alone, on every core: no engine, four minutes on two
	@$(BIN)/python -m pytest tests/unit -n auto --dist loadfile $(ARGS)

test-cpus: $(INSTALLED) ## Run the unit tests as on four other CPUs, and without a compiler (20 minutes on two cores)
	@for machine in --cpu=avx2 --cpu=avx512 --cpu=bf16 --cpu=amx --no-compiler; do \
		echo "conserve: unit tests with $$machine"; \
		$(BIN)/python -m pytest tests/unit -n auto --dist loadfile $$machine $(ARGS); \
	done

test-engines: $(INSTALLED) $(LIBRARIES) ## Run only the tests on real engines: all but the unit tests (minutes)
	@$(BIN)/python -m pytest tests --ignore=tests/unit $(ARGS)

test-fuzz: $(INSTALLED) ## Try 10,000 requests on real engines (CASES=..., SEED=...: which)
	@$(BIN)/python -m pytest tests/acceptance/fuzz -o log_cli=true -o log_cli_level=INFO \
		--fuzz-cases '$(CASES)' --fuzz-seed '$(SEED)' $(ARGS)

test-agents: $(INSTALLED) ## Have 1,000 agents run tools while processes are killed beneath them (many minutes)
	@$(BIN)/python -m pytest tests/engines/many_agents $(ARGS)

test-autoscaler: $(INSTALLED) ## Have Ray's autoscaler start and end nodes for decoders (six minutes)
	@$(BIN)/python -m pytest tests/engines/autoscaler $(ARGS)

test-cancelling: $(INSTALLED) ## Cancel up to 300 first turns at a time, at several moments (ten minutes)
	@$(BIN)/python -m pytest tests/engines/cancelling $(ARGS)

test-peers: $(INSTALLED) $(PEERS) ## Start every peer of the benchmarks, and talk to it (minutes)
	@$(BIN)/python -m pytest -m 'long or not long' \
		tests/engines/peers tests/engines/every_peer $(ARGS)

test-gpu: ## Settle what one GPU can, in order, and write a page of it (45 minutes; skips by name where there is none)
	@$(MAKE) --no-print-directory VENV=$(if $(wildcard $(GPU_VENV)),$(GPU_VENV),$(VENV)) test-gpu-here

test-gpu-here: $(INSTALLED)
	@$(BIN)/python -m pytest tests/acceptance/gpu -v -o log_cli=true -o log_cli_level=INFO $(ARGS)

test-image: $(INSTALLED) ## Run the image of `make image` as containers do, without a runtime (root, podman; ten minutes)
	@$(BIN)/python -m pytest tests/acceptance/image $(ARGS)

test-metrics: $(INSTALLED) ## Have Prometheus scrape a real application, and try each alert (Debian: prometheus; minutes)
	@command -v prometheus promtool >/dev/null || { \
		echo "conserve: prometheus and promtool are needed (Debian: prometheus)." >&2; exit 1; }
	@$(BIN)/python -m pytest tests/unit/monitoring tests/engines/monitoring $(ARGS)

test-models: $(INSTALLED) $(TORCHVISION) ## Serve a model of random weights of each family, with tools (40 minutes)
	@$(BIN)/python -m pytest tests/engines/models $(ARGS)

test-dashboard: $(INSTALLED) ## Watch real engines in the dashboard, in Chromium (Debian: chromium; minutes)
	@command -v chromium >/dev/null || { \
		echo "conserve: chromium is needed (Debian: chromium)." >&2; exit 1; }
	@$(BIN)/python -m pytest tests/engines/dashboard $(ARGS)

test-vision: $(INSTALLED) $(TORCHVISION) ## Show images to models of random weights, and see them handed off (minutes)
	@$(BIN)/python -m pytest tests/engines/vision $(ARGS)

test-chaos: $(INSTALLED) ## Kill processes and harm the disk under 64 conversations for 20 minutes (ARGS='--minutes 5 --seed 1')
	@$(BIN)/python -m tests.acceptance.chaos $(ARGS)

test-clients: $(INSTALLED) $(LIBRARIES) $(PROGRAMS) ## Have other people's agents do a task (npm; 3 GB, minutes)
	@$(BIN)/python -m pytest tests/acceptance/clients tests/acceptance/programs \
		-o log_cli=true -o log_cli_level=INFO $(ARGS)

test-compatibility: $(INSTALLED) ## Try vLLM's own tests, and Open Responses', on the router (VLLM=, OPENRESPONSES=path)
	@$(BIN)/python -m pytest tests/acceptance/compatibility -o log_cli=true -o log_cli_level=INFO \
		$(if $(VLLM),--vllm '$(VLLM)') $(if $(OPENRESPONSES),--openresponses '$(OPENRESPONSES)') $(ARGS)

test-cluster: $(INSTALLED) ## Run `ray up cluster.yaml` over SSH on loopback (root; ten minutes)
	@scripts/test_cluster.sh

test-next: $(INSTALLED) ## Try the newest vLLM, LMCache and Ray in .venv-next, and say what fails by patch (half an hour)
	@$(BIN)/python -m scripts.test_next .venv-next $(ARGS)

check-upstream: $(INSTALLED) ## Compare what patches change with another release (PACKAGE=vllm VERSION=0.33.0 ARGS=--brief)
	@test -n '$(PACKAGE)' -a -n '$(VERSION)' || { \
		echo "conserve: say which: make check-upstream PACKAGE=vllm VERSION=0.33.0" >&2; exit 1; }
	@$(BIN)/python -m scripts.check_upstream '$(PACKAGE)' '$(VERSION)' $(ARGS)

lint: $(INSTALLED) ## Check style, format, types, imports between floors, prose and each package's size
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo --no-cache
	@$(BIN)/python scripts/lint_plain.py

lines: $(INSTALLED) ## Count each package's lines, beside its budget
	@$(BIN)/python scripts/lint_plain.py --table

format: $(INSTALLED) ## Format the code and mend what can be mended by itself
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

bench: $(INSTALLED) ## Compare with the peers, on two cores (DATA=folder of recorded sessions)
	@$(BIN)/python -m experiments.suite --cores 0,1 $(if $(DATA),--data '$(DATA)') $(ARGS)

bench-overhead: $(INSTALLED) $(PEERS) ## Measure what ConServe costs over the bare engine
	@$(BIN)/python -m experiments.overhead $(ARGS)

bench-scale: $(INSTALLED) ## Simulate other systems' rules at the papers' scale (DATA=folder of recorded sessions)
	@$(BIN)/python -m experiments.scale $(if $(DATA),--data '$(DATA)') $(ARGS)

experiment: $(INSTALLED) $(if $(filter sessions,$(NAME)),$(PEERS)) ## Run a measurement of experiments/ (NAME=table ARGS='--rounds 5'; without NAME: list them)
	@$(BIN)/python -m experiments$(if $(NAME),.$(NAME)) $(if $(DATA),--data '$(DATA)') $(ARGS)

docs: $(PAGES) ## Build the pages into out/docs, and fail where a link leads nowhere (a minute)
	@NO_MKDOCS_2_WARNING=1 $(CLIENTS)/mkdocs/bin/mkdocs build --strict --quiet
	@echo "conserve: the pages are in out/docs; to read them with search:" \
		"python3 -m http.server --bind 127.0.0.1 -d out/docs 8080"

hashes: $(INSTALLED) ## Write the pinned packages' hashes, as the index has them (uv has to be installed; a minute)
	@$(BIN)/python -m scripts.pin_hashes

image: ## Build the image for CPUs, or TARGET=cuda for GPUs, by podman or docker, and print its layers (1 GB to fetch; for GPUs 4.3 GB)
	@TARGET='$(TARGET)' BASE='$(BASE)' scripts/image.sh $(ARGS)

release: $(INSTALLED) ## Test, build, check and tag a release: all but its upload (on main, without changes; an hour)
	@$(BIN)/python -m scripts.release

clean: ## Remove .venv, .venv-gpu, caches and build products
	rm -rf $(VENV) $(GPU_VENV) .venv-next $(CLIENTS) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Three steps, each done again only when what it depends on has changed.

$(BIN)/python:
	@command -v '$(PYTHON)' >/dev/null || { \
		echo "conserve: Python $(VERSIONS) is needed and was not found." \
			"Install it (Debian: python3.11), or say where it is: make PYTHON=path" >&2; exit 1; }
	@'$(PYTHON)' -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] not in "$(VERSIONS)".split())' || { \
		echo "conserve: Python $(VERSIONS) is needed, and $(PYTHON) is $$('$(PYTHON)' --version)." \
			"Say where it is: make PYTHON=path" >&2; exit 1; }
	@'$(PYTHON)' -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "conserve: $(PYTHON) cannot make virtual environments." \
			"Install its venv module (Debian: python3.11-venv)." >&2; exit 1; }
	@echo "conserve: making $(VENV) with $$('$(PYTHON)' --version)"
	@'$(PYTHON)' -m venv $(VENV)

CPU_BUILDS := If it did not find torch's CPU build, give it PyTorch's own CPU index as an extra index \
	(see the head of requirements-cpu.txt).

$(REQUIREMENTS): requirements-$(KIND).txt | $(BIN)/python
	$(if $(filter gpu,$(KIND)),@$(BIN)/python -m conserve_cli.doctor.compiler)
	@echo "conserve: installing $$(grep -c '^[^#].*==' $<) packages, about $(if $(filter gpu,$(KIND)),4.3,3) GB;" \
		"the first time this takes a few minutes"
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off --no-deps -r $< \
		2> $(VENV)/pip-messages.log \
		| awk -v total="$$(grep -c '^[^#].*==' $<)" ' \
			/^(Collecting|Requirement)/ { \
				if (++seen % 20 == 0) print "conserve:   " seen " of " total " fetched"; fflush() } \
			/^Installing/ { print "conserve:   unpacking, about a minute"; fflush() }' || { \
		grep -v '^WARNING' $(VENV)/pip-messages.log | tail -20 >&2; \
		echo "conserve: pip failed. $(if $(filter cpu,$(KIND)),$(CPU_BUILDS))" >&2; exit 1; }
	@touch $@

$(INSTALLED): pyproject.toml conserve/__init__.py $(REQUIREMENTS)
	@echo "conserve: installing the project itself"
# compat: as a folder on the path. Setuptools' other way is asked after the path, on which a folder
# called conserve (the home of a checkout, say) would be taken for the package.
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation \
		--config-settings editable_mode=compat -e .
	@echo "conserve: making the embedded model"
	@$(BIN)/python -c "from conserve.embedded import model_path; print('conserve: it is in', model_path())"
ifeq ($(KIND),cpu)
# It keeps what it finds; else each engine looks for itself at its first start, for nine seconds.
	@echo "conserve: having vLLM look at the model"
	@VLLM_LOGGING_LEVEL=ERROR VLLM_CPU_KVCACHE_SPACE=1 $(BIN)/python -c \
		"from conserve.embedded import model_path as path; from vllm.engine.arg_utils import EngineArgs; \
		EngineArgs(str(path()), enforce_eager=True, dtype='bfloat16').create_model_config()"
endif
	@touch $@

# A client, at the versions that its file says.

define install_python_client
	@echo "conserve: installing $(notdir $(@D)) in an environment of its own"
	@rm -rf $(@D)
	@$(BIN)/python -m venv $(@D)
	@$(@D)/bin/python -m pip install -qq --disable-pip-version-check --no-deps -r $<
	@touch $@
endef

$(CLIENTS)/%/.installed: $(CLIENT_VERSIONS)/%.txt | $(BIN)/python
	$(install_python_client)

$(CLIENTS)/%/.installed: conserve_lab/peers/%.txt | $(BIN)/python
	$(install_python_client)

$(CLIENTS)/%/.installed: scripts/pages/%.txt | $(BIN)/python
	$(install_python_client)

# Its Python files alone, for a process's path. Its native libraries may be for another torch, and
# without their operators nothing can be registered for these.
$(TORCHVISION): $(CLIENT_VERSIONS)/torchvision.txt | $(BIN)/python
	@echo "conserve: installing torchvision's Python files for tests"
	@rm -rf $(@D)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --target $(@D) -r $<
	@rm -f $(@D)/torchvision/*.so
	@: > $(@D)/torchvision/_meta_registrations.py
	@touch $@

# What these would run after they are installed fetches or links what their packages hold already.
$(CLIENTS)/%/.installed: $(CLIENT_VERSIONS)/%.json
	@command -v npm >/dev/null || { \
		echo "conserve: npm is needed for $*, and was not found (Debian: npm)." >&2; exit 1; }
	@echo "conserve: installing $* for tests"
	@rm -rf $(@D)
	@mkdir -p $(@D)
	@cp $< $(@D)/package.json
	@cd $(@D) && npm install --ignore-scripts --no-audit --no-fund --no-package-lock >/dev/null
	@touch $@
