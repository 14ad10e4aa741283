"""The run of an extraction: folder, plan of shards, capture, progress.

    OUT/extraction.json     what is extracted (a resumed run must match it)
    OUT/answers/, answers.jsonl   what the target answered: so far, and all of it
    OUT/target/             target directory
    OUT/train-00000.h5 ...  finished shards (and val-*.h5)
    OUT/documents.jsonl     manifest: a line a document, written when all shards are there
    OUT/claims/             which of several workers has which piece of work

Shards are planned from the documents alone, so a resumed run plans the same ones and skips those that
exist. Nothing but the states of one batch is held in memory.
"""

import dataclasses
import hashlib
import json
import os
import time

import numpy as np

from dtrain_tools.documents import InputError, load_json
from dtrain_tools.shards import (TEMPORARY, DiskFull, ShardWriter, document_id, free_bytes, holds_documents,
                                 shard_bytes, token_bytes)
from dtrain_tools.tensor_file import bf16_to_float


@dataclasses.dataclass
class Shard:
    name: str
    documents: list
    ids: list
    tokens: int = 0


def plan_shards(documents, val_keys, base_key, shard_tokens):
    """Documents in order, cut into shards of at most shard_tokens (a longer document has its own)."""
    shards, seen = [], {}
    for split in ("train", "val"):
        open_shard = None
        for document in documents:
            if (base_key(document) in val_keys) != (split == "val"):
                continue
            identity = document_id(document.key, document.sample, document.ids, document.mask)
            if seen.setdefault(identity, document) is not document:
                raise InputError(f"{document.where}: same document id as {seen[identity].where}; give `id` fields")
            if open_shard is None or open_shard.tokens + len(document.ids) > shard_tokens:
                number = sum(shard.name.startswith(split) for shard in shards)
                open_shard = Shard(f"{split}-{number:05d}.h5", [], [])
                shards.append(open_shard)
            open_shard.documents.append(document)
            open_shard.ids.append(identity)
            open_shard.tokens += len(document.ids)
    return shards


def state_attributes(target, layer_ids):
    """What the states of a target are, for shards and manifests."""
    return {"target_layer_ids": layer_ids, "hidden_size": target.hidden_size, "vocab_size": target.vocab_size,
            "last_hidden": "pre_norm"}


