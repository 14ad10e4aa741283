"""The extractor's side of a spool: plan, room, going back; and tools/extract.py feeding dtrain while it trains.

    DTRAIN=build/dtrain python -m unittest discover -s tools/tests        (the second part needs torch and DTRAIN)
"""

import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest

import h5py
import numpy as np

TOOLS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
sys.path[:0] = [TOOLS, os.path.dirname(os.path.abspath(__file__))]

from dtrain_tools import spool  # noqa: E402
from dtrain_tools.documents import InputError  # noqa: E402
from dtrain_tools.shards import DiskFull, shard_bytes, write_manifest  # noqa: E402

try:
    import torch

    import tiny_llama
except ImportError:
    torch = None

DTRAIN = os.environ.get("DTRAIN")
LENGTHS = [30, 50, 20, 70, 40]
STATES = 1000  # bytes of a token


def made_order(epochs=2, identity="00000000000000aa", most=10 ** 6):
    lines = ["# dtrain-order 1", f"# order {identity}", f"# documents {len(LENGTHS)}",
             f"# end {epochs * len(LENGTHS)}", f"# bytes {most}", "# manifest m.h5", "# spool -"]
    for serial in range(epochs * len(LENGTHS)):
        document = (serial * 3) % len(LENGTHS)
        lines.append(f"{serial} {serial // len(LENGTHS)} 1 {100 + document} {LENGTHS[document]}")
    order = spool.Order(lines)
    order.check("test")
    return order


