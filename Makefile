# make test | test-all | demo | lint | docs | bench | gpu-test | wheels | soak | crash-test | fuzz | mutants | format | clean
#
#   test       what a person waits for: under four minutes on two cores; ARGS naming tests runs those alone
#   test-all   all other tests: models, servers, and what takes long
#
# The first use of any of them creates $(VENV) from constraints.txt and installs the package there, editable: a
# changed Python file is used at once, and the C libraries, which lie beside their sources, are built again
# when one of theirs has changed.
#
#   PYTHON=python3.12     which interpreter $(VENV) is made with
#   VENV=..., BUILD=...   other places for the environment and the build products (two clones, two users)
#   ARGS=...              further arguments for pytest, the demo, or the benchmark
#   TORCH_ARGS=...        further arguments for installing torch, such as --index-url of the CPU builds

PYTHON ?= python3
VENV ?= .venv
BUILD ?= build
CC ?= cc
ARGS ?=
TORCH_ARGS ?=
SOAK_ROUNDS ?= 1
SOAK_KILLS ?= 1000
SOAK_SECONDS ?= 600
SOAK_EXAMPLES ?= 2000
SOAK_DEMOS ?= 20
SOAK_RESTARTS ?= 100
FUZZ_CASES ?= 1000000
BENCHES ?= index recovery
# A torch with CUDA brings the triton that belongs to it; beside one without, this one interprets the
# kernels. No wheels of it for Python 3.10: there those tests are skipped.
TRITON ?= triton==3.9.0; platform_machine == "x86_64" and python_version >= "3.11"

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

venv := $(abspath $(VENV))
build := $(abspath $(BUILD))
bin := $(venv)/bin
pause := $(build)/pause
pip := $(bin)/python -m pip --quiet --disable-pip-version-check

