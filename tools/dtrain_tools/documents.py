"""From JSONL lines to token ids and masks.

A line is a conversation (`messages` that ends with the assistant), a prompt (`messages` that ends with
the user, or `turns`: user messages) that the target will answer, or ready ids (`input_ids`,
`loss_mask`). Owns reading, checking, templates and masks; generation is in generate.py. Every fault
names the file and the line. Token ids that exist are never decoded and encoded again.
"""

import dataclasses
import hashlib
import json
import re

SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
SENTINEL = "DTRAINPLACEOFTHEANSWER"  # stands for an answer while a template's text around it is taken


class InputError(Exception):
    """A line, a file or an option that cannot be used; the message is fit to print."""


def load_json(path):
    """-> the file's object."""
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise InputError(f"{path}: expected a JSON object")
    return found


@dataclasses.dataclass
class Source:
    """One input line."""
    kind: str             # "conversation" | "prompt" | "ids"
    index: int            # 0-based count over all files
    where: str            # FILE:LINE
    key: str              # identity of the prompt: given `id`, or a hash of its content
    messages: list = None
    turns: list = None    # of a prompt: user messages answered one after the other
    ids: list = None
    mask: list = None


@dataclasses.dataclass
class Document:
    key: str
    sample: int
    source: int
    where: str
    ids: list
    mask: list

    @property
    def supervised(self):
        return sum(self.mask)


def text_lines(path):
    """The lines of a file of text."""
    number = 0
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                yield line.decode("utf-8")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}:{number}: not UTF-8 text: {error.reason} at byte {error.start + 1} of the line"
                         ) from error


def read_sources(paths, limit=None):
    """All lines of all files, checked as far as possible without a tokenizer."""
    sources = []
    for path in paths:
        for number, line in enumerate(text_lines(path), 1):
            if line.strip() and (limit is None or len(sources) < limit):
                sources.append(parse_line(line, f"{path}:{number}", len(sources)))
    if not sources:
        raise InputError(f"{', '.join(paths)}: no documents")
    return sources


def parse_line(line, where, index):
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:  # numbers and nesting that Python does not read
        raise InputError(f"{where}: not JSON that can be read: {error}") from error
    if not isinstance(entry, dict):
        raise InputError(f"{where}: expected a JSON object")
    key = _key(entry, where)
    if SURROGATE.search(line):
        _refuse_surrogates(entry, where)
    if "input_ids" in entry:
        ids, mask = _ready_ids(entry, where)
        return Source("ids", index, where, key, ids=ids, mask=mask)
    if "turns" in entry:
        turns = entry["turns"]
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
            raise InputError(f"{where}: `turns` must be a list of strings, at least one")
        if not isinstance(entry.get("system", ""), str):
            raise InputError(f"{where}: `system` must be a string")
        system = [{"role": "system", "content": entry["system"]}] if "system" in entry else []
        return Source("prompt", index, where, key, messages=system, turns=turns)
    if "messages" in entry:
        return _conversation(entry["messages"], where, index, key)
    raise InputError(f"{where}: has none of `messages`, `turns`, `input_ids`")


