#!/usr/bin/env python3
"""A real target whose drafter is trained through a spool while features are extracted, both sides killed at random:
the weights are bitwise those of the same training from plain shards, and the spool never holds more than its bytes.

    benchmarks/spool_live.py --model DIR --prompts prompts.jsonl --dtrain build/dtrain --work FOLDER [--kills 20]

Lines of the prompts are {"turns": ["..."]}. Documents are made of them without answers by the target: the texts of --texts lines
are in turn prompt and supervised part; what they say is of no consequence here. Documents are extracted one
at a time, so that their states do not depend on a batch.

A side is killed (SIGKILL) when the run has come a random part further of what is left for it, so that kills are spread over all of it;
every other time also when a random time of at most --longest seconds has passed, which may be in a start. It is started again at
once. Extractors are forks of a process that has imported torch and transformers, which is most of their start (--start-anew:
none are); whatever they do themselves, loading the model included, they do after each kill. The last line of the output is a
JSON object; status 1 when weights differ, the spool was too large, or the run ended before all kills.
"""

import argparse
import collections
import hashlib
import json
import multiprocessing
import os
import random
import runpy
import subprocess
import sys
import time

TOOLS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tools")
CONFIG = """run: {{dir: unset, seed: 1, epochs: {epochs}, compute: {compute}}}
target: {{path: plain/target}}
data: {{seq_len: 1024, rows_per_step: 1, spool_bytes: {spool_bytes}, spool_wait: 600}}
drafter: {{layers: 3, block_size: 8, mask_token_id: {mask_token}}}
anchors: {{max_anchors: 128}}
loss: {{kl: 1.0}}
checkpoint: {{every: {every}, keep: 2}}
log: {{every: 50, tensorboard: false}}
"""


def build_parser():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, help="Hugging Face model directory")
    add("--prompts", required=True, help="JSONL")
    add("--dtrain", required=True)
    add("--work", required=True, help="empty folder; needs room for the plain shards, too")
    add("--documents", type=int, default=440)
    add("--texts", type=int, default=6, help="lines of the prompts in a document")
    add("--layers", type=int, default=5)
    add("--epochs", type=int, default=2)
    add("--every", type=int, default=10, help="steps between checkpoints")
    add("--compute", default="bf16")
    add("--device", default="auto", help="of the extractor")
    add("--spool-bytes", default="1GiB")
    add("--mask-token", type=int, default=16)
    add("--kills", type=int, default=20)
    add("--longest", type=float, default=10.0, help="seconds between a kill and the next of every pair, at most")
    add("--kill-seconds", type=float, default=1e9, help="no kills after these; the run then goes on to its end")
    add("--start-anew", action="store_true", help="extractors are started as programs of their own")
    add("--seed", type=int, default=1)
    return parser


class Forked:
    """A Python program in a fork of a process that has imported what is slow to import."""

    server = None

    def __init__(self, command, path):
        if Forked.server is None:
            Forked.server = multiprocessing.get_context("forkserver")
            Forked.server.set_forkserver_preload(["torch", "transformers", "transformers.modeling_utils",
                                                  "transformers.models.llama.modeling_llama", "h5py"])
        self.process = Forked.server.Process(target=run_program, args=(command, path))
        self.process.start()

    def poll(self):
        return self.process.exitcode

    def kill(self):
        self.process.kill()

    def wait(self, timeout=None):
        self.process.join(timeout)
        return self.process.exitcode


def run_program(command, path):
    """command: a Python program and its arguments; path: of its output."""
    with open(path, "a", encoding="utf-8") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")


class Kills:
    """When which side is killed."""

    def __init__(self, args):
        self.args, self.pick, self.started = args, random.Random(args.seed), time.monotonic()
        self.done, self.furthest = [], 0.0
        self.plan()

    def plan(self):
        left = self.args.kills - len(self.done)
        soon = len(self.done) % 2 == 1  # after a kill, perhaps before the side that was started again is at work
        self.due = time.monotonic() + (self.pick.uniform(0, self.args.longest) if soon else 4 * self.args.longest)
        self.mark = self.furthest + (1 - self.furthest) * self.pick.uniform(0.2, 1) / (left + 1)

    def side(self, sides, progress):
        """-> the side to be killed now, or None. progress: of the run, of 1."""
        self.furthest = max(self.furthest, progress)
        if len(self.done) >= self.args.kills or time.monotonic() - self.started > self.args.kill_seconds:
            return None
        if time.monotonic() < self.due and self.furthest < self.mark:
            return None
        return self.pick.choice(sorted(sides))

    def note(self, side, serial):
        self.done.append((side, serial))
        self.plan()

    def counts(self):
        return dict(collections.Counter(side for side, _ in self.done))


