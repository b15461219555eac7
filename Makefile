# Set-up installs into .venv. A machine with its own torch brings it: make setup TORCH=system
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
RUN := $(VENV)/bin/python
DEMO_PROMPT ?= two large yellow circles moving up fast
DEMO_OUT ?= demo.mp4
# Of make fuzz: cases, seed, and cpu or cuda.
N ?= 10000
SEED ?= 1
DEVICE ?= cpu

# Peers install root packages named `tests` and `docs`, so they have an environment of their own.
BENCH_VENV := .venv-bench
PEERS := diffusers==0.42.1 xfuser==0.7.0 yunchang==0.6.4 triton tyro rich

.PHONY: setup demo test test-gpu fuzz lint format bench clean

setup: $(VENV)/.ready

# torch first and by itself, so that no later requirement picks another build of it.
$(VENV)/.ready: pyproject.toml
ifeq ($(TORCH),system)
	$(PYTHON) -m venv --system-site-packages $(VENV)
else
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check "$(TORCH)"
endif
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable ".[models,dev]"
	touch $@

demo: setup
	$(RUN) -m torch.distributed.run --nproc-per-node=2 --standalone --local-addr=127.0.0.1 -m scripts.generate \
	    --model cosmos3-pocket --prompt "$(DEMO_PROMPT)" --parallel.ulysses 2 --attention.recipe pocket-switch \
	    --offload.mode layerwise --offload.resident-blocks 2 --out $(DEMO_OUT)

# Two tests at a time, one thread each. Those that start ranks go by the file, so that what a file's tests share is made
# once, and in order of name: xdist would start the files of fewest tests last, and long ones are among them. Forked tests
# come last and alone: they fork a process that has not imported torch.
test: setup lint
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 --dist worksteal tests/unit
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder tests/parity
	$(RUN) -m pytest --forked tests/isolated

test-gpu: setup
	$(RUN) -m pytest tests/gpu

# The exchange against other packages on two CPU ranks; about five minutes on a quiet machine.
bench: $(BENCH_VENV)/.ready
	$(BENCH_VENV)/bin/python -m scripts.bench_ulysses --ranks 2 --backend gloo

$(BENCH_VENV)/.ready: Makefile
	$(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BENCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PEERS)
	touch $@

fuzz: setup
	$(RUN) -m tests.fuzz.run --cases $(N) --seed $(SEED) --device $(DEVICE)

lint: setup
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: setup
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

clean:
	rm -rf $(VENV) $(BENCH_VENV) .mypy_cache .ruff_cache .pytest_cache build *.egg-info