class Extraction:
    def __init__(self, target, folder, layer_ids, attributes, say, float8=False):
        self.target, self.folder, self.layer_ids, self.say = target, folder, layer_ids, say
        self.attributes = {**attributes, **state_attributes(target, layer_ids)}
        self.float8 = float8
        self.token_bytes = token_bytes(len(layer_ids), True, target.hidden_size, float8)
        self.seconds = 0.0
        self.tokens = self.padded = self.greedy_same = self.supervised = 0
        self.shards, self.done = {}, set()  # by name; names of finished ones

    def bytes_needed(self, shards):
        return sum(shard_bytes(len(s.documents), s.tokens, self.token_bytes) for s in shards)

    def run(self, shards, budget, capture, teacher_rows, claims):
        self.shards = {shard.name: shard for shard in shards}
        missing = [shard for shard in shards if not self._finished(shard)]
        if len(missing) < len(shards):
            self.say(f"{len(shards) - len(missing)} of {len(shards)} shards are finished and kept")
        need, free = self.bytes_needed(missing), free_bytes(self.folder)
        self.say(f"{sum(s.tokens for s in missing):,} tokens in {sum(len(s.documents) for s in missing)} documents, "
                 f"{len(missing)} shards: {need:,} bytes needed, {free:,} free in {self.folder}")
        if need > free:
            raise DiskFull(f"{self.folder}: {need:,} bytes needed, {free:,} free; nothing was captured: make room, "
                           "choose fewer layers or documents (--limit), or write to another disk")
        claims.share(self.shards, lambda name: self._finished(self.shards[name]),
                     lambda name, dead: self._write(self.shards[name], budget, capture, teacher_rows, claims, dead))
        self._write_manifest(shards, claims.token)

    def _finished(self, shard):
        """A shard of that name exists and holds exactly these documents."""
        path = os.path.join(self.folder, shard.name)
        if shard.name in self.done or not os.path.exists(path):
            return shard.name in self.done
        if not holds_documents(path, shard.ids):
            raise InputError(f"{path}: is damaged, or holds other documents than this run plans for it; use another "
                             "--out")
        self.done.add(shard.name)
        return True

    def _write(self, shard, budget, capture, teacher_rows, claims, dead):
        """dead: the token of a worker that died over this shard, or None."""
        path = os.path.join(self.folder, shard.name)
        if dead and os.path.exists(f"{path}.{dead}{TEMPORARY}"):
            os.remove(f"{path}.{dead}{TEMPORARY}")
        left = sum(other.tokens for other in self.shards.values() if not self._finished(other))
        workers = claims.workers()
        writer = ShardWriter(path, self.attributes, [len(d.ids) for d in shard.documents], shard.ids,
                             float8=self.float8, suffix=f".{claims.token}{TEMPORARY}")
        self._fill(writer, shard, budget, capture, teacher_rows, lambda done, tokens: self._report(
            f"{shard.name} {done}/{len(shard.documents)}", (left - tokens) / workers))
        if not claims.still_mine(shard.name):  # this process was taken for dead
            writer.abort()
            return
        writer.finish()

    def write(self, shard, budget, capture, teacher_rows):
        """A shard that nobody else writes."""
        writer = ShardWriter(os.path.join(self.folder, shard.name), self.attributes,
                             [len(d.ids) for d in shard.documents], shard.ids, float8=self.float8)
        self._fill(writer, shard, budget, capture, teacher_rows, lambda done, tokens: None)
        writer.finish()

    def _fill(self, writer, shard, budget, capture, teacher_rows, report):
        """Captures all documents. report(documents, tokens that are done)."""
        done = tokens = 0
        try:
            groups = budget.run(list(enumerate(shard.documents)), lambda pair: len(pair[1].ids),
                                lambda group: self._capture(group, capture, teacher_rows))
            for group, results in groups:
                for (index, document), (states, teacher) in zip(group, results):
                    writer.write(index, document.ids, document.mask, states, teacher)
                done += len(group)
                tokens += sum(len(document.ids) for _, document in group)
                report(done, tokens)
        except BaseException:
            writer.abort()
            raise

    def _capture(self, group, capture, teacher_rows):
        started = time.time()
        results = capture.run([document.ids for _, document in group], teacher_rows)
        self.seconds += time.time() - started
        lengths = [len(document.ids) for _, document in group]
        self.tokens += sum(lengths)
        self.padded += max(lengths) * len(lengths)
        for (_, document), (_, teacher) in zip(group, results):
            ids, mask = np.array(document.ids), np.array(document.mask, dtype=bool)
            self.supervised += int(mask[1:].sum())
            self.greedy_same += int((ids[1:] == teacher[0][:-1])[mask[1:]].sum())
        return results

    def _report(self, what, left):
        """left: tokens to come, of this worker's share."""
        rate = self.tokens / max(self.seconds, 1e-9)
        self.say(f"{what}, {rate:.0f} tokens/s, {100 * (1 - self.tokens / self.padded):.1f} % padding, "
                 f"{left / rate / 60:.1f} minutes left")

    def _write_manifest(self, shards, token):
        path = os.path.join(self.folder, "documents.jsonl")
        temporary = f"{path}.{token}{TEMPORARY}"
        with open(temporary, "w", encoding="utf-8") as file:
            for shard in shards:
                for document, identity in zip(shard.documents, shard.ids):
                    file.write(json.dumps({"doc_id": identity, "source": document.source, "key": document.key,
                                           "sample": document.sample, "tokens": len(document.ids),
                                           "supervised": document.supervised, "shard": shard.name}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)


def settle_folder(folder, settings):
    """Creates the folder, or refuses one that holds an extraction with other settings."""
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, "extraction.json")
    if os.path.exists(path):
        before = load_json(path)
        differ = [name for name in sorted({*before, *settings}) if before.get(name) != settings.get(name)]
        if differ:
            raise InputError(f"{folder}: holds an extraction with other settings ({', '.join(differ)}); "
                             "use another --out, or the same settings to go on with it")
        return
    temporary = f"{path}.{os.getpid()}{TEMPORARY}"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(settings, file, indent=2)
    try:
        os.link(temporary, path)
    except FileExistsError:  # another worker was faster
        settle_folder(folder, settings)
    finally:
        os.remove(temporary)


def padding_tolerance(target):
    return 2e-2 if "float32" in str(target.dtype) else 0.5  # states are rounded to bf16: 2^-7 is one unit


def check_padding(capture, documents, teacher_rows, tolerance):
    """Refuses a model whose states depend on the padding of a batch. -> the largest relative difference."""
    shortest = min(documents, key=lambda d: len(d.ids)).ids
    longest = max(documents, key=lambda d: len(d.ids)).ids[:2 * len(shortest) + 16]
    alone = bf16_to_float(capture.run([shortest], teacher_rows)[0][0])
    padded = bf16_to_float(capture.run([longest, shortest], teacher_rows)[1][0])
    size = np.maximum(np.abs(alone), np.sqrt((alone ** 2).mean(axis=(0, 2), keepdims=True)))
    error = float((np.abs(alone - padded) / size).max())
    if not error <= tolerance:
        raise InputError(f"states of a padded document differ from those of the same document alone by {error:.1e} "
                         "of their size: this model cannot be run on padded batches")
    return error


def content_sha256(paths):
    digest = hashlib.sha256()
    for path in paths:
        try:
            with open(path, "rb") as file:
                for block in iter(lambda: file.read(1 << 20), b""):
                    digest.update(block)
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}") from error
    return digest.hexdigest()
