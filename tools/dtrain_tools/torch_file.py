"""Loading torch files from elsewhere: tensors only, nothing in them is run, no memory is taken on their word.

A file is a zip archive whose members lie in it as they are, so its tensors can be mapped and are no larger than the file.
Packed members, names that leave the archive, and tensors larger than their bytes are refused. Needs torch.
"""

import gzip
import os
import tempfile
import zipfile
import zlib

from dtrain_tools.dumped import refuse
from dtrain_tools.shards import DiskFull

PIECE = 1 << 22


def _refuse_unsafe(path, name):
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        refuse(name, f"cannot be loaded (cut short, or not plain tensors): {error}", error)
    for member in members:
        parts = member.filename.replace("\\", "/").split("/")
        if member.filename.startswith("/") or ".." in parts:
            refuse(name, f"cannot be loaded: its member {member.filename!r} leaves the archive")
        if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
            refuse(name, f"cannot be loaded: its member {member.filename!r} is compressed, as torch never writes it")
    if sum(member.file_size for member in members) > os.path.getsize(path):
        refuse(name, "cannot be loaded: its members are larger than the file")


def _load_plain(path, name):
    import torch
    _refuse_unsafe(path, name)
    try:
        data = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except MemoryError:
        raise
    except Exception as error:  # damage makes the reader of pickles stumble in many ways
        refuse(name, f"cannot be loaded (cut short, or not plain tensors): {(str(error) or '?').splitlines()[0]}", error)
    if not isinstance(data, dict):
        refuse(name, f"holds a {type(data).__name__}; expected a dict of tensors")
    for key, value in data.items():
        if isinstance(value, torch.Tensor):
            _refuse_unreadable(name, key, value)
    return data


def _refuse_unreadable(name, key, tensor):
    """weights_only lets tensors through that have no values in the file, or not one after the other."""
    import torch
    if tensor.is_nested or tensor.layout != torch.strided:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        refuse(name, f"{key}: a tensor of layout {kind}; expected a plain one")
    if tensor.is_meta:
        refuse(name, f"{key}: a tensor without values (of torch's device meta)")
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        refuse(name, f"{key}: shape {list(tensor.shape)} is of more values than the file holds")


def load_torch_file(path, largest):
    """-> dict. A .gz is unpacked beside nothing, to a file that has no name; largest: bytes it may have."""
    if not path.endswith(".gz"):
        return _load_plain(path, path)
    with tempfile.NamedTemporaryFile(prefix="dtrain-import-", buffering=0) as plain:
        try:
            with gzip.open(path) as packed:
                while piece := packed.read(PIECE):
                    _write(plain, piece, path)
                    if plain.tell() > largest:
                        refuse(path, f"unpacks to more than {largest:,} bytes, which no document has")
        except (EOFError, OSError, zlib.error) as error:
            refuse(path, f"cannot be loaded (cut short, or not plain tensors): {error}", error)
        return _load_plain(plain.name, path)


def _write(plain, piece, path):
    """All of it: a file without a buffer may take less at once."""
    left = memoryview(piece)
    while left:
        try:
            left = left[plain.write(left):]
        except OSError as error:
            raise DiskFull(f"{tempfile.gettempdir()}: {path} can not be unpacked there: {error.strerror}; make room, or "
                           "set TMPDIR") from error
