# make verify: set up, then the verdict on our ring and, as a demonstration, on a published package.
# make test:   the same, then lint, strict types and every test.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed

.PHONY: verify test lint browser install clean

verify: install
	@$(BIN)/ringverify check ring --report .ringverify/ring.jsonl; status=$$?; \
	echo; echo "--- demonstration: a published package; its verdict does not decide this command's exit status ---"; \
	$(BIN)/ringverify check peer:ring-attention-pytorch --max-examples 40 --time-budget 120 \
	  --report .ringverify/peer.jsonl; \
	echo; echo "make verify: exit status of our ring's verdict is $$status"; exit $$status

test: verify lint browser
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Chromium for the tests of the page, which are skipped without one. It is only installed if that is asked for, by root.
browser:
	@if { command -v chromium || command -v google-chrome; } >/dev/null && command -v chromedriver >/dev/null; then :; \
	elif [ "$(BROWSER)" = install ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  (timeout 120 apt-get update -qq && timeout 300 apt-get install -qq -y --no-install-recommends chromium chromium-driver) >/dev/null 2>&1 \
	  || echo "make browser: Chromium could not be installed, so the tests of the page in a browser are skipped"; \
	else echo "make browser: no Chromium here, so the tests of the page in a browser are skipped"; fi

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test,peers,plots]'
	$(BIN)/python -m pip install --quiet --no-deps dilated-attention-pytorch==0.2.0  # it asks for another torch
	@mkdir -p .ringverify
	@touch $@

clean:
	rm -rf $(VENV) .ringverify build *.egg-info
