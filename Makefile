# Every target works as the first command after cloning: it makes what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LATEST := .venv-latest
PTX := .venv-ptx
RELEASE := .venv-release
TODAY := $(shell date +%F)

.PHONY: help demo test test-all check test-latest test-latest-all test-kernels test-ptx gpu gpu-exact gpu-virtual gpu-kernels gpu-launches gpu-steps gpu-wheels bench results performance sweep soak two-hosts faults release-check docs docs-serve clean
.DEFAULT_GOAL := help

help:
	@echo "make demo         train on handwritten digits in two processes"
	@echo "make test         the test suite, but for what takes long and breaks rarely"
	@echo "make test-all     all of it"
	@echo "make check        ruff and pyright"
	@echo "make docs         the site with all pages and the API reference, in site/"
	@echo "make test-latest  the test suite under the newest Python here, with the newest jax"
	@echo "make test-latest-all  all of it"
	@echo "make test-kernels every GPU kernel, interpreted on the CPU with races found"
	@echo "make test-ptx     compile the GPU kernels for CUDA, without a GPU"
	@echo "make gpu          on a GPU: exact sums of every kernel, times, steps"
	@echo "make bench        a step compared with other systems"
	@echo "make results      every benchmark of docs/performance.md, into benchmarks/results: an hour of a quiet machine"
	@echo "make performance  docs/performance.md, its pictures and README's figures, from the results"
	@echo "make sweep        every all-reduce at every size, beside the cost model"
	@echo "make soak         long runs: uneven inputs, the watch, shared memory, the eager engine, its coordinator and its wire, parameter servers, replica groups"
	@echo "make two-hosts    as root: train over two hosts, each with its own network and name"
	@echo "make faults       every fault at every moment: is the right process blamed, or named where it hangs, and soon"
	@echo "make release-check  build wheel and sdist; install, launch and train in clean environments"
	@echo "make clean        remove the virtual environments and caches"

demo: $(VENV)/.examples
	$(BIN)/jdp launch -n 2 examples/digits.py

IN_TURNS := -n 4 --dist loadfile --no-loadscope-reorder
test: $(VENV)/.test
	$(BIN)/python -m pytest $(IN_TURNS)

test-all: test
	$(BIN)/python -m pytest $(IN_TURNS) -m slow

check: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# mkdocs-material prints an advertisement of its successor.
docs: $(VENV)/.test
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

docs-serve: $(VENV)/.test
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

test-latest:
	$(call latest,)

test-latest-all: test-latest
	$(call latest,-m slow)

latest = @python=$$(./tools/newest-python 3 12) || { \
		echo "$@: skipped, no Python above 3.11 runs on this machine"; \
		exit 0; \
	}; \
	echo "$@: $$($$python --version)"; \
	$(MAKE) --no-print-directory $(LATEST)/.test LATEST_PYTHON="$$python" && \
	$(LATEST)/bin/python -c "import jax; print('jax', jax.__version__)" && \
	$(LATEST)/bin/python -m pytest $(IN_TURNS) $(1)

test-kernels: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 --dist load -m kernels

# With the CUDA plug-ins of the jax that each Python gets, and a ptxas from a wheel where
# none is installed.
test-ptx: $(PTX)/.ptx
	$(call ptx,$(PTX))
	@python=$$(./tools/newest-python 3 12) || exit 0; \
	$(MAKE) --no-print-directory $(PTX)-latest/.ptx LATEST_PYTHON="$$python" && \
	$(call ptx,$(PTX)-latest)

ptx = PATH="$$PATH:$$(echo $(CURDIR)/$(1)/lib/python*/site-packages/nvidia/cu13/bin)" \
	$(1)/bin/python -m pytest -m ptx

