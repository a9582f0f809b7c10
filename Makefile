# Everything a checkout needs, from Python 3.11+ and make alone. `make` lists the targets.
#
# PYTHON=python3.12 chooses the interpreter of a new .venv; PYTEST_ARGS='-k cancel' goes to pytest; UPGRADE=--upgrade lets
# `make lock` move to newer versions. Every package comes from requirements/*.txt, by hash.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup setup-dev tools demo test lint docs screenshots dashboards rules site protos protos-check protos-release lock bench wheel compiled test-compiled fuzz fuzz-rpc fuzz-flags chaos clean

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?=
PYTEST_ARGS ?=
BENCH_ARGS ?=
FUZZ_ARGS ?=
CHAOS_ARGS ?=
SCREENSHOTS ?=
SITE ?= build
UPGRADE ?=

# uv's own environment of the caller must not redirect it to another environment than ours.
unexport VIRTUAL_ENV UV_PROJECT_ENVIRONMENT
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Each of the many processes that tests start would compile all that it imports, which takes as long as the rest.
unexport PYTHONDONTWRITEBYTECODE

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

# ---- environment --------------------------------------------------------------------------------------------------

setup: $(VENV)/.stamp-run ## prepare .venv, with lorrery in .venv/bin

setup-dev: $(VENV)/.stamp-dev ## the same, and what checks the tree

# An environment that lacks pip (uv makes such) gets it; one whose interpreter is gone is made again.
$(VENV)/.stamp-base: requirements/uv.txt
	@set -e; found=; \
	if ! $(BIN)/python -c '' 2>/dev/null; then \
	  PYTHON='$(PYTHON)' sh .ci/need python || true; \
	  for python in $(or $(PYTHON),python3.13 python3.12 python3.11 python3); do \
	    if "$$python" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found=$$python; break; fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo 'no Python 3.11 or newer with venv and ensurepip (looked for $(or $(PYTHON),python3.13 python3.12 python3.11 python3));' >&2; \
	    echo 'name one: make PYTHON=/path/to/python3.12. On Debian the two modules are in the package python3-venv.' >&2; exit 1; \
	  fi; \
	  echo "making $(VENV) with $$("$$found" --version)"; \
	  "$$found" -m venv --clear $(VENV); \
	fi; \
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip >/dev/null; \
	if ! $(BIN)/python -m pip install --quiet --only-binary=:all: --require-hashes -r requirements/uv.txt; then \
	  echo 'uv has no wheel for this platform: pip does the rest, more slowly'; \
	fi; \
	touch $@

# $(call install,ARGUMENTS): uv where it is there, otherwise pip; both check every hash.
define install
if [ -x $(BIN)/uv ]; then $(BIN)/uv pip install --quiet --python $(BIN)/python $(1); \
else $(BIN)/python -m pip install --quiet $(1); fi
endef

# The build lock holds what builds the project, so that neither its editable install nor a wheel of it fetches anything.
$(VENV)/.stamp-run: $(VENV)/.stamp-base requirements/run.txt requirements/build.txt pyproject.toml
	@$(call install,--require-hashes -r requirements/run.txt -r requirements/build.txt)
	@$(call install,--no-deps --no-build-isolation --editable .)
	@$(BIN)/lorrery --version
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-run requirements/dev.txt
	@$(call install,--require-hashes -r requirements/dev.txt)
	@touch $@

# ---- use ----------------------------------------------------------------------------------------------------------

demo: setup ## a real trace through a cluster on this machine, about a minute
	$(BIN)/lorrery demo

PYTEST := $(BIN)/python -m pytest
# What tests of TLS and of pages need beyond Python. CI sets TESTS_NO_SKIPS, and fails without.
tools:
	@sh .ci/need openssl || echo 'no openssl, and it cannot be installed here (apt-get, as root): tests of TLS are skipped' >&2
	@sh .ci/need chromium || echo 'no Chromium, and it cannot be installed here (apt-get, as root): tests of pages are skipped' >&2

# More than the two cores of a small machine: tests of clusters mostly wait.
PROCESSES := -n 3 --dist worksteal
ALONE := timing

