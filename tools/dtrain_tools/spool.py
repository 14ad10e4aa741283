"""The extractor's side of a spool: in which order shards are wanted, which one is next, when there is no room.

docs/file-formats.md has the convention. Needs numpy and h5py, not torch: states come from a function that
writes one shard. Features must depend on their shard alone, so shards are cut from the order once and for all, from
each epoch's first document on, whatever was there when the extractor started.
"""

import array
import fcntl
import glob
import json
import os
import socket
import subprocess
import time

import h5py
import numpy as np

from dtrain_tools.documents import Document, InputError
from dtrain_tools.shards import TEMPORARY, DiskFull, shard_bytes

SHARD_SHARE = 8       # a shard takes at most this share of the spool, or one document
LOOK_SECONDS = 0.2    # between looks at the state
LOCK_SECONDS = 0.5    # the run asks for a moment whether an extractor holds the lock, by taking it
SAY_SECONDS = 60      # between lines while waiting


class Stalled(Exception):
    """The run takes nothing any more; the message is fit to print."""


class Order:
    """The output of `dtrain data order`. doc_ids, tokens: arrays by serial number."""

    def __init__(self, lines):
        self.facts, self.doc_ids, self.tokens = {}, array.array("Q"), array.array("i")
        for line in lines:
            if line.startswith("#"):
                name, _, value = line[1:].strip().partition(" ")
                self.facts[name] = value
                continue
            _serial, _epoch, _step, doc_id, tokens = line.split()
            self.doc_ids.append(int(doc_id))
            self.tokens.append(int(tokens))

    def check(self, where):
        if self.facts.get("dtrain-order") != "1" or int(self.facts["end"]) != len(self.doc_ids):
            raise InputError(f"{where}: not a whole order of this version")
        self.identity, self.manifest = self.facts["order"], self.facts["manifest"]
        self.documents, self.end, self.bytes = (int(self.facts[name]) for name in ("documents", "end", "bytes"))


def read_order(dtrain, config, sets):
    """Asks the trainer's own program, so that there is one definition of the order."""
    command = [dtrain, "data", "order", "--config", config]
    for one in sets:
        command += ["--set", one]
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            order = Order(process.stdout)
            words = process.stderr.read()
    except OSError as error:
        raise InputError(f"{dtrain}: {error.strerror}; --dtrain names the program") from error
    if process.returncode != 0:
        raise InputError(f"{' '.join(command)}: {words.strip()}")
    order.check(" ".join(command))
    if order.manifest == "-":
        raise InputError(f"{config}: has no data.manifest; a spool needs one (extract.py --manifest-only writes it)")
    return order


class Manifest:
    """Documents of a manifest by doc_id."""

    def __init__(self, path):
        self.path = path
        try:
            self.file = h5py.File(path, "r")
        except OSError as error:
            raise InputError(f"{path}: {error}") from error
        self.attributes = {name: value for name, value in self.file.attrs.items()
                           if name not in ("format", "format_version", "dtype")}
        if self.file.attrs.get("format") != "dtrain-manifest":
            raise InputError(f"{path}: not a manifest")
        self.float8 = self.file.attrs["dtype"] == "float8_e4m3"
        self.layer_ids = [int(i) for i in self.attributes["target_layer_ids"]]
        self.offsets = self.file["doc_offsets"][:]
        self.index = {int(doc_id): at for at, doc_id in enumerate(self.file["doc_id"][:])}

    def document(self, doc_id, tokens):
        """-> the document's first tokens."""
        at = self.index.get(doc_id)
        if at is None:
            raise InputError(f"{self.path}: has no document {doc_id}, which the order has")
        begin = int(self.offsets[at])
        ids = self.file["input_ids"][begin:begin + tokens].tolist()
        mask = self.file["loss_mask"][begin:begin + tokens].tolist()
        return Document(str(doc_id), 0, at, f"{self.path}: document {at}", ids, mask)


