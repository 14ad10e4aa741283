"""Prompts in parts, so that several workers answer different ones: OUT/answers/NAME.jsonl of each, and all of them in
OUT/answers.jsonl when the last is done. A part that a dead worker left is gone on with in the same file.
"""

import os

from dtrain_tools.answers import AnswerLog, occurrences, read_answers


class AnswerParts:
    """known: as in AnswerLog, of all parts, after they have been merged."""

    def __init__(self, folder, sources, size):
        self.folder, self.path = os.path.join(folder, "answers"), os.path.join(folder, "answers.jsonl")
        prompts = [(source, count) for source, count in zip(sources, occurrences(sources)) if source.kind == "prompt"]
        self.parts = {f"answers-{at // size:05d}": prompts[at:at + size] for at in range(0, len(prompts), size)}
        self.known = {}
        if self.parts:
            os.makedirs(self.folder, exist_ok=True)

    def path_of(self, name):
        return os.path.join(self.folder, f"{name}.jsonl")

    def open_log(self, name):
        return AnswerLog(self.path_of(name))

    def merge(self, token):
        """Every worker does it, with the same result. token: of this one's temporary file."""
        for name in self.parts:
            self.known.update(read_answers(self.path_of(name))[0])
        temporary = f"{self.path}.{token}.tmp"
        with open(temporary, "wb") as to:
            for name in self.parts:
                with open(self.path_of(name), "rb") as file:
                    to.write(file.read())
            to.flush()
            os.fsync(to.fileno())
        os.replace(temporary, self.path)