def _refuse_surrogates(entry, where):
    try:
        json.dumps(entry, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{where}: holds half of a character, {error.object[error.start:error.end]!r}") from error


def _key(entry, where):
    if "id" in entry:
        if not isinstance(entry["id"], (str, int)):
            raise InputError(f"{where}: `id` must be a string or an integer")
        return str(entry["id"])
    content = json.dumps({name: entry[name] for name in ("system", "turns", "messages", "input_ids")
                          if name in entry}, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:24]


def _ready_ids(entry, where):
    ids, mask = entry["input_ids"], entry.get("loss_mask")
    if mask is None:
        raise InputError(f"{where}: `input_ids` without `loss_mask`")
    for name, values, kinds in (("input_ids", ids, (int,)), ("loss_mask", mask, (int, bool))):
        if not isinstance(values, list) or not all(type(v) in kinds for v in values):
            raise InputError(f"{where}: `{name}` must be a flat list of integers")
    if any(not -2**31 <= v < 2**31 for v in ids):
        raise InputError(f"{where}: `input_ids` holds a number that no token has")
    if len(ids) != len(mask):
        raise InputError(f"{where}: {len(ids)} input_ids but {len(mask)} loss_mask values")
    if not set(mask) <= {0, 1}:
        raise InputError(f"{where}: `loss_mask` holds {min(set(mask) - {0, 1})}; only 0 and 1 are allowed")
    return ids, [int(value) for value in mask]


def _conversation(messages, where, index, key):
    if not isinstance(messages, list) or not messages:
        raise InputError(f"{where}: `messages` must be a list, at least one")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise InputError(f"{where}: message {number} needs `role` and `content`")
        content = message["content"]
        if not isinstance(content, (str, list)) and not (content is None and message.get("tool_calls")):
            raise InputError(f"{where}: message {number}: `content` must be a string or a list of parts; null only "
                             "beside `tool_calls`")
    role = messages[-1]["role"]
    if role == "assistant":
        return Source("conversation", index, where, key, messages=messages)
    if role == "user":
        return Source("prompt", index, where, key, messages=messages[:-1], turns=[messages[-1]["content"]])
    raise InputError(f"{where}: the last message is by {role!r}; expected assistant (a conversation) "
                     "or user (a prompt to be answered)")


class Template:
    """A tokenizer's chat template with its switches."""

    def __init__(self, tokenizer, end_ids, thinking=None, supervise="all"):
        self.tokenizer, self.end_ids, self.supervise = tokenizer, frozenset(end_ids), supervise
        self.options = {} if thinking is None else {"enable_thinking": thinking}
        self.text_template = tokenizer.chat_template
        self.marks_answers = isinstance(self.text_template, str) and "generation %}" in self.text_template

    def sha256(self):
        text = self.text_template
        if not isinstance(text, str):
            text = json.dumps(text, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def _render(self, messages, where, **options):
        try:
            return self.tokenizer.apply_chat_template(messages, **self.options, **options)
        except Exception as error:  # templates raise errors of their own on roles they do not know
            raise InputError(f"{where}: the chat template refuses these messages: {error}") from error

    def text(self, messages, where, prompt):
        return self._render(messages, where, tokenize=False, add_generation_prompt=prompt)

    def ids(self, messages, where, prompt):
        return list(self._render(messages, where, tokenize=True, return_dict=True,
                                 add_generation_prompt=prompt)["input_ids"])

    def plain_ids(self, text):
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def conversation(self, messages, where):
        """-> ids, mask of a finished conversation."""
        marked = self.marks_answers and self.supervise == "all"
        ids, mask = (self._by_marks if marked else self._by_prefixes)(messages, where)
        for at in range(1, len(ids)):  # the token that ends an answer belongs to it
            if mask[at - 1] and not mask[at] and ids[at] in self.end_ids and ids[at - 1] not in self.end_ids:
                mask[at] = 1
        return ids, mask

    def _by_marks(self, messages, where):
        out = self._render(messages, where, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        return list(out["input_ids"]), [int(value) for value in out["assistant_masks"]]

    def _by_prefixes(self, messages, where):
        """An answer is what its conversation has after the prompt that led to it."""
        ids = self.ids(messages, where, False)
        mask = [0] * len(ids)
        answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        for at in answers if self.supervise == "all" else answers[-1:]:
            before = self.ids(messages[:at], where, True) if at else []
            after = self.ids(messages[:at + 1], where, False)
            if ids[:len(before)] != before or ids[:len(after)] != after:
                raise InputError(
                    f"{where}: message {at}: the tokens up to this answer are not a prefix of the whole "
                    "conversation's (the chat template rewrites earlier turns, or tokens join across the "
                    "border), so its tokens cannot be told apart; use --supervise last, or give input_ids")
            end = len(after)
            ends = [p for p in range(len(before), end) if ids[p] in self.end_ids]
            mask[len(before):ends[-1] + 1 if ends else end] = [1] * ((ends[-1] + 1 if ends else end) - len(before))
        return ids, mask

    def next_turn(self, messages, user, answer_ids, where):
        """Tokens between an answer that was just generated and the next one: the user's next message.

        The answer's own text is never tokenised: a placeholder stands for it.
        """
        before = self.text(messages, where, True)
        head, found, tail = self.text(self.answered(messages, user), where, True).rpartition(SENTINEL)
        if not found or head != before:
            raise InputError(f"{where}: the chat template rewrites earlier turns, so several answers cannot be "
                             "one document; use --turns first")
        ids = self.plain_ids(tail)
        if ids and answer_ids[-1] == ids[0] and ids[0] in self.end_ids:
            ids = ids[1:]
        return ids

    @staticmethod
    def answered(messages, user):
        """The conversation after an answer and the user's next message."""
        return messages + [{"role": "assistant", "content": SENTINEL}, {"role": "user", "content": user}]


def keep_usable(documents, vocab_size, longest, say):
    """Checks ids, cuts long documents, drops those without a supervised token; says what it did."""
    kept, cut, unsupervised = [], 0, 0
    for document in documents:
        bad = [i for i in document.ids if not 0 <= i < vocab_size]
        if bad:
            raise InputError(f"{document.where}: token id {bad[0]} is outside the vocabulary of {vocab_size}")
        if len(document.ids) > longest:
            cut += 1
            document.ids, document.mask = document.ids[:longest], document.mask[:longest]
        if any(document.mask):
            kept.append(document)
        else:
            unsupervised += 1
    if cut:
        say(f"{cut} documents cut to {longest} tokens (--max-tokens)")
    if unsupervised:
        say(f"{unsupervised} documents left out: no supervised token")
    if not kept:
        raise InputError("no document has a supervised token")
    return kept


def validation_keys(keys, wanted, seed):
    """Which prompts are held out: a share (0 < wanted < 1) or a number of them, by a hash of (seed, key)."""
    keys = sorted(set(keys), key=lambda key: hashlib.sha256(f"{seed}\0{key}".encode()).digest())
    count = round(wanted * len(keys)) if wanted < 1 else int(wanted)
    if count >= len(keys) > 0:
        raise InputError(f"--split-val {wanted:g} leaves no prompt of {len(keys)} to train on")
    return set(keys[:max(count, 1)]) if wanted > 0 else set()
