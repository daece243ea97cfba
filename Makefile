# make train    trains a small model over two worker processes
# make demo     compares DDP with pipelines over slow links, in five minutes; draws a picture like that of the README
# make test     the default tests: no root, no GPU, no browser, a few minutes on two cores
# make test-all all tests that this machine can run, and what is missing for each skipped one
# make check    format, lint, types, the direction of imports, and the rules for words and sizes
# make results  compares trained weights, plans and simulations with a table of earlier ones, in two to four minutes
# make docs     writes the gallery from the code, then builds the site in build/site, with llms.txt and the API in one
#               page; fails on a dead link or reference
# make bench    runs the benchmarks in turn
# make gpu      checks a CUDA card, nine minutes at most; says so if there is none
# make clean    removes everything that these made
#
# Each makes .venv first if it is missing. PYTHON=... chooses the interpreter, PYTEST=... adds options.

# Tests start many processes: each would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train demo test test-all check results docs bench gpu clean
.DEFAULT_GOAL := test

BIN := .venv/bin
# The first interpreter that is new enough: on some systems python3 is too old, but a newer one is installed too.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
STAMP := .venv/installed
# Tests that start processes mostly wait: they run in turn in one runner or two, and others compute.
RUNNERS := -n 3

train: $(STAMP)
	@$(BIN)/pipedream train examples/digits.py --workers 2
	@echo "next: make demo (over slow links), or a recipe of your own (docs/quickstart.md): $(BIN)/pipedream train RECIPE"

demo: $(STAMP)
	@$(BIN)/pipedream compare examples/vgg_digits.py --workers 2 --seconds 1 \
		--link 4gbit/s --link 1gbit/s --link 400mbit/s --link 100mbit/s \
		--schedule torch --schedule pipedream --schedule pipedream_2bw

test: $(STAMP)
	@$(BIN)/pytest -q $(RUNNERS) $(PYTEST)

test-all: $(STAMP)
	@$(BIN)/pytest -q $(RUNNERS) -m "" $(PYTEST)

check: $(STAMP)
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy
	@PYTHONPATH=src $(BIN)/lint-imports --no-cache
	@$(BIN)/python scripts/check_style.py

results: $(STAMP)
	@$(BIN)/python scripts/check_results.py

docs: $(STAMP) .venv/docs-installed
	@$(BIN)/python scripts/make_docs.py
	@$(BIN)/python -m sphinx -q -E -W -n --keep-going -c docs -d build/doctrees -b html . build/site
	@$(BIN)/python scripts/make_llms.py build/site
	@echo "build/site/index.html"

.venv/docs-installed: requirements/docs.txt $(STAMP)
	@$(BIN)/python -m pip --quiet --disable-pip-version-check install --requirement requirements/docs.txt
	@touch $@

bench: $(STAMP)
	@for question in $(wildcard benchmarks/*/run.py); do echo "$$question"; $(BIN)/python "$$question" || exit 1; done

gpu: $(STAMP)
	@$(BIN)/python benchmarks/gpu/run.py

clean:
	@rm -rf .venv .nox build dist src/*.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	@find src tests examples benchmarks docs -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

$(STAMP): requirements/pins.txt pyproject.toml scripts/install.sh
	@test -n "$(PYTHON)" && $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "pipedream needs Python 3.11 or newer; found $$($(or $(PYTHON),python3) --version 2>&1)." \
			"Install one, or name it: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@echo "making .venv with $$($(PYTHON) --version) (minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || { \
		rm -rf .venv; echo "$(PYTHON) has no venv module; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@sh scripts/install.sh
	@touch $@
