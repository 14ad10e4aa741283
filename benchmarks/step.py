#!/usr/bin/env python3
"""Times whole optimizer steps of dtrain at real sizes from made-up inputs, one run a setting.

    python3 benchmarks/step.py --dtrain build/dtrain --settings v4-512,v4-1024 [--steps 12]

Needs torch, numpy, h5py; pynvml for the memory of a GPU. A run is killed after its steps, so that it writes no
checkpoint. Settings: v4-ANCHORS, qwen3-8b-ANCHORS, and marks behind the number: -low (memory.mode low), -bf16
(memory.logits bf16), -generic (kernels.path generic), -mix (short documents, 60 % supervised), -few (the same, 7 %),
-wild (rows from a few anchors to every token supervised), -whole (one document a row). all: the list below. One line a
setting, and an object a setting in --json.
"""
import argparse
import json
import os
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time

import made_up
import step_floor

TOKENS = 8192
ALL = ("v4-512 v4-1024 v4-2048 v4-3072 v4-8192 v4-1024-low v4-2048-wild qwen3-8b-1024 v4-1024-mix").split()
WILD_STEPS = 19  # every row three times
PARTS = ("wait", "forward", "loss", "backward", "optimizer")


class DeviceMemory:
    """Bytes in use on a GPU, sampled in a thread, above what was in use at the start."""

    def __init__(self, gpu=0):
        self.peak, self.last, self.stopped = 0, 0, threading.Event()
        try:
            import pynvml
        except ImportError:
            sys.exit("device memory is read with the package nvidia-ml-py: pip install nvidia-ml-py")
        try:
            pynvml.nvmlInit()
            self.nvml, self.handle = pynvml, pynvml.nvmlDeviceGetHandleByIndex(gpu)
        except pynvml.NVMLError:
            self.nvml = None  # no GPU
            return
        self.base = self.used()
        self.thread = threading.Thread(target=self.sample, daemon=True)
        self.thread.start()

    def used(self):
        return self.nvml.nvmlDeviceGetMemoryInfo(self.handle).used

    def sample(self):
        while not self.stopped.wait(0.02):
            self.last = self.used() - self.base
            self.peak = max(self.peak, self.last)

    def close(self):
        if self.nvml is not None:
            self.stopped.set()
            self.thread.join()


def parse_setting(name):
    for model in made_up.MODELS:
        if name.startswith(model + "-"):
            anchors, *marks = name[len(model) + 1:].split("-")
            unknown = set(marks) - {"low", "bf16", "mix", "few", "wild", "whole", "generic", "loss"}
            if anchors.isdigit() and not unknown:
                return model, int(anchors), marks
    sys.exit(f"setting {name}: MODEL-ANCHORS[-low][-bf16][-mix][-few][-wild][-whole][-generic] expected")


def documents_for(marks, tokens):
    if "mix" in marks:
        return "mix", made_up.mixed_documents(tokens)
    if "few" in marks:
        return "few", made_up.few_documents(tokens)
    if "wild" in marks:
        return "wild", made_up.wild_documents(tokens)
    if "whole" in marks:
        return "whole", made_up.even_documents(tokens, per_row=1)
    return "even", made_up.even_documents(tokens)


def prepare(folder, model_name, marks, tokens):
    """Writes target and shard unless they are there; returns their paths."""
    model, target = made_up.MODELS[model_name], folder / model_name
    if not (target / "head.safetensors").exists():
        made_up.write_target(target, model)
    kind, documents = documents_for(marks, tokens)
    shard = target / f"{kind}.h5"
    if not shard.exists():
        made_up.write_shard(shard, model, documents)
    return target, shard


