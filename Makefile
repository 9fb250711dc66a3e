# Two commands do everything, from nothing: `make demo` and `make test`. Each sets up .venv first; a
# second run finds it ready.
PYTHON ?= python3
VENV := .venv
READY := $(VENV)/.ready
RUN := $(VENV)/bin/
GPU_PYTHON ?= $(RUN)python

.PHONY: demo test lint types unit docs test-gpu format clean
.DEFAULT_GOAL := demo

demo: $(READY)
	$(RUN)wherefrom demo

test: lint types unit

lint: $(READY)
	$(RUN)ruff check .
	$(RUN)ruff format --check .

types: $(READY)
	$(RUN)mypy

# two processes of one thread each: files of tests are dealt out to them whole. They start a hundred
# more, so bytecode is kept even where the environment says not to
unit: $(READY)
	PYTHONDONTWRITEBYTECODE= $(RUN)pytest -n 2 --dist loadfile --no-loadscope-reorder

# the documentation as a site, in site/; a broken link or anchor fails. The tests build it too.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(RUN)mkdocs build --strict

# the CUDA paths; where nothing can be installed, with the torch and pytest that are there:
# make test-gpu GPU_PYTHON=python3
test-gpu: $(if $(filter $(RUN)python,$(GPU_PYTHON)),$(READY))
	PYTHONPATH=src:tests $(GPU_PYTHON) -m pytest -p no:cacheprovider -o addopts= \
		--confcutdir=tests/gpu -ra --durations=10 tests/gpu

format: $(READY)
	$(RUN)ruff check --fix .
	$(RUN)ruff format .

# the stamp is written last: an interrupted set-up is taken up again
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "wherefrom needs Python 3.11 or newer: make PYTHON=python3.12"; exit 1; }
	test -x $(RUN)python || $(PYTHON) -m venv $(VENV)
	$(RUN)python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
# without dependencies: kronfluence declares a torchvision that it never imports and that, unless
# pinned too, replaces torch; torchmetrics is only compared with
	$(RUN)python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps \
		kronfluence einconv einops opt_einsum torchmetrics lightning-utilities torchsde trampoline
	@touch $(READY)

clean:
	rm -rf $(VENV) wherefrom-demo site build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
