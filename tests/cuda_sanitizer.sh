#!/bin/bash
# Runs compute-sanitizer on the small kernel cases and on whole steps; a line for each run that finds
# something, with the beginning of what it says, then a count.
#   tests/cuda_sanitizer.sh BUILD [LOGS]      LOGS: folder of the outputs, BUILD/sanitizer by default
# memcheck, racecheck and initcheck, the long ops by themselves, on both kernel paths where there are two,
# the others together; a whole tiny step through the program (benchmarks/gpu_check.py: needs python3 with numpy, h5py,
# safetensors). LIMIT: seconds for one run, 100 by default. JOBS: runs at a time, 14 by default. A run that is
# out of time is a failure, too. Exit status 1 when there was any, 77 (SKIPPED) without compute-sanitizer.
set -u
build=$1
logs=${2:-$build/sanitizer}
values=500000 # most values that a case's tensors may have
root=$(cd "$(dirname "$0")/.." && pwd)
ops=$(sed -n 's/^ *X(\([a-z_]*\)).*/\1/p' "$root/kernels/kernels.h")
command -v compute-sanitizer >/dev/null || { echo "SKIPPED: no compute-sanitizer here"; exit 77; }
rm -rf "$logs"
mkdir -p "$logs"

one() { # name, command...
    local name=$1 status
    shift
    timeout -k 5 "${LIMIT:-100}" "$@" >"$logs/$name.log" 2>&1
    status=$?
    [ $status -eq 0 ] && return
    echo "FAIL $name: status $status: $(grep -m 1 -E 'Invalid|hazard|ninitialized|Leak|bug|CUDA:' "$logs/$name.log" |
        cut -c1-150)$(grep -m 1 -oE 'in [A-Za-z_]*kernel[^ ]*' "$logs/$name.log" | sed 's/^/ /' | cut -c1-90)
$(grep -E '^=====' "$logs/$name.log" | head -n 12 | cut -c9-180 | sed 's/^/  /')"
    touch "$logs/$name.failed"
}

later() {
    while (($(jobs -rp | wc -l) >= ${JOBS:-14})); do wait -n; done
    one "$@" &
}

export REQUIRE_CUDA=1
later step python3 "$root/benchmarks/gpu_check.py" --dtrain "$build/dtrain" sanitizer
others=$(echo "$ops" | grep -v -E '^(attention|softmax)' | sed 's|$|/|' | paste -sd ,)
run() { # path, name, parts of names
    local tool
    for tool in racecheck initcheck memcheck; do
        later "$tool-$1-$2" compute-sanitizer --tool $tool --error-exitcode 9 "$build/tests/test_kernels" "$1" "$3" $values
    done
}
for op in attention_backward attention_forward softmax_loss; do # the longest first
    run cuda $op $op/
    run cuda-generic $op $op/
done
run cuda others "$others"
wait
failed=$(find "$logs" -name '*.failed' | wc -l)
echo "$(find "$logs" -name '*.log' | wc -l) runs under the sanitizer, $failed with an error"
[ "$failed" -eq 0 ]