shm_c := $(sort $(wildcard shm/native/*.c))
index_c := $(sort $(wildcard lightcache/native/*.c)) \
           $(filter-out shm/native/process.c shm/native/%_api.c,$(shm_c))
headers := $(wildcard shm/native/*.h lightcache/native/*.h)

warn := -std=c11 -O2 -fPIC -fvisibility=hidden -Wall -Wextra -Werror -pthread -D_GNU_SOURCE \
        -Ishm/native -Ilightcache/native

export LIGHTCACHE_TEST_BUILD := $(pause)
# Without bytecode each of a thousand processes that tests start would compile the package again.
unexport PYTHONPATH PYTHONDONTWRITEBYTECODE

.PHONY: help test test-all demo docs wheels lint bench gpu-test soak crash-test fuzz mutants format install pause venv clean distclean \
        lint-python lint-types lint-c

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

# ---- set-up, once ----

requirements := setuptools wheel numpy xxhash posix_ipc click rich prometheus_client pyyaml pyzmq \
                msgspec msgpack transformers \
                pytest pytest-timeout pytest-xdist hypothesis lmdb ruff mypy redis obstore \
                mooncake-transfer-engine-non-cuda moto[s3] flask flask-cors

$(venv)/.requirements: constraints.txt
	@echo "creating $(venv)"
	$(PYTHON) -m venv $(venv)
	$(pip) install -c constraints.txt pip
	$(pip) install -c constraints.txt $(TORCH_ARGS) torch
	$(bin)/python -c 'import triton' 2>/dev/null || $(pip) install '$(TRITON)'
	$(pip) install -c constraints.txt $(requirements)
	@rm -f $@ && touch $@

venv: $(venv)/.requirements

# ---- the package, built again when a C source changes ----

# The build folder is named through an extra configuration file, so that two makes with different BUILD
# never meet.
$(venv)/.installed: $(venv)/.requirements setup.cfg setup.py benchmarks/pyproject.toml $(shm_c) $(index_c) $(headers)
	@mkdir -p $(build)/package
	@printf '[build]\nbuild_base = %s\n[egg_info]\negg_base = %s\n' \
	    $(build)/package $(build)/package > $(build)/package/dist.cfg
	@touch $(build)/package/started
	DIST_EXTRA_CONFIG=$(build)/package/dist.cfg LIGHTCACHE_WERROR=1 PYTHONWARNINGS=ignore \
	    $(pip) install --no-build-isolation --no-deps --force-reinstall --editable . --editable ./benchmarks
	@touch -r $(build)/package/started $@

install: $(venv)/.installed

# ---- the same libraries with pause points, for the tests ----

pause_flags := $(filter-out -O2,$(warn)) -O1 -g -shared -DLC_PAUSE_POINTS

$(pause)/_shm.so: $(shm_c) $(headers)
	@mkdir -p $(@D)
	$(CC) $(pause_flags) -o $@ $(shm_c)

$(pause)/_index.so: $(index_c) $(headers)
	@mkdir -p $(@D)
	$(CC) $(pause_flags) -o $@ $(index_c)

pause: $(pause)/_shm.so $(pause)/_index.so

# ---- what people run ----

# A process for each core, which takes tests from the others when its own are done.
workers := -n auto --dist worksteal
stand_in := gpu/test_hybrid_gpu.py gpu/test_vllm_connector.py

test: install pause
	cd tests && $(bin)/python -m pytest --part=first $(workers) $(ARGS)

test-all: install pause
	cd tests && $(bin)/python -m pytest --part=rest $(workers) $(ARGS)
	@# Of those for a GPU, on threads that stand in for one, what is tried nowhere else.
	[ -n "$(ARGS)" ] || (cd tests && LIGHTCACHE_TEST_STAND_IN=1 $(bin)/python -m pytest $(stand_in) $(workers))

# Into dist; for a platform that has no compiler. ARGS=x86_64 builds one of them.
wheels: $(venv)/.requirements
	$(bin)/python .ci/wheels dist $(ARGS)

demo: install
	@$(bin)/lightcache demo $(ARGS) && \
	if [ -z "$(ARGS)" ]; then $(bin)/lightcache demo --model hybrid --users 2 --turns 3 --no-kill; fi

bench: install
	@for name in $(BENCHES); do $(bin)/lightcache bench $$name $(ARGS); done

# On a machine with a GPU; elsewhere they all skip themselves. BENCHES=transfer measures there.
gpu-test: install pause
	cd tests && $(bin)/python -m pytest gpu $(ARGS)

# Each round has seeds of its own; the round is printed first, so that it can be run again alone.
soak: install pause
	@cd tests && for round in $$(seq 1 $(SOAK_ROUNDS)); do \
	    echo "soak: LIGHTCACHE_TEST_SEED=$$round"; \
	    LIGHTCACHE_TEST_SEED=$$round LIGHTCACHE_KILLS_INSIDE=$(SOAK_KILLS) \
	    LIGHTCACHE_STRESS_SECONDS=$(SOAK_SECONDS) LIGHTCACHE_STORM_SECONDS=$(SOAK_SECONDS) \
	    LIGHTCACHE_TEST_EXAMPLES=$(SOAK_EXAMPLES) LIGHTCACHE_DEMO_KILLS=$(SOAK_DEMOS) \
	    LIGHTCACHE_RESTARTS=$(SOAK_RESTARTS) \
	        $(bin)/python -m pytest -q multi crash model --timeout 3600 $(ARGS); \
	done

# Every operation, killed behind every instruction, under every compiler and level that is here; which
# lines of the core that were; a cache's life, killed around every system call; and calls of managers,
# interrupted at every place.
crash-test: install
	cd tests && $(bin)/python crash/run.py $(ARGS)
	cd tests && $(bin)/python crash/run.py --builds gcc-O2 --stride 7 $(ARGS) --eviction hz
	cd tests && $(bin)/python crash/covered.py
	cd tests && LIGHTCACHE_STEP_BUILDS=all $(bin)/python -m pytest -q crash/test_structures.py
	cd tests && LIGHTCACHE_LIFE_STRIDE=1 $(bin)/python -m pytest -q crash/test_life_cycle.py
	cd tests && LIGHTCACHE_INTERRUPT_STRIDE=1 $(bin)/python -m pytest -q unit/test_interrupts.py

# Damaged segments, on every processor: a million cases take minutes on 16. ARGS=--sanitize, --first N.
fuzz: install
	cd tests/hostile && $(bin)/python fuzz.py --cases $(FUZZ_CASES) --build $(build)/fuzz $(ARGS)

# Every store, fence and step of recovery of the core taken away in turn; ARGS="--only PATTERN".
mutants:
	$(PYTHON) tests/mutants/run.py $(ARGS)

# The site, into build/site. A page that is in no menu and a link that leads nowhere are errors.
docs: $(venv)/.docs
	NO_MKDOCS_2_WARNING=1 $(bin)/python -m mkdocs build --strict --site-dir $(build)/site

$(venv)/.docs: $(venv)/.requirements
	$(pip) install -c constraints.txt mkdocs-material mkdocstrings-python
	@rm -f $@ && touch $@

lint: lint-python lint-types lint-c

lint-python: $(venv)/.requirements
	$(bin)/ruff check --no-cache .
	$(bin)/ruff format --no-cache --check .

lint-types: $(venv)/.requirements
	MYPYPATH=benchmarks $(bin)/mypy --cache-dir $(build)/mypy -p lightcache -p lightcache_bench

lint-c:
	@mkdir -p $(build)
	@compilers=gcc; \
	if command -v clang >/dev/null; then compilers="gcc clang"; \
	elif [ "$${CI:-}" = true ]; then echo "lint: clang is missing" >&2; exit 1; \
	else echo "lint: no clang here, so only gcc looks at the C core"; fi; \
	for compiler in $$compilers; do \
	    for source in $(sort $(shm_c) $(index_c)); do \
	        $$compiler $(warn) -c $$source -o $(build)/lint.o; \
	        $$compiler $(warn) -DLC_PAUSE_POINTS -c $$source -o $(build)/lint.o; \
	    done; \
	    echo "$$compiler: $(words $(sort $(shm_c) $(index_c))) files without a warning"; \
	done

format: $(venv)/.requirements
	$(bin)/ruff check --no-cache --fix .
	$(bin)/ruff format --no-cache .

clean:
	rm -rf $(build) dist *.egg-info shm/*.so lightcache/*.so $(venv)/.installed tests/.hypothesis .ruff_cache .mypy_cache
	find . -path ./.git -prune -o -path ./$(VENV) -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf

distclean: clean
	rm -rf $(venv)