# In the Python that has a jax with CUDA: make gpu PYTHON=python3. Nothing is installed.
gpu:
	@$(ON_GPU) -c "import jax, sys; \
		sys.exit(jax.default_backend() != 'gpu')" || { \
		echo "gpu: the jax of $(PYTHON) sees no GPU"; \
		exit 1; \
	}
	$(MAKE) --keep-going gpu-exact gpu-virtual gpu-kernels gpu-steps

# Each stage ends within 8 minutes, and what it has measured by then is on disk.
GPU_OUT ?= benchmarks/results
# Seconds after which a stage begins nothing new; each has its own, if this is empty.
GPU_LIMIT_S ?=
LIMIT = $(if $(GPU_LIMIT_S),--limit-s $(GPU_LIMIT_S))
ON_GPU = PYTHONUNBUFFERED=1 PYTHONPATH="$(CURDIR):$$PYTHONPATH" \
	timeout --kill-after=5 480 $(PYTHON)
gpu-exact:
	XLA_PYTHON_CLIENT_PREALLOCATE=false $(ON_GPU) -m pytest \
		-p no:cacheprovider -m gpu tests/collectives/test_kernels_on_gpu.py
	$(ON_GPU) -m tests.collectives.kernels_on_gpu \
		--json $(GPU_OUT)/$(TODAY)_kernels_gpu.jsonl $(LIMIT)
gpu-virtual:
	folder=$$(mktemp -d) && \
	$(ON_GPU) -m tests.collectives.virtual_gpus compile $$folder && \
	CUDA_DEVICE_MAX_CONNECTIONS=32 $(ON_GPU) -m tests.collectives.virtual_gpus \
		run $$folder --json $(GPU_OUT)/$(TODAY)_virtual_gpus.jsonl $(LIMIT)
gpu-kernels:
	$(ON_GPU) -m jdp.cli.main bench kernel \
		--json $(GPU_OUT)/$(TODAY)_kernel_times_gpu.jsonl $(LIMIT)
# Which launches are fastest: what `default_launch` was chosen from; not in `make gpu`.
gpu-launches:
	$(ON_GPU) -m benchmarks.gpu_launches \
		--json $(GPU_OUT)/$(TODAY)_launch_shapes_gpu.jsonl $(LIMIT)
gpu-steps:
	$(ON_GPU) -m benchmarks.gpu_steps --json $(GPU_OUT)/$(TODAY)_steps_gpu.jsonl $(LIMIT)

