"""Reading hidden states that speculators, or vLLM's hidden-state extraction by itself, wrote to disk.

Tokens and masks come from an Arrow data set (columns input_ids, loss_mask; the states of row i are
hs_i.safetensors), or from JSON lines {"input_ids", "loss_mask"} (the states of a line are those of
whichever file has its token_ids, since vLLM names files by request). A file of states holds token_ids [S] and
hidden_states [S, P, H], bf16, fp16 or fp32, or fp8 e4m3 with hidden_states_scales [S, 1, 1]. The order of the
planes is that of the ids given to vLLM; what they are is not in the file.

Everything but the values is checked when the documents are listed; of a document only its mask is kept, a bit
a token.
Does not write shards. Needs pyarrow for Arrow data sets.
"""

import fcntl
import hashlib
import json
import os
import re

import numpy as np

from dtrain_tools.documents import InputError, parse_line, text_lines
from dtrain_tools.dumped import PIECE_VALUES, check_values, check_vocabulary, make_document, mask_of, refuse
from dtrain_tools.extraction import content_sha256
from dtrain_tools.shards import Float8
from dtrain_tools.tensor_file import e4m3_to_float, float_to_bf16, read_header, read_tensors

SCALES = "hidden_states_scales"
FLOATS = ("BF16", "F16", "F32", "F8_E4M3")
INTEGERS = ("I64", "I32")


def _mapped(path, names=None):
    try:
        return read_tensors(path, names)
    except ValueError as error:
        refuse(path, str(error).removeprefix(f"{path}: "), error)
    except OSError as error:
        refuse(path, error.strerror, error)


