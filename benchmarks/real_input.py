#!/usr/bin/env python3
"""A drafter for a real target, trained by dtrain and by the published speculators package on the same data.

    python3 benchmarks/real_input.py --dtrain build/dtrain --gguf FILE.gguf --out RESULTS --budget 500 gsm8k.jsonl mt-bench.jsonl

The target answers every prompt several times (sampled; held-out prompts once, greedily), its states go to shards, both systems
train the same drafters on the same packed rows, and one judge, `dtrain eval --served`, scores both on the held-out prompts; some
of these are decoded for real. The first seed's trainings run alone and are timed; everything else shares the machine. --budget
bounds the seconds: what no longer fits is left out, the least important first, and the report says what.
RESULTS gets report.md, results.json (rewritten as results come), answers.npz (for --answers), log.txt and logs.tgz. Needs what tools/ needs,
and speculators (collect_peer.py).
"""
import argparse
import concurrent.futures
import importlib
import json
import pathlib
import shutil
import subprocess
import sys
import tarfile
import threading
import time
import traceback

import packed_rows
import real_data
import real_report
from real_runs import SYSTEMS, Run, Runner

VARIANTS = ("once", "six", "once-rate", "six-few")
JUDGE_SECONDS = 10  # at most, of one `dtrain eval` beside others; a guess for the plan


class Plan:
    """Clock, results that are saved as they come, and what was left out."""

    def __init__(self, args, out):
        self.begin, self.budget, self.out, self.lock = time.monotonic(), args.budget, out, threading.Lock()
        self.results = dict(arguments={k: str(v) for k, v in vars(args).items()}, runs={}, failed=[], dropped=[], phases={})
        self.log = open(out / "log.txt", "a", encoding="utf-8")

    def elapsed(self):
        return time.monotonic() - self.begin

    def left(self):
        return self.budget - self.elapsed()

    def say(self, text):
        line = f"[{self.elapsed():6.1f}] {text}"
        with self.lock:
            print(line, flush=True)
            print(line, file=self.log, flush=True)

    def phase(self, name, seconds):
        self.results["phases"][name] = seconds
        self.say(f"{name}: {seconds:.1f} s")

    def keep(self, run, **facts):
        with self.lock:
            entry = self.results["runs"].setdefault(run.name, dict(run=vars(run).copy()))
            entry.update(facts)
            self.save()

    def save(self):
        partial = self.out / "results.json.tmp"
        partial.write_text(json.dumps(self.results))
        partial.rename(self.out / "results.json")

    def attempt(self, what, seconds, work):
        """Runs work(limit) unless less than the seconds it is expected to take are left; a failure does not end the others."""
        if self.left() < seconds:
            self.say(f"left out: {what} ({self.left():.0f} s left, {seconds:.0f} expected)")
            with self.lock:
                self.results["dropped"].append(what)
            return None
        begin = self.elapsed()
        try:
            result = work(self.left())
            self.say(f"{what}: done in {self.elapsed() - begin:.1f} s")
            return result
        except Exception as error:
            with self.lock:
                self.results["failed"].append(f"{what}: {error}")
                self.save()
            self.say(f"FAILED {what}: {error}")
            if not isinstance(error, RuntimeError):
                self.say(traceback.format_exc())
            return None


