"""Writing feature shards (HDF5, version 1) and target directories.

The one writer of the tools: extraction, importers and the tiny example use it. Layout, attributes
and datasets are described in docs/file-formats.md. Needs numpy and h5py, not torch.
Does not decide which documents go into a shard.
"""

import errno
import hashlib
import os
import typing

import h5py
import numpy as np

from dtrain_tools.crc32c import crc32c

ALIGNMENT = 4096
HEADER_BYTES = 64 * 1024  # more than the headers, attributes and alignment gaps of a shard take
TEMPORARY = ".tmp"


class DiskFull(Exception):
    """The shard does not fit on its file system."""


def document_id(prompt_id, sample, ids, mask):
    """Stable uint64 identity: depends on where the document came from and on what it holds."""
    digest = hashlib.blake2b(digest_size=8)
    digest.update(f"{prompt_id}\0{sample}\0".encode())
    digest.update(np.asarray(ids, dtype="<i4").tobytes())
    digest.update(np.asarray(mask, dtype=np.uint8).tobytes())
    return int.from_bytes(digest.digest(), "little")


def holds_documents(path, ids):
    """Whether the shard holds exactly the documents of these identities, in this order."""
    try:
        with h5py.File(path, "r") as file:
            return np.array_equal(file["doc_id"][:], np.array(ids, dtype=np.uint64))
    except (OSError, KeyError):  # not whole, so another file than what was written under this name
        return False


class Float8(typing.NamedTuple):
    """States of a document of a float8 shard: a value is its e4m3 code times the scale of its token and plane."""
    codes: np.ndarray   # uint8 [n, L, H]
    scales: np.ndarray  # float32 [n, L]
    last: np.ndarray    # uint16 bf16 bits [n, H]; None when there is no last hidden state


def token_bytes(layers, has_last, hidden_size, float8=False):
    """Of a token's states in a shard."""
    return (layers * (hidden_size + 4) if float8 else 2 * layers * hidden_size) + 2 * has_last * hidden_size


def shard_bytes(documents, tokens, bytes_of_states):
    """Size of a shard file, slightly over-estimated. bytes_of_states: of a token, from token_bytes."""
    per_token = 4 + 1 + bytes_of_states + 4 + 4 + 4
    return tokens * per_token + documents * 20 + HEADER_BYTES


def free_bytes(folder):
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize


def fsync_folder(folder):
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_attributes(file, kind, attributes, float8):
    attrs = file.attrs
    attrs["format"] = kind
    attrs["format_version"] = np.int32(1)
    attrs["dtype"] = "float8_e4m3" if float8 else "bfloat16"
    for name, value in attributes.items():
        if name == "target_layer_ids":
            value = np.asarray(value, dtype=np.int32)
        elif name in ("hidden_size", "vocab_size"):
            value = np.int64(value)
        if value is not None:
            attrs[name] = value


def write_manifest(path, attributes, documents, ids, float8=False):
    """All documents (with .ids and .mask) without features; attributes and float8 as those of the shards to come."""
    temporary = f"{path}.{os.getpid()}{TEMPORARY}"
    with h5py.File(temporary, "w") as file:
        write_attributes(file, "dtrain-manifest", attributes, float8)
        file["doc_offsets"] = np.concatenate([[0], np.cumsum([len(d.ids) for d in documents])]).astype("<i8")
        file["doc_id"] = np.asarray(ids, dtype="<u8")
        file["input_ids"] = np.concatenate([np.asarray(d.ids, dtype="<i4") for d in documents])
        file["loss_mask"] = np.concatenate([np.asarray(d.mask, dtype=np.uint8) for d in documents])
    with open(temporary, "r+b") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)
    fsync_folder(os.path.dirname(os.path.abspath(path)))


