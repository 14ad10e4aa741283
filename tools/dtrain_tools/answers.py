"""From sources to documents: ready ids, tokenised conversations, and prompts answered by the target.

Answers go to a side file as soon as a batch is done, so that a killed extraction generates nothing
twice. Owns the loop over turns; does not own the model's forward pass.
"""

import dataclasses
import json
import os
import time

from dtrain_tools.documents import Document, InputError
from dtrain_tools.generate import Generation, random_stream


class AnswerLog:
    """JSON lines {"key", "occurrence", "sample", "turns", "ids", "mask"}, one for each answered turn.

    `turns` counts the answers that ids and mask hold. A line cut short by a kill is removed.
    known: (key, occurrence, sample) -> (turns, ids, mask), of the latest line.
    """

    def __init__(self, path):
        self.path, self.known = path, {}
        if os.path.exists(path):
            self.known, good = read_answers(path)
            os.truncate(path, good)
        self.file = open(path, "a", encoding="utf-8")

    def add(self, entries):
        for (key, occurrence, sample), turns, ids, mask in entries:
            self.known[(key, occurrence, sample)] = (turns, ids, mask)
            self.file.write(json.dumps({"key": key, "occurrence": occurrence, "sample": sample, "turns": turns,
                                        "ids": ids, "mask": mask}) + "\n")
        self.file.flush()
        os.fsync(self.file.fileno())

    def close(self):
        self.file.close()


def read_answers(path):
    """-> known, bytes of whole lines."""
    known, good = {}, 0
    with open(path, "rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            entry = json.loads(line)
            known[(entry["key"], entry["occurrence"], entry["sample"])] = (entry["turns"], entry["ids"], entry["mask"])
            good += len(line)
    return known, good


@dataclasses.dataclass
class Dialogue:
    """One sample of one prompt while its turns are answered."""
    source: object
    name: tuple           # (key, occurrence, sample)
    answered: int         # turns that ids and mask hold the answers of
    ids: list
    mask: list

    @property
    def length(self):
        return len(self.ids)


def occurrences(sources):
    """How often the same prompt came before: equal prompts are different documents."""
    seen, counts = {}, []
    for source in sources:
        counts.append(seen.get(source.key, 0))
        seen[source.key] = counts[-1] + 1
    return counts


class Answerer:
    def __init__(self, target, template, budget, log, options, say):
        self.target, self.template, self.budget, self.log, self.say = target, template, budget, log, say
        self.temperature, self.samples = options.temperature, options.samples
        self.limit, self.turns, self.seed = options.max_new_tokens, options.turns, options.seed
        self.longest = options.max_tokens

    def run(self, prompts):
        """Answers every turn of every prompt (source, occurrence) that the log does not have yet."""
        waiting = []
        for source, occurrence in prompts:
            for sample in range(self.samples):
                name = (source.key, occurrence, sample)
                answered, ids, mask = self.log.known.get(name, (0, [], []))
                if answered < self._turns_of(source):
                    waiting.append(Dialogue(source, name, answered, ids, mask))
        if waiting:
            self.say(f"answering {len(waiting)} prompts, at most {self.limit} new tokens a turn")
        while waiting:
            waiting = self._round(waiting)

    def _turns_of(self, source):
        return len(source.turns) if self.turns == "all" else 1

    def _round(self, dialogues):
        """Answers one turn of each. -> those with another turn."""
        asked = [(dialogue, self._question(dialogue)) for dialogue in dialogues]
        fits = [(d, ids) for d, ids in asked if d.length + len(ids) + self.limit <= self.longest]
        if len(fits) < len(asked):
            self.say(f"{len(asked) - len(fits)} turns left unanswered: with {self.limit} new tokens they may exceed "
                     f"{self.longest} tokens (--max-tokens)")
        going, done, tokens, started = [], 0, 0, time.time()
        for group, answers in self.budget.run(fits, lambda pair: pair[0].length + len(pair[1]) + self.limit,
                                              self._generate):
            for (dialogue, question), answer in zip(group, answers):
                dialogue.ids = dialogue.ids + question + answer
                dialogue.mask = dialogue.mask + [0] * len(question) + [1] * len(answer)
                dialogue.answered += 1
                tokens += len(answer)
                if dialogue.answered < self._turns_of(dialogue.source):
                    going.append(dialogue)
            self.log.add([(d.name, d.answered, d.ids, d.mask) for d, _ in group])
            done += len(group)
            seconds = time.time() - started
            self.say(f"answered {done}/{len(fits)}, {tokens / seconds:.0f} tokens/s, "
                     f"{seconds * (len(fits) - done) / done / 60:.1f} minutes left")
        return going

    def _question(self, dialogue):
        """Tokens from the end of the last answer to the start of the next one."""
        source, messages = dialogue.source, list(dialogue.source.messages)
        if dialogue.answered == 0:
            return self.template.ids(messages + [{"role": "user", "content": source.turns[0]}], source.where, True)
        messages.append({"role": "user", "content": source.turns[0]})
        for turn in range(1, dialogue.answered):
            messages = self.template.answered(messages, source.turns[turn])
        return self.template.next_turn(messages, source.turns[dialogue.answered], dialogue.ids, source.where)

    def _generate(self, group):
        streams = [random_stream(self.seed, f"{d.name[0]}#{d.name[1]}#{d.answered}", d.name[2]) for d, _ in group]
        return Generation(self.target, [d.ids + question for d, question in group], streams,
                          self.template.end_ids, self.limit, self.temperature).run()


def documents_of(sources, template, log, samples):
    """Every document in the order of the sources."""
    documents = []
    for source, occurrence in zip(sources, occurrences(sources)):
        key = source.key if occurrence == 0 else f"{source.key}#{occurrence}"
        if source.kind == "ids":
            documents.append(Document(key, 0, source.index, source.where, source.ids, source.mask))
        elif source.kind == "conversation":
            ids, mask = template.conversation(source.messages, source.where)
            documents.append(Document(key, 0, source.index, source.where, ids, mask))
        else:
            for sample in range(samples):
                answer = log.known.get((source.key, occurrence, sample))
                if answer is not None:
                    documents.append(Document(key, sample, source.index, source.where, *answer[1:]))
    if not documents:
        raise InputError("no prompt could be answered within --max-tokens")
    return documents