class Proof:
    def __init__(self, args):
        self.args, self.most, self.back = args, 0, 0

    def path(self, name):
        return os.path.join(self.args.work, name)

    def write_inputs(self):
        with open(self.args.prompts, encoding="utf-8") as file:
            texts = [json.loads(line)["turns"][0] for line in file]
        with open(self.path("documents.jsonl"), "w", encoding="utf-8") as file:
            for at in range(self.args.documents):
                messages = [{"role": ("user", "assistant")[turn % 2], "content": texts[(5 * at + turn) % len(texts)]}
                            for turn in range(self.args.texts)]
                file.write(json.dumps({"id": str(at), "messages": messages}) + "\n")
        with open(self.path("run.yaml"), "w", encoding="utf-8") as file:
            file.write(CONFIG.format(**vars(self.args)))

    def extractor(self, *options):
        return [os.path.join(TOOLS, "extract.py"), "--model", self.args.model, "--device", self.args.device,
                "--batch-tokens", "1", *options]

    def feeder(self):
        return self.extractor("--spool", self.path("spool"), "--config", self.path("run.yaml"), "--dtrain",
                              self.args.dtrain, "--set", f"data.manifest={self.path('data/manifest.h5')}")

    def trainer(self, name, *sets):
        sets = [word for one in (f"run.dir={self.path(name)}", *sets) for word in ("--set", one)]
        return [self.args.dtrain, "--config", self.path("run.yaml"), *sets]

    def spooled(self):
        return self.trainer("spooled", f"data.manifest={self.path('data/manifest.h5')}",
                            f"data.spool={self.path('spool')}")

    def start(self, command, name):
        path = self.path(name + ".out")
        python = command[0].endswith(".py")
        if python and not self.args.start_anew:
            return Forked(command, path)
        command = [sys.executable, *command] if python else command
        with open(path, "a", encoding="utf-8") as out:
            return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)

    def must(self, command, name):
        started = time.monotonic()
        status = self.start(command, name).wait()
        if status != 0:
            sys.exit(f"{name}: status {status}; see {self.path(name)}.out")
        seconds = time.monotonic() - started
        print(f"{name}: {seconds:.1f} s", flush=True)
        return seconds

    def look(self):
        """Bytes in the spool now, unfinished shards included."""
        total = 0
        for entry in os.scandir(self.path("spool")):
            try:
                total += entry.stat().st_size if entry.name.startswith("features") else 0
            except FileNotFoundError:  # removed meanwhile
                continue
        self.most = max(self.most, total)

    def state(self):
        """-> the document that the run is at, the end. It is replaced by rename, so a file that is there is whole."""
        try:
            with open(self.path("spool/spool.json"), encoding="utf-8") as file:
                state = json.load(file)
        except FileNotFoundError:
            return 0, 1
        return state["serial"], state["end"]

    def run_live(self):
        """Until the trainer has ended by itself. -> seconds."""
        os.makedirs(self.path("spool"), exist_ok=True)
        started = time.monotonic()
        sides = {"feeder": self.feeder(), "spooled": self.spooled()}
        self.running = {name: self.start(command, name) for name, command in sides.items()}
        try:
            return self.watch(sides, self.running, started)
        finally:
            for process in self.running.values():
                if process.poll() is None:
                    process.kill()
                    process.wait()

    def watch(self, sides, running, started):
        self.kills, before = Kills(self.args), 0
        while True:
            time.sleep(0.02)
            self.look()
            status = running["spooled"].poll()
            if status == 0:
                break
            if status is not None or running["feeder"].poll() not in (None, 0):
                sys.exit(f"spooled {status}, feeder {running['feeder'].poll()}; see {self.path('*.out')}")
            serial, end = self.state()
            self.back += serial < before
            before = serial
            name = self.kills.side(sides, serial / end)
            if name is not None:
                running[name].kill()
                running[name].wait()
                self.kills.note(name, serial)
                running[name] = self.start(sides[name], name)
        if running["feeder"].wait(timeout=120) != 0:
            sys.exit(f"feeder: did not end in good order; see {self.path('feeder.out')}")
        return time.monotonic() - started


def weights(run):
    folder = os.path.join(run, "checkpoints")
    newest = max(name for name in os.listdir(folder) if name.startswith("step-"))
    digest = hashlib.sha256()
    for name in ("master", "adam_m", "adam_v"):
        with open(os.path.join(folder, newest, name + ".safetensors"), "rb") as file:
            digest.update(file.read())
    return newest, digest.hexdigest()


def main():
    args = build_parser().parse_args()
    for name in ("model", "dtrain", "work"):
        setattr(args, name, os.path.abspath(getattr(args, name)))
    os.makedirs(args.work, exist_ok=True)
    proof = Proof(args)
    proof.write_inputs()
    layers = ("--layers", str(args.layers))
    extract = proof.must(proof.extractor("--out", proof.path("plain"), *layers, proof.path("documents.jsonl")), "plain")
    proof.must(proof.extractor("--out", proof.path("data"), "--manifest-only", *layers, proof.path("documents.jsonl")),
               "manifest")
    train = proof.must(proof.trainer("plain-run", f"data.train=[{proof.path('plain')}/train-*.h5]"), "plain-run")
    live = proof.run_live()
    plain = sum(entry.stat().st_size for entry in os.scandir(proof.path("plain")) if entry.name.endswith(".h5"))
    same = weights(proof.path("plain-run")) == weights(proof.path("spooled"))
    unit = {"KiB": 10, "MiB": 20, "GiB": 30}[args.spool_bytes[-3:]]
    bound = int(float(args.spool_bytes[:-3]) * 2 ** unit)
    print("killed at documents:", " ".join(f"{side}:{serial}" for side, serial in proof.kills.done), flush=True)
    print(json.dumps({"same_weights": same, "kills": proof.kills.counts(), "went_back": proof.back,
                      "spool_bytes_most": proof.most, "spool_bytes": bound, "plain_bytes": plain,
                      "extract_seconds": extract, "train_seconds": train, "live_seconds": live}))
    return 0 if same and proof.most <= bound and len(proof.kills.done) == args.kills else 1


if __name__ == "__main__":
    sys.exit(main())
