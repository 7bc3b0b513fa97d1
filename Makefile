# Everything runs in .venv, which is made on first use: python3 (with venv) and make are all a new machine needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Newer than pyproject.toml and constraints.txt: what they ask for is installed.
STAMP := $(VENV)/.installed
# Torch uses one thread in each worker, so workers and cores match.
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help demo test lint types pytest chromium docs figures install support bench format clean

help: ## show this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

demo: $(STAMP) ## explain the bundled photo with a real ResNet-50, which is fetched once; ends with the picture's path
	$(BIN)/relprop explain --out out/demo $(ARGS)

test: lint types pytest ## everything that must pass: ruff, mypy, pytest

lint: $(STAMP) ## ruff, rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP) ## mypy --strict on src/relprop
	$(BIN)/mypy

pytest: $(STAMP) chromium ## the tests alone; ARGS="-k ledger" to choose
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadgroup $(ARGS)

docs: $(STAMP) ## build the documentation into build/site, strictly; open build/site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -W ignore -m mkdocs build --strict

figures: $(STAMP) ## run the pages' own code with real weights and keep its pictures in docs/images; ARGS=tutorial.md for one
	$(BIN)/python -W ignore tests/pages.py $(ARGS)

install: $(STAMP) ## build wheel and sdist, install each for real into an empty environment, use it outside; takes minutes
	.ci/install $(BIN)/python

# The page is tested in a real browser: Debian's, installed where root or sudo may, named in a sentence where not.
chromium:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || { \
	  root=$$([ "$$(id -u)" = 0 ] || echo sudo -n); command -v apt-get >/dev/null && $$root apt-get update -qq \
	  && $$root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium; } \
	|| echo "The browser tests need chromium, which could not be installed here; install it so that it is on PATH."

support: $(STAMP) ## examine every model of the support matrix and write docs/support.md; takes most of an hour
	$(BIN)/python -W ignore tests/sums.py
	$(BIN)/python -W ignore tests/support.py $(ARGS)

bench: $(STAMP) ## cost, its growth and its parts, memory, first call; ARGS=--quick for a smoke run
	$(BIN)/python benchmarks/bench.py $(ARGS)

format: $(STAMP) ## rewrite the code as `lint` wants it
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove what can be made again, .venv included
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@