def write_config(folder, name, target, shard, anchors, tokens, device, marks):
    memory = (["mode: low"] if "low" in marks else []) + (["logits: bf16"] if "bf16" in marks else [])
    kernels = "kernels: {path: generic}\n" if "generic" in marks else ""
    path = folder / f"{name}.yaml"
    path.write_text(f"""
run: {{dir: {folder}/run-{name}, epochs: 1000000, max_steps: 1000, device: {device}, compute: bf16}}
target: {{path: {target}}}
data: {{train: [{shard}], seq_len: {tokens}, rows_per_step: 1}}
drafter: {{kind: dflash, layers: {made_up.DRAFTER_LAYERS}, block_size: {made_up.BLOCK}, mask_token_id: 0}}
anchors: {{max_anchors: {anchors}, per: row}}
loss: {{kl: 1.0, slot_decay_gamma: 7.0}}
optimizer: {{lr: 1.0e-5}}
checkpoint: {{every: 0}}
memory: {{{', '.join(memory)}}}
{kernels}log: {{every: 1, tensorboard: false}}
""")
    return path, folder / f"run-{name}"


def read_steps(run):
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]
    return [line for line in map(json.loads, lines) if "loss" in line]


def run_steps(command, run, count, limit, execution=None):
    """Starts the program, kills it after `count` steps; its steps, start-up seconds and memory. `execution`: a file
    that holds the execution.json of an earlier run, so that products are not timed again, or is made from this one."""
    shutil.rmtree(run, ignore_errors=True)
    if execution is not None and execution.exists():
        run.mkdir()
        shutil.copy(execution, run / "execution.json")
    memory, begin, startup, settled = DeviceMemory(), time.monotonic(), None, 0
    with open(run.with_suffix(".log"), "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    steps = []
    while process.poll() is None and len(steps) < count and time.monotonic() - begin < limit:
        time.sleep(0.02)
        steps = read_steps(run)
        if steps and startup is None:
            startup = time.monotonic() - begin - steps[0]["seconds"]
        if len(steps) <= 2:
            settled = memory.last
    last, seconds = memory.last, time.monotonic() - begin
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
        ending = f"killed after {seconds:.0f} s"
    else:
        ending = f"exit status {process.returncode} after {seconds:.0f} s"
    process.wait()
    memory.close()
    with open(run.with_suffix(".log"), "a") as log:
        log.write(ending + "\n")
    if execution is not None and steps:
        shutil.copy(run / "execution.json", execution)
    return steps, startup, {"peak_gib": memory.peak / 2**30, "growth_gib": (last - settled) / 2**30}


def last_lines(run):
    lines = [line for line in run.with_suffix(".log").read_text().split("\n") if line.strip()]
    return " / ".join(line[:300] for line in lines[-3:])


def planned_gib(dtrain, config):
    """What `dtrain plan --json` says one device needs; None where it says nothing."""
    done = subprocess.run([dtrain, "plan", "--json", "--config", str(config)], capture_output=True, text=True)
    try:
        return json.loads(done.stdout)["needed"] / 2**30
    except (ValueError, KeyError):
        return None


def floor_of(name, tokens):
    """None where rows differ from each other."""
    model, anchors, marks = parse_setting(name)
    if {"mix", "few"} & set(marks):
        rows = made_up.rows_of(documents_for(marks, tokens)[1], tokens)
        return step_floor.floor_of_rows(made_up.MODELS[model], rows, anchors)
    if "wild" in marks:
        return None
    length = tokens if "whole" in marks else tokens // 4
    return step_floor.floor_milliseconds(made_up.MODELS[model], anchors, tokens, length)


def warm_up(count):
    """Steps that do not count: the first one fills caches."""
    return max(1, count // 4) if count > 1 else 0


def summarise(name, steps, startup, memory, plan, tokens):
    counted = steps[warm_up(len(steps)):]
    median = statistics.median(s["seconds"] for s in counted)
    rows = statistics.median(made_up.BLOCK * s["anchors"] / s["seconds"] for s in counted)
    parts = {part: statistics.median(s[part + "_seconds"] for s in counted) for part in PARTS}
    return dict(setting=name, steps=len(steps), milliseconds=1e3 * median,
                quartiles=[1e3 * q for q in statistics.quantiles((s["seconds"] for s in counted), n=4)]
                if len(counted) > 1 else None,
                block_rows_per_second=rows, anchors=[s["anchors"] for s in steps],
                seconds=[s["seconds"] for s in steps], parts={k: 1e3 * v for k, v in parts.items()},
                floor=floor_of(name, tokens), startup=startup, own_gib=steps[-1]["memory_bytes"] / 2**30, plan_gib=plan,
                loss=[steps[0]["loss"], steps[-1]["loss"]], **memory)


def print_line(r):
    parts = " ".join(f"{k} {v:.0f}" for k, v in r["parts"].items())
    plan = f"{r['plan_gib']:.2f}" if r["plan_gib"] else "-"
    floor = f"{r['milliseconds'] / r['floor']:.2f} x floor" if r["floor"] else ""
    print(f"{r['setting']:20s} {r['milliseconds']:8.1f} ms {floor}  {r['block_rows_per_second']:8.0f} rows/s  "
          f"peak {r['peak_gib']:6.2f} GiB (own {r['own_gib']:.2f}, plan {plan}, growth {r['growth_gib']:+.2f})  "
          f"start {r['startup']:.1f} s  [{parts}]  loss {r['loss'][0]:.3f} to {r['loss'][1]:.3f}", flush=True)


def print_wild(steps):
    """Every row by its anchors: its first visit and its later ones."""
    visits = {}
    for s in steps:
        visits.setdefault((s["anchors"], s["tokens"]), []).append(1e3 * s["seconds"])
    for (anchors, tokens), times in sorted(visits.items()):
        print(f"    {int(anchors):5d} anchors, {int(tokens):5d} tokens: first {times[0]:.1f} ms, then "
              + ", ".join(f"{t:.1f}" for t in times[1:]), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtrain", required=True)
    parser.add_argument("--settings", default="all")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--folder", default="/dev/shm/dtrain-step", help="for the inputs; some 14 GB for all")
    parser.add_argument("--limit", type=float, default=90, help="seconds a setting may take")
    parser.add_argument("--set", action="append", default=[], help="passed to dtrain")
    parser.add_argument("--prepare", action="store_true", help="only write the inputs")
    parser.add_argument("--json", help="file for all results")
    arguments = parser.parse_args()
    names = ALL if arguments.settings == "all" else arguments.settings.split(",")
    dtrain, folder, results = os.path.abspath(arguments.dtrain), pathlib.Path(arguments.folder), []
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.prepare:
        for model, _, marks in map(parse_setting, names):
            prepare(folder, model, marks, arguments.tokens)
        return 0
    failed = 0
    for name in names:
        model, anchors, marks = parse_setting(name)
        target, shard = prepare(folder, model, marks, arguments.tokens)
        config, run = write_config(folder, name, target, shard, anchors, arguments.tokens,
                                   arguments.device, marks)
        command = [dtrain, "--config", str(config)]
        for words in arguments.set:
            command += ["--set", words]
        # Long steps need fewer of them, and time on a GPU machine is short.
        count = WILD_STEPS if "wild" in marks else min(arguments.steps, max(4, 12288 // anchors))
        cut = sorted(set(marks) & {"low", "bf16", "generic"})
        execution = folder / f"execution-{'-'.join([model] + cut)}.json"
        steps, startup, memory = run_steps(command, run, count, arguments.limit, execution)
        if not steps:
            print(f"{name:20s} FAILED: {last_lines(run)}", flush=True)
            failed += 1
            continue
        failed += len(steps) < count
        plan = planned_gib(dtrain, config)
        if len(steps) < count:
            print(f"{name:20s} ended after {len(steps)} steps: {last_lines(run)}", flush=True)
        results.append(summarise(name, steps, startup, memory, plan, arguments.tokens))
        print_line(results[-1])
        if "wild" in marks:
            print_wild(steps)
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(results, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
