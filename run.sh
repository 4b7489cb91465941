#!/usr/bin/env bash
# The main job from nothing: cold start, then GRPO and GRPO+GCD side by side, then the table and the report.
#
#   bash run.sh          about 10 minutes on 2 CPU cores; no GPU, no download of data or weights, no compiler, no Java
#   bash run.sh test     set up what the tests need, and run them all
#
# Both make .venv on first use ($PYTHON names another python3.11 or 3.12). A stage whose output is there is not run again:
# remove runs/main to start over. $OUT is where everything goes (runs/main), $SEED the seed (0).
set -euo pipefail
cd "$(dirname "$0")"
OUT=${OUT:-runs/main} SEED=${SEED:-0}

[ -x .venv/bin/python ] || "${PYTHON:-python3}" -m venv .venv
install() { cmp -s "$1" ".venv/$1" || { .venv/bin/pip install -q -r "$1" && cp "$1" ".venv/$1"; }; }
python() { .venv/bin/python "$@"; }
gcd() { python gcd.py --seed "$SEED" "$@"; }

if [ "${1:-}" = test ]; then
    install requirements-test.txt
    install requirements-alfworld.txt || echo "alfworld could not be installed (it needs g++ and make): its tests will be skipped"
    shift
    exec .venv/bin/python -m pytest "$@"
fi
[ $# = 0 ] || { echo "run.sh: unknown argument $1 (nothing, or: test)" >&2; exit 2; }
install requirements.txt

if [ ! -e "$OUT/cold_start/stages.json" ]; then
    gcd --out "$OUT/cold_start" --iterations 0
fi
start=(--model "$OUT/cold_start/checkpoint" --demonstrations 0)
if [ ! -e "$OUT/grpo/stages.json" ]; then       # in the background, on the second core; its log is $OUT/grpo.log
    gcd "${start[@]}" --out "$OUT/grpo" --no-gcd 2> "$OUT/grpo.log" & grpo=$!
fi
if [ ! -e "$OUT/grpo+gcd/stages.json" ]; then
    gcd "${start[@]}" --out "$OUT/grpo+gcd"
fi
[ -z "${grpo:-}" ] || wait "$grpo" || { cat "$OUT/grpo.log" >&2; exit 1; }
python report.py "$OUT"
