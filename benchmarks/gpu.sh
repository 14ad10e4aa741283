#!/bin/bash
# Builds dtrain on a machine with a GPU, checks its CUDA backend, times it, and prints one table.
#   benchmarks/gpu.sh [SECTION...]
# Sections, in this order whatever the order of the words; without words: all but peer. `proof` stands for what a
# changed backend has to show, in six minutes and by worth: build tests sanitizer counts low peer qwen loss attention.
#   build      the program, the tests and the benchmarks; always done when there is no build folder yet
#   tests      the kernel tests op by op, with and without the paths for some GPUs only; ctest -L cuda;
#              steps in fp32 against the CPU, 50 steps twice
#   sanitizer  compute-sanitizer (memcheck, racecheck, initcheck) on small kernel cases and a tiny step
#   steps      whole steps at real sizes, a run each (STEPS: settings of step.py, "all" by default)
#   counts, low, qwen   steps of several numbers of anchors in one process; in little memory; of another target
#   peer       the same steps in the published speculators package, and ours beside them (PEER: a folder of wheels
#              that collect_peer.py has filled, .peer by default); it compiles beside the build and the checks
#   loss, attention, gemm, kernels, data   times of the parts (CASES: part of the names of the loss's)
# Checks run side by side; what is timed runs alone. Variables:
# BUILD: build folder, /tmp/dtrain-gpu by default. ARCH: architecture to build for, the GPU's by default.
# COMMIT: what is printed as the commit where git is not there. OUT: a folder for the logs (few files), BUILD
# by default. DEBS: a folder of .deb files with libraries that the machine lacks; they are unpacked to
# /tmp/debs. TIME: seconds after which nothing more is begun, 3600 by default, 330 for proof.
# Logs and table are in OUT as soon as a part has ended. Needs python3 with numpy, h5py, safetensors, torch (pip install them).
# Exit status 1 when a check failed.
set -u
cd "$(dirname "$0")/.." || exit 1
BUILD=${BUILD:-/tmp/dtrain-gpu}
OUT=${OUT:-$BUILD}
logs=$BUILD/logs
table=$OUT/gpu-table.txt
begin=$(date +%s)
sections=" ${*:-build tests sanitizer steps counts low qwen loss attention gemm kernels data} "
TIME=${TIME:-3600}
if [ "${*:-}" = proof ]; then
    sections=" build tests sanitizer counts low peer qwen loss attention "
    TIME=330
fi
OPS=$(sed -n 's/^ *X(\([a-z_]*\)).*/\1/p' kernels/kernels.h)
INPUTS=/dev/shm/dtrain-step
(($(df --output=avail -k /dev/shm | tail -n 1) > 16000000)) || INPUTS=/tmp/dtrain-step
mkdir -p "$BUILD" "$OUT"
rm -rf "$logs"
mkdir -p "$logs"
: >"$table"

