#!/usr/bin/env bash
# The main job from nothing: cold start, then GRPO and GRPO+GCD side by side, then the table and the report.
#
#   bash run.sh          3 to 6 minutes on 2 CPU cores; no GPU, no download of data or weights, no compiler
#   bash run.sh alfworld the same on the real games of $ALFWORLD_DATA (or where ALFWorld puts them without it), in
#                        under an hour: six task types for L0 and L1, four for L2
#   bash run.sh test     set up what the tests need, run them (what follows "test" goes to pytest: -m fast)
#   bash run.sh chaos    attack it, for about 20 minutes (see tests/chaos/__main__.py; --part: under five)
#
# All make .venv on first use ($PYTHON names another python3.11 or 3.12). A stage that has ended is not run
# again; an interrupted RL stage goes on from its checkpoint, and so does practice beside the expert; another
# cold start begins again. $OUT is where everything goes (runs/main, runs/alfworld; remove it to start over),
# $SEED the seed (0; give another seed another $OUT). However this script ends, its runs end too: they save,
# even where it was killed.
set -euo pipefail
cd "$(dirname "$0")"
SEED=${SEED:-0} PYTHON=${PYTHON:-python3}

unknown() {
    echo "run.sh: unknown argument $1 (nothing, or: alfworld, test, chaos)" >&2
    exit 2
}

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
# Flags of every run, of the cold start, of RL
world=(--env household) cold_start=(--iterations 0) rl=(--demonstrations 0)
if [ "${1:-}" = alfworld ]; then        # those of results/table1_alfworld_hour.json
    [ $# = 1 ] || unknown "$2"
    games=${ALFWORLD_DATA:-$HOME/.cache/alfworld}/json_2.1.1
    [ -d "$games/valid_seen" ] || {
        echo "run.sh: $games holds no games; .venv/bin/pip install -r requirements-alfworld.txt and" \
             ".venv/bin/alfworld-download fetch them, to \$ALFWORLD_DATA where that is set" >&2; exit 2; }
    world+=(--games "$games" --hidden-size 96 --max-turns 30 --protocol eight)
    cold_start+=(--train-types all --evaluate L0,L1,L2 --demonstrations 12000 --dagger 49152)
    rl+=(--rearranged --iterations 60 --lr 3e-4 --invalid-penalty 0.5)
    OUT=${OUT:-runs/alfworld}
elif [ $# != 0 ]; then
    unknown "$1"
fi
OUT=${OUT:-runs/main}
install requirements.txt

method() {                              # one RL method from the cold start, or from where it was interrupted
    [ ! -e "$OUT/$1/stages.json" ] || return 0
    exec .venv/bin/python gcd.py --seed "$SEED" --model "$OUT/cold_start/checkpoint" --out "$OUT/$1" \
        --resume --overwrite "${world[@]}" "${rl[@]}" "${@:2}"
}

both() {                                # with GCD and without at once; $1: the end of their names
    method "grpo$1" --no-gcd "${@:2}" > "$OUT/grpo$1.log" 2>&1 &       # its progress is in the log
    local grpo=$!
    method "grpo+gcd$1" --gcd "${@:2}" &
    wait $!
    wait $grpo || { cat "$OUT/grpo$1.log" >&2; exit 1; }
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
    .venv/bin/python gcd.py --seed "$SEED" --out "$OUT/cold_start" --resume --overwrite \
        "${world[@]}" "${cold_start[@]}" &
    wait $!
fi
if [ "${1:-}" = alfworld ]; then
    both "" --train-types all
    both -part --train-types part
else
    both ""
fi
.venv/bin/python -m report "$OUT"
echo "next: see it, .venv/bin/python -m report $OUT --open; play a game, .venv/bin/python -m envs.household;"
echo "      read one step of training: gcd.py, function iteration"