def refuse_unfinished(path):
    """vLLM holds a lock on FILE.lock for as long as it writes FILE."""
    if not os.path.exists(path + ".lock"):
        return
    with open(path + ".lock", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            refuse(path, "is still being written (its .lock is held); start again when the extraction is done", error)


def read_token_ids(path):
    """-> int64 [S]."""
    refuse_unfinished(path)
    dtype, ids = _mapped(path, ["token_ids"])["token_ids"]
    if dtype not in INTEGERS or ids.ndim != 1:
        refuse(path, f"token_ids: {dtype} {list(ids.shape)}; expected integers [S]")
    return np.asarray(ids, dtype=np.int64)


def check_states_header(path, tokens, planes, hidden_size):
    """Types and shapes of a file of states, from its header. -> dtype name of the states."""
    header = read_header(path)[0]
    entry = header.get("hidden_states")
    if entry is None:
        refuse(path, "has no tensor hidden_states")
    dtype, shape = entry["dtype"], entry["shape"]
    if dtype not in FLOATS:
        refuse(path, f"hidden_states: type {dtype}; understood are {', '.join(FLOATS)}")
    if len(shape) != 3 or shape[0] != tokens or shape[2] != hidden_size:
        refuse(path, f"hidden_states: shape {shape}; expected [{tokens}, {planes}, {hidden_size}] "
                     "(tokens of token_ids, planes, hidden size of the target)")
    if shape[1] != planes:
        refuse(path, f"hidden_states: {shape[1]} planes, but --layer-ids and --last-hidden speak of {planes}")
    _check_scales(path, header.get(SCALES), dtype, tokens)
    return dtype


def _check_scales(path, scales, dtype, tokens):
    if (scales is None) != (dtype != "F8_E4M3"):
        refuse(path, f"hidden_states is {dtype}, but {SCALES} is {'missing' if scales is None else 'there'}")
    if scales is not None and (scales["dtype"] != "F32" or scales["shape"] not in ([tokens], [tokens, 1, 1])):
        refuse(path, f"{SCALES}: {scales['dtype']} {scales['shape']}; expected F32 [{tokens}, 1, 1]")


def _mapped_states(path):
    """States and scales of a file whose header was checked; what else it holds is nobody's concern."""
    scaled = read_header(path)[0]["hidden_states"]["dtype"] == "F8_E4M3"
    return _mapped(path, ["hidden_states", SCALES] if scaled else ["hidden_states"])


def read_states(path, limit=None):
    """-> uint16 bf16 bits [S, P, H], of the first `limit` tokens; refuses values that no model computes."""
    tensors = _mapped_states(path)
    dtype, states = tensors["hidden_states"]
    states = states[:limit]
    bits = states if dtype == "BF16" else _to_bf16(dtype, states, tensors.get(SCALES))
    check_values(path, bits)
    return bits


def read(document, limit=None):
    """-> ids [S], uint16 bf16 bits [S, P, H], of the first `limit` tokens."""
    return read_token_ids(document.path)[:limit], read_states(document.path, limit)


def read_float8(document, has_last):
    """The same as Float8 where the file has codes: those of the layers as they are, the last hidden state as bf16."""
    ids, bits = read(document)
    tensors = _mapped_states(document.path)
    dtype, codes = tensors["hidden_states"]
    if dtype != "F8_E4M3":
        return ids, bits
    layers = codes.shape[1] - has_last
    scales = np.repeat(tensors[SCALES][1].reshape(-1, 1), layers, axis=1)
    return ids, Float8(np.array(codes[:, :layers]), scales, bits[:, -1] if has_last else None)


def _to_bf16(dtype, states, scales):
    """Rounded once, from code x scale in fp32."""
    out = np.empty(states.shape, dtype=np.uint16)
    rows = max(1, PIECE_VALUES // max(1, states[0].size))
    for first in range(0, len(states), rows):
        piece = states[first:first + rows]
        if dtype == "F8_E4M3":
            piece = e4m3_to_float(piece) * scales[1].reshape(-1, 1, 1)[first:first + len(piece)]
        out[first:first + rows] = float_to_bf16(piece)
    return out


class Rows:
    """(where, number, ids int64, mask) of an Arrow data set that datasets.save_to_disk wrote."""

    def __init__(self, folder):
        self.folder = folder
        path = os.path.join(folder, "state.json")
        if os.path.exists(os.path.join(folder, "dataset_dict.json")):
            refuse(folder, "holds several splits; name the folder of one of them")
        try:
            with open(path, encoding="utf-8") as file:
                self.state = json.load(file)
            self.files = [os.path.join(folder, entry["filename"]) for entry in self.state["_data_files"]]
        except OSError as error:
            refuse(path, f"{error.strerror}; expected a data set as speculators prepare-data writes it", error)
        except (ValueError, KeyError, TypeError) as error:
            refuse(path, "not the state of a data set on disk", error)
        if self.state.get("_indices_data_files"):
            refuse(path, "_indices_data_files: rows are in another order than in the Arrow files; save the data set "
                         "again after flatten_indices()")

    def fingerprint(self):
        return [[os.path.basename(path), os.path.getsize(path)] for path in self.files]

    def __iter__(self):
        try:
            import pyarrow
        except ImportError as error:
            raise InputError("Arrow data sets need the package pyarrow (or give --documents)") from error
        number = 0
        for path in self.files:
            try:
                with pyarrow.memory_map(path) as source, pyarrow.ipc.open_stream(source) as batches:
                    for batch in batches:
                        batch.validate(full=True)  # offsets that leave the file would be read
                        for ids, mask in zip(self._lists(path, batch, "input_ids", number),
                                             self._lists(path, batch, "loss_mask", number)):
                            yield f"{path}: row {number}", number, ids, mask
                            number += 1
            except (pyarrow.ArrowException, OSError) as error:
                refuse(path, f"not a readable Arrow file: {error}", error)

    @staticmethod
    def _lists(path, batch, name, first):
        """The lists of a column, one after the other; first: the number of the batch's first row."""
        if batch.schema.names.count(name) != 1:
            refuse(path, f"{'several columns' if name in batch.schema.names else 'no column'} {name}; it has "
                         f"{', '.join(batch.schema.names)}")
        column = batch.column(name)
        for row in range(len(column)):
            values = getattr(column[row], "values", column)
            if values is column or callable(values):
                refuse(path, f"column {name}: {column.type}; expected lists of integers")
            if values is None or values.null_count:
                refuse(path, f"row {first + row}: column {name} is or holds a null")
            kind = str(values.type)
            if kind.removeprefix("u") not in ("int8", "int16", "int32", "int64", "bool"):
                refuse(path, f"column {name}: lists of {kind}; expected integers")
            yield values.to_numpy(zero_copy_only=False)


class Lines:
    """The same of JSON lines."""

    def __init__(self, path):
        self.path = path

    def fingerprint(self):
        return content_sha256([self.path])

    def __iter__(self):
        for number, line in enumerate(text_lines(self.path)):
            where = f"{self.path}:{number + 1}"
            if line.strip():
                source = parse_line(line, where, number)
                if source.kind != "ids":
                    refuse(where, "has no `input_ids` and `loss_mask`")
                yield where, number, np.array(source.ids, dtype=np.int64), np.array(source.mask)


def files_by_row(folder):
    """-> find(number, ids): hs_NUMBER.safetensors, or None."""
    def find(number, _ids):
        path = os.path.join(folder, f"hs_{number}.safetensors")
        return path if os.path.exists(path) else None
    return find


def _digest(ids):
    return hashlib.sha256(ids.tobytes()).digest()


def files_by_tokens(folder):
    """-> find(number, ids): a file whose token_ids are these, each file once, or None."""
    waiting = {}
    for name in sorted(os.listdir(folder), reverse=True):
        if re.search(r"\.safetensors\.\w*zst\w*$|\.zst$", name):
            refuse(os.path.join(folder, name), "is compressed; unpack it first (zstd -d)")
        if name.endswith(".safetensors"):
            path = os.path.join(folder, name)
            waiting.setdefault(_digest(read_token_ids(path)), []).append(path)

    def find(_number, ids):
        paths = waiting.get(_digest(ids))
        return paths.pop() if paths else None
    return find


def _check_tokens(where, path, ids, vocab_size):
    found = read_token_ids(path)
    if len(found) != len(ids) or not np.array_equal(found, ids):
        same = min(len(found), len(ids))
        differ = np.flatnonzero(found[:same] != ids[:same])
        at = int(differ[0]) if len(differ) else same
        refuse(path, f"token_ids ({len(found)}) differ from input_ids ({len(ids)}) of {where}, first at token {at}: "
                     "the states are of another text")
    check_vocabulary(where, ids, vocab_size)


def list_documents(rows, find, planes, head, skip_missing, say, masks=None):
    """Every usable document, checked but for the values of its states. -> [DumpedDocument]"""
    documents, missing, unsupervised, rounded = [], [], 0, 0
    for where, number, ids, mask in rows:
        ids, mask = np.asarray(ids, dtype=np.int64), mask_of(where, ids, mask)
        if not mask.any():
            unsupervised += 1
            continue
        path = find(number, ids)
        if path is None:
            missing.append(where)
            continue
        _check_tokens(where, path, ids, head.vocab_size)
        rounded += check_states_header(path, len(ids), planes, head.hidden_size) not in ("BF16", "F8_E4M3")
        if masks:
            masks.add(ids, mask)
        documents.append(make_document(where, path, number, ids, mask))
    if missing and not skip_missing:
        raise InputError(f"{missing[0]}: has no file of states, nor have {len(missing) - 1} others; finish the "
                         "extraction, or leave them out with --missing skip")
    for count, what in ((len(missing), "documents left out: no file of states"),
                        (unsupervised, "documents left out: no supervised token"),
                        (rounded, "documents in fp16 or fp32: rounded to bf16")):
        if count:
            say(f"{count} {what}")
    if not documents:
        raise InputError("no document has states and a supervised token")
    return documents
