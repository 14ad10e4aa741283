"""Reading and writing safetensors files with numpy alone.

Tensors are (dtype name, array) pairs; bf16 and fp8 come and go as their bits (uint16, uint8), since
numpy has neither. Does not know what the tensors mean.
"""

import json
import math
import os

import numpy as np

DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "F64": "<f8", "I64": "<i8", "I32": "<i4",
          "I16": "<i2", "I8": "i1", "U8": "u1", "BOOL": "u1", "F8_E4M3": "u1"}
HEADER_MOST = 100 << 20  # bytes


def read_header(path):
    """-> {name: {"dtype", "shape", "data_offsets"}}, offset of the data, metadata."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, HEADER_MOST):
            raise ValueError(f"{path}: not a safetensors file, or cut short")
        text = file.read(length)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a safetensors file: its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise ValueError(f"{path}: not a safetensors file")
    metadata = header.pop("__metadata__", {})
    for name, entry in header.items():
        _check_entry(path, name, entry, size - 8 - length)
    return header, 8 + length, metadata


def _check_entry(path, name, entry, data_bytes):
    """A tensor's shape, type and range of bytes say the same, and the bytes are there."""
    numbers = [*entry.get("shape", ["none"]), *entry.get("data_offsets", ["none"])] if isinstance(entry, dict) else [-1]
    if not all(type(number) is int and number >= 0 for number in numbers) or len(entry["data_offsets"]) != 2:
        raise ValueError(f"{path}: tensor {name}: not described as safetensors are")
    begin, end = entry["data_offsets"]
    kind = DTYPES.get(str(entry.get("dtype")))
    if kind and end - begin != math.prod(entry["shape"]) * np.dtype(kind).itemsize:
        raise ValueError(f"{path}: tensor {name}: {end - begin} bytes are not {entry['dtype']} {entry['shape']}")
    if end > data_bytes:
        raise ValueError(f"{path}: tensor {name} ends after the file")


def read_tensors(path, names=None):
    """-> {name: (dtype name, array mapped from the file)}."""
    header, start, _ = read_header(path)
    data = np.memmap(path, dtype=np.uint8, mode="r", offset=0)
    tensors = {}
    for name in header if names is None else names:
        if name not in header:
            raise ValueError(f"{path}: has no tensor {name}")
        entry = header[name]
        begin, end = (start + at for at in entry["data_offsets"])
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{path}: tensor {name}: type {entry['dtype']}; understood are {', '.join(DTYPES)}")
        array = data[begin:end].view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
        tensors[name] = (entry["dtype"], array)
    return tensors


def write_tensors(path, tensors, metadata=None):
    """tensors: {name: (dtype name, array)}. Written under a temporary name, fsynced, renamed."""
    header, at = {}, 0
    for name, (dtype, array) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    if metadata:
        header["__metadata__"] = metadata
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    temporary = path + ".tmp"
    with open(temporary, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for dtype, array in tensors.values():
            file.write(np.ascontiguousarray(array, dtype=DTYPES[dtype]).tobytes())
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def bf16_to_float(bits):
    """uint16 bits -> float32."""
    return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def float_to_bf16(values):
    """float32 -> uint16 bits, rounded to nearest even; a NaN stays a NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(nan, (bits >> np.uint32(16)) | np.uint32(0x40), rounded).astype(np.uint16)


def _float8_values(mantissa_bits):
    """-> float32 [256]: sign, exponent with bias 7 (e4m3, 3 bits of mantissa) or 15 (e5m2, 2 bits).

    e4m3 has no infinity, and 0x7F and 0xFF are NaN; e5m2 is as fp16.
    """
    codes = np.arange(256)
    if mantissa_bits == 2:
        return (codes.astype(np.uint16) << np.uint16(8)).view(np.float16).astype(np.float32)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    values = np.where(exponent == 0, mantissa / 8 * 2.0 ** -6, normal)
    values[(codes & 0x7F) == 0x7F] = np.nan
    return np.where(codes & 0x80, -values, values).astype(np.float32)


E4M3_VALUES, E5M2_VALUES = _float8_values(3), _float8_values(2)


def e4m3_to_float(codes):
    """uint8 codes of float8_e4m3fn -> float32."""
    return E4M3_VALUES[codes]


def e5m2_to_float(codes):
    return E5M2_VALUES[codes]
