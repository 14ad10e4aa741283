#!/bin/sh
# Checks the CUDA backend on a machine with a GPU, within three minutes, and prints one table:
# the kernel tests, compute-sanitizer on small cases, one step in fp32 against the CPU, 50 steps twice.
#   benchmarks/gpu.sh [BUILD]          BUILD: build folder, /tmp/dtrain-gpu by default
# ARCH: architecture to build for, 90a by default. DEBS: a folder of .deb files with libraries that the
# machine lacks; they are unpacked to /tmp/debs. OUT: a folder for all logs in one file, BUILD by default.
# Needs python3 with numpy, h5py and safetensors.
set -u
cd "$(dirname "$0")/.." || exit 1
build=${1:-/tmp/dtrain-gpu}
out=$build/logs
table=$build/table.txt
begin=$(date +%s)
mkdir -p "$out"
: >"$table"

row() { printf '%-34s %-8s %s\n' "$1" "$2" "$3" >>"$table"; }
elapsed() { echo $(($(date +%s) - begin)); }
finish() {
    tail -n 100000 "$out"/*.log >"${OUT:-$build}/gpu-logs.txt"
    echo
    sort "$table"
    echo "total $(elapsed) s"
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
    limit=$1 name=$2 log=$out/$3.log
    shift 3
    start=$(date +%s)
    timeout "$limit" "$@" >"$log" 2>&1
    status=$?
    took=$(($(date +%s) - start))
    if [ $status -eq 0 ]; then
        row "$name" ok "$took s"
    else
        row "$name" "FAIL $status" "$took s: $(tail -n 1 "$log" | cut -c1-90)"
        grep -E 'differ, worst|mean square|FAILED|CUDA|cuBLAS|Invalid|ERROR SUMMARY' "$log" | head -n 40
    fi
}

[ -n "${DEBS:-}" ] && unpack "$DEBS"
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DWITH_CUDA=ON -DREQUIRE_CUDA=ON -DCUDA_BACKEND=ON \
    -DCMAKE_CUDA_ARCHITECTURES="${ARCH:-90a}" >"$out/cmake.log" 2>&1 || {
    tail -n 20 "$out/cmake.log"
    exit 1
}
ninja -C "$build" dtrain test_kernels >"$out/ninja.log" 2>&1 || {
    grep -A 12 FAILED "$out/ninja.log" | head -n 60
    exit 1
}
row build ok "$(elapsed) s"

export REQUIRE_CUDA=1 OMP_NUM_THREADS=4 OMP_WAIT_POLICY=passive
tests=$build/tests/test_kernels
# The checks do not disturb one another: each has its own process and little memory.
# An op a process: a fault in one kernel then hides no other.
for op in gemm rms_norm_forward rms_norm_backward norm_rope_forward norm_rope_backward \
    swiglu_forward swiglu_backward gather_rows scatter_rows context_load attention_forward \
    attention_backward softmax_loss adamw sum_squares convert; do
    check 80 "tests of $op" "$op" "$tests" cuda "$op/" &
done
check 80 "one step against the CPU, 50 steps" step python3 benchmarks/gpu_check.py \
    --dtrain "$build/dtrain" &
if command -v compute-sanitizer >/dev/null; then
    check 60 "memcheck, small cases" memcheck \
        compute-sanitizer --tool memcheck --error-exitcode 9 "$tests" cuda /7x &
    check 60 "racecheck, attention" racecheck-attention \
        compute-sanitizer --tool racecheck --error-exitcode 9 "$tests" cuda attention_backward/7x5 &
    check 60 "racecheck, loss" racecheck-loss \
        compute-sanitizer --tool racecheck --error-exitcode 9 "$tests" cuda softmax_loss/7x1003x5x11 &
fi
wait
cat "$out/step.log"