class Plan(unittest.TestCase):
    def test_shards_cover_the_order_and_end_with_epochs(self):
        order = made_order(epochs=3)
        for most in (1, shard_bytes(2, 100, STATES), 10 ** 9):
            first, last, sizes = spool.plan_shards(order, most, STATES)
            self.assertEqual([*first[1:], order.end], [at + 1 for at in last])
            for a, b, size in zip(first, last, sizes):
                self.assertEqual(a // len(LENGTHS), b // len(LENGTHS))
                tokens = sum(order.tokens[a:b + 1])
                self.assertEqual(size, shard_bytes(b - a + 1, tokens, STATES))
                self.assertTrue(size <= most or a == b)
        self.assertEqual(len(first), 3)

    def test_orders_that_are_not_whole(self):
        with self.assertRaisesRegex(InputError, "not a whole order"):
            order = spool.Order(["# dtrain-order 1", "# order a", "# documents 1", "# end 2", "# bytes 1",
                                 "# manifest m", "0 0 1 5 6"])
            order.check("test")


class Folder(unittest.TestCase):
    """What is written when, without a model: a shard is a file of its planned size."""

    def setUp(self):
        self.temporary = tempfile.TemporaryDirectory()
        self.folder = os.path.join(self.temporary.name, "spool")
        self.order = made_order()
        self.spool = self.open()

    def tearDown(self):
        self.spool.close()
        self.temporary.cleanup()

    def open(self, order=None, settings=None):
        return spool.Spool(self.folder, order or self.order, settings or {"model": "m"}, 1, STATES)

    def say_state(self, **fields):
        state = {"format": "dtrain-spool", "format_version": 1, "order": self.order.identity,
                 "documents": len(LENGTHS), "serial": 0, "needed": 0, "end": self.order.end,
                 "bytes": self.order.bytes, "finished": False, **fields}
        with open(os.path.join(self.folder, "spool.json"), "w", encoding="utf-8") as file:
            json.dump(state, file)

    def write(self, at):
        name = spool.shard_name(int(self.spool.first[at]), int(self.spool.last[at]))
        with open(os.path.join(self.folder, name), "wb") as file:
            file.truncate(int(self.spool.bytes[at]))

    def next(self):
        return self.spool.next_shard()

    def test_in_order_until_the_spool_is_full(self):
        most = int(self.spool.bytes[:3].sum())
        self.say_state(bytes=most)
        for at in range(3):
            self.assertEqual(self.next(), (at, False))
            self.write(at)
        self.assertEqual(self.next(), (None, False))
        os.remove(os.path.join(self.folder, spool.shard_name(0, 0)))
        self.say_state(bytes=most + 10 ** 5, serial=1)
        self.assertEqual(self.next(), (3, False))

    def test_what_is_needed_is_written_without_room(self):
        self.say_state(bytes=1, needed=2)
        for at in range(2):
            self.assertEqual(self.next(), (at, False))
            self.write(at)
        self.assertEqual(self.next(), (None, False))

    def test_a_run_that_goes_back(self):
        most = int(self.spool.bytes[:3].sum())
        self.say_state(bytes=most, serial=4)
        for at in range(4, 7):
            self.write(at)
        self.say_state(bytes=most, serial=2)
        self.assertEqual(self.next(), (2, False))
        self.assertLess(len(self.spool.present()), 3)  # the furthest made room
        self.assertIn(4, self.spool.present())

    def test_the_end(self):
        for at in range(len(self.spool.first)):
            self.write(at)
        self.say_state(bytes=1)
        self.assertEqual(self.next(), (None, False))  # the run may yet go back
        self.say_state(finished=True)
        self.assertEqual(self.next(), (None, True))

    def test_a_run_that_ended_before(self):
        self.say_state(finished=True, serial=self.order.end, needed=self.order.end)
        said = self.feed(None, 60)
        self.assertEqual(len(said), 1)
        self.assertIn("nothing is written; to feed another run, start that first, or remove the file", said[0])
        half = len(LENGTHS)  # it had one epoch, and is to go on with another
        self.say_state(finished=True, serial=half, needed=half, end=half)
        self.assertEqual(self.next(), (half, False))
        self.say_state(serial=half, needed=half, end=half)
        self.next()
        self.say_state(finished=True, serial=half, needed=half, end=half)
        self.assertEqual(self.next(), (None, True))  # it was met alive, and has ended

    def test_before_the_run_has_begun(self):
        self.assertEqual(self.next(), (0, False))

    def test_other_runs_and_extractors(self):
        with self.assertRaisesRegex(InputError, "another extractor feeds this spool .process"):
            self.open()
        self.say_state(order="00000000000000bb")
        with self.assertRaisesRegex(InputError, "another order of documents"):
            self.next()
        self.say_state(end=self.order.end + 1)
        with self.assertRaisesRegex(InputError, "the run reads 11 documents, this extractor's config 10"):
            self.next()
        self.write(0)
        self.spool.close()
        with self.assertRaisesRegex(InputError, r"other settings \(model\)"):
            self.open(settings={"model": "other"})
        self.spool = self.open()

    def test_a_run_that_looks_at_the_lock(self):
        """It holds the lock for a moment, which is no other extractor."""
        self.spool.close()
        with open(os.path.join(self.folder, "extractor.lock"), encoding="utf-8") as run:
            fcntl.flock(run, fcntl.LOCK_SH)
            looking = threading.Timer(0.1, fcntl.flock, (run, fcntl.LOCK_UN))
            looking.start()
            self.spool = self.open()
            looking.join()

    def test_leftovers_are_removed(self):
        name = os.path.join(self.folder, spool.shard_name(0, 0))
        self.spool.close()
        for path in (name + ".tmp", os.path.join(self.folder, "notes.tmp")):
            with open(path, "w", encoding="utf-8"):
                pass
        self.spool = self.open()
        self.assertFalse(os.path.exists(name + ".tmp"))
        self.assertTrue(os.path.exists(os.path.join(self.folder, "notes.tmp")))

    def feed(self, write, limit):
        class NoManifest:
            def document(self, _doc_id, tokens):
                return spool.Document("k", 0, 0, "w", [0] * tokens, [1] * tokens)
        said = []
        spool.feed(self.spool, NoManifest(), write, said.append, limit)
        return said

    def test_a_full_disk_is_waited_for(self):
        names = []

        def write(name, documents, ids):
            self.assertEqual([len(d.ids) for d in documents], [LENGTHS[i - 100] for i in ids])
            names.append(name)
            if len(names) == 1:
                raise DiskFull("no room")
            self.say_state(finished=len(names) == 3)
            self.write(len(names) - 2)
        said = self.feed(write, 60)
        self.assertEqual(names, [spool.shard_name(0, 0)] * 2 + [spool.shard_name(1, 1)])
        self.assertIn("ETA 0:00:", said[0])

    def test_a_run_that_stands_still(self):
        self.say_state(bytes=1)
        with self.assertRaisesRegex(spool.Stalled, "the run took nothing for 0 s"):
            self.feed(None, 0.01)


class Manifest(unittest.TestCase):
    def test_documents_come_back(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "m.h5")
            documents = [spool.Document("k", 0, 0, "w", list(range(5)), [0, 0, 1, 1, 1]),
                         spool.Document("l", 0, 1, "w", [7, 8, 9], [1, 0, 1])]
            attributes = {"target_model": "t", "target_layer_ids": [1, 3], "hidden_size": 8, "vocab_size": 16,
                          "last_hidden": "pre_norm"}
            write_manifest(path, attributes, documents, [2 ** 63 + 1, 5])
            manifest = spool.Manifest(path)
            self.assertEqual(manifest.layer_ids, [1, 3])
            self.assertEqual(manifest.document(2 ** 63 + 1, 4).ids, [0, 1, 2, 3])
            self.assertEqual(manifest.document(5, 3).mask, [1, 0, 1])
            with self.assertRaisesRegex(InputError, "has no document 6"):
                manifest.document(6, 1)
            manifest.file.close()
            with h5py.File(path, "r+") as file:
                file.attrs["format"] = "dtrain-features"
            with self.assertRaisesRegex(InputError, "not a manifest"):
                spool.Manifest(path)


CONFIG = """
run: {dir: unset, seed: 3, epochs: 10, max_steps: 24, device: cpu, compute: fp32}
target: {path: plain/target}
data: {seq_len: 160, rows_per_step: 2, spool_bytes: 1MiB, spool_wait: 120}
drafter: {layers: 1, block_size: 4, mask_token_id: 259}
anchors: {max_anchors: 32}
loss: {kl: 1.0}
checkpoint: {every: 3, background: true}
parallel: {threads: 1}
log: {every: 1, tensorboard: false}
"""


@unittest.skipIf(torch is None or not DTRAIN, "needs torch, transformers and DTRAIN")
class Live(unittest.TestCase):
    """The real program and the real extractor side by side, killed at random moments."""

    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory()
        cls.folder = cls.temporary.name
        tiny_llama.save(os.path.join(cls.folder, "model"))
        cls.write_inputs(cls())

    @classmethod
    def tearDownClass(cls):
        cls.temporary.cleanup()

    def write_inputs(self):
        pick = random.Random(4)
        with open(self.path("documents.jsonl"), "w", encoding="utf-8") as file:
            for _ in range(30):
                ids = [pick.randrange(256) for _ in range(pick.randrange(20, 150))]
                mask = [0] * 8 + [1] * (len(ids) - 8)
                file.write(json.dumps({"input_ids": ids, "loss_mask": mask}) + "\n")
        with open(self.path("run.yaml"), "w", encoding="utf-8") as file:
            file.write(CONFIG)
        self.must(self.extractor("--out", self.path("plain"), self.path("documents.jsonl")), "extract")
        self.must(self.extractor("--out", self.path("data"), "--manifest-only", self.path("documents.jsonl")),
                  "manifest")

    def path(self, name):
        return os.path.join(self.folder, name)

    def extractor(self, *options):
        # One document at a time, so that its states do not depend on which others share its batch.
        return [sys.executable, os.path.join(TOOLS, "extract.py"), "--model", self.path("model"), "--device", "cpu",
                "--threads", "1", "--batch-tokens", "1", "--layers", "3", *options]

    def feeder(self, *options):
        return self.extractor("--spool", self.path("spool"), "--config", self.path("run.yaml"), "--set",
                              f"data.manifest={self.path('data/manifest.h5')}", "--dtrain", DTRAIN, *options)

    def trainer(self, name, *sets):
        sets = [word for one in (f"run.dir={self.path(name)}", *sets) for word in ("--set", one)]
        return [DTRAIN, "--config", self.path("run.yaml"), *sets]

    def spooled(self):
        return self.trainer("spooled", f"data.manifest={self.path('data/manifest.h5')}",
                            f"data.spool={self.path('spool')}")

    def start(self, command, name):
        with open(self.path(name + ".out"), "a", encoding="utf-8") as out:
            return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)

    def said(self, name):
        with open(self.path(name + ".out"), encoding="utf-8") as file:
            return file.read()

    def must(self, command, name, status=0):
        process = self.start(command, name)
        self.assertEqual(process.wait(timeout=200), status, self.said(name))

    def wait_for(self, name, words, seconds=120):
        end = time.monotonic() + seconds
        while words not in self.said(name):
            self.assertLess(time.monotonic(), end, f"{name} never said: {words}\n{self.said(name)}")
            time.sleep(0.02)

    def weights(self, run):
        found = {}
        for name in ("master", "adam_m", "adam_v"):
            with open(self.path(f"{run}/checkpoints/step-00000024/{name}.safetensors"), "rb") as file:
                found[name] = file.read()
        return found

    def test_killed_on_both_sides(self):
        self.assertEqual([name for name in os.listdir(self.path("data")) if name.endswith(".h5")], ["manifest.h5"])
        self.must(self.trainer("plain-run", f"data.train=[{self.path('plain')}/train-*.h5]"), "plain-run")

        extractor = self.start(self.feeder(), "feeder")
        trainer = self.start(self.spooled(), "spooled-run")
        self.wait_for("spooled-run", "checkpoint of step 3 written")  # while features are extracted
        self.assertIsNone(extractor.poll(), self.said("feeder"))
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
        trainer = self.start(self.spooled(), "spooled-run")
        self.wait_for("spooled-run", "resuming from")
        self.wait_for("spooled-run", "step 12/24")
        for process in (extractor, trainer):
            process.send_signal(signal.SIGKILL)
            process.wait()
        extractor = self.start(self.feeder(), "feeder")
        self.must(self.spooled(), "spooled-run")
        self.assertEqual(extractor.wait(timeout=200), 0, self.said("feeder"))
        self.assertEqual(self.weights("spooled"), self.weights("plain-run"))
        self.assertEqual([n for n in os.listdir(self.path("spool")) if n.startswith("features")], [])
        self.assertIn("tokens/s with waits, ETA ", self.said("feeder"))
        with open(self.path("spooled/metrics.jsonl"), encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
        self.assertEqual([line["step"] for line in lines], list(range(1, 25)))
        self.assertLessEqual(max(line["spool_bytes"] for line in lines), 2 ** 20)

    def test_refusals(self):
        shutil.copy(self.path("data/manifest.h5"), self.path("other.h5"))
        with h5py.File(self.path("other.h5"), "r+") as file:
            file.attrs["hidden_size"] = np.int64(16)
        self.must(self.feeder("--set", f"data.manifest={self.path('other.h5')}"), "width", 2)
        self.assertIn("hidden_size is 16, but 32 with", self.said("width"))
        self.must(self.feeder("documents.jsonl"), "input", 2)
        self.assertIn("--spool needs --config, and takes neither input files nor --out", self.said("input"))
        self.must(self.feeder("--set", "data.manifest=none.h5"), "missing", 2)
        self.assertIn("none.h5", self.said("missing"))


if __name__ == "__main__":
    unittest.main()