def plan_shards(order, most_bytes, bytes_of_states):
    """-> arrays first, last, bytes of all shards: as many documents of one epoch as most_bytes hold, at least one."""
    starts, sizes = array.array("q"), array.array("q")
    tokens = documents = 0
    for serial, length in enumerate(order.tokens):
        full = shard_bytes(documents + 1, tokens + length, bytes_of_states) > most_bytes
        if serial % order.documents == 0 or full:
            starts.append(serial)
            sizes.append(0)
            tokens = documents = 0
        tokens += length
        documents += 1
        sizes[-1] = shard_bytes(documents, tokens, bytes_of_states)
    first = np.array(starts, dtype=np.int64)
    last = np.append(first[1:], order.end) - 1
    return first, last, np.array(sizes, dtype=np.int64)


def shard_name(first, last):
    return f"features-{first:012d}-{last:012d}.h5"


class Spool:
    """The folder. next_shard() says what to do; the caller writes shards under their names."""

    def __init__(self, folder, order, settings, most_bytes, bytes_of_states):
        self.folder, self.order = folder, order
        self.met_run = False  # one that had not ended
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise InputError(f"{folder}: {error.strerror}") from error
        self.first, self.last, self.bytes = plan_shards(order, most_bytes, bytes_of_states)
        self.tokens_to = np.concatenate([[0], np.cumsum(np.array(order.tokens, dtype=np.int64))])
        self.lock = self._take_lock()
        try:
            self._settle({**settings, "order": order.identity, "shard_bytes": int(most_bytes)})
        except InputError:
            self.close()
            raise
        for path in glob.glob(os.path.join(glob.escape(folder), "features-*.h5" + TEMPORARY)):
            os.remove(path)  # of an extractor that was killed: the lock says that none is at work

    def _take_lock(self):
        """Dropped by the kernel with this process, so a killed extractor leaves none behind."""
        path = os.path.join(self.folder, "extractor.lock")
        file = open(path, "a+", encoding="utf-8")
        end = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if time.monotonic() < end:
                    time.sleep(0.05)
                    continue
                file.seek(0)
                holder = file.read().strip()
                file.close()
                raise InputError(f"{self.folder}: another extractor feeds this spool "
                                 f"({holder or 'it has not said which'})") from error
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        return file

    def close(self):
        self.lock.close()

    def _settle(self, settings):
        """Shards of another cut, model or batch must not mix with this extractor's."""
        path = os.path.join(self.folder, "extractor.json")
        before = _read_json(path)
        if before is not None and before != settings and self.present():
            differ = [name for name in sorted({*before, *settings}) if before.get(name) != settings.get(name)]
            raise InputError(f"{self.folder}: its shards were written with other settings ({', '.join(differ)}); use the "
                             "same ones, or remove the shards")
        with open(path + TEMPORARY, "w", encoding="utf-8") as file:
            json.dump(settings, file, indent=2)
        os.replace(path + TEMPORARY, path)

    def present(self):
        """-> {first: (last, bytes)} of the shards that are there."""
        found = {}
        for name in os.listdir(self.folder):
            parts = name.removesuffix(".h5").split("-")
            if not name.endswith(".h5") or len(parts) != 3 or parts[0] != "features":
                continue
            try:
                first, last = int(parts[1]), int(parts[2])
                found[first] = (last, os.path.getsize(os.path.join(self.folder, name)))
            except (ValueError, FileNotFoundError):  # another file, or removed meanwhile
                continue
        return found

    def state(self):
        """-> serial, needed, bytes, finished: what the run says, or what it will begin with."""
        state = _read_json(os.path.join(self.folder, "spool.json"))
        if state is None:
            return 0, 0, self.order.bytes, False
        if state.get("format") != "dtrain-spool" or state.get("format_version") != 1:
            raise InputError(f"{self.folder}/spool.json: not the state of a spool of this version")
        if state["order"] != self.order.identity:
            return self._other_order()
        if state["end"] > self.order.end:
            raise InputError(f"{self.folder}: the run reads {state['end']} documents, this extractor's config "
                             f"{self.order.end}; start it with the run's config")
        # One that was to read less and ended before this extractor began: another goes on from there.
        finished = state["finished"] and (self.met_run or state["end"] == self.order.end)
        self.met_run = self.met_run or not state["finished"]
        return state["serial"], state["needed"], state["bytes"], finished

    def _other_order(self):
        raise InputError(f"{self.folder}/spool.json: a run with another order of documents uses this spool "
                         f"(run.seed, data.seq_len or data.manifest differ from --config); give it the run's config, or "
                         "remove the file if that run is over")

    def next_shard(self):
        """-> (place of a shard in the plan, or None: nothing to do now; finished)."""
        serial, needed, most, finished = self.state()
        if finished:
            return None, True
        there = self.present()
        at = int(np.searchsorted(self.last, serial))
        while at < len(self.first) and int(self.first[at]) in there:
            at += 1
        if at == len(self.first):
            return None, False
        first, last = int(self.first[at]), int(self.last[at])
        taken = sum(size for _, size in there.values())
        for ahead in sorted((f for f in there if f > last), reverse=True):
            if taken + self.bytes[at] <= most:
                break
            self._remove(ahead, there[ahead][0])  # left from before the run went back
            taken -= there[ahead][1]
        if taken + self.bytes[at] > most and first >= needed:
            return None, False
        return at, False

    def _remove(self, first, last):
        try:
            os.remove(os.path.join(self.folder, shard_name(first, last)))
        except FileNotFoundError:
            pass

    def documents(self, at, manifest):
        """-> documents and ids of a shard."""
        serials = range(int(self.first[at]), int(self.last[at]) + 1)
        ids = [self.order.doc_ids[serial] for serial in serials]
        return [manifest.document(doc_id, self.order.tokens[serial]) for doc_id, serial in zip(ids, serials)], ids

    def tokens_after(self, at):
        """Behind this shard, to the run's end."""
        return int(self.tokens_to[-1] - self.tokens_to[int(self.last[at]) + 1])


