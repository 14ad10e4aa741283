#!/usr/bin/env python3
"""Checks dtrain's numbers and their repetition on a GPU, through the program itself.

    python3 benchmarks/gpu_check.py --dtrain build/dtrain [NAME...]

trace     one step in fp32 on the GPU and on the CPU, two mixtures of losses, both kernel paths: every
          tensor within 1e-4 of its largest value
bf16      one step in bf16, fresh and trained weights: no tensor's gradient errs more than 1.25 times as
          much as under PyTorch autocast, both against float64 (tests/reference/bf16_error.py); norms of
          heads, 64 numbers, 2 times once trained
twice     50 steps twice, with GEMM algorithms timed each time, and with each level of recomputation: the
          same bits
kill      50 steps, killed (SIGKILL) at random moments and started again: the bits of the run left alone
generic   steps with kernels.path generic beside those without: the same but for rounding
memory    rows and anchors of every size: device memory in use does not grow after the first step. Run it
          alone: it is the whole device's memory that is read
sanitizer compute-sanitizer (memcheck, racecheck, initcheck) on a whole tiny step, both kernel paths, bf16 (initcheck: fp32)

All but the sanitizer without names, beside each other, one line each, FAIL and exit status 1 where it does not hold. Rows
have up to 2,048 tokens, of documents of 8 to 2,048, some with two supervised tokens.
Needs numpy, h5py, safetensors; bf16 also torch. Without a GPU: SKIPPED, exit status 77.
"""
import argparse
import concurrent.futures
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time

import h5py
import numpy as np
from safetensors import safe_open

import cpu_step

BF16_LIMIT, FEW_LIMIT = 1.25, 2.0  # of a gradient's error under autocast
LIMIT = 1e-4  # of a tensor's largest value, fp32 against the CPU
STEPS = 50
KILLS = 3
MIXTURES = {
    "kl": "{kl: 1.0, slot_decay_gamma: 4.0}",
    "all terms": "{kl: 0.5, reverse_kl: 0.2, js: 0.3, ce_teacher: 0.1, ce_data: 0.2, tv: 0.4, "
                 "nla: 0.1, lk: 0.3}",
}
ROOT = pathlib.Path(__file__).resolve().parent.parent


class Failed(Exception):
    pass


# ---- inputs


def smooth(path):
    """Makes each hidden state resemble the last, so that the context says something of what follows."""
    with h5py.File(path, "r+") as file:
        hidden = cpu_step.from_bf16(file["hidden_states"][:]).copy()
        begins = set(file["doc_offsets"][:].tolist())
        for t in range(len(hidden)):
            if t not in begins:
                hidden[t] = 0.95 * hidden[t - 1] + (1 - 0.95**2) ** 0.5 * hidden[t]
        file["hidden_states"][:] = cpu_step.to_bf16(hidden)