def main_runs(args):
    """By block: runs of both systems for each seed, the first with marks."""
    every = max(1, args.steps // args.marks)
    marks = tuple(range(every, args.steps, every))
    return {block: {(system, seed): Run(system, block, seed, args.steps, args.anchors, rate=args.rate,
                                        marks=marks if seed == args.seeds[0] else ())
                    for system in SYSTEMS for seed in args.seeds} for block in args.blocks}


def variant_runs(args, seed):
    """One pass over many anchors, and several over few, all by dtrain with the first block size."""
    n, k = args.few_anchors, args.passes
    made = {
        "once": dict(anchors=k * n, epochs=1, rate=args.rate), "six": dict(anchors=n, epochs=k, rate=args.rate),
        "once-rate": dict(anchors=k * n, epochs=1, rate=args.rate * k ** 0.5),
        "six-few": dict(anchors=n, epochs=k, rows_per_step=k, rate=args.rate),
    }
    return [Run("dtrain", args.blocks[0], seed, args.variant_steps, kind=kind, **made[kind]) for kind in VARIANTS]


def check_environment(args, plan):
    """Everything that would fail later for a trivial reason fails here."""
    for name in ("h5py", "safetensors", "speculators.models.dflash"):
        importlib.import_module(name)
    import torch
    import transformers
    import peer_training

    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda: torch sees no GPU")
    version = subprocess.run([args.dtrain, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
    plan.results["machine"] = dict(device=device, torch=torch.__version__, transformers=transformers.__version__, dtrain=version)
    assert peer_training.learning_rate(dict(warmup_ratio=0.5, steps=4, lr=1.0), 2) == 1.0
    plan.say(json.dumps(plan.results["machine"]))


def prepare_data(args, plan, work, start_peers):
    """-> the folder of the shards. Peers start to compile as soon as the target directory is there."""
    if args.features:
        features, facts = pathlib.Path(args.features).resolve(), {}
        start_peers(features)
        for split in real_data.SPLITS:
            if (features / split / "documents.jsonl").exists():
                facts[split] = real_data.shard_facts(features / split)
    else:
        extractions = real_data.Extractions(args, work, plan.say)
        while not extractions.target_is_there() and not extractions.failed():
            time.sleep(0.2)
        time.sleep(0.5)
        if not extractions.failed():
            start_peers(extractions.features)
        extractions.wait(plan.left())
        features, facts = extractions.features, extractions.facts
        if not args.answers:
            real_data.save_answers(plan.out / "answers.npz", features)
    plan.results["data"] = facts
    shape = packed_rows.read_documents(features / "val" / "train-*.h5").states[0].shape
    plan.results["token_bytes"] = 2 * shape[1] * shape[2]
    plan.say(f"data: {json.dumps(facts)}")
    return features


def same_rows(features, args, runs, plan):
    """Whether dtrain trained on the rows that were given to the peer."""
    for block, by_key in runs.items():
        for seed in args.seeds:
            ours, theirs = (plan.results["runs"].get(by_key[(system, seed)].name, {}).get("training") for system in SYSTEMS)
            if ours and theirs:
                same = all(ours[k] == theirs[k] for k in ("row_tokens", "valid_anchors"))
                plan.results.setdefault("same_rows", {})[f"b{block}-s{seed}"] = same
                if not same:
                    plan.say(f"block {block}, seed {seed}: the rows DIFFER")


class Work:
    def __init__(self, args, plan, runner, runs):
        self.args, self.plan, self.runner, self.runs = args, plan, runner, runs
        self.seconds = {}  # (system, block) -> seconds of a process, when it ran alone

    def alone(self, peers):
        """The first seed's trainings, one after another, larger blocks first, once no peer compiles any more."""
        first = self.args.seeds[0]
        for block, (process, go) in list(peers.items()):
            run = self.runs[block][("speculators", first)]
            if not self.wait_ready(run, process):
                self.plan.say(f"{run.name}: started again: {(self.runner.folder(run) / 'train.log').read_text()[-800:]}")
                peers[block] = (self.runner.start_peer(run, go), go)
                self.wait_ready(run, peers[block][0])
        for block in sorted(self.args.blocks, reverse=True):
            for system in SYSTEMS:
                run = self.runs[block][(system, first)]
                started = {}
                if system == "speculators":
                    process, go = peers[block]
                    started = dict(process=process, go=go)
                result = self.plan.attempt(f"{run.name}, alone", 5, lambda limit: self.runner.train_run(run, limit, **started))
                if result:
                    self.plan.keep(run, training=result, alone=True)
                    self.seconds[(system, block)] = result["wall"]
                    self.plan.say(f"  {1e3 * result['seconds'] / result['steps']:.2f} ms a step, {result['seconds']:.1f} s")
                    if self.plan.results["runs"][run.name].get("training") and result["losses"]:
                        self.plan.say(f"  loss and accept_len at the end: {result['losses'][-1]}")

    def wait_ready(self, run, process):
        begin = time.monotonic()
        while not (self.runner.folder(run) / "ready").exists() and process.poll() is None:
            if self.plan.left() < 30:
                break
            time.sleep(0.05)
        self.plan.say(f"{run.name}: waited {time.monotonic() - begin:.1f} s for its compilation")
        return process.poll() is None

    def train_and_judge(self, run):
        expected = 1.5 * self.seconds.get((run.system, run.block), 20) + JUDGE_SECONDS
        result = self.plan.attempt(run.name, expected, lambda limit: self.runner.train_run(run, limit))
        if result:
            self.plan.keep(run, training=result, alone=False)
            self.judge(run, result["steps"])

    def judge(self, run, step):
        judged = self.plan.attempt(f"{run.name} judged at {step}", 3, lambda limit: self.runner.judge(run, step, limit))
        if judged:
            self.plan.say(f"  {run.name}: {judged['walk']:.4f} tokens per block after {step} steps")
            with self.plan.lock:
                entry = self.plan.results["runs"][run.name]
                entry.setdefault("judged", {})[str(step)] = judged
                self.plan.save()
        return judged

    def decode(self, run):
        """The first seed's last checkpoint: judged, then decoded."""
        if run.name not in self.plan.results["runs"]:
            return
        step = self.plan.results["runs"][run.name]["training"]["steps"]
        if self.judge(run, step) and self.args.decode:
            result = self.plan.attempt(f"{run.name} decoded", 20,
                                       lambda limit: self.runner.decode(run, step, self.args.decode, limit))
            if result:
                self.plan.keep(run, decoding=result)

    def curve(self, run):
        entry = self.plan.results["runs"].get(run.name)
        for step, _ in reversed(entry["training"]["marks"][:-1] if entry else []):
            self.judge(run, step)

    def together(self):
        """By worth: judging and decoding the timed runs, the other seeds in pairs, curves, one pass against several."""
        first, *others = self.args.seeds
        pairs = [self.runs[block] for block in self.args.blocks]
        tasks = [(self.decode, by_key[(system, first)]) for by_key in pairs for system in SYSTEMS]
        variants = variant_runs(self.args, first) if self.args.few_anchors else []
        for number, seed in enumerate(others):
            tasks += [(self.train_and_judge, by_key[(system, seed)]) for by_key in pairs for system in SYSTEMS]
            if number == 0:
                tasks += [(self.train_and_judge, run) for run in variants]
                tasks += [(self.curve, by_key[(system, first)]) for by_key in pairs for system in SYSTEMS]
        if not others:
            tasks += [(self.train_and_judge, run) for run in variants]
            tasks += [(self.curve, by_key[(system, first)]) for by_key in pairs for system in SYSTEMS]
        for seed in others[:1] if variants else []:
            tasks += [(self.train_and_judge, run) for run in variant_runs(self.args, seed)]
        with concurrent.futures.ThreadPoolExecutor(self.args.jobs) as pool:
            for future in [pool.submit(task, run) for task, run in tasks]:
                future.result()


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("prompts", nargs="*", help="JSONL files of prompts; not needed with --answers or --features")
    add("--dtrain", required=True)
    add("--model", help="the target, a Hugging Face folder")
    add("--gguf", help="the target as a GGUF file")
    add("--name", help="of the target, written in the shards")
    add("--out", required=True, help="folder for results")
    add("--work", default="/dev/shm/real-input", help="folder for shards and runs: 10 GB for 1.4 M tokens")
    add("--answers", help="answers.npz of an earlier run instead of answering")
    add("--features", help="folder with train/ and val/ of tools/extract.py instead of answering and capturing")
    add("--budget", type=float, default=1e9, help="seconds for everything")
    add("--limit", type=int, help="only the first N prompts")
    add("--held-out", type=int, default=200, help="prompts for the judge")
    add("--split-seed", type=int, default=0)
    add("--samples", type=int, default=5, help="answers to each training prompt")
    add("--temperature", type=float, default=0.7, help="of these answers")
    add("--sample-seed", type=int, default=1)
    add("--max-new-tokens", type=int, default=256)
    add("--batch-tokens", type=int, default=32768)
    add("--dtype", default="bfloat16", help="of the target for the training answers")
    add("--device", default="cuda", choices=["cuda", "cpu"])
    add("--compute", default="bf16", choices=["bf16", "fp32"], help="of dtrain's training")
    add("--layers", type=int, default=5)
    add("--mask-token-id", type=int, default=16)
    add("--blocks", type=lambda text: [int(w) for w in text.split(",")], default=[8, 16])
    add("--seeds", type=lambda text: [int(w) for w in text.split(",")], default=[1, 2, 3])
    add("--steps", type=int, default=1536)
    add("--seq-len", type=int, default=4096)
    add("--anchors", type=int, default=512)
    add("--rate", type=float, default=1e-3)
    add("--warmup-ratio", type=float, default=0.05)
    add("--marks", type=int, default=8, help="checkpoints of a timed run")
    add("--decode", type=int, default=12, help="held-out prompts to decode")
    add("--few-anchors", type=int, default=256, help="of each of the several passes; 0: no comparison of passes")
    add("--passes", type=int, default=6)
    add("--variant-steps", type=int, default=0, help="most steps of a run of that comparison; 0: whole passes")
    add("--jobs", type=int, default=5, help="processes that share the device where nothing is timed")
    return parser.parse_args()


def main():
    args = parse()
    for name in ("dtrain", "model", "gguf", "answers", "features"):  # some processes run in another folder
        if getattr(args, name):
            setattr(args, name, str(pathlib.Path(getattr(args, name)).resolve()))
    out, work = pathlib.Path(args.out).resolve(), pathlib.Path(args.work).resolve()
    out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    plan = Plan(args, out)
    check_environment(args, plan)
    runs, peers, made = main_runs(args), {}, {}

    def start_peers(features):
        made["runner"] = Runner(args, work, features, {})
        for block in sorted(args.blocks, reverse=True):
            go = work / f"go-{block}"
            run = runs[block][("speculators", args.seeds[0])]
            peers[block] = (made["runner"].start_peer(run, go), go)

    try:
        features = prepare_data(args, plan, work, start_peers)
        runner = made["runner"]
        runner.prompt_of = real_data.prompt_numbers(features / "val")
        plan.phase("answers and shards", plan.elapsed())
        jobs = Work(args, plan, runner, runs)
        begin = plan.elapsed()
        jobs.alone(peers)
        plan.phase("trainings alone", plan.elapsed() - begin)
        begin = plan.elapsed()
        same_rows(features, args, runs, plan)
        jobs.together()
        plan.phase("the rest, side by side", plan.elapsed() - begin)
        same_rows(features, args, runs, plan)
    finally:
        for process, _ in peers.values():
            if process.poll() is None:
                process.kill()
        plan.save()
        with tarfile.open(out / "logs.tgz", "w:gz") as archive:
            for log in sorted(work.rglob("*.log")):
                archive.add(log, log.relative_to(work))
    text = real_report.report(plan.results, args)
    (out / "report.md").write_text(text)
    print(text)
    shutil.rmtree(work, ignore_errors=True)
    return 1 if plan.results["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