def _read_json(path):
    """None when there is no such file. It is replaced by rename, so a file that is there is whole."""
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:
        return None
    except json.JSONDecodeError as error:
        raise InputError(f"{path}: not JSON: {error.msg}; remove it") from error


class Waiting:
    """Words and limit of a wait."""

    def __init__(self, say, limit):
        self.say, self.limit = say, limit
        self.since = self.told = None

    def done(self):
        self.since = None

    def pause(self, why, serial):
        """Sleeps shortly. serial: how far the run is; as long as it moves, there is no limit."""
        now = time.monotonic()
        if self.since is None or serial != self.serial:
            self.since, self.serial = now, serial
            self.told = now if self.told is None or now - self.told > SAY_SECONDS else self.told
        if now - self.told >= SAY_SECONDS:
            self.told = now
            self.say(f"{why}, for {now - self.since:.0f} s")
        if self.limit and now - self.since > self.limit:
            raise Stalled(f"{why}, and the run took nothing for {self.limit:.0f} s (--spool-wait); the same command goes "
                          "on from here")
        time.sleep(LOOK_SECONDS)


def feed(spool, manifest, write, say, limit=0):
    """Writes shards until the run has ended. write(name, documents, ids): one shard of the folder."""
    waiting, started, tokens = Waiting(say, limit), time.monotonic(), 0
    while True:
        at, finished = spool.next_shard()
        if finished and tokens == 0:
            say(f"{spool.folder}/spool.json: the run has ended, nothing is written; to feed another run, start that first, "
                "or remove the file")
        if finished:
            return
        if at is None:
            waiting.pause("waiting for the run: the spool is full, or everything is written", spool.state()[0])
            continue
        documents, ids = spool.documents(at, manifest)
        name = shard_name(int(spool.first[at]), int(spool.last[at]))
        try:
            write(name, documents, ids)
        except DiskFull as error:
            waiting.pause(f"waiting for room: {error}", spool.state()[0])
            continue
        waiting.done()
        tokens += sum(len(document.ids) for document in documents)
        rate = tokens / max(time.monotonic() - started, 1e-9)
        left = spool.tokens_after(at) / max(rate, 1e-9)
        say(f"{name}: {len(ids)} documents, {rate:.0f} tokens/s with waits, ETA {_duration(left)}")


def _duration(seconds):
    seconds = int(seconds)
    return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
