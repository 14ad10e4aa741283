"""The run of an import: plan of shards, conversion, final check, and only then the names that training finds.

    OUT/extraction.json          what is imported (a resumed run must match it)
    OUT/unchecked/train-*.h5     converted, not yet checked
    OUT/train-*.h5, val-*.h5     after `dtrain data check` found no fault
    OUT/documents.jsonl          a line a document

Shards are planned from the documents alone, so a resumed run plans the same ones and skips those that
exist. One document is held in memory. Does not read foreign formats.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import subprocess
import time

from dtrain_tools.documents import InputError, validation_keys
from dtrain_tools.shards import (TEMPORARY, DiskFull, ShardWriter, free_bytes, fsync_folder, holds_documents,
                                 shard_bytes, token_bytes)

SAY_SECONDS = 10


@dataclasses.dataclass
class Shard:
    name: str
    documents: list
    tokens: int = 0

    @property
    def ids(self):
        return [document.identity for document in self.documents]


def plan_shards(documents, split_val, seed, shard_tokens):
    """Documents in order, cut into shards of at most shard_tokens (a longer document has its own)."""
    held_out = validation_keys([document.key for document in documents], split_val, seed)
    shards = []
    for split in ("train", "val"):
        own = []
        for document in documents:
            if (document.key in held_out) != (split == "val"):
                continue
            if not own or own[-1].tokens + document.tokens > shard_tokens:
                own.append(Shard(f"{split}-{len(own):05d}.h5", []))
            own[-1].documents.append(document)
            own[-1].tokens += document.tokens
        shards += own
    return shards


def lock_folder(folder):
    """Keeps a second import out of a folder that is settled. -> what holds the lock, dropped with this process."""
    file = open(os.path.join(folder, "extraction.json"), "r+", encoding="utf-8")
    with contextlib.suppress(OSError):  # of a file system without locks
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise InputError(f"{folder}: another import is at work there; let it end, or use another --out") from error
    return file


class Import:
    """read(document) -> ids, states as ShardWriter takes them; attributes: those of ShardWriter."""

    def __init__(self, folder, attributes, read, say, float8=False):
        self.folder, self.attributes, self.read, self.say = folder, attributes, read, say
        self.unchecked, self.float8 = os.path.join(folder, "unchecked"), float8
        self.token_bytes = token_bytes(len(attributes["target_layer_ids"]), attributes["last_hidden"] != "absent",
                                       attributes["hidden_size"], float8)
        self.started = self.said = time.time()
        self.tokens = 0

    def _path(self, shard):
        """Where a finished shard is, or None."""
        for folder in (self.folder, self.unchecked):
            path = os.path.join(folder, shard.name)
            if os.path.exists(path):
                if not holds_documents(path, shard.ids):
                    raise InputError(f"{path}: is damaged, or holds other documents than this run plans for it (were "
                                     "states added to the dump?); use another --out")
                return path
        return None

    def run(self, shards):
        os.makedirs(self.unchecked, exist_ok=True)
        missing = [shard for shard in shards if self._path(shard) is None]
        if len(missing) < len(shards):
            self.say(f"{len(shards) - len(missing)} of {len(shards)} shards are converted and kept")
        need = sum(shard_bytes(len(s.documents), s.tokens, self.token_bytes) for s in missing)
        free, total = free_bytes(self.folder), sum(shard.tokens for shard in missing)
        self.say(f"{total:,} tokens in {len(missing)} shards: {need:,} bytes needed, {free:,} free in {self.folder}")
        if need > free:
            raise DiskFull(f"{self.folder}: {need:,} bytes needed, {free:,} free; nothing was converted: make room, or "
                           "write to another disk")
        for shard in missing:
            self._write(shard, total)

    def _write(self, shard, total):
        lengths = [document.tokens for document in shard.documents]
        writer = ShardWriter(os.path.join(self.unchecked, shard.name), self.attributes, lengths, shard.ids,
                             has_teacher=False, float8=self.float8)
        try:
            for index, document in enumerate(shard.documents):
                ids, states = self.read(document)
                writer.write(index, ids, document.mask, states)
                self.tokens += document.tokens
                self._report(shard, index + 1, total)
        except BaseException:
            writer.abort()
            raise
        writer.finish()

    def _report(self, shard, done, total):
        now = time.time()
        if done < len(shard.documents) and now - self.said < SAY_SECONDS:
            return
        self.said, rate = now, self.tokens / max(now - self.started, 1e-9)
        self.say(f"{shard.name} {done}/{len(shard.documents)}, {rate:.0f} tokens/s, "
                 f"{(total - self.tokens) / rate / 60:.1f} minutes left")

    def bless(self, shards, dtrain, target):
        """The final check of all shards; they get their names when it finds nothing."""
        paths = [self._path(shard) for shard in shards]
        command = [dtrain, "data", "check", "--no-verdicts", "--target", target, *paths]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        for line in done.stdout.splitlines():
            self.say(f"  {line}")
        if done.returncode != 0:
            raise InputError(f"{self.unchecked}: `dtrain data check --target {target}` found faults (above); these "
                             "shards are not released for training")
        self._write_manifest(shards)
        for path, shard in zip(paths, shards):
            os.replace(path, os.path.join(self.folder, shard.name))
        fsync_folder(self.folder)
        os.rmdir(self.unchecked)

    def _write_manifest(self, shards):
        path = os.path.join(self.folder, "documents.jsonl")
        with open(path + TEMPORARY, "w", encoding="utf-8") as file:
            for shard in shards:
                for document in shard.documents:
                    file.write(json.dumps({"doc_id": document.identity, "source": document.where, "key": document.key,
                                           "tokens": document.tokens, "supervised": int(document.mask.sum()),
                                           "shard": shard.name}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(path + TEMPORARY, path)
