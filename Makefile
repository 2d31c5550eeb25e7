# Every target works as the first command after cloning: it makes what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LATEST := .venv-latest

.PHONY: help demo test check test-latest bench sweep soak clean
.DEFAULT_GOAL := help

help:
	@echo "make demo         train on handwritten digits in two processes"
	@echo "make test         the test suite"
	@echo "make check        ruff and pyright"
	@echo "make test-latest  the suite under the newest Python here, with the newest jax"
	@echo "make bench        a step beside what it is compared to"
	@echo "make sweep        every all-reduce at every size, beside the cost model"
	@echo "make soak         long runs: schedules of uneven inputs, shared memory"
	@echo "make clean        remove the virtual environments and caches"

demo: $(VENV)/.examples
	$(BIN)/jdp launch -n 2 examples/digits.py

test: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 --dist loadfile

check: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

test-latest:
	@python=$$(./tools/newest-python 3 12) || { \
		echo "test-latest: skipped, no Python above 3.11 runs on this machine"; \
		exit 0; \
	}; \
	echo "test-latest: $$($$python --version)"; \
	$(MAKE) --no-print-directory $(LATEST)/.test LATEST_PYTHON="$$python" && \
	$(LATEST)/bin/python -c "import jax; print('jax', jax.__version__)" && \
	$(LATEST)/bin/python -m pytest -n 2 --dist loadfile

# Also times torch and mpi4jax where they are installed: pip install -e '.[peers]'.
bench: $(VENV)/.examples
	$(BIN)/jdp bench step
	$(BIN)/jdp bench overhead
	$(BIN)/jdp bench join

sweep: $(VENV)/.test
	$(BIN)/jdp bench collectives --plot collectives_devices.png
	$(BIN)/jdp bench collectives --kind processes --replicas 2,4 \
		--plot collectives_processes.png

soak: $(VENV)/.test
	$(BIN)/python -m tests.runtime.lockstep_simulation --runs 10000
	$(BIN)/python -m tests.collectives.shared_memory_soak

$(VENV)/.made:
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" 2>/dev/null || { \
		version=$$($(PYTHON) --version 2>/dev/null) || version="not one that runs"; \
		echo "jdp needs Python 3.11 or newer; $(PYTHON) is $$version."; \
		echo "Name another one: make PYTHON=python3.12 ..."; \
		exit 1; \
	}
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.examples: pyproject.toml | $(VENV)/.made
	$(BIN)/python -m pip install --quiet --editable '.[examples]'
	@touch $@

$(VENV)/.test: pyproject.toml | $(VENV)/.made
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	@touch $@ $(VENV)/.examples

$(LATEST)/.test: pyproject.toml
	$(LATEST_PYTHON) -m venv $(LATEST)
	$(LATEST)/bin/python -m pip install --quiet --upgrade --editable '.[test]'
	@touch $@

clean:
	rm -rf $(VENV) $(LATEST) .pytest_cache .ruff_cache .hypothesis
