#!/usr/bin/env bash
# The main job from nothing: cold start, then GRPO and GRPO+GCD side by side, then the table and the report.
#
#   bash run.sh          3 to 6 minutes on 2 CPU cores; no GPU, no download of data or weights, no compiler
#   bash run.sh test     set up what the tests need, run them (what follows "test" goes to pytest: -m fast)
#   bash run.sh chaos    attack it, for about 20 minutes (see tests/chaos/__main__.py; --part: under five)
#
# All make .venv on first use ($PYTHON names another python3.11 or 3.12). A stage that has ended is not run
# again; an interrupted RL stage goes on from its checkpoint, an interrupted cold start begins again. Remove
# runs/main to start over. $OUT is where everything goes (runs/main), $SEED the seed (0; give another seed
# another $OUT). However this script ends, its runs end too: they save, even where it was killed.
set -euo pipefail
cd "$(dirname "$0")"
OUT=${OUT:-runs/main} SEED=${SEED:-0} PYTHON=${PYTHON:-python3}

install() {                                     # a requirements file, once
    cmp -s "$1" ".venv/$1" && return
    echo "installing $1 into .venv (the first time this takes minutes)"
    .venv/bin/pip install -q -r "$1" && cp "$1" ".venv/$1"
}

if [ ! -x .venv/bin/pip ]; then
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' ||
        { echo "run.sh: $PYTHON is not Python 3.11 or 3.12; name one: PYTHON=python3.11 bash run.sh" >&2
          exit 2; }
    rm -rf .venv
    "$PYTHON" -m venv .venv
fi
if [ "${1:-}" = test ]; then
    install requirements.txt
    install requirements-bench.txt
    install requirements-test.txt
    install requirements-endpoint.txt
    install requirements-trl.txt
    install requirements-scienceworld.txt
    install requirements-alfworld.txt ||
        echo "alfworld could not be installed (it needs g++ and make): the tests that play it will be skipped"
    OMP_NUM_THREADS=1 exec .venv/bin/python -m pytest -n 2 --dist loadfile "${@:2}"     # two files at a time
fi
if [ "${1:-}" = chaos ]; then
    install requirements.txt
    install requirements-bench.txt
    install requirements-test.txt
    install requirements-endpoint.txt
    OMP_NUM_THREADS=1 exec .venv/bin/python tests/chaos "${@:2}"
fi
[ $# = 0 ] || { echo "run.sh: unknown argument $1 (nothing, or: test, chaos)" >&2; exit 2; }
install requirements.txt

method() {                              # one RL method from the cold start, or from where it was interrupted
    [ ! -e "$OUT/$1/stages.json" ] || return 0
    exec .venv/bin/python gcd.py --seed "$SEED" --model "$OUT/cold_start/checkpoint" --demonstrations 0 \
        --out "$OUT/$1" --resume --overwrite "${@:2}"
}

tell() { kill $(jobs -p) 2> /dev/null || true; }   # told once the runs save and end, told twice they end

stop() {                                        # this script leaves no run behind
    status=$?
    trap tell INT TERM HUP
    tell
    until wait; do :; done
    exit $status
}

export GCD_PARENT=$$                    # gcd.py stops where this process is gone
trap stop EXIT
trap 'exit 130' INT TERM HUP
set -m                                  # Ctrl-C is for this script alone, and reaches the runs through `tell`
if [ ! -e "$OUT/cold_start/stages.json" ]; then
    .venv/bin/python gcd.py --seed "$SEED" --out "$OUT/cold_start" --iterations 0 --overwrite &
    wait $!
fi
method grpo --no-gcd > "$OUT/grpo.log" 2>&1 &   # its progress is in the log
grpo=$!
method grpo+gcd --gcd &
wait $!
wait $grpo || { cat "$OUT/grpo.log" >&2; exit 1; }
.venv/bin/python -m report "$OUT"
echo "next: see it, .venv/bin/python -m report $OUT --open; play a game, .venv/bin/python -m envs.household;"
echo "      read one step of training: gcd.py, function iteration"
