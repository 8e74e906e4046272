#!/bin/sh
# What CI runs, and anybody else: sh ci.sh [FOLDER FOR RESULTS]
set -eu
results="${1:-ci-results}"
mkdir -p "$results"

echo "== tests, and the ring: a test a property =="
python -m pytest -n 2 --junitxml="$results/tests.xml" \
  --ringverify-report="$results/ring.jsonl" --ringverify-cases="$results/cases"

echo "== the prototype: nothing new =="
ringverify check acme.prototype:attend --max-examples 16 --baseline known_violations.toml \
  --report "$results/prototype.jsonl" --cases "$results/cases"
