"""Single runs of real_input.py: a training of either system, its judgement by `dtrain eval`, real decoding.

Everything is a process of its own with a log in its folder. Knows the settings that both systems share; does not decide what is
run when.
"""
import contextlib
import dataclasses
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

import acceptance

HERE = pathlib.Path(__file__).resolve().parent
DECODE = HERE.parent / "tools" / "decode.py"
GAMMA = {8: 4.0, 16: 7.0}
SYSTEMS = ("dtrain", "speculators")


@dataclasses.dataclass(frozen=True)
class Run:
    """One training."""
    system: str
    block: int
    seed: int
    steps: int            # 0: what the epochs give
    anchors: int
    epochs: int = 100000
    rows_per_step: int = 1
    rate: float = 1e-3
    kind: str = "main"    # or the name of a variant
    marks: tuple = ()     # steps with a checkpoint, besides the last one
    sets: tuple = ()      # further settings of dtrain's training

    @property
    def name(self):
        return f"{self.kind}-{self.system}-b{self.block}-s{self.seed}"


class Runner:
    def __init__(self, args, work, features, prompt_of, gpu=None):
        self.args, self.work, self.prompt_of, self.gpu = args, work, prompt_of, gpu
        self.environment = dict(os.environ, **({} if gpu is None else dict(CUDA_VISIBLE_DEVICES=str(gpu))))
        self.train, self.val = features / "train" / "train-*.h5", features / "val" / "train-*.h5"
        self.target = features / "val" / "target"
        self.dtrain = str(pathlib.Path(args.dtrain).resolve())
        self.seq_len = args.seq_len

    def call(self, command, log, limit, accepted=(0,)):
        """-> output. Raises with the last lines of the log unless the exit status is an accepted one."""
        begin = time.monotonic()
        with open(log, "w", encoding="utf-8") as file:
            try:
                done = subprocess.run([str(word) for word in command], stdout=file, stderr=subprocess.STDOUT,
                                      timeout=max(1.0, limit), cwd=HERE, env=self.environment)
                status = done.returncode
            except subprocess.TimeoutExpired:
                status = f"stopped after {time.monotonic() - begin:.0f} s"
        text = pathlib.Path(log).read_text(errors="replace")
        if status not in accepted:
            raise RuntimeError(f"{pathlib.Path(log).name}: {status}: {text[-1200:]}")
        return text

    # ---- dtrain --------------------------------------------------------------------------------------

    def write_config(self, run, folder):
        a = self.args
        every = run.marks[0] if run.marks else 0
        path = folder / "config.yaml"
        path.write_text(f"""
run: {{dir: {folder}/run, seed: {run.seed}, epochs: {run.epochs}, max_steps: {run.steps}, device: {a.device}, compute: {a.compute}}}
target: {{path: {self.target}}}
data: {{train: ["{self.train}"], seq_len: {self.seq_len}, rows_per_step: {run.rows_per_step}, readers: 4, prefetch_rows: 8}}
validation: {{rows: 1048576}}
drafter: {{kind: dflash, layers: {a.layers}, block_size: {run.block}, mask_token_id: {a.mask_token_id}, init_std: 0.02}}
anchors: {{max_anchors: {run.anchors}, per: row}}
loss: {{kl: 1.0, slot_decay_gamma: {GAMMA.get(run.block, 7.0)}, slot_mask: each, normalize: count}}
optimizer: {{lr: {run.rate!r}, betas: [0.9, 0.999], weight_decay: 0, grad_clip: 1.0}}
schedule: {{kind: cosine, warmup_ratio: {a.warmup_ratio}}}
checkpoint: {{every: {every}, keep: 1000, best: false}}
log: {{every: 100, tensorboard: false}}
""")
        return path

    def train_dtrain(self, run, limit):
        folder = self.folder(run)
        config = self.write_config(run, folder)
        begin = time.monotonic()
        sets = [word for some in run.sets for word in ("--set", some)]
        with device_memory(self.gpu or 0) as memory:
            self.call([self.dtrain, "--config", config, *sets], folder / "train.log", limit)
        wall = time.monotonic() - begin
        steps = [json.loads(line) for line in open(folder / "run" / "metrics.jsonl", encoding="utf-8")]
        steps = [step for step in steps if "lr" in step]
        marks, clock = [], 0.0
        last = steps[-1]["step"]
        for step in steps:
            clock += step["seconds"]
            if step["step"] in run.marks or step["step"] == last:
                marks.append([step["step"], clock])
        return dict(seconds=clock, wall=wall, steps=last, marks=marks, losses=[[s["step"], s["loss"], s["accept_len"]] for s in steps],
                    row_tokens=[int(s["tokens"]) for s in steps], valid_anchors=[int(s["valid_anchors"]) for s in steps],
                    save_seconds=sum(s["save_seconds"] for s in steps), wait_seconds=sum(s["wait_seconds"] for s in steps),
                    block_rows=run.block * sum(s["anchors"] for s in steps), tokens_read=sum(s["tokens"] for s in steps),
                    slots=sum(s["slots"] for s in steps), memory=memory, planned_gib=steps[-1].get("planned_bytes", 0) / 2**30,
                    own_gib=steps[-1]["memory_bytes"] / 2**30,
                    parts={p: sum(s[p + "_seconds"] for s in steps) / len(steps)
                           for p in ("wait", "forward", "loss", "backward", "optimizer")})

    # ---- the peer ------------------------------------------------------------------------------------

    def peer_settings(self, run, go=None):
        a, folder = self.args, self.folder(run)
        layer_ids = json.loads((self.target.parent / "extraction.json").read_text())["layer_ids"]
        path = folder / "settings.json"
        path.write_text(json.dumps(dict(
            out=str(folder), target=str(self.target), train=str(self.train), seq_len=self.seq_len, seed=run.seed, steps=run.steps,
            layers=a.layers, block_size=run.block, mask_token_id=a.mask_token_id, layer_ids=layer_ids, anchors=run.anchors,
            lr=run.rate, warmup_ratio=a.warmup_ratio, betas=[0.9, 0.999], gamma=GAMMA.get(run.block, 7.0), init_std=0.02,
            checkpoints=list(run.marks), go=None if go is None else str(go))))
        return path

    def start_peer(self, run, go):
        """A process that compiles now and trains when the file `go` is there."""
        settings = self.peer_settings(run, go)
        log = open(self.folder(run) / "train.log", "w", encoding="utf-8")
        return subprocess.Popen([sys.executable, str(HERE / "peer_training.py"), str(settings)], stdout=log,
                                stderr=subprocess.STDOUT, cwd=HERE, env=self.environment)

    def train_peer(self, run, limit, process=None, go=None):
        folder, begin = self.folder(run), time.monotonic()
        if process is None:
            self.call([sys.executable, HERE / "peer_training.py", self.peer_settings(run)], folder / "train.log", limit)
        else:
            go.write_text("")
            try:
                status = process.wait(max(1.0, limit))
            except subprocess.TimeoutExpired:
                process.kill()
                status = "stopped"
            if status != 0:
                raise RuntimeError(f"{run.name}: {status}: {(folder / 'train.log').read_text(errors='replace')[-1200:]}")
        result = json.loads((folder / "result.json").read_text())
        return dict(result, wall=time.monotonic() - begin, steps=run.steps, block_rows=run.block * run.anchors * run.steps,
                    tokens_read=sum(result["row_tokens"]))

    # ---- judgement -----------------------------------------------------------------------------------

    def folder(self, run):
        path = self.work / "runs" / run.name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def train_run(self, run, limit, **started):
        shutil.rmtree(self.folder(run) / "run", ignore_errors=True)
        if run.system == "dtrain":
            return self.train_dtrain(run, limit)
        if not started:
            shutil.rmtree(self.folder(run), ignore_errors=True)
        return self.train_peer(run, limit, **started)

    def export(self, run, step):
        """Folder of a checkpoint in z-lab layout."""
        inside = "run/checkpoints" if run.system == "dtrain" else "checkpoints"
        return self.folder(run) / inside / f"step-{step:08d}"

    def dtrain_checkpoint(self, run, step, limit):
        """The peer's weights become a checkpoint of dtrain: read by drafter.init_from, one step with learning rate 0."""
        if run.system == "dtrain":
            return self.export(run, step)
        folder = self.folder(run) / f"judge-{step}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        one = dataclasses.replace(run, steps=1, anchors=1, rate=0.0, rows_per_step=1, epochs=1, marks=())
        config = self.write_config(one, folder)
        self.call([self.dtrain, "--config", config, "--set", f"drafter.init_from={self.export(run, step)}", "--set",
                   "schedule.warmup_ratio=0"], folder / "init.log", limit)
        return folder / "run" / "checkpoints" / "step-00000001"

    def judge(self, run, step, limit):
        """accept_len_walk of the served weights in fp32 on every held-out document."""
        checkpoint = self.dtrain_checkpoint(run, step, limit)
        folder = self.folder(run)
        blocks = folder / f"blocks-{step}.jsonl"
        text = self.call([self.dtrain, "eval", "--config", self.write_config(run, folder), "--checkpoint", checkpoint, "--served",
                          "--set", f"data.val={self.val}", "--set", "run.compute=fp32", "--blocks", blocks],
                         folder / f"eval-{step}.log", limit)
        counts = acceptance.by_prompt(acceptance.read_blocks(blocks), self.prompt_of)
        return dict(step=step, walk=float(re.search(r"accept_len_walk\s+([\d.]+)", text)[1]), counts=counts.tolist(),
                    drafts=[float(v) for v in re.findall(r"with +\d+ drafts +([\d.]+)", text)],
                    overlap=float(re.search(r"overlap\s+([\d.]+)", text)[1]),
                    loss=float(re.search(r"loss\s+([\d.]+)", text)[1]))

    def decode(self, run, step, documents, limit):
        """Real decoding of held-out prompts, beside what eval said of the same blocks."""
        folder, a = self.folder(run), self.args
        blocks = folder / "decoded.jsonl"
        model = ["--gguf", a.gguf] if a.gguf else ["--model", a.model]
        shards = sorted(self.val.parent.glob(self.val.name))
        command = [sys.executable, DECODE, *model, "--drafter", self.export(run, step), "--shard", *shards, "--limit", documents,
                   "--dtype", "float32", "--device", a.device, "--bf16-features", "--blocks-out", blocks]
        text = self.call(command, folder / "decode.log", limit, accepted=(0, 1))  # 1: a difference that is no tie
        found = acceptance.read_blocks(blocks)
        if not found:
            raise RuntimeError(f"{run.name}: no block decoded: {text[-800:]}")
        scored = acceptance.read_blocks(folder / f"blocks-{step}.jsonl")
        same = sum(scored.get(key) == value for key, value in found.items())
        seen = {document for document, _ in found}
        judged = [value for (document, _), value in scored.items() if document in seen]
        return dict(blocks=len(found), same=same, decoded=sum(found.values()) / len(found) + 1,
                    judged=sum(judged) / len(judged) + 1, last=text.strip().splitlines()[-1])


@contextlib.contextmanager
def device_memory(gpu):
    """Filled at the end: most bytes in use on the device above what was in use before, in GiB."""
    result = {}
    memory = None
    if importlib.util.find_spec("pynvml") is not None:
        import step
        memory = step.DeviceMemory(gpu)
    try:
        yield result
    finally:
        if memory is not None:
            memory.close()
            result["used_gib"] = memory.peak / 2**30