wanted() { [[ $sections == *" $1 "* ]]; }
row() { printf '%-40s %-8s %s\n' "$1" "$2" "$3" >>"$table"; }
save() { # whole at any moment, whoever else does the same
    local part
    part=$(mktemp "$BUILD/gpu-logs.XXXXXX")
    tail -n 100000 "$logs"/*.log >"$part" 2>/dev/null
    mv "$part" "$OUT/gpu-logs.txt"
}
elapsed() { echo $(($(date +%s) - begin)); }

# shellcheck disable=SC2317 # called by the trap
finish() {
    cp "$INPUTS"/run-*.log "$logs" 2>/dev/null
    save
    echo
    echo "$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader), ${COMMIT:-$(git rev-parse --short HEAD 2>/dev/null)}," \
        "$(date -u +%Y-%m-%d), $(elapsed) s"
    # Checks that passed are counted; what failed and what was timed has its own line.
    grep ' ok ' "$table" | awk '{print $1}' | sort | uniq -c | awk '{printf "%s %s ok; ", $1, $2} END {print ""}'
    grep -v ' ok ' "$table" | sort
    for name in inputs steps counts low peer qwen loss attention gemm kernels data; do
        [ -s "$logs/$name.log" ] && { echo "-- $name"; tail -n 25 "$logs/$name.log" | cut -c1-200; }
    done
}
trap finish EXIT

unpack() {
    for file in "$1"/*.deb; do dpkg -x "$file" /tmp/debs; done
    libraries=/tmp/debs/usr/lib/x86_64-linux-gnu
    sed -i 's|/usr|/tmp/debs/usr|g' $libraries/pkgconfig/*.pc
    export PKG_CONFIG_PATH=$libraries/pkgconfig
    export LD_LIBRARY_PATH="$libraries:${LD_LIBRARY_PATH:-}"
}

# limit, name, log, command...: one row, with the last line of the log when it fails.
check() {
    local limit=$1 name=$2 log=$logs/$3.log start status took
    shift 3
    start=$(date +%s)
    timeout -k 5 "$limit" "$@" >"$log" 2>&1
    status=$?
    took=$(($(date +%s) - start))
    if [ $status -eq 0 ]; then
        row "$name" ok "$took s"
    else
        row "$name" "FAIL $status" "$took s: $(grep -v '^$' "$log" | tail -n 1 | cut -c1-90)"
        grep -E 'differ, worst|mean square|FAILED|CUDA|cuBLAS|Invalid|hazard|ninitialized|ERROR SUMMARY|FAIL ' \
            "$log" | head -n 12 | cut -c1-180 | sed "s|^|$name: |"
    fi
    save
}

# section, limit, command...: when it is wanted and there is time.
timed() {
    local section=$1 limit=$2
    shift 2
    wanted "$section" || return
    if (($(elapsed) > TIME)); then
        row "timed $section" "left out" "$TIME s are over"
        return
    fi
    check "$limit" "timed $section" "$section" "$@"
}

# The same in the background, at most 14 at a time.
check_later() {
    while (($(jobs -rp | wc -l) >= 14)); do wait -n; done
    check "$@" &
}

build() {
    cmake -S . -B "$BUILD" -G Ninja -DCMAKE_BUILD_TYPE=Release -DWITH_CUDA=ON -DREQUIRE_CUDA=ON \
        ${ARCH:+-DCMAKE_CUDA_ARCHITECTURES="$ARCH"} >"$logs/cmake.log" 2>&1 || {
        tail -n 20 "$logs/cmake.log"
        exit 1
    }
    timeout 300 ninja -C "$BUILD" -k 0 >"$logs/ninja.log" 2>&1 || {
        grep -A 8 FAILED "$logs/ninja.log" | cut -c1-200 | head -n 60
        [ -x "$BUILD/dtrain" ] && [ -x "$BUILD/tests/test_kernels" ] || exit 1
    }
    row build ok "$(elapsed) s"
}

tests() {
    local op path
    for op in $OPS; do
        for path in cuda cuda-generic; do
            check_later 120 "$path $op" "$path-$op" "$BUILD/tests/test_kernels" $path "$op/"
        done
    done
    check_later 150 "steps against the CPU, and repeated" check python3 benchmarks/gpu_check.py --dtrain "$BUILD/dtrain" bf16 twice kill trace generic
    check_later 150 "ctest -L cuda" ctest ctest --test-dir "$BUILD" -L cuda -E '^kernels' -j 4 --output-on-failure
}

sanitizer() {
    check_later "${SANITIZER_LIMIT:-120}" "sanitizer" sanitizer tests/cuda_sanitizer.sh "$BUILD" "$BUILD/sanitizer"
}

export REQUIRE_CUDA=1 OMP_WAIT_POLICY=passive PYTHONUNBUFFERED=1
[ -n "${DEBS:-}" ] && unpack "$DEBS"
PEER=${PEER:-.peer}
ANCHORS=${ANCHORS:-512,1024,2048,1024-mix,1024-few,1024-loss,3072}
site=$BUILD/peer-site
peer() {
    mkdir -p "$site"
    for wheel in "$PEER"/*.whl; do [ -f "$wheel" ] && python3 -m zipfile -e "$wheel" "$site"; done
    PYTHONPATH=$site exec python3 benchmarks/against_speculators.py --anchors "$ANCHORS" --go "$logs/go" \
        --seconds "${PEER_LIMIT:-60}" --ours "$OUT/steps.json" --json "$OUT/peer.json"
}
peer_ends() { # seconds: true when it has ended within them, or what it is asked for has been said
    local until=$(($(elapsed) + $1))
    while kill -0 "$peer_id" 2>/dev/null && ! grep -q "${2:-no such word}" "$logs/peer.log"; do
        (($(elapsed) >= until)) && return 1
        sleep 0.2
    done
}
measure_peer() {
    [ -s "$OUT/steps.json" ] || echo '[]' >"$OUT/steps.json"
    : >"$logs/go"
    kill -CONT "$peer_id" 2>/dev/null
    if peer_ends $((${PEER_LIMIT:-60} + 60)) && wait "$peer_id"; then
        row "timed peer" ok ""
    else
        kill -KILL "$peer_id" 2>/dev/null
        row "timed peer" FAIL "$(tail -n 1 "$logs/peer.log" | cut -c1-90)"
    fi
    save
}
peer_id=''
if wanted steps; then # beside the build and the checks
    timeout 120 python3 benchmarks/step.py --prepare --settings "${STEPS:-all}" --folder $INPUTS --dtrain - >"$logs/inputs.log" 2>&1 &
fi
if wanted peer; then
    rm -f "$OUT/steps.json"
    peer >"$logs/peer.log" 2>&1 &
    peer_id=$!
fi
if wanted build || [ ! -x "$BUILD/dtrain" ]; then build; fi
export OMP_NUM_THREADS=2
wanted tests && tests
wanted sanitizer && sanitizer
for id in $(jobs -rp); do [ "$id" = "$peer_id" ] || wait "$id"; done
# It reads the memory of the whole device, so nothing else may run there.
wanted tests && check 60 "memory stays the same" memory python3 benchmarks/gpu_check.py --dtrain "$BUILD/dtrain" memory
if [ -n "$peer_id" ]; then # it compiles before, and stands still while others are timed
    peer_ends 20 waiting
    kill -STOP "$peer_id" 2>/dev/null
fi
unset OMP_NUM_THREADS
[ -s "$logs/check.log" ] && cut -c1-200 "$logs/check.log"

bench=$BUILD/benchmarks
timed steps "${STEPS_LIMIT:-300}" python3 benchmarks/step.py --dtrain "$BUILD/dtrain" \
    --settings "${STEPS:-all}" --folder $INPUTS --json "$OUT/steps.json"
timed counts 90 "$bench/bench_step" cuda v4 512,1024,2048,3072,8192
timed low 40 "$bench/bench_step" cuda v4 512,1024 memory.mode=low
[ -n "$peer_id" ] && measure_peer
timed qwen 40 "$bench/bench_step" cuda qwen3-8b 512,1024
timed loss 40 "$bench/bench_loss" cuda "${CASES:-v4}"
timed attention 30 "$bench/bench_attention"
timed gemm 60 "$bench/bench_gemm"
timed kernels 60 "$bench/bench_kernels" --device cuda --sizes v4
timed data 60 "$bench/bench_data" "$BUILD"
! grep -q FAIL "$table"
