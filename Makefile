# Everything runs in .venv, which make creates and reuses. Each target installs only what it needs,
# and installs again when pyproject.toml has changed.

PYTHON ?= python3
BACKENDS ?= torch tensorflow jax
ARGS ?=
BENCH ?= throughput
# torch and torchvision belong together: move both, here and in pyproject.toml.
TORCH ?= torch==2.13.0 torchvision==0.28.0
# A second index for other builds of them. PyTorch's own for CPUs: https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
export KERAS_BACKEND ?= tensorflow
export TF_CPP_MIN_LOG_LEVEL ?= 3
export PYRIGHT_PYTHON_IGNORE_WARNINGS ?= 1

VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.PHONY: help demo test slow fuzz mutants lint format bench notebooks docs dist clean
.NOTPARALLEL:

help: ## show this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1\t\2/p' Makefile | expand -t 14
	@echo
	@echo 'make test BACKENDS="jax torch" ARGS="-k pooling"   some backends, some tests'
	@echo 'make demo KERAS_BACKEND=jax                        another backend'

demo: $(STAMP)-demo-$(KERAS_BACKEND) ## train a small ViT on real images
	@$(RUN) -m training.demo $(ARGS)

test: $(STAMP)-test ## run the tests, once a backend
	@$(RUN) tests/run.py $(BACKENDS) -- $(ARGS)

slow: $(STAMP)-test ## run the tests marked slow, once a backend
	@$(RUN) tests/run.py $(BACKENDS) -- -m slow --timeout=1800 $(ARGS)

fuzz: $(STAMP)-test ## read damaged files through every door (docs/security.md)
	@$(RUN) tests/fuzz/run.py $(ARGS)

mutants: export KERAS_BACKEND = torch
mutants: $(STAMP)-test ## break the modules that promises stand on, place by place, and run their tests
	@$(RUN) tests/mutation/run.py $(ARGS)

# The commands of .pre-commit-config.yaml.
lint: $(STAMP)-lint ## check style and types
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/pyright

format: $(STAMP)-lint ## fix the formatting
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format

bench: $(STAMP)-bench ## measure the speed beside other libraries (BENCH=distribution, ...)
	@$(RUN) -m benchmarks.$(BENCH) $(ARGS)

notebooks: $(STAMP)-test ## run the notebooks and write them with their outputs (ARGS=deploy: one)
	@$(RUN) notebooks/build.py $(ARGS)

docs: $(STAMP)-docs ## build the documentation into site/, strictly
	@NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet $(ARGS)
	@echo "site/index.html; '$(RUN) -m mkdocs serve' shows it while you write"

# The date of a file in an archive is that of the commit.
dist: export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 1577836800)
dist: $(STAMP)-release ## build the wheel and the sdist into dist/, and check them
	@rm -rf dist
	$(RUN) -m hatchling build
	$(RUN) -m twine check --strict dist/*

clean: ## remove caches and builds, keep .venv and runs/
	rm -rf build dist site .pytest_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +

# All of a target's requirements go to pip at once, so that it keeps to the torch named above.
$(STAMP)-demo-%: WANT = $(if $(filter torch,$*),$(TORCH)) -e '.[$*,train,export]'
$(STAMP)-lint: WANT = -e . --group dev
$(STAMP)-test: WANT = $(TORCH) -e '.[tensorflow,jax,torch,train]' --group test
$(STAMP)-docs: WANT = --group docs
$(STAMP)-release: WANT = --group release
$(STAMP)-bench: WANT = $(TORCH) -e '.[tensorflow,jax,torch,train]' --group test --group bench

# A new .venv has the pip of its Python; --group is an option of 25.1.
PIP := $(RUN) -m pip install --quiet --disable-pip-version-check
define INSTALL
@echo "Installing into $(VENV): $(strip $(WANT))"
@$(PIP) 'pip>=25.1' && $(PIP) \
	$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(WANT) \
	|| { echo "ERROR: pip could not install $(strip $(WANT))" >&2; exit 1; }
@touch $@
endef

$(STAMP)-lint $(STAMP)-test $(STAMP)-bench $(STAMP)-docs $(STAMP)-release: pyproject.toml | $(RUN)
	$(INSTALL)
$(STAMP)-demo-%: pyproject.toml | $(RUN)
	$(INSTALL)

# TensorFlow 2.21 has no wheels for Python 3.14.
$(RUN):
	@for python in $(PYTHON) python3.13 python3.12 python3.11 ""; do \
		"$$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
			2>/dev/null && break; \
	done; \
	seen="$(PYTHON) is $$($(PYTHON) --version 2>&1)"; \
	if [ -z "$$python" ]; then \
		echo "ERROR: no Python 3.11 to 3.13 found ($$seen). Name one: make PYTHON=python3.12" >&2; \
		exit 1; \
	fi; \
	[ "$$python" = "$(PYTHON)" ] || echo "Using $$python ($$seen; 3.11 to 3.13 is needed)"; \
	echo "Making $(VENV) with $$($$python --version)"; \
	"$$python" -m venv --clear $(VENV) || { \
		rm -rf $(VENV); \
		echo "ERROR: $$python cannot make $(VENV): are its venv and pip installed?" >&2; \
		exit 1; \
	}