def write_ragged_shard(path, rng, documents):
    """Documents of every length, most of them too long to share a row, so that rows are of every length, too.
    Each has a stretch of supervised tokens, some only two."""
    longest = cpu_step.TOKENS
    alone = rng.random(documents) < 0.7
    lengths = np.where(alone, rng.integers(longest // 2 + 1, longest + 1, documents),
                       8 + np.minimum(rng.exponential(longest / 32, documents).astype(int), longest // 4))
    tokens = int(lengths.sum())
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    mask = np.zeros(tokens, np.uint8)
    for begin, end in zip(offsets[:-1], offsets[1:]):
        first = rng.integers(begin, end - 2)
        mask[first : first + 2 if rng.random() < 0.3 else end] = 1
    planes = cpu_step.FEATURES + 1
    with h5py.File(path, "w") as file:
        file.attrs.update({"format": "dtrain-features", "format_version": 1,
                           "target_model": "random", "hidden_size": cpu_step.HIDDEN,
                           "vocab_size": cpu_step.VOCAB,
                           "target_layer_ids": np.array([1, 8, 14, 20, 26], np.int32),
                           "dtype": "bfloat16", "last_hidden": "pre_norm"})
        file["doc_offsets"] = offsets
        file["input_ids"] = rng.integers(3, cpu_step.VOCAB, tokens, np.int32)
        file["loss_mask"] = mask
        file["hidden_states"] = cpu_step.to_bf16(
            rng.standard_normal((tokens, planes, cpu_step.HIDDEN), np.float32))
        file["doc_id"] = np.arange(1, documents + 1, dtype=np.uint64)


def at_once(*calls):
    """Results of calls that run beside each other, in their order; the first failure is raised."""
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def write_config(folder, name, **given):
    keys = dict(device="cuda", compute="bf16", loss=MIXTURES["kl"], data="ragged.h5", noise="", memory="{}",
                path="auto", algorithms=folder.resolve() / "algorithms", steps=STEPS, every=10, lr="1.0e-4", layers=3,
                anchors=96)
    keys.update(given)
    text = """
run: {{dir: {name}, epochs: {steps}, max_steps: {steps}, device: {device}, compute: {compute}}}
target: {{path: target}}
data: {{train: [{data}], seq_len: {tokens}, rows_per_step: 1{noise}}}
drafter: {{kind: dflash, layers: {layers}, block_size: {block}, mask_token_id: 0,
  layer_types: [full_attention, sliding_attention, full_attention], sliding_window: 200}}
anchors: {{max_anchors: {anchors}, per: row}}
loss: {loss}
optimizer: {{lr: {lr}}}
memory: {memory}
kernels: {{path: {path}, algorithms: {algorithms}}}
checkpoint: {{every: {every}, keep: 1000}}
log: {{every: 1000, tensorboard: false}}
""".format(name=name, tokens=cpu_step.TOKENS, block=cpu_step.BLOCK, **keys)
    path = folder / f"{name}.yaml"
    path.write_text(text)
    return str(path)


# ---- running


class Check:
    """Runs dtrain in a folder. Checks run beside each other, with at most `jobs` programs at a time."""

    def __init__(self, dtrain, folder, jobs):
        self.dtrain, self.folder = dtrain, folder
        self.room, self.first_run, self.has_first = threading.Semaphore(jobs), threading.Lock(), False

    def run(self, arguments):
        with self.room:
            return subprocess.run(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def must(self, arguments, what):
        done = self.run(arguments)
        if done.returncode != 0:
            raise Failed(f"{what}: exit status {done.returncode}: {done.stdout[-600:].strip()}")
        return done.stdout

    def first(self):
        """The run that others repeat, made by whoever needs it first."""
        with self.first_run:
            if not self.has_first:
                self.train("first")
            self.has_first = True

    def trace(self, name, checkpoint=None, **given):
        out = str(self.folder / f"{name}.safetensors")
        config = write_config(self.folder, name, **given)
        more = ["--checkpoint", str(checkpoint)] if checkpoint else []
        self.must([self.dtrain, "trace", "--config", config, "--out", out] + more, f"trace {name}")
        return out

    def take_execution(self, name, other, **changes):
        """A folder for a run that begins with another run's choices, GEMM algorithms among them."""
        run = self.folder / name
        run.mkdir()
        execution = json.loads((self.folder / other / "execution.json").read_text())
        (run / "execution.json").write_text(json.dumps({**execution, **changes}))
        return run

    def train(self, name, **given):
        config = write_config(self.folder, name, **given)
        self.must([self.dtrain, "--config", config], f"training {name}")
        return config

    def steps(self, name):
        lines = [json.loads(line) for line in open(self.folder / name / "metrics.jsonl")]
        return [line for line in lines if "loss" in line]

    def checkpoint(self, name, step=STEPS):
        return self.folder / name / "checkpoints" / f"step-{step:08d}"

    def state(self, name):
        """Bytes of the last checkpoint, and the losses on the way."""
        files = ("master", "adam_m", "adam_v")
        bits = [(self.checkpoint(name) / f"{part}.safetensors").read_bytes() for part in files]
        return bits + [[(line["step"], line["loss"]) for line in self.steps(name)]]

    def must_equal(self, first, second):
        a, b = self.state(first), self.state(second)
        if len(a[3]) != STEPS:
            raise Failed(f"{first}: {len(a[3])} steps")
        if a == b:
            return
        at = next((i for i, (x, y) in enumerate(zip(a[3], b[3])) if x != y), None)
        algorithms = [json.load(open(self.folder / n / "execution.json")).get("gemm") for n in (first, second)]
        raise Failed(f"{first} and {second}: bits differ, losses "
                     + ("equal" if a[3] == b[3] else f"from step {at + 1 if at is not None else 'count'} on")
                     + ("" if algorithms[0] == algorithms[1] else "; other GEMM algorithms"))


# ---- the checks: each returns what it found, or raises Failed


def tensors_of(path):
    """All tensors but the inputs and the updates (in the first step signs of gradients)."""
    left_out = ("row", "param.", "updated.", "adam_", "decay.")
    with safe_open(path, "numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()
                if not name.startswith(left_out)}


def worst_tensor(cpu, cuda):
    errors = []
    for name, a in cpu.items():
        a, b = a.astype(np.float64), cuda[name].astype(np.float64)
        if a.shape != b.shape or not np.array_equal(np.isfinite(a), np.isfinite(b)):
            errors.append((np.inf, name))
        elif name.endswith("argmax"):
            errors.append((np.mean(a != b) * LIMIT / 0.01, name))  # 1 % may be near ties
        else:
            scale = np.max(np.abs(a), initial=0.0)
            errors.append((np.max(np.abs(a - b), initial=0.0) / (scale if scale > 0 else 1.0), name))
    return max(errors)


def check_trace(check):
    found = []
    noise = ", noise_std: 0.05, noise_kind: uniform"
    for label, extra in (("kl", ""), ("all terms", noise)):
        given = dict(loss=MIXTURES[label], noise=extra, compute="fp32", data="full.h5", anchors=64)
        name = label.split()[0]
        cpu, *traces = at_once(
            lambda: tensors_of(check.trace(f"{name}-cpu", device="cpu", **given)),
            *(lambda path=path: tensors_of(check.trace(f"{name}-{path}", path=path, **given))
              for path in ("auto", "generic")))
        for path, cuda in zip(("auto", "generic"), traces):
            error, name = worst_tensor(cpu, cuda)
            found.append(f"{label}, {path}: {error:.1e}")
            if not error <= LIMIT:
                raise Failed(f"{label}, {path}: {name} off by {error:.1e} of its largest value")
    return "; ".join(found)


def judged(lines, traces):
    """What bf16_error.py says of each trace: [(trace, names and ratios that are too large, its last words)]."""
    result = []
    for line in lines:
        if line in traces:
            result.append([line, [], ""])
        elif result and line.startswith("FAIL "):
            name, ratio = line.split()[1], float(line.split("=")[-1])
            # In the first layer most rows of every block are the same mask token: the 64 numbers of a
            # head's norm then hang on few roundings, once weights have left their symmetric start.
            few = name.endswith(("q_norm.weight", "k_norm.weight")) and "trained" in result[-1][0]
            if not ratio <= (FEW_LIMIT if few else BF16_LIMIT):
                result[-1][1].append(f"{name} {ratio:.2f}")
        elif result and " tensors, " in line:
            result[-1][2] = line.split("; ")[-1]
    return result


def check_bf16(check):
    # Enough updates for norm weights to leave 1. The step that is traced follows the run's last.
    given = dict(data="full.h5", anchors=64)
    fresh, _ = at_once(lambda: check.trace("fresh", **given),
                       lambda: check.train("moved", lr="1.0e-3", every=STEPS, **given))
    traces = [fresh] + at_once(*(
        lambda path=path: check.trace(f"trained-{path}", check.checkpoint("moved"), path=path, steps=STEPS + 1,
                                      **given)
        for path in ("auto", "generic")))
    done = check.run(
        [sys.executable, str(ROOT / "tests/reference/bf16_error.py"), *traces, "--target",
         str(check.folder / "target"), "--device", "cuda", "--limit", str(BF16_LIMIT)])
    verdicts = judged(done.stdout.splitlines(), traces)
    if done.returncode not in (0, 1) or [verdict[0] for verdict in verdicts] != traces:
        raise Failed(done.stdout[-400:])
    for trace, wrong, said in verdicts:
        if wrong or not said:
            raise Failed(f"{pathlib.Path(trace).stem}: {len(wrong)} too large: {', '.join(wrong[:4])}; {said}")
    return "; ".join(f"{pathlib.Path(trace).stem}: {said}" for trace, _, said in verdicts)


def check_twice(check):
    check.first()
    for level in ("none", "cheap", "layer"):
        check.take_execution(f"second-{level}", "first", recompute=level)
    at_once(lambda: check.train("again", algorithms="none"),
            *(lambda level=level: check.train(f"second-{level}", memory=f"{{recompute: {level}}}")
              for level in ("none", "cheap", "layer")))
    check.must_equal("first", "again")
    for level in ("none", "cheap", "layer"):
        check.must_equal("first", f"second-{level}")
    losses = [line["loss"] for line in check.steps("first")]
    return f"bits equal with every level of recomputation; loss {losses[0]:.4f} to {losses[-1]:.4f}"


def wait_and_kill(process, run, step, limit):
    """Kills once that step's line is there; False when the run ended before."""
    end = time.monotonic() + limit
    metrics = run / "metrics.jsonl"
    while process.poll() is None and time.monotonic() < end:
        if metrics.exists() and metrics.read_text().count('"loss"') >= step:
            process.kill()
            process.wait()
            return True
        time.sleep(0.001)
    return False


def kill_at_random(check, name, draw, **given):
    """Trains under `name`, killed several times; returns after which steps."""
    config = write_config(check.folder, name, every=5, **given)
    metrics, killed = check.folder / name / "metrics.jsonl", []
    for _ in range(KILLS):
        done = check.steps(name)[-1]["step"] if metrics.exists() else 0
        target = done + draw.randint(1, STEPS // KILLS)
        with check.room, open(check.folder / f"{name}.log", "a") as log:
            process = subprocess.Popen([check.dtrain, "--config", config], stdout=log, stderr=log)
            if wait_and_kill(process, metrics.parent, target, 60):
                killed.append(target)
    check.must([check.dtrain, "--config", config], f"resuming {name} after kills")
    return killed


def check_kill(check):
    check.first()
    levels = ("cheap", "layer")

    def killed(level, seed):
        name = f"killed-{level}"
        check.take_execution(name, "first", recompute=level)
        after = kill_at_random(check, name, random.Random(seed), memory=f"{{recompute: {level}}}")
        if len(after) < 2:
            raise Failed(f"{name}: only {len(after)} kills met a running program")
        check.must_equal("first", name)
        return f"recompute {level}, killed after steps {after}"

    found = at_once(*(lambda level=level, seed=seed: killed(level, seed) for seed, level in enumerate(levels)))
    return "; ".join(found) + ": bits equal"


def check_generic(check):
    found = []
    for compute, limit in (("fp32", 1e-4), ("bf16", 2e-2)):
        names = [f"path-{path}-{compute}" for path in ("auto", "generic")]
        at_once(*(lambda name=name, path=path: check.train(name, path=path, compute=compute, steps=20, every=0)
                  for name, path in zip(names, ("auto", "generic"))))
        a, b = ([line["loss"] for line in check.steps(name)] for name in names)
        worst = max(abs(x - y) / abs(x) for x, y in zip(a, b))
        found.append(f"{compute}: losses of {len(a)} steps within {worst:.1e}")
        if not (worst <= limit and len(a) == len(b) == 20):
            raise Failed(found[-1])
    return "; ".join(found)


def check_memory(check):
    check.train("wild", steps=120, every=0, anchors=400)
    lines = check.steps("wild")
    memory = [line["memory_bytes"] for line in lines]
    tokens, anchors = ([line[k] for line in lines] for k in ("tokens", "anchors"))
    found = (f"rows of {min(tokens):.0f} to {max(tokens):.0f} tokens, {min(anchors):.0f} to {max(anchors):.0f} "
             f"anchors: {memory[0] / 2**20:.1f} MiB after step 1, {memory[-1] / 2**20:.1f} after {len(lines)}")
    if memory[-1] > memory[0]:
        raise Failed(found)
    return found


SANITIZER_SIZES = dict(HIDDEN=128, VOCAB=1003, HEADS=4, KV_HEADS=2, HEAD_DIM=64, INTERMEDIATE=192, TOKENS=256)


def check_sanitizer(check):
    if shutil.which("compute-sanitizer") is None:
        raise Failed("compute-sanitizer is not there")
    rng, sizes = np.random.default_rng(1), {name: getattr(cpu_step, name) for name in SANITIZER_SIZES}
    small = Check(check.dtrain, check.folder / "small", 1)
    small.folder.mkdir()
    for name, value in SANITIZER_SIZES.items():
        setattr(cpu_step, name, value)
    cpu_step.write_target(small.folder / "target", rng)
    write_ragged_shard(small.folder / "ragged.h5", rng, 6)
    running, clean = [], []
    for path in ("auto", "generic"):
        for tool in ("memcheck", "racecheck", "initcheck"):
            # The library's products in bf16 store in a way that initcheck takes for none.
            compute = "fp32" if tool == "initcheck" else "bf16"
            # Groups of 5 blocks and chunks of 64 rows: several of each.
            config = write_config(small.folder, f"{tool}-{path}", path=path, compute=compute, anchors=23, steps=1,
                                  every=0, memory="{group_rows: 40, chunk_rows: 64}")
            log = small.folder / f"{tool}-{path}.log"
            command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", check.dtrain, "trace",
                       "--config", config, "--out", str(small.folder / f"{tool}-{path}.safetensors")]
            running.append((f"{tool}, {path}", log, subprocess.Popen(
                command, stdout=open(log, "w"), stderr=subprocess.STDOUT)))
    for name, value in sizes.items():
        setattr(cpu_step, name, value)
    for label, log, process in running:
        if process.wait() == 0:
            clean.append(label)
            continue
        lines = [line for line in log.read_text().splitlines()
                 if any(word in line for word in ("Invalid", "hazard", "ninitialized", "at ", "ERROR SUMMARY", "bug"))]
        raise Failed(f"{label}: " + " | ".join(lines[:3] + lines[-1:]) + f" (status {process.returncode})")
    return f"{len(clean)} runs without an error"


CHECKS = {"bf16": check_bf16, "twice": check_twice, "kill": check_kill, "trace": check_trace,
          "generic": check_generic, "memory": check_memory,
          "sanitizer": check_sanitizer}
SLOW = {"sanitizer"}  # by name only
ALONE = {"memory"}  # after the others


def judge(name, check):
    """Prints the check's line; True when it holds."""
    start = time.monotonic()
    try:
        found, ok = CHECKS[name](check), True
    except Failed as failure:
        found, ok = str(failure), False
    print(f"{'ok  ' if ok else 'FAIL'} {name}: {found} ({time.monotonic() - start:.1f} s)", flush=True)
    return ok


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtrain", required=True)
    parser.add_argument("--keep", help="folder for the runs, kept (default: a temporary one)")
    parser.add_argument("--jobs", type=int, default=6, help="programs that run beside each other")
    parser.add_argument("names", nargs="*", choices=[[], *CHECKS], metavar="NAME")
    arguments = parser.parse_args()
    dtrain = str(pathlib.Path(arguments.dtrain).resolve())
    if not os.path.exists("/dev/nvidiactl") and os.environ.get("REQUIRE_CUDA") != "1":
        print("SKIPPED: no NVIDIA device here")
        sys.exit(77)
    rng = np.random.default_rng(0)
    names = arguments.names or [name for name in CHECKS if name not in SLOW]
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(arguments.keep or name)
        folder.mkdir(exist_ok=True)
        cpu_step.write_target(folder / "target", rng)
        cpu_step.write_shard(folder / "full.h5", rng)
        smooth(folder / "full.h5")
        write_ragged_shard(folder / "ragged.h5", rng, 24)
        check, together = Check(dtrain, folder, arguments.jobs), [n for n in names if n not in ALONE]
        verdicts = at_once(*(lambda n=n: judge(n, check) for n in together)) if together else []
        verdicts += [judge(n, check) for n in names if n in ALONE]
    sys.exit(0 if all(verdicts) else 1)


if __name__ == "__main__":
    main()
