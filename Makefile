# The front door. Each target is one line that calls scripts/; `make help` lists them.

PYTHON ?= python3
VENV := .venv
TOOL := $(VENV)/bin/python -m scripts
override CMD := $(value CMD)# a shell's text: its dollar signs are not make's
override TEST := $(value TEST)
override ARGS := $(value ARGS)
export ARGS PROJECT PLATFORM SOURCE REPOSITORY FORCE VERBATIM JSON PATCH CMD CONTINUE ABORT REV TEST TAG YES SKIP KEEP TAGS MARKDOWN

.PHONY: help wheel fetch tree status lint check export edit rebase drift verify bisect show-change verify-wheel install doctor bump test bench clean
.DEFAULT_GOAL := help
.NOTPARALLEL:

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

wheel: $(VENV)/.tool ## build both wheels into dist/ (PLATFORM=x86_64|aarch64, SOURCE=sdist|git)
	@$(TOOL) wheel

verify-wheel: $(VENV)/.tests ## check the finished wheels (PLATFORM=)
	@$(TOOL) verify-wheel

test: lint wheel verify-wheel install ## everything: checks, tools, kernels, selection, wheels, install
	@$(VENV)/bin/python -m pytest -n 2 --dist loadfile

lint: $(VENV)/.tests ## check without its tests, which are among all tests
	@$(TOOL) check --no-tests

check: $(VENV)/.tests ## lint series, headers, overlay and code; fast tests
	@$(TOOL) check

status: $(VENV)/.tool ## show the series as a table (JSON=1, PROJECT=)
	@$(TOOL) status

tree: $(VENV)/.tool ## patched sources as git repositories in build/ (PROJECT=, SOURCE=, FORCE=1)
	@$(TOOL) tree

edit: $(VENV)/.tool ## work on one patch (PATCH=name, CMD=, CONTINUE=1, ABORT=1, PROJECT=)
	@$(TOOL) edit

export: $(VENV)/.tool ## commits of build/<project> back to patch files (PROJECT=, FORCE=1, VERBATIM=1)
	@$(TOOL) export

rebase: $(VENV)/.tool ## bring the series to another release (TAG=v0.33.0|latest, YES=1, CONTINUE=1, SKIP=1, KEEP=1, ABORT=1, PROJECT=)
	@$(TOOL) rebase

drift: $(VENV)/.tool ## what series and overlay would meet on other releases (TAGS=, JSON=path, MARKDOWN=path, PROJECT=)
	@$(TOOL) drift

verify: $(VENV)/.tests ## does each prefix of the series apply, import and pass its tests? after install (PROJECT=)
	@$(TOOL) verify

bisect: $(VENV)/.tests ## which patch breaks or mends a command? (TEST="...", REV= of this repository, PROJECT=)
	@$(TOOL) bisect

show-change: $(VENV)/.tool ## what a change of patches, overlay or pin does to the source (REV=a or a..b, PROJECT=)
	@$(TOOL) show-change

fetch: $(VENV)/.tool ## bring the pinned upstream files into the cache (PLATFORM=)
	@$(TOOL) fetch

install: $(VENV)/.tests ## install dist/ with all dependencies into .venv
	@$(TOOL) install

doctor: $(VENV)/bin/vllm ## after install: which attention backend fits a model, and why (ARGS="MODEL --gpu NAME ...")
	@$(VENV)/bin/python -m vllm.sm120 doctor $(ARGS)

bench: $(VENV)/.bench ## on a GPU, after install: tests, measurements, tables and plots into benchmarks/results/
	@$(VENV)/bin/python -m benchmarks

bump: $(VENV)/.tool ## raise the release number
	@$(TOOL) bump

clean: $(VENV)/.tool ## remove build/ and dist/ (FORCE=1 if they hold work of yours)
	@$(TOOL) clean

$(VENV)/.tool: scripts/requirements.txt
	@$(PYTHON) -I scripts/bootstrap.py $(VENV) $< $@

$(VENV)/.tests: tests/requirements.txt $(VENV)/.tool
	@$(PYTHON) -I scripts/bootstrap.py $(VENV) $< $@

$(VENV)/bin/vllm:
	@echo "error: no vLLM in $(VENV); cure: make wheel install" >&2; exit 1

$(VENV)/.bench: benchmarks/requirements.txt $(VENV)/.tests
	@$(PYTHON) -I scripts/bootstrap.py $(VENV) $< $@
