"""Several processes, on one machine or on several that share a folder, divide named pieces of work.

    CLAIMS/NAME.0      who works on NAME: host, boot, process; its time is renewed while that process lives
    CLAIMS/NAME.1      who took it over when that process had died, and so on: the highest number counts
    CLAIMS/NAME.done   finished, for pieces that no other file shows to be finished

A claim is a link to a finished file, which exactly one process can make. A worker is dead when its process is gone (seen
on its own machine) or when its claim has not been renewed for STALE_SECONDS, by the clock of the shared folder. Who
finds a piece done after claiming it gives it back, so nothing is done twice.
"""

import json
import os
import socket
import threading
import time

RENEW_SECONDS = 5
STALE_SECONDS = 60
WAIT_SECONDS = 0.5


def _boot():
    """Of the machine, and which of its process numbers are meant: containers have their own."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"


def _process_start(pid):
    """When a process of this machine started, in ticks; None: there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


class Claims:
    def __init__(self, folder, say):
        os.makedirs(folder, exist_ok=True)
        self.folder, self.say = folder, say
        self.me = {"host": socket.gethostname(), "boot": _boot(), "pid": os.getpid(),
                   "start": _process_start(os.getpid())}
        self.token = self.me["token"] = f"{self.me['host']}-{self.me['pid']}-{os.urandom(4).hex()}"
        self.held = {}  # name: number
        self.lock, self.stop = threading.Lock(), threading.Event()
        self.thread = threading.Thread(target=self._renew, daemon=True)
        self.thread.start()

    def close(self):
        self.stop.set()
        self.thread.join()
        for name in list(self.held):
            self.release(name)

    def _path(self, name, number):
        return os.path.join(self.folder, f"{name}.{number}")

    def _renew(self):
        while not self.stop.wait(RENEW_SECONDS):
            with self.lock:
                for name, number in self.held.items():
                    try:
                        os.utime(self._path(name, number))
                    except FileNotFoundError:
                        pass  # taken over: seen by still_mine

    def _claims_of(self, name):
        """Numbers of the claims to a piece, ascending."""
        prefix = name + "."
        rest = [entry[len(prefix):] for entry in os.listdir(self.folder) if entry.startswith(prefix)]
        return sorted(int(part) for part in rest if part.isdigit())

    def _now(self):
        """By the clock that claims are renewed by."""
        path = os.path.join(self.folder, f"{self.token}.clock")
        with open(path, "w", encoding="ascii"):
            pass
        os.utime(path)
        now = os.stat(path).st_mtime
        os.remove(path)
        return now

    def _owner(self, name, number):
        """-> who holds it, or None where it was given back meanwhile."""
        try:
            with open(self._path(name, number), encoding="utf-8") as file:
                return json.load(file)
        except FileNotFoundError:
            return None

    def _is_dead(self, name, number, owner):
        if owner["host"] == self.me["host"] and owner["boot"] == self.me["boot"]:
            return _process_start(owner["pid"]) != owner["start"]
        try:
            renewed = os.stat(self._path(name, number)).st_mtime
        except FileNotFoundError:
            return False
        return self._now() - renewed > STALE_SECONDS

    def _make(self, name, number):
        temporary = os.path.join(self.folder, f"{self.token}.{threading.get_ident()}.new")
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(self.me, file)
            file.flush()
            os.fsync(file.fileno())  # no claim is empty after a loss of power
        try:
            os.link(temporary, self._path(name, number))
        except FileExistsError:
            return False
        finally:
            os.remove(temporary)
        with self.lock:
            self.held[name] = number
        return True

    def claim(self, name):
        """-> whether the piece is this worker's now, and the token of a dead one that had it, or None."""
        numbers = self._claims_of(name)
        if not numbers:
            return self._make(name, 0), None
        owner = self._owner(name, numbers[-1])
        if owner is None or not self._is_dead(name, numbers[-1], owner):
            return False, None
        if not self._make(name, numbers[-1] + 1):
            return False, None
        self.say(f"{name}: taken over from process {owner['pid']} of {owner['host']}, which has died")
        return True, owner["token"]

    def still_mine(self, name):
        return self._claims_of(name)[-1:] == [self.held.get(name)]

    def release(self, name):
        with self.lock:
            mine = self.held.pop(name)
        for number in self._claims_of(name):
            if number <= mine:
                os.remove(self._path(name, number))

    def mark_done(self, name):
        with open(os.path.join(self.folder, f"{name}.done"), "w", encoding="ascii") as file:
            os.fsync(file.fileno())

    def is_done(self, name):
        return os.path.exists(os.path.join(self.folder, f"{name}.done"))

    def workers(self):
        """How many processes hold a claim, this one counted."""
        tokens = {self.token}
        for entry in os.listdir(self.folder):
            name, _, number = entry.rpartition(".")
            owner = self._owner(name, int(number)) if number.isdigit() else None
            if owner and not self._is_dead(name, int(number), owner):
                tokens.add(owner["token"])
        return len(tokens)

    def share(self, names, finished, work):
        """Returns when every piece is finished(name); does work(name, token of a dead worker or None) on those it claims."""
        waiting, told = list(names), False
        while waiting:
            waiting = [name for name in waiting if not finished(name)]
            worked = False
            for name in waiting:
                mine, dead = self.claim(name)
                if not mine:
                    continue
                try:
                    if not finished(name):  # by a worker that gave it back between the look and the claim
                        work(name, dead)
                        worked = True
                finally:
                    self.release(name)
            if waiting and not worked:
                if not told:
                    self.say(f"waiting for {len(waiting)} pieces that other workers have")
                    told = True
                time.sleep(WAIT_SECONDS)
