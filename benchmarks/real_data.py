"""Prompts to feature shards for real_input.py: the split by prompt, both extractions, and answers kept in one small file.

Training prompts are answered several times, sampled, in bf16; held-out prompts once, greedily, in fp32, since on greedy text
accept_len_walk is what decoding does. Does not train.
"""
import json
import pathlib
import re
import subprocess
import sys
import time

import numpy as np

TOOLS = pathlib.Path(__file__).resolve().parent.parent / "tools"
sys.path.insert(0, str(TOOLS))

from dtrain_tools.documents import read_sources, validation_keys  # noqa: E402

SPLITS = ("train", "val")


def split_prompts(files, held_out, seed, limit, folder):
    """Writes train.jsonl and val.jsonl. -> number of prompts in each."""
    sources = read_sources([str(path) for path in files], limit)
    keys = validation_keys([source.key for source in sources], held_out, seed)
    counts = {}
    for split in SPLITS:
        some = {source.key: source for source in sources if (source.key in keys) == (split == "val")}  # equal prompts once
        lines = [json.dumps({"id": source.key, "turns": source.turns}) for source in some.values()]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
        counts[split] = len(lines)
    return counts


def extraction_command(args, split, lines, out):
    """tools/extract.py for one side; lines: prompts, or answers that are there."""
    sampled = split == "train"
    command = [sys.executable, TOOLS / "extract.py", *(["--gguf", args.gguf] if args.gguf else ["--model", args.model]),
               "--out", out, "--layers", "5", "--max-new-tokens", args.max_new_tokens, "--seed", args.sample_seed,
               "--dtype", args.dtype if sampled else "float32", "--device", args.device, "--batch-tokens", args.batch_tokens]
    if sampled and not args.answers:
        command += ["--samples", args.samples, "--temperature", args.temperature]
    if args.name:
        command += ["--name", args.name]
    return [str(word) for word in [*command, lines]]


def save_answers(path, features):
    """Both sides' answers.jsonl as arrays: what the next run takes with --answers."""
    ids, masks, names = [], [], []
    for split in SPLITS:
        final = {}
        for line in open(features / split / "answers.jsonl", encoding="utf-8"):
            entry = json.loads(line)
            final[(entry["key"], entry["occurrence"], entry["sample"])] = entry  # the last turn has all of them
        for (key, _, sample), entry in final.items():
            names.append((split, key, str(sample)))
            ids.append(np.array(entry["ids"], np.int64))
            masks.append(np.array(entry["mask"], np.uint8))
    flat = np.concatenate(ids)
    kind = np.uint16 if flat.max() < 65536 else np.int32
    np.savez_compressed(path, ids=flat.astype(kind), mask=np.packbits(np.concatenate(masks)),
                        lengths=np.array([len(some) for some in ids]), names=np.array(names))


def lines_of_answers(path, folder):
    """Writes train.jsonl and val.jsonl of ready documents from a file of save_answers."""
    with np.load(path) as file:
        lengths, names = file["lengths"], file["names"]
        ids, mask = file["ids"], np.unpackbits(file["mask"])[:int(lengths.sum())]
    ends = np.cumsum(lengths)
    for split in SPLITS:
        with open(folder / f"{split}.jsonl", "w", encoding="utf-8") as file:
            for (side, key, sample), end, length in zip(names.tolist(), ends, lengths):
                if side == split:
                    file.write(json.dumps({"id": f"{key}/{sample}", "input_ids": ids[end - length:end].tolist(),
                                           "loss_mask": mask[end - length:end].tolist()}) + "\n")


class Extractions:
    """Both extractions side by side."""

    def __init__(self, args, work, say):
        self.features, self.say, self.begin = work / "features", say, time.monotonic()
        folder = work / "prompts"
        folder.mkdir(parents=True, exist_ok=True)
        self.facts = {}
        if args.answers:
            lines_of_answers(args.answers, folder)
        else:
            self.facts["prompts"] = split_prompts(args.prompts, args.held_out, args.split_seed, args.limit, folder)
        self.processes = {}
        for split in SPLITS:
            log = open(work / f"extract-{split}.log", "w", encoding="utf-8")
            command = extraction_command(args, split, folder / f"{split}.jsonl", self.features / split)
            self.processes[split] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        self.logs = {split: work / f"extract-{split}.log" for split in SPLITS}

    def target_is_there(self):
        return (self.features / "val" / "target" / "config.json").exists()  # written last

    def failed(self):
        return [split for split, process in self.processes.items() if process.poll()]

    def wait(self, seconds):
        for split, process in self.processes.items():
            try:
                status = process.wait(max(1.0, seconds - (time.monotonic() - self.begin)))
            except subprocess.TimeoutExpired:
                process.kill()
                status = "killed, out of time"
            text = self.logs[split].read_text(errors="replace")
            if status != 0:
                raise RuntimeError(f"extraction of {split}: {status}: {text[-1500:]}")
            self.facts[split] = dict(read_log(text), **shard_facts(self.features / split))
        self.facts["seconds"] = time.monotonic() - self.begin


def clock(text):
    hours, minutes, seconds = (int(part) for part in text.split(":"))
    return 3600 * hours + 60 * minutes + seconds


def read_log(text):
    """Seconds and tokens of answering and of capturing, by the log's own clock."""
    facts, lines = {}, re.findall(r"^(\d\d:\d\d:\d\d) (.*)$", text, re.M)
    times = {name: [clock(at) for at, line in lines if re.search(pattern, line)] for name, pattern in {
        "asked": r"^answering ", "answered": r"^answered ", "captured": r"tokens/s.* padding", "planned": r"bytes needed"}.items()}
    if times["asked"] and times["answered"]:
        facts["answer_seconds"] = (times["answered"][-1] - times["asked"][0]) % 86400
        facts["answer_rates"] = [int(rate) for rate in re.findall(r"answered \d+/\d+, (\d+) tokens/s", text)][-4:]
    if times["captured"] and times["planned"]:
        facts["capture_seconds"] = (times["captured"][-1] - times["planned"][0]) % 86400
    facts["last_lines"] = [line for _, line in lines[-2:]]
    return facts


def shard_facts(folder):
    entries = [json.loads(line) for line in open(folder / "documents.jsonl", encoding="utf-8")]
    lengths = [entry["tokens"] for entry in entries]
    return dict(documents=len(entries), prompts=len({prompt_key(entry) for entry in entries}), tokens=sum(lengths),
                supervised=sum(entry["supervised"] for entry in entries), longest=max(lengths))


def prompt_key(entry):
    return entry["key"].split("/")[0]


def prompt_numbers(folder):
    """doc_id -> number of its prompt, of the held-out documents."""
    entries = [json.loads(line) for line in open(folder / "documents.jsonl", encoding="utf-8")]
    keys = sorted({prompt_key(entry) for entry in entries})
    number = {key: at for at, key in enumerate(keys)}
    return {entry["doc_id"]: number[prompt_key(entry)] for entry in entries}