class ShardWriter:
    """A shard whose documents and lengths are known; their states may come in any order.

    attributes: everything but format, format_version and dtype: target_model, target_layer_ids,
    hidden_size, vocab_size, last_hidden, and optional ones (None is left out).
    lengths: tokens of each document; ids: its identities. has_teacher: whether there are teacher columns.
    float8: states are Float8. suffix: of the name until the shard is finished.
    """

    def __init__(self, path, attributes, lengths, ids, has_teacher=True, float8=False, suffix=TEMPORARY):
        self.has_teacher, self.float8 = has_teacher, float8
        self.path, self.temporary = path, path + suffix
        self.offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self.crc = np.zeros(len(lengths), dtype=np.uint32)
        self.written = np.zeros(len(lengths), dtype=bool)
        self.layers, self.has_last = len(attributes["target_layer_ids"]), attributes["last_hidden"] != "absent"
        self.hidden_size = int(attributes["hidden_size"])
        self._refuse_full_disk(len(lengths))
        self.file = h5py.File(self.temporary, "w", alignment_threshold=ALIGNMENT, alignment_interval=ALIGNMENT)
        write_attributes(self.file, "dtrain-features", attributes, float8)
        self._create_datasets(np.asarray(ids, dtype=np.uint64))
        self.file.flush()
        self._reserve()

    def _refuse_full_disk(self, documents):
        folder = os.path.dirname(os.path.abspath(self.path))
        of_states = token_bytes(self.layers, self.has_last, self.hidden_size, self.float8)
        need = shard_bytes(documents, int(self.offsets[-1]), of_states)
        free = free_bytes(folder)
        if need > free:
            raise DiskFull(f"{folder}: {need:,} bytes needed for {os.path.basename(self.path)}, {free:,} free; "
                           "make room or write to another disk, then start again: finished shards are kept")

    def _create(self, name, shape, dtype):
        """Contiguous, allocated at once, not filled: a document is one byte range of the file."""
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_layout(h5py.h5d.CONTIGUOUS)
        plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        kind = h5py.h5t.py_create(np.dtype(dtype))
        h5py.h5d.create(self.file.id, name.encode(), kind, h5py.h5s.create_simple(shape), dcpl=plist)
        return self.file[name]

    def _create_datasets(self, ids):
        tokens = int(self.offsets[-1])
        self._create("doc_offsets", self.offsets.shape, "<i8")[...] = self.offsets
        self._create("doc_id", ids.shape, "<u8")[...] = ids
        self.doc_crc = self._create("doc_crc32c", self.crc.shape, "<u4")
        self.input_ids = self._create("input_ids", (tokens,), "<i4")
        self.loss_mask = self._create("loss_mask", (tokens,), "u1")
        if self.has_teacher:
            self.top1 = self._create("teacher_top1", (tokens,), "<i4")
            self.top1_logit = self._create("teacher_top1_logit", (tokens,), "<f4")
            self.lse = self._create("teacher_lse", (tokens,), "<f4")
        width = self.hidden_size
        if not self.float8:
            shape = (tokens, self.layers + self.has_last, width)
            self.states = [self._create("hidden_states", shape, "<u2")]
            return
        self.states = [self._create("hidden_states", (tokens, self.layers, width), "u1"),
                       self._create("scales", (tokens, self.layers), "<f4")]
        if self.has_last:
            self.states.append(self._create("last_hidden", (tokens, width), "<u2"))

    def _reserve(self):
        """Takes the disk blocks now, so that a full disk is an error here and not in the middle."""
        with open(self.temporary, "r+b") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    self.abort()
                    raise DiskFull(f"{self.path}: no space left for this shard") from error
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise

    def write(self, document, ids, mask, states, teacher=None):
        """states: uint16 bf16 bits [n, P, H], or Float8; teacher, when has_teacher: (top1 int32, logit,
        log-sum-exp) [n] each."""
        begin, end = (int(at) for at in self.offsets[document:document + 2])
        ids, mask = np.asarray(ids, dtype="<i4"), np.asarray(mask, dtype=np.uint8)
        states = [part for part in states if part is not None] if isinstance(states, Float8) else [states]
        states = [np.ascontiguousarray(part, dtype=to.dtype) for part, to in zip(states, self.states, strict=True)]
        for part, to in zip(states, self.states):
            if len(ids) != end - begin or part.shape != (end - begin, *to.shape[1:]):
                raise ValueError(f"{self.path}: document {document} has {end - begin} tokens, got {part.shape}")
            to[begin:end] = part
        self.input_ids[begin:end] = ids
        self.loss_mask[begin:end] = mask
        if self.has_teacher:
            self.top1[begin:end], self.top1_logit[begin:end], self.lse[begin:end] = teacher
        self.crc[document] = crc32c(ids, mask, *states)
        self.written[document] = True

    def finish(self):
        """All documents written: the shard gets its name."""
        if not self.written.all():
            raise ValueError(f"{self.path}: document {int(np.argmin(self.written))} was never written")
        self.doc_crc[...] = self.crc
        self.file.close()
        with open(self.temporary, "r+b") as file:
            os.fsync(file.fileno())
        os.replace(self.temporary, self.path)
        fsync_folder(os.path.dirname(os.path.abspath(self.path)))

    def abort(self):
        """Leaves nothing behind."""
        self.file.close()
        if os.path.exists(self.temporary):
            os.remove(self.temporary)