# What a GPU's Python lacks, in a folder that can travel: PYTHONPATH=gpu-wheels/site.
gpu-wheels:
	python3 -m pip download --quiet --no-deps --only-binary=:all: \
		--python-version 3.12 --implementation cp --dest gpu-wheels \
		$(foreach tag,2_28 2_26 2_17,--platform manylinux_$(tag)_x86_64) \
		--platform manylinux2014_x86_64 msgspec pyzmq
	for wheel in gpu-wheels/*.whl; do \
		python3 -m zipfile -e $$wheel gpu-wheels/site; \
	done

# Also times torch (pip install -e '.[peers]') and mpi4jax (pip install mpi4jax, with
# an MPI), where they are installed.
bench: $(VENV)/.examples
	$(BIN)/jdp bench step
	$(BIN)/jdp bench train
	$(BIN)/jdp bench overhead
	$(BIN)/jdp bench join
	$(BIN)/jdp bench eager
	$(BIN)/jdp bench hooks
	$(BIN)/jdp bench zero1
	$(BIN)/jdp bench local
	$(BIN)/jdp bench parameter-server

# The files that docs/performance.md is made from; `make result-train` stores one. Needs
# torch and mpi4jax as `make bench` does, and a machine that does nothing else.
BENCH_step := step --rounds 15
BENCH_step_101mb := step --blocks 24 --width 1024 --batch 32 --rounds 9 --steps 3
BENCH_step_4_processes := step -n 4 --rounds 7
BENCH_scaling := scaling --rounds 7
BENCH_train := train --rounds 9
BENCH_train_no_pin := train --rounds 9 --no-pin
BENCH_overhead := overhead
BENCH_leaves := leaves
BENCH_hooks := hooks
BENCH_zero1 := zero1 --rounds 15
BENCH_shards := shards --rounds 15
BENCH_local := local
BENCH_eager := eager
BENCH_parameter_server := parameter-server
BENCH_join := join --rounds 51
BENCH_overlap := step --overlap --rounds 15
BENCH_overlap_101mb := step --overlap --blocks 24 --width 1024 --batch 32 --rounds 7 --steps 3
BENCH_collectives_devices := collectives --steps 3
BENCH_collectives_processes := collectives --kind processes --replicas 2 --sizes 64k,1m,12.1m --rounds 11 --steps 20
RESULTS := $(sort $(patsubst BENCH_%,result-%,$(filter BENCH_%,$(.VARIABLES))))
results: $(RESULTS)
result-%: $(VENV)/.examples
	$(BIN)/jdp bench $(BENCH_$*) \
		--json benchmarks/results/$(TODAY)_$*_cpu$(shell nproc).json

performance: $(VENV)/.test
	$(BIN)/python tools/write_performance.py

sweep: $(VENV)/.test
	$(BIN)/jdp bench collectives --plot collectives_devices.png
	$(BIN)/jdp bench collectives --kind processes --replicas 2,4 \
		--plot collectives_processes.png

soak: $(VENV)/.test
	$(BIN)/python -m tests.join.lockstep_simulation --runs 10000
	$(BIN)/python -m tests.collectives.shared_memory_soak
	$(BIN)/python -m tests.eager.engine_soak
	$(BIN)/python -m tests.eager.coordinator_simulation --decisions 1000000
	$(BIN)/python -m tests.eager.eager_fuzz --messages 1000000
	$(BIN)/python -m tests.runtime.transport_fuzz --messages 1000000
	$(BIN)/python -m tests.runtime.roll_call_fuzz --messages 1000000
	$(BIN)/python -m tests.wire_fuzz --messages 1000000
	$(BIN)/python -m tests.step.sameness_soak --programs 1000
	$(BIN)/python -m tests.step.shards.soak
	$(BIN)/python -m tests.parameter_server.soak
	$(BIN)/python -m tests.parameter_server.fuzz --messages 1000000
	$(BIN)/python -m tests.join.lockstep_fuzz --messages 1000000
	$(BIN)/python -m tests.watch.simulation --runs 10000 --processes 256
	$(BIN)/python -m tests.watch.false_alarms
	$(BIN)/python -m tests.watch.straggler_jobs --runs 5
	$(BIN)/python -m tests.elastic.simulation --runs 10000
	$(BIN)/python -m tests.elastic.simulation --runs 100 --slots 64

# As root, with iproute2: each host is a network namespace of its own.
two-hosts: $(VENV)/.examples $(VENV)/.test
	$(BIN)/python -m tests.two_hosts

faults: $(VENV)/.test
	$(BIN)/python -m tests.launch.fault_table
	$(BIN)/python -m tests.watch.fault_table --others

# Needs a network, some 10 minutes, and Python 3.11, 3.12 and 3.13 (pyenv's are found).
release-check: $(RELEASE)/.release
	$(RELEASE)/bin/python tools/release_check.py

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

$(PTX)/.ptx: pyproject.toml
	$(PYTHON) -m venv $(PTX)
	$(PTX)/bin/python -m pip install --quiet --editable '.[test,ptx]'
	@touch $@

$(PTX)-latest/.ptx: pyproject.toml
	$(LATEST_PYTHON) -m venv $(PTX)-latest
	$(PTX)-latest/bin/python -m pip install --quiet --upgrade --editable '.[test,ptx]'
	@touch $@

$(RELEASE)/.release:
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip install --quiet build twine
	@touch $@

clean:
	rm -rf site $(VENV) $(LATEST) $(PTX) $(PTX)-latest $(RELEASE) dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