# Several processes. Then, alone, the tests that watch real time: another process would stretch it.
# PYTEST_ARGS may select none of one part (pytest's exit status 5), and no -m of its own. What is not a failed test, such
# as Ctrl-C or a path that is not there, ends both.
test: setup-dev tools ## every test
	@$(PYTEST) $(PROCESSES) $(PYTEST_ARGS) -m 'not ($(ALONE))'; many=$$?; \
	case $$many in 0|1|5) ;; *) exit $$many;; esac; \
	$(PYTEST) $(PYTEST_ARGS) -n 0 -m '$(ALONE)'; alone=$$?; \
	case "$$many $$alone" in '0 0'|'0 5'|'5 0') ;; *) exit 1;; esac

# `make bench clients` is `make bench BENCH_ARGS=clients`.
ifeq ($(firstword $(MAKECMDGOALS)),bench)
BENCHMARKS := $(wordlist 2,$(words $(MAKECMDGOALS)),$(MAKECMDGOALS))
$(BENCHMARKS): ; @:
endif

# Where it can be made, sim-speed measures the compiled core too.
bench: setup-dev ## pace, CPU per token and per simulated request, beside bare references
	@$(MAKE) --no-print-directory compiled || echo 'no compiled core: it takes a C compiler and the headers of Python' >&2
	$(BIN)/python -m lab.bench $(BENCHMARKS) $(BENCH_ARGS)

COMPILED := build/compiled
PACKAGED := $(shell find -L src -type f -not -path '*/__pycache__/*')

wheel: dist/.stamp ## sdist and wheel, in dist; the wheel's core is compiled where there is a C compiler

# The wheel is built from the sdist, in an environment of its own, so that what either lacks is missed here and not where
# others build it. What a build needs is of the version that the lock says and, where uv is there, checked by hash: pip
# would ask for the sdist's hash too.
ISOLATED = if [ -x $(BIN)/uv ]; then \
    $(BIN)/uv build --wheel --python $(BIN)/python --build-constraints requirements/build.txt --require-hashes \
      --out-dir dist dist/*.tar.gz; \
  else \
    grep == requirements/build.txt | tr -d '\\' >build/constraints.txt; \
    PIP_BUILD_CONSTRAINT=build/constraints.txt PIP_CONSTRAINT=build/constraints.txt \
      $(BIN)/python -m pip wheel --verbose --no-deps --wheel-dir dist dist/*.tar.gz; \
  fi

dist/.stamp: $(VENV)/.stamp-run requirements/build.txt pyproject.toml hatch_build.py README.md $(PACKAGED)
	@rm -rf dist; mkdir -p build
	@$(BIN)/python -m hatchling build --target sdist --directory dist
	@{ $(ISOLATED); } >build/wheel.log 2>&1 || { cat build/wheel.log >&2; exit 1; }
	@grep -h 'interpreted core' build/wheel.log || true
	@ls dist/*.whl
	@touch $@

compiled: $(COMPILED)/.stamp ## the wheel with its core compiled to C, unpacked in build/compiled; needs a C compiler

$(COMPILED)/.stamp: dist/.stamp
	@rm -rf $(COMPILED)
	@case $$(echo dist/*.whl) in *-none-any.whl) rm dist/.stamp; grep -h 'interpreted core' build/wheel.log >&2; exit 1;; esac
	@$(BIN)/python -m pip install --quiet --no-deps --target $(COMPILED) dist/*.whl
	@printf '%s\n' '#!/bin/sh' '# pip gives a command no path to the folder beside it, and would run the checkout.' \
	  'PYTHONPATH=$(abspath $(COMPILED)) PYTHONSAFEPATH=1 exec $(abspath $(BIN))/python -m lorrery.cli "$$@"' >$(COMPILED)/bin/lorrery
	@$(COMPILED)/bin/lorrery --version | grep 'compiled core'
	@touch $@

# pytest's own pythonpath would put the checkout's src before it.
test-compiled: compiled ## the tests of core, device, simulator and plug-ins with the compiled core
	PYTHONSAFEPATH=1 PYTHONPATH=$(COMPILED) $(PYTEST) $(PROCESSES) -o pythonpath=. $(PYTEST_ARGS) \
	  tests/scheduler/core tests/scheduler/test_plugins.py tests/worker/device tests/simulator tests/validation/test_golden.py

fuzz: setup-dev ## more of the simulator's fuzz corpus, and the services in virtual time; FUZZ_ARGS='--first 3000 --cases 100000'
	$(BIN)/python -m tests.simulator.fuzz $(FUZZ_ARGS)
	$(BIN)/python -m tests.simulator.fuzz_runs $(FUZZ_ARGS)
	$(BIN)/python -m tests.virtual.fuzz $(FUZZ_ARGS)

fuzz-rpc: setup-dev ## 100,000 hostile calls of every RPC; FUZZ_ARGS='--seed 7 --first 41 --cases 1' sends one again
	$(BIN)/python -m tests.fuzz_rpc.fuzz $(FUZZ_ARGS)

fuzz-flags: setup-dev ## 2,000 hostile command lines of every subcommand; FUZZ_ARGS='--seed 7 --first 41 --cases 1' runs one again
	$(BIN)/python -m tests.fuzz_flags.fuzz $(FUZZ_ARGS)

chaos: setup-dev ## kill, stop and restart every service under load, and check that nothing is lost; CHAOS_ARGS='--seed 7'
	$(BIN)/python -m tests.chaos $(CHAOS_ARGS)

lint: setup-dev ## style, types, who may import whom, the wire's style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy deploy/healthcheck.py
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/buf lint

docs: setup-dev ## rewrite from the code settings.md, grpc.md, metrics.md, engines.md, and the schema of the Helm chart's values
	$(BIN)/python -m lab.reference

site: setup-dev ## the documentation as a site with search, in build/site; SITE=serve shows it while you write
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs $(SITE)

dashboards: setup-dev ## rewrite deploy/grafana/dashboards from lab/dashboards
	$(BIN)/python -m lab.dashboards

rules: setup-dev ## check Prometheus' configurations and rules, and every alert; takes prometheus and promtool, or Docker
	bash .ci/prometheus

screenshots: setup-dev ## take the pictures in docs/figures again; needs Chromium; SCREENSHOTS=orrery for one
	$(BIN)/python -m lab.screenshots $(SCREENSHOTS)

clean: ## remove what was made here, .venv included
	rm -rf $(VENV) build dist out .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- the wire -----------------------------------------------------------------------------------------------------

PROTOS := $(wildcard protos/lorrery/*/*.proto)

