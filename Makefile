# make test:    set up, lint, strict types, and every test but those of a night.
# make suite:   the same without lint and types.
# make nightly: the tests that take long and change rarely, which are marked `nightly`; pytest leaves them out otherwise.
#               `pytest -m nightly FILE` runs those of one file, `pytest -m "" FILE` all of it.
# make verify:  the verdict on our ring and, as a demonstration, on a published package; tests hold what both come to.
#
# VERSIONS=pinned installs what constraints.txt names, into .venv; VERSIONS=newest the newest that pip finds, which is
# what users get; VERSIONS=floor the oldest that pyproject.toml allows. The last two have an environment each beside it.

PYTHON ?= python3
VERSIONS ?= pinned
VENV := .venv$(patsubst %,-%,$(filter-out pinned,$(VERSIONS)))
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
CONSTRAINTS := $(VENV)/constraints.txt
FLOORS := /^dependencies = \[/,/^\]/s/^ *"\([a-z0-9-]*\)>=\([0-9.]*\).*/\1==\2/p

# Tests that mostly wait: for processes that start, for deadlines, for processes to end. More of them run at once.
WAITING := tests/bench/test_bench.py tests/ci tests/conformance/test_bad_files.py tests/conformance/test_closed_files.py \
  tests/conformance/test_deadlines.py tests/conformance/test_ended_from_outside.py \
  tests/conformance/test_failures_that_help.py tests/conformance/test_first_verdict.py \
  tests/conformance/test_imports_that_misbehave.py tests/conformance/test_misbehaving.py \
  tests/conformance/test_one_verdict.py tests/conformance/test_watched_beside.py tests/misbehaviour tests/newcomers \
  tests/pytest_plugin tests/reports/test_browser.py tests/training tests/worlds/test_fault_matrix.py \
  tests/worlds/test_gloo_leaving.py tests/worlds/test_gloo_world.py tests/worlds/test_torchrun.py \
  tests/worlds/test_whose_fault.py tests/worlds/test_worlds_agree.py
# Dozens of tests start a process; it takes a third less time where it finds compiled what the one before it compiled.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: verify suite test waiting most nightly lint ready browser install clean

verify: install
	@$(BIN)/ringverify check ring --report .ringverify/ring.jsonl; status=$$?; \
	echo; echo "--- demonstration: a published package; its verdict does not decide this command's exit status ---"; \
	$(BIN)/ringverify check peer:ring-attention-pytorch --max-examples 40 --time-budget 120 \
	  --report .ringverify/peer.jsonl; \
	echo; echo "make verify: exit status of our ring's verdict is $$status"; exit $$status

# Lint and types, which keep one processor busy, are done beside the tests that wait.
test: ready
	@$(MAKE) --no-print-directory --keep-going --jobs 2 lint waiting; first=$$?; \
	$(MAKE) --no-print-directory most && exit $$first
	@echo "make test: tests marked nightly were left out; \`make nightly\` runs them"

suite: ready
	@$(MAKE) --no-print-directory waiting; first=$$?; $(MAKE) --no-print-directory most && exit $$first

waiting:
	@$(BIN)/python -m pytest -n 4 --dist worksteal $(WAITING)

most:
	@$(BIN)/python -m pytest -n 2 --dist worksteal $(addprefix --ignore=,$(WAITING))

nightly: ready
	$(BIN)/python -m pytest -n 2 --dist worksteal -m nightly

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# What tests need: two downloads, side by side.
ready:
	@$(MAKE) --no-print-directory --jobs 2 install browser

# Chromium for the tests of the page, which are skipped without one. It is only installed if that is asked for, by root.
browser:
	@if { command -v chromium || command -v google-chrome; } >/dev/null && command -v chromedriver >/dev/null; then :; \
	elif [ "$(BROWSER)" = install ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  (timeout 120 apt-get update -qq && timeout 300 apt-get install -qq -y --no-install-recommends chromium chromium-driver) >/dev/null 2>&1 \
	  || echo "make browser: Chromium could not be installed, so the tests of the page in a browser are skipped"; \
	else echo "make browser: no Chromium here, so the tests of the page in a browser are skipped"; fi

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@case "$(VERSIONS)" in pinned|floor|newest) ;; \
	*) echo "VERSIONS=$(VERSIONS): expected pinned, floor or newest" >&2; exit 2;; esac
	$(PYTHON) -m venv $(VENV)
	@case "$(VERSIONS)" in \
	pinned) cp constraints.txt $(CONSTRAINTS);; \
	floor) sed -n '$(FLOORS)' pyproject.toml > $(CONSTRAINTS);; \
	newest) : > $(CONSTRAINTS);; esac
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[test,peers,plots]'
	$(BIN)/python -m pip install --quiet --no-deps dilated-attention-pytorch==0.2.0  # it asks for another torch
	@mkdir -p .ringverify
	@touch $@

clean:
	rm -rf .venv .venv-floor .venv-newest .ringverify build *.egg-info
