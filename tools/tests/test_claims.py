"""Several workers on one extraction: claims, dead workers, and that nothing is done twice or left out.

    python -m unittest discover -s tools/tests        (the runs of extract.py are skipped without torch)
"""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from unittest import mock

TOOLS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
sys.path[:0] = [TOOLS, os.path.dirname(os.path.abspath(__file__))]

from dtrain_tools import claims  # noqa: E402
from dtrain_tools.claims import Claims  # noqa: E402
from test_extract import PROMPTS, Case, needs_torch  # noqa: E402


def silent(_text):
    pass


class Folder(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = temporary.name

    def claims(self, **me):
        made = Claims(self.folder, silent)
        made.me.update(me)
        self.addCleanup(made.close)
        return made


class One(Folder):
    def test_one_has_it_until_it_is_given_back(self):
        a, b = self.claims(), self.claims()
        self.assertEqual(a.claim("x"), (True, None))
        self.assertEqual(b.claim("x"), (False, None))
        self.assertEqual(b.claim("y"), (True, None))
        a.release("x")
        self.assertEqual(b.claim("x"), (True, None))

    def test_who_died_on_this_machine(self):
        process = subprocess.Popen([sys.executable, "-c", "pass"])
        process.wait()
        dead = self.claims(pid=process.pid, start=1)
        self.assertTrue(dead.claim("x")[0])
        self.assertEqual(self.claims().claim("x"), (True, dead.token))
        self.assertFalse(dead.still_mine("x"))
        dead.release("x")  # takes only its own away
        self.assertEqual(self.claims().claim("x"), (False, None))

    def test_another_process_of_the_same_number(self):
        before = self.claims(start=1)
        self.assertTrue(before.claim("x")[0])
        self.assertTrue(self.claims().claim("x")[0])

    def test_who_is_not_heard_of_on_another_machine(self):
        far = self.claims(host="elsewhere")
        self.assertTrue(far.claim("x")[0])
        near = self.claims()
        self.assertEqual(near.claim("x"), (False, None))
        path = os.path.join(self.folder, "x.0")
        old = time.time() - claims.STALE_SECONDS - 5
        os.utime(path, (old, old))
        self.assertEqual(near.workers(), 1)
        self.assertEqual(near.claim("x"), (True, far.token))

    def test_claims_are_renewed(self):
        with mock.patch.object(claims, "RENEW_SECONDS", 0.02):
            a = self.claims()
        with mock.patch.object(claims, "RENEW_SECONDS", 0.02):
            a.claim("x")
            path = os.path.join(self.folder, "x.0")
            os.utime(path, (1, 1))
            deadline = time.time() + 120
            while os.stat(path).st_mtime < 2 and time.time() < deadline:
                time.sleep(0.01)
        self.assertGreater(os.stat(path).st_mtime, 2)

    def test_of_many_that_see_a_dead_one_one_takes_over(self):
        for number in range(20):
            dead = self.claims(start=1)
            dead.claim(f"x{number}")
            others, won = [self.claims() for _ in range(6)], []
            barrier = threading.Barrier(len(others))

            def race(other, name=f"x{number}", barrier=barrier, won=won):
                barrier.wait()
                if other.claim(name)[0]:
                    won.append(other)
            threads = [threading.Thread(target=race, args=(other,)) for other in others]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            self.assertEqual(len(won), 1)


def count_up(folder, seed):
    """A worker that appends its number to a file of each piece, slowly, and may be killed in the middle."""
    own, dice = Claims(os.path.join(folder, "claims"), silent), random.Random(seed)

    def work(name, _dead):
        path = os.path.join(folder, f"{name}.{own.token}.part")
        with open(path, "w", encoding="ascii") as file:
            file.write("half")
            file.flush()
            time.sleep(dice.random() * 0.02)
            file.write("whole")
        with open(os.path.join(folder, "log"), "a", encoding="ascii") as file:
            file.write(name + "\n")
        os.replace(path, os.path.join(folder, name))
    own.share([f"piece-{n}" for n in range(40)], lambda name: os.path.exists(os.path.join(folder, name)), work)
    own.close()


class Many(Folder):
    def test_each_piece_once_whoever_is_killed(self):
        workers = [multiprocessing.Process(target=count_up, args=(self.folder, seed)) for seed in range(4)]
        for worker in workers:
            worker.start()
        time.sleep(0.15)
        for worker in workers[:2]:
            os.kill(worker.pid, signal.SIGKILL)
            worker.join()
        for worker in workers[2:]:
            worker.join(240)
            self.assertEqual(worker.exitcode, 0)
        for number in range(40):
            with open(os.path.join(self.folder, f"piece-{number}"), encoding="ascii") as file:
                self.assertEqual(file.read(), "halfwhole")
        with open(os.path.join(self.folder, "log"), encoding="ascii") as file:
            done = file.read().split()
        self.assertEqual(len(set(done)), 40)
        self.assertLessEqual(len(done), 42)  # at most what was finished, but not yet named, when its worker was killed
        self.assertEqual([name for name in os.listdir(os.path.join(self.folder, "claims")) if "piece" in name], [])


@needs_torch
class Extractions(Case):
    SMALL = ("--shard-bytes", "20000", "--batch-tokens", "300", "--answer-tokens", "200", "--split-val", "4",
             "--claim-prompts", "3")

    def start(self, path, out, *options):
        command = [sys.executable, os.path.join(TOOLS, "extract.py"), *self.command(path, out, *options)[1:]]
        log = open(os.path.join(out, f"log-{time.monotonic_ns()}"), "w+", encoding="utf-8")
        self.addCleanup(log.close)
        return subprocess.Popen(command, stderr=log), log

    def assert_ended(self, worker, log):
        status = worker.wait(240)
        log.seek(0)
        self.assertEqual(status, 0, log.read())

    def documents(self, out):
        found = {}
        for name in sorted(name for name in os.listdir(out) if name.endswith(".h5")):
            for document in self.read(out, name)[0]:
                found[document["id"]] = (name, document["input_ids"].tolist(), document["crc"])
        return found

    def assert_same(self, out, whole):
        ours, expected = self.documents(out), self.documents(whole)
        self.assertEqual(sorted(ours), sorted(expected))
        for identity, (name, ids, _) in expected.items():
            self.assertEqual(ours[identity][:2], (name, ids))
        with open(os.path.join(out, "answers.jsonl"), encoding="utf-8") as file:
            keys = [json.loads(line)["key"] for line in file]
        self.assertEqual(len(keys), len(set(keys)), "a prompt was answered twice")
        self.assertEqual([name for name in os.listdir(out) if ".tmp" in name], [])

    def test_three_workers_of_which_two_are_killed(self):
        path, whole, out = self.lines(PROMPTS), self.out(), self.out()
        self.assertEqual(self.extract(path, whole, *self.SMALL)[0], 0)
        workers = [self.start(path, out, *self.SMALL) for _ in range(3)]
        answers = os.path.join(out, "answers")

        def wait_for(ready):
            deadline = time.time() + 240
            while not ready() and time.time() < deadline:
                self.assertTrue(any(worker.poll() is None for worker, _ in workers), "all ended too early")
                time.sleep(0.005)
        wait_for(lambda: os.path.isdir(answers) and len(os.listdir(answers)) >= 2)
        workers[0][0].kill()
        wait_for(lambda: any(name.endswith(".h5") for name in os.listdir(out)))
        workers[1][0].kill()
        self.assert_ended(*workers[2])
        for worker, _ in workers[:2]:
            worker.wait()
        self.assert_same(out, whole)

    def test_two_workers_end_with_the_same(self):
        path, whole, out = self.lines(PROMPTS[:10]), self.out(), self.out()
        self.assertEqual(self.extract(path, whole, *self.SMALL)[0], 0)
        workers = [self.start(path, out, *self.SMALL) for _ in range(2)]
        for worker, log in workers:
            self.assert_ended(worker, log)
        self.assert_same(out, whole)
        with open(os.path.join(out, "documents.jsonl"), encoding="utf-8") as a, \
                open(os.path.join(whole, "documents.jsonl"), encoding="utf-8") as b:
            self.assertEqual(a.read(), b.read())


if __name__ == "__main__":
    unittest.main()