# $(call generate,FOLDER): the stubs of every .proto; a file without a service has no use for its empty gRPC module.
define generate
PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=$(1) --grpc_python_out=$(1) \
  --mypy_out=quiet,readable_stubs:$(1) --mypy_grpc_out=quiet,readable_stubs:$(1) $(PROTOS); \
for proto in $(PROTOS:protos/%.proto=%); do \
  grep -q '^service ' "protos/$$proto.proto" || rm -f "$(1)/$${proto}_pb2_grpc.py" "$(1)/$${proto}_pb2_grpc.pyi"; \
done
endef

protos: setup-dev ## regenerate the stubs from protos/**/*.proto
	@set -e; $(call generate,protos)

protos-check: setup-dev ## fail if the stubs are stale or the wire breaks the released one
	@set -e; stubs=$$(mktemp -d); trap 'rm -rf "$$stubs"' EXIT; \
	$(call generate,$$stubs); \
	diff -r -x '*.proto' -x __init__.py -x __pycache__ "$$stubs/lorrery" protos/lorrery || { echo 'stale stubs: run make protos' >&2; exit 1; }
	$(BIN)/buf lint
	$(BIN)/buf breaking --against protos/released.binpb

protos-release: setup-dev ## make today's wire the one that protos-check compares with
	$(BIN)/buf build --exclude-source-info -o protos/released.binpb

# ---- locks --------------------------------------------------------------------------------------------------------

COMPILE = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header \
  --no-emit-index-url --no-annotate $(UPGRADE)

lock: $(VENV)/.stamp-base ## rewrite requirements/*.txt from pyproject.toml
	$(COMPILE) pyproject.toml --extra all -o requirements/run.txt
	$(COMPILE) pyproject.toml -c requirements/run.txt -o requirements/base.txt
	$(COMPILE) pyproject.toml --extra all --group dev -c requirements/run.txt -o requirements/dev.txt
	printf '%s\n' hatchling hatch-fancy-pypi-readme 'mypy[mypyc]' numpy setuptools | $(COMPILE) - -c requirements/dev.txt -o requirements/build.txt
	echo uv | $(COMPILE) - -o requirements/uv.txt
