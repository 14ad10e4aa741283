#!/bin/bash
# Builds dtrain on a machine with a GPU, checks its CUDA backend, times it, and prints one table.
#   benchmarks/gpu.sh [SECTION...]
# Sections, in this order whatever the order of the words; without words: all but peer.
#   build      the program, the tests and the benchmarks; always done when there is no build folder yet
#   tests      the kernel tests op by op, with and without the paths for some GPUs only; ctest -L cuda;
#              steps in fp32 against the CPU, 50 steps twice
#   sanitizer  compute-sanitizer (memcheck, racecheck, initcheck) on small kernel cases and a tiny step
#   kernels, gemm, attention, loss, data   times of the parts (CASES: part of the names of the loss's)
#   steps      whole steps at real sizes (STEPS: settings of step.py, "all" by default)
#   counts     steps of several numbers of anchors in one process
#   peer       the same steps in the published speculators package, and ours beside them (PEER: a folder of wheels
#              that collect_peer.py has filled, .peer by default); it compiles beside the build and the checks, and is measured last
# Checks run side by side; what is timed runs alone. Variables:
# BUILD: build folder, /tmp/dtrain-gpu by default. ARCH: architecture to build for, the GPU's by default.
# COMMIT: what is printed as the commit where git is not there. OUT: a folder for the logs (few files), BUILD
# by default. DEBS: a folder of .deb files with libraries that the machine lacks; they are unpacked to
# /tmp/debs.
# Needs python3 with numpy, h5py, safetensors, torch (pip install them). Exit status 1 when a check failed.
set -u
cd "$(dirname "$0")/.." || exit 1
BUILD=${BUILD:-/tmp/dtrain-gpu}
OUT=${OUT:-$BUILD}
logs=$BUILD/logs
table=$BUILD/table.txt
begin=$(date +%s)
sections=" ${*:-build tests sanitizer kernels gemm attention loss data steps counts} "
OPS=$(sed -n 's/^ *X(\([a-z_]*\)).*/\1/p' kernels/kernels.h)
INPUTS=/dev/shm/dtrain-step
(($(df --output=avail -k /dev/shm | tail -n 1) > 16000000)) || INPUTS=/tmp/dtrain-step
mkdir -p "$BUILD" "$OUT"
rm -rf "$logs"
mkdir -p "$logs"
: >"$table"

wanted() { [[ $sections == *" $1 "* ]]; }
row() { printf '%-40s %-8s %s\n' "$1" "$2" "$3" >>"$table"; }
elapsed() { echo $(($(date +%s) - begin)); }

# shellcheck disable=SC2317 # called by the trap
finish() {
    cp "$INPUTS"/run-*.log "$logs" 2>/dev/null
    tail -n 100000 "$logs"/*.log >"$OUT/gpu-logs.txt"
    echo
    echo "$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader), ${COMMIT:-$(git rev-parse --short HEAD 2>/dev/null)}," \
        "$(date -u +%Y-%m-%d), $(elapsed) s"
    # Checks that passed are counted; what failed and what was timed has its own line.
    grep ' ok ' "$table" | awk '{print $1}' | sort | uniq -c | awk '{printf "%s %s ok; ", $1, $2} END {print ""}'
    grep -v ' ok ' "$table" | sort
    for name in inputs kernels gemm attention loss data steps counts peer; do
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
    ninja -C "$BUILD" -k 0 >"$logs/ninja.log" 2>&1 || {
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
    check_later 150 "steps against the CPU, and repeated" check python3 benchmarks/gpu_check.py --dtrain "$BUILD/dtrain"
    check_later 150 "ctest -L cuda" ctest ctest --test-dir "$BUILD" -L cuda -E '^kernels' -j 4 --output-on-failure
}

sanitizer() {
    check_later "${SANITIZER_LIMIT:-120}" "sanitizer" sanitizer tests/cuda_sanitizer.sh "$BUILD" "$BUILD/sanitizer"
}

export REQUIRE_CUDA=1 OMP_WAIT_POLICY=passive PYTHONUNBUFFERED=1
[ -n "${DEBS:-}" ] && unpack "$DEBS"
PEER=${PEER:-.peer}
ANCHORS=${ANCHORS:-512,1024,3072,2048}
site=$BUILD/peer-site
wait_for() { # file that holds a word, process
    while ! grep -q "$2" "$1" 2>/dev/null && kill -0 "$3" 2>/dev/null; do sleep 0.2; done
}
peer() {
    mkdir -p "$site"
    for wheel in "$PEER"/*.whl; do [ -f "$wheel" ] && python3 -m zipfile -e "$wheel" "$site"; done
    PYTHONPATH=$site exec timeout "${PEER_LIMIT:-400}" python3 benchmarks/against_speculators.py --anchors "$ANCHORS" \
        --go "$logs/go" --ours "$OUT/steps.json" --json "$OUT/peer.json"
}
peer_id=''
if wanted steps; then # beside the build and the checks
    python3 benchmarks/step.py --prepare --settings "${STEPS:-all}" --folder $INPUTS --dtrain - >"$logs/inputs.log" 2>&1 &
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
[ -n "$peer_id" ] && wait_for "$logs/peer.log" waiting "$peer_id" # it compiles before
unset OMP_NUM_THREADS
[ -s "$logs/check.log" ] && cut -c1-200 "$logs/check.log"

wanted kernels && check "${LIMIT:-60}" "timed kernels" kernels "$BUILD/benchmarks/bench_kernels" --device cuda --sizes v4
wanted gemm && check "${LIMIT:-60}" "timed gemm" gemm "$BUILD/benchmarks/bench_gemm"
wanted attention && check "${LIMIT:-60}" "timed attention" attention "$BUILD/benchmarks/bench_attention"
wanted loss && check "${LIMIT:-60}" "timed loss" loss "$BUILD/benchmarks/bench_loss" cuda "${CASES:-v4}"
wanted data && check "${LIMIT:-60}" "timed data" data "$BUILD/benchmarks/bench_data" "$BUILD"
wanted steps && check "${STEPS_LIMIT:-300}" "timed steps" steps python3 benchmarks/step.py --dtrain "$BUILD/dtrain" \
    --settings "${STEPS:-all}" --folder $INPUTS --json "$OUT/steps.json"
wanted counts && check "${LIMIT:-120}" "timed counts" counts "$BUILD/benchmarks/bench_step" cuda v4 512,1024,2048,3072,8192
if [ -n "$peer_id" ]; then
    [ -s "$OUT/steps.json" ] || echo '[]' >"$OUT/steps.json"
    : >"$logs/go"
    if wait "$peer_id"; then
        row "timed peer" ok ""
    else
        row "timed peer" "FAIL" "$(tail -n 1 "$logs/peer.log" | cut -c1-90)"
    fi
fi
! grep -q FAIL "$table"
