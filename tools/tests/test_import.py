"""tools/import_features.py on dumps of the tiny target, written here from states that are known.

    DTRAIN=build/dtrain python -m unittest discover -s tools/tests

Without $DTRAIN all that ends in `dtrain data check` is skipped; without torch, pyarrow, datasets or speculators
what needs them.
"""

import contextlib
import fcntl
import gzip
import io
import json
import os
import shutil
import sys
import tempfile
import unittest
from importlib.util import find_spec
from unittest import mock

import h5py
import numpy as np

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
TINY = os.path.join(ROOT, "examples", "tiny")
sys.path[:0] = [os.path.join(ROOT, "tools"), TINY]

import import_features  # noqa: E402
import make_shards  # noqa: E402
from dtrain_tools import command, import_check, importing, speculators_dump  # noqa: E402
from dtrain_tools.crc32c import crc32c  # noqa: E402
from dtrain_tools.documents import InputError  # noqa: E402
from dtrain_tools.tensor_file import (bf16_to_float, e4m3_to_float, float_to_bf16, read_tensors,  # noqa: E402
                                      write_tensors)
from tiny_model import TinyModel, rms_norm  # noqa: E402

try:
    import torch
except ImportError:
    torch = None
try:
    import datasets  # and with it pyarrow
except ImportError:
    datasets = None
try:
    import hs_connectors
    from speculators.data_generation import preprocessing
except ImportError:
    hs_connectors = None

MODEL = os.path.join(TINY, "model")
DTRAIN = os.environ.get("DTRAIN", "")
LAYERS, VLLM_LAYERS = [1, 2, 3], "2,3,4"
needs_dtrain = unittest.skipIf(not os.path.exists(DTRAIN), "needs $DTRAIN, the built program")


class Text:
    """A document of the tiny target with the states that it computed."""

    def __init__(self, ids, mask, states):
        self.ids, self.mask, self.states = np.array(ids), np.array(mask, dtype=np.uint8), states


def tiny_documents():
    """Greedy answers of the tiny target, of different lengths."""
    with open(os.path.join(TINY, "text.txt"), encoding="ascii") as file:
        prompts = [make_shards.prompt_of(line) for line in file.read().splitlines()[:6]]
    batch = make_shards.Batch(TinyModel(MODEL), prompts, 300, LAYERS)
    batch.run(make_shards.chooser(range(len(prompts)), 0.0, 1), lambda _: None)
    return [Text(*document[:3]) for document in batch.documents()]


def quantise(states):
    """bf16 bits [n, P, H] -> e4m3 codes, scales [n, 1, 1]: the nearest value, by search."""
    values = bf16_to_float(states)
    scales = (np.abs(values).max(axis=(1, 2), keepdims=True) / 448).astype(np.float32)
    codes = np.array([c for c in range(256) if c & 0x7F != 0x7F], dtype=np.uint8)
    order = np.argsort(e4m3_to_float(codes), kind="stable")
    levels = e4m3_to_float(codes)[order]
    middle = (levels[1:] + levels[:-1]) / 2
    return codes[order][np.searchsorted(middle, values / scales)], scales


class Case(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.texts = tiny_documents()

    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = temporary.name
        self.states, self.out = os.path.join(self.folder, "states"), os.path.join(self.folder, "out")
        os.mkdir(self.states)

    def state_file(self, name):
        return os.path.join(self.states, f"{name}.safetensors")

    def dump(self, change=None, name="cmpl-{}-0"):
        """A dump in vLLM's own layout; change(tensors) alters what the file of the second document holds."""
        lines = os.path.join(self.folder, "documents.jsonl")
        with open(lines, "w", encoding="utf-8") as file:
            for number, text in enumerate(self.texts):
                file.write(json.dumps({"input_ids": text.ids.tolist(), "loss_mask": text.mask.tolist()}) + "\n")
                tensors = {"token_ids": ("I64", text.ids.astype(np.int64)), "hidden_states": ("BF16", text.states)}
                if change and number == 1:
                    change(tensors)
                write_tensors(self.state_file(name.format(number)), tensors)
        return lines

    def run_import(self, *options, data=None, one_folder=False, layers=VLLM_LAYERS, numbering="vllm", trust=True):
        """-> status, what was printed. one_folder: data holds the states too."""
        source = ["--data", data] if data else ["--documents", os.path.join(self.folder, "documents.jsonl")]
        source += [] if one_folder else ["--states", self.states]
        argv = ["import_features.py", *source, *(["--layer-ids", layers] if layers else []), "--numbering", numbering,
                "--target", MODEL, "--out", self.out, "--dtrain", DTRAIN or "dtrain", "--name", "tiny", *options]
        printed = io.StringIO()
        with mock.patch.object(sys, "argv", argv + (["--unverified", "layers"] if trust else [])), \
                contextlib.redirect_stderr(printed):
            try:
                status = import_features.main()
            except SystemExit as stop:
                status = stop.code
        return status, printed.getvalue()

    def refused(self, expected, *options, **arguments):
        status, printed = self.run_import(*options, **arguments)
        self.assertEqual(status, command.REFUSED, printed)
        self.assertIn(expected, printed)
        names = os.listdir(self.out) if os.path.exists(self.out) else []
        self.assertEqual([name for name in names if name.endswith(".h5")], [], "a refused import released shards")

    def imported(self, *options, **arguments):
        status, printed = self.run_import(*options, **arguments)
        self.assertEqual(status, 0, printed)
        return printed

    def assert_shard(self, name, expected, texts=None, last_hidden="pre_norm"):
        """The shard holds these texts with these states (bf16 bits of each), and is what it says."""
        texts = self.texts if texts is None else texts
        with h5py.File(os.path.join(self.out, name), "r") as file:
            self.assertEqual(list(file.attrs["target_layer_ids"]), LAYERS)
            self.assertEqual((file.attrs["hidden_size"], file.attrs["vocab_size"]), (128, 260))
            self.assertEqual((file.attrs["last_hidden"], file.attrs["target_model"]), (last_hidden, "tiny"))
            self.assertNotIn("teacher_top1", file)
            lengths = np.diff(file["doc_offsets"][:])
            np.testing.assert_array_equal(lengths, [len(text.ids) for text in texts])
            for d, (text, states) in enumerate(zip(texts, expected)):
                rows = slice(*file["doc_offsets"][d:d + 2])
                np.testing.assert_array_equal(file["input_ids"][rows], text.ids)
                np.testing.assert_array_equal(file["loss_mask"][rows], text.mask)
                np.testing.assert_array_equal(file["hidden_states"][rows], states)
                crc = crc32c(file["input_ids"][rows], file["loss_mask"][rows], file["hidden_states"][rows])
                self.assertEqual(crc, file["doc_crc32c"][d])
            self.assertEqual(len(set(file["doc_id"][:])), len(texts))


class Float8(unittest.TestCase):
    def test_known_codes(self):
        codes = np.array([0x00, 0x01, 0x07, 0x08, 0x38, 0xB8, 0x3C, 0x7E, 0xFE], dtype=np.uint8)
        expected = [0, 2**-9, 7 * 2**-9, 2**-6, 1, -1, 1.5, 448, -448]
        np.testing.assert_array_equal(e4m3_to_float(codes), np.float32(expected))
        self.assertTrue(np.isnan(e4m3_to_float(np.array([0x7F, 0xFF]))).all())

    @unittest.skipIf(torch is None, "needs torch")
    def test_every_code_equals_torch(self):
        codes = np.arange(256, dtype=np.uint8)
        expected = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
        np.testing.assert_array_equal(e4m3_to_float(codes), expected)


@needs_dtrain
class Imports(Case):
    def test_bf16(self):
        self.dump()
        printed = self.imported()
        self.assert_shard("train-00000.h5", [text.states for text in self.texts])
        self.assertIn("NOT verified", printed)
        self.assertFalse(os.path.exists(os.path.join(self.out, "unchecked")))

    def test_numbering_of_outputs(self):
        self.dump()
        self.imported(layers="1,2,3", numbering="output")
        self.assert_shard("train-00000.h5", [text.states for text in self.texts])

    def test_fp8_is_code_times_scale_rounded_once(self):
        expected = []
        self.dump()
        for number, text in enumerate(self.texts):
            codes, scales = quantise(text.states)
            write_tensors(self.state_file(f"cmpl-{number}-0"), {
                "token_ids": ("I64", text.ids.astype(np.int64)), "hidden_states": ("F8_E4M3", codes),
                "hidden_states_scales": ("F32", scales)})
            expected.append(float_to_bf16(e4m3_to_float(codes).astype(np.float64) * scales))
        with mock.patch.object(speculators_dump, "PIECE_VALUES", 7 * 4 * 128):
            self.imported()
        self.assert_shard("train-00000.h5", expected)

    def test_fp32_is_rounded_and_said(self):
        self.dump(lambda tensors: tensors.update(
            hidden_states=("F32", bf16_to_float(tensors["hidden_states"][1]) * np.float32(1 + 2**-10))))
        self.assertIn("1 documents in fp16 or fp32", self.imported())
        self.assert_shard("train-00000.h5", [text.states for text in self.texts])

    def test_documents_without_supervised_token_or_states(self):
        lines = self.dump()
        os.remove(self.state_file("cmpl-2-0"))
        with open(lines, encoding="utf-8") as file:
            entries = [json.loads(line) for line in file]
        entries[0]["loss_mask"] = [0] * len(entries[0]["loss_mask"])
        with open(lines, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(entry) + "\n" for entry in entries)
        self.refused(f"{lines}:3: has no file of states")
        printed = self.imported("--missing", "skip")
        self.assertIn("1 documents left out: no file of states", printed)
        self.assertIn("1 documents left out: no supervised token", printed)
        kept = [self.texts[1], *self.texts[3:]]
        self.assert_shard("train-00000.h5", [text.states for text in kept], kept)

    def test_post_norm(self):
        weights = TinyModel(MODEL)
        normed = []
        self.dump()
        for number, text in enumerate(self.texts):
            states = text.states.copy()
            states[:, -1] = float_to_bf16(rms_norm(bf16_to_float(states[:, -1]), weights.norm, weights.eps))
            write_tensors(self.state_file(f"cmpl-{number}-0"), {
                "token_ids": ("I64", text.ids.astype(np.int64)), "hidden_states": ("BF16", states)})
            normed.append(states)
        self.refused("behind the target's final norm already; --last-hidden post_norm")
        self.imported("--last-hidden", "post_norm")
        self.assert_shard("train-00000.h5", normed, last_hidden="post_norm")

    def test_pre_norm_is_not_taken_for_post_norm(self):
        self.dump()
        self.refused("is not behind this target's final norm", "--last-hidden", "post_norm")

    def test_missing_teacher_is_declared_and_said(self):
        self.dump()
        for number, text in enumerate(self.texts):
            write_tensors(self.state_file(f"cmpl-{number}-0"), {
                "token_ids": ("I64", text.ids.astype(np.int64)), "hidden_states": ("BF16", text.states[:, :-1])})
        self.refused("3 planes, but --layer-ids and --last-hidden speak of 4")
        self.assertIn("only ce_data", self.imported("--last-hidden", "absent"))
        self.assert_shard("train-00000.h5", [text.states[:, :-1] for text in self.texts], last_hidden="absent")

    def test_shifted_states_are_not_released(self):
        self.dump()
        for number, text in enumerate(self.texts):
            write_tensors(self.state_file(f"cmpl-{number}-0"), {
                "token_ids": ("I64", text.ids.astype(np.int64)), "hidden_states": ("BF16", np.roll(text.states, 1, 0))})
        self.refused("these shards are not released")
        self.assertTrue(os.path.exists(os.path.join(self.out, "unchecked", "train-00000.h5")))

    def test_one_document_of_shifted_states_is_not_released(self):
        self.dump(lambda tensors: tensors.update(hidden_states=("BF16", np.roll(self.texts[1].states, 1, 0))))
        status, printed = self.run_import()
        self.assertEqual(status, command.REFUSED, printed)
        for text in ("train-00000.h5: document 1 (doc_id ", "ONE TOKEN LATE: DOES NOT FIT", "these shards are not released"):
            self.assertIn(text, printed)

    def test_kill_and_resume(self):
        self.dump()
        options = ("--shard-bytes", "300000", "--split-val", "2")
        self.imported(*options)
        whole, self.out = self.out, os.path.join(self.folder, "again")
        names = sorted(name for name in os.listdir(whole) if name.endswith(".h5"))
        self.assertGreater(len(names), 3)
        for stop in range(2):
            calls = iter([None] * (import_check.PROBES + 2))
            read = speculators_dump.read_states

            def interrupted(*arguments, calls=calls, read=read):
                if next(calls, "stop") == "stop":
                    raise KeyboardInterrupt
                return read(*arguments)
            with mock.patch.object(speculators_dump, "read_states", interrupted):
                self.assertEqual(self.run_import(*options)[0], command.RUN_FAILED, stop)
            self.assertEqual([name for name in os.listdir(self.out) if name.endswith(".h5")], [])
        self.assertIn("shards are converted and kept", self.imported(*options))
        for name in names:
            with h5py.File(os.path.join(whole, name), "r") as a, h5py.File(os.path.join(self.out, name), "r") as b:
                self.assertEqual(set(a), set(b))
                for dataset in a:
                    np.testing.assert_array_equal(a[dataset][:], b[dataset][:], f"{name} {dataset}")

    def test_a_shard_that_was_damaged_since(self):
        self.dump()
        self.imported("--shard-bytes", "300000")
        path = os.path.join(self.out, "train-00001.h5")
        with open(path, "r+b") as file:
            file.truncate(1000)
        status, printed = self.run_import("--shard-bytes", "300000")
        self.assertEqual(status, command.REFUSED, printed)
        self.assertIn(f"{path}: is damaged, or holds other documents", printed)
        with open(os.path.join(self.out, "extraction.json"), "w", encoding="utf-8"):
            pass
        status, printed = self.run_import("--shard-bytes", "300000")
        self.assertEqual(status, command.REFUSED, printed)
        self.assertIn("extraction.json: not JSON", printed)

    def test_a_second_import_of_the_folder(self):
        self.dump()
        status, printed = self.run_import("--shard-bytes", "4e5", "--dtrain", "/bin/false")
        self.assertEqual(status, command.REFUSED, printed)
        with importing.lock_folder(self.out):
            self.refused(f"{self.out}: another import is at work there", "--shard-bytes", "4e5", "--dtrain", "/bin/false")

    def test_other_settings_than_the_folder_s(self):
        self.dump()
        self.imported()
        status, printed = self.run_import("--split-val", "1")
        self.assertEqual(status, command.REFUSED)
        self.assertIn("other settings (split_val)", printed)


class Refusals(Case):
    """Faults that are found before anything is written."""

    def assert_fault(self, change, *expected):
        self.dump(change)
        for text in (self.state_file("cmpl-1-0"), *expected):
            self.refused(text)

    def test_other_text(self):
        lines = self.dump()
        os.rename(self.state_file("cmpl-1-0"), self.state_file("gone"))
        tensors = read_tensors(self.state_file("gone"))
        tensors["token_ids"] = ("I64", tensors["token_ids"][1] ^ 1)
        write_tensors(self.state_file("cmpl-1-0"), tensors)
        os.remove(self.state_file("gone"))
        self.refused(f"{lines}:2: has no file of states")

    def test_lines_that_are_no_documents(self):
        lines = self.dump()
        for line, text in ((b'{"input_ids": [1], "caf\xe9": 1}', ":7: not UTF-8 text"),
                           (b'{"input_ids": [99999999999999999999], "loss_mask": [1]}', ":7: `input_ids` holds a number"),
                           (b'{"turns": ["x"]}', ":7: has no `input_ids`")):
            self.dump()
            with open(lines, "ab") as file:
                file.write(line + b"\n")
            self.refused(lines + text)

    def test_shape(self):
        self.assert_fault(lambda tensors: tensors.update(hidden_states=("BF16", self.texts[1].states[:-1])),
                          "hidden_states: shape")

    def test_type(self):
        self.assert_fault(lambda tensors: tensors.update(hidden_states=("I16", self.texts[1].states.view(np.int16))),
                          "hidden_states: type I16")

    def test_no_states(self):
        self.assert_fault(lambda tensors: tensors.pop("hidden_states"), "has no tensor hidden_states")

    def test_fp8_without_scales(self):
        self.assert_fault(lambda tensors: tensors.update(hidden_states=("F8_E4M3", quantise(self.texts[1].states)[0])),
                          "hidden_states_scales is missing")

    def test_scales_of_another_length(self):
        codes, scales = quantise(self.texts[1].states)
        self.assert_fault(lambda tensors: tensors.update(hidden_states=("F8_E4M3", codes),
                                                         hidden_states_scales=("F32", scales[:-1])),
                          "hidden_states_scales: F32")

    @needs_dtrain
    def test_other_tensors_of_the_file_are_left_aside(self):
        self.dump(lambda tensors: tensors.update(extra=("I8", np.zeros(3, dtype=np.int8))))
        path = self.state_file("cmpl-1-0")
        with open(path, "rb") as file:
            content = file.read()
        with open(path, "wb") as file:
            file.write(content.replace(b'"dtype":"I8"', b'"dtype":"Q8"'))
        self.imported()
        self.assert_shard("train-00000.h5", [text.states for text in self.texts])

    def test_truncated_file(self):
        self.dump()
        with open(self.state_file("cmpl-1-0"), "r+b") as file:
            file.truncate(os.path.getsize(file.name) - 2)
        self.refused("cmpl-1-0.safetensors: tensor")

    def test_not_finite(self):
        def spoil(tensors):
            states = self.texts[1].states.copy()
            states[5, 2, 7] = 0x7FC0
            tensors["hidden_states"] = ("BF16", states)
        self.dump(spoil)
        with self.assertRaisesRegex(InputError, "cmpl-1-0.*token 5, plane 2, column 7: NaN or infinity"):
            speculators_dump.read_states(self.state_file("cmpl-1-0"))

    def test_states_that_were_never_computed(self):
        def spoil(tensors):
            states = self.texts[1].states.copy()
            states[3] = 0
            tensors["hidden_states"] = ("BF16", states)
        self.dump(spoil)
        with self.assertRaisesRegex(InputError, "token 3, plane 0: all zero"):
            speculators_dump.read_states(self.state_file("cmpl-1-0"))

    def test_a_file_that_is_being_written(self):
        self.dump()
        with open(self.state_file("cmpl-1-0") + ".lock", "w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.refused("is still being written")

    def test_compressed_file(self):
        self.dump()
        with open(self.state_file("cmpl-9-0") + ".zst", "wb"):
            pass
        self.refused("is compressed")

    def test_token_outside_the_vocabulary(self):
        self.texts = [*self.texts[:-1], Text(np.append(self.texts[-1].ids[:-1], 260), self.texts[-1].mask,
                                             self.texts[-1].states)]
        lines = self.dump()
        self.refused(f"{lines}:6: token id 260 is outside the vocabulary of 260")

    def test_layer_ids(self):
        self.dump()
        for layers, numbering, text in (("0,2,3", "vllm", "the embedding's output"),
                                        ("2,3,6", "vllm", "the last hidden state itself"),
                                        ("2,3,7", "vllm", "must ascend within the model's 6 layers"),
                                        ("3,2,1", "output", "must ascend")):
            self.refused(text, layers=layers, numbering=numbering)

    def test_layers_are_verified_or_taken_on_trust_by_name(self):
        self.dump()
        self.refused("--unverified layers", trust=False)


    def test_cutting(self):
        self.dump()
        for option, value, text in (("--split-val", "nan", "--split-val is a share below 1 or a whole number"),
                                    ("--shard-bytes", "0", "--shard-bytes must be above 0"),
                                    ("--shard-bytes", "-1", "--shard-bytes must be above 0")):
            self.refused(text, option, value)


class Probes(unittest.TestCase):
    """Which documents --model looks at."""

    @staticmethod
    def choose(lengths):
        documents = [mock.Mock(tokens=tokens, place=place) for place, tokens in enumerate(lengths)]
        return [[document.place for document in some] for some in import_check.choose_probes(documents)]

    def test_few(self):
        self.assertEqual(self.choose([20, 90, 30, 80, 100, 3]), [[4, 1, 3], [0, 2]])
        self.assertEqual(self.choose([5]), [[0], []])

    def test_many_are_spread_from_end_to_end(self):
        longest, spread = self.choose([300, 200, 400] + [100] * 10000)
        self.assertEqual(longest, [2, 0, 1])
        self.assertEqual((len(spread), spread[0], spread[-1]), (import_check.SPREAD, 3, 10002))
        self.assertLess(max(np.diff(spread)), 200)


class Norm(unittest.TestCase):
    def test_either_kind_of_weight(self):
        rng = np.random.default_rng(1)
        states, weight = rng.normal(size=(20, 64)) * 9, rng.uniform(0.2, 3, 64)
        size = np.sqrt((states ** 2).mean(axis=1, keepdims=True))
        self.assertFalse(import_check.looks_normed(states, weight))
        self.assertTrue(import_check.looks_normed(states / size * weight, weight))
        self.assertTrue(import_check.looks_normed(states / size * (1 + weight), weight))


@needs_dtrain
@unittest.skipIf(torch is None or not find_spec("transformers"), "needs torch and transformers")
class Layers(Case):
    """--model: the target itself says which layers the planes are."""

    def test_right_ids(self):
        self.dump()
        printed = self.imported("--model", MODEL, "--device", "cpu", trust=False)
        self.assertIn("planes are the layers declared", printed)
        self.assertNotIn("NOT verified", printed)

    def test_ids_in_the_other_numbering(self):
        self.dump()
        self.refused("plane 0 was declared to be the output of layer 2, but is the output of layer 1; every wrong "
                     "plane is off by one", "--model", MODEL, "--device", "cpu", numbering="output", trust=False)

    def test_one_wrong_layer(self):
        self.dump()
        self.refused("plane 2 was declared to be the output of layer 4, but is the output of layer 3", "--model", MODEL,
                     "--device", "cpu", layers="2,3,5", trust=False)

    def test_one_document_of_swapped_planes(self):
        """The second document is not among the longest."""
        self.assertNotIn(1, np.argsort([-len(text.ids) for text in self.texts], kind="stable")[:import_check.PROBES])
        self.dump(lambda tensors: tensors.update(hidden_states=("BF16", self.texts[1].states[:, [1, 0, 2, 3]])))
        self.refused(f"{self.state_file('cmpl-1-0')}: hidden_states: plane 0 was declared to be the output of layer 1, "
                     "but is the output of layer 2", "--model", MODEL, "--device", "cpu", trust=False)

    def test_shifted_states(self):
        self.dump()
        for number, text in enumerate(self.texts):
            write_tensors(self.state_file(f"cmpl-{number}-0"), {
                "token_ids": ("I64", text.ids.astype(np.int64)), "hidden_states": ("BF16", np.roll(text.states, 1, 0))})
        self.refused("is no layer of this model", "--model", MODEL, "--device", "cpu", trust=False)


@needs_dtrain
@unittest.skipIf(torch is None or datasets is None, "needs torch, pyarrow and datasets")
class Arrow(Case):
    def arrow(self):
        data = os.path.join(self.folder, "data")
        rows = {"input_ids": [text.ids.tolist() for text in self.texts],
                "loss_mask": [text.mask.tolist() for text in self.texts]}
        datasets.Dataset.from_dict(rows).save_to_disk(data, num_shards=2)
        return data

    def test_bf16(self):
        self.dump(name="hs_{}")
        self.imported(data=self.arrow())
        self.assert_shard("train-00000.h5", [text.states for text in self.texts])

    def test_rows_that_belong_to_another_data_set(self):
        self.dump(name="hs_{}")
        shutil.copy(self.state_file("hs_0"), self.state_file("hs_3"))
        self.refused("hs_3.safetensors: token_ids", data=self.arrow())

    def test_damaged_arrow_file(self):
        self.dump(name="hs_{}")
        data = self.arrow()
        path = os.path.join(data, "data-00000-of-00002.arrow")
        with open(path, "r+b") as file:
            file.truncate(os.path.getsize(path) // 2)
        self.refused(f"{path}: not a readable Arrow file", data=data)

    def test_masks_that_are_no_masks(self):
        self.dump(name="hs_{}")
        for name, value, expected in (("two", 2, "loss_mask holds 2"), ("none", None, "row 2: column loss_mask is or"),
                                      ("float", 0.5, "column loss_mask: lists of double")):
            masks = [text.mask.tolist() for text in self.texts]
            masks[2][-1] = value
            data = os.path.join(self.folder, name)
            datasets.Dataset.from_dict({"input_ids": [text.ids.tolist() for text in self.texts],
                                        "loss_mask": masks}).save_to_disk(data)
            self.refused(expected, data=data)

    def test_columns_that_are_no_lists(self):
        self.dump(name="hs_{}")
        for name, ids, text in (("numbers", [1, 2], "expected lists of integers"), ("words", ["x", "y"], "string; expected lists"),
                                ("nested", [[[1]], [[2]]], "lists of list")):
            data = os.path.join(self.folder, name)
            datasets.Dataset.from_dict({"input_ids": ids, "loss_mask": [[1], [1]]}).save_to_disk(data)
            self.refused("column input_ids: ", data=data)
            self.refused(text, data=data)

    def test_a_column_twice(self):
        import pyarrow
        self.dump(name="hs_{}")
        data = self.arrow()
        path = os.path.join(data, "data-00000-of-00002.arrow")
        with open(path, "rb") as file:
            table = pyarrow.ipc.open_stream(file.read()).read_all()
        table = table.append_column("input_ids", table["loss_mask"])
        with open(path, "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
        self.refused(f"{path}: several columns input_ids", data=data)

    def test_no_mask(self):
        self.dump(name="hs_{}")
        data = os.path.join(self.folder, "data")
        datasets.Dataset.from_dict({"input_ids": [text.ids.tolist() for text in self.texts]}).save_to_disk(data)
        self.refused("no column loss_mask; it has input_ids", data=data)


@unittest.skipIf(torch is None, "needs torch")
class Specforge(Case):
    """Torch files as SpecForge lays them out: EAGLE-3 with its post-norm teacher, DFlash without one."""

    def write(self, kind="eagle3", suffix=".ckpt", change=None):
        """change(data) alters what the file of the second document holds. -> bits [S, P, H] of each document."""
        tiny, expected = TinyModel(MODEL), []
        for number, text in enumerate(self.texts):
            states = text.states.copy()
            states[:, -1] = float_to_bf16(rms_norm(bf16_to_float(states[:, -1]), tiny.norm, tiny.eps))
            tensor = torch.from_numpy(states.view(np.int16)).view(torch.bfloat16)
            layers, last = tensor[:, :-1].reshape(1, len(text.ids), -1), tensor[None, :, -1]
            data = {"input_ids": torch.from_numpy(text.ids), "loss_mask": torch.from_numpy(text.mask).long()}
            if kind == "eagle3":
                data.update(aux_hidden_state=layers.clone(), hidden_state=last.clone())
            else:
                data.update(hidden_states=layers.clone(), position_ids=torch.arange(len(text.ids))[None])
            expected.append(states if kind == "eagle3" else states[:, :-1])
            if change and number == 1:
                change(data)
            self.save(data, self.path(number, suffix))
        return expected

    def path(self, number, suffix=".ckpt"):
        """Several in a folder, so that 5 comes before 10 only by number."""
        folder = os.path.join(self.states, f"rows_{number // 4 * 20}-{number // 4 * 20 + 20}")
        os.makedirs(folder, exist_ok=True)
        return os.path.join(folder, f"data_{number * 5}{suffix}")

    @staticmethod
    def save(data, path):
        with (gzip.open(path, "wb") if path.endswith(".gz") else open(path, "wb")) as file:
            torch.save(data, file)

    def run_import(self, *options, layers="1,2,3", numbering="output", **arguments):
        argv = ["--format", "specforge", *options]
        return super().run_import(*argv, data=self.states, one_folder=True, layers=layers, numbering=numbering,
                                  **arguments)

    @needs_dtrain
    def test_eagle3(self):
        expected = self.write()
        self.imported()
        self.assert_shard("train-00000.h5", expected, last_hidden="post_norm")

    @needs_dtrain
    def test_compressed(self):
        expected = self.write(suffix=".ckpt.gz")
        self.imported()
        self.assert_shard("train-00000.h5", expected, last_hidden="post_norm")

    @needs_dtrain
    def test_dflash_has_no_teacher(self):
        expected = self.write("dflash")
        self.refused("has no target_last_hidden_states: there is no teacher")
        self.assertIn("only ce_data", self.imported("--last-hidden", "absent"))
        self.assert_shard("train-00000.h5", expected, last_hidden="absent")

    @needs_dtrain
    @unittest.skipIf(not find_spec("transformers"), "needs transformers")
    def test_layers_are_verified(self):
        expected = self.write()
        model = ("--model", MODEL, "--device", "cpu")
        self.refused("the ids are in the other --numbering", *model, numbering="vllm", layers="1,2,3", trust=False)
        self.imported(*model, trust=False)
        self.assert_shard("train-00000.h5", expected, last_hidden="post_norm")

    def test_pre_norm_states(self):
        self.write()
        for number, text in enumerate(self.texts):
            data = torch.load(self.path(number), weights_only=True)
            last = text.states[:, -1].copy().view(np.int16)
            data["hidden_state"] = torch.from_numpy(last).view(torch.bfloat16)[None]
            self.save(data, self.path(number))
        self.refused("is not behind this target's final norm")

    def test_code_in_a_pickle_is_not_run(self):
        ran = os.path.join(self.folder, "ran")

        class Trap:
            def __reduce__(self):
                return os.mkdir, (ran,)
        self.write(change=lambda data: data.update(trap=Trap()))
        self.refused(f"{self.path(1)}: cannot be loaded")
        self.assertFalse(os.path.exists(ran))

    def test_faults(self):
        def other(name, value):
            return lambda data: data.update({name: value})
        length = len(self.texts[1].ids)
        for change, text in (
                (lambda data: data.pop("aux_hidden_state"), "has none of aux_hidden_state, hidden_states"),
                (lambda data: data.pop("loss_mask"), "has no tensor loss_mask"),
                (other("loss_mask", torch.full((length,), 2)), "loss_mask holds 2"),
                (other("loss_mask", torch.ones(length - 1)), f"{length} input_ids but {length - 1} loss_mask values"),
                (other("input_ids", torch.full((length,), 260)), "token id 260 is outside"),
                (other("hidden_state", torch.zeros(1, length - 1, 128)), "hidden_state: shape"),
                (other("aux_hidden_state", torch.zeros(1, length, 256)), "aux_hidden_state: shape"),
                (other("input_ids", torch.ones(length, dtype=torch.complex64)), "input_ids: torch.complex64; expected integers"),
                (other("input_ids", torch.ones(length, dtype=torch.bool)), "input_ids: torch.bool; expected integers"),
                (other("loss_mask", torch.ones(length, dtype=torch.complex64)), "loss_mask: torch.complex64; expected numbers"),
                (other("hidden_state", torch.ones(1, length, 128, dtype=torch.float64)), "hidden_state: torch.float64"),
                (other("position_ids", list(range(length))), "position_ids: not 0, 1, 2"),
                (other("position_ids", torch.zeros(3, length)), "position_ids: not 0, 1, 2"),
                (other("position_ids", torch.arange(length - 1)), "position_ids: not 0, 1, 2")):
            self.write(change=change)
            self.refused(f"{self.path(1)}: {text}")

    @needs_dtrain
    def test_tensors_that_were_trained(self):
        def parameters(data):
            for name in ("aux_hidden_state", "hidden_state"):
                data[name] = torch.nn.Parameter(data[name])
            data["loss_mask"] = torch.nn.Parameter(data["loss_mask"].float())
        expected = self.write(change=parameters)
        self.imported()
        self.assert_shard("train-00000.h5", expected, last_hidden="post_norm")

    def test_truncated_files(self):
        for suffix in (".ckpt", ".ckpt.gz"):
            self.write(suffix=suffix)
            with open(self.path(1, suffix), "r+b") as file:
                file.truncate(os.path.getsize(file.name) // 2)
            self.refused(f"{self.path(1, suffix)}: cannot be loaded")
            for number in range(len(self.texts)):
                os.remove(self.path(number, suffix))

    def test_the_same_document_twice(self):
        self.write()
        self.write(suffix=".ckpt.gz")
        self.refused("the same document as")


@needs_dtrain
@unittest.skipIf(torch is None or datasets is None or hs_connectors is None, "needs speculators and hs_connectors")
class Published(Case):
    """Dumps by speculators' own functions, and what speculators itself reads of them."""

    def prepare(self, fp8):
        from hs_connectors.fp8_utils import SCALES_KEY, quantize_tensor_to_fp8
        from safetensors.torch import save_file
        rows = datasets.Dataset.from_dict({"input_ids": [text.ids.tolist() for text in self.texts],
                                           "loss_mask": [text.mask.tolist() for text in self.texts]})
        data = os.path.join(self.folder, "data")
        preprocessing.build_speculator_training_dataset(rows, None, num_proc=1).save_to_disk(data)
        for number, text in enumerate(self.texts):
            states = torch.from_numpy(text.states).view(torch.bfloat16)
            tensors = {"hidden_states": states, "token_ids": torch.from_numpy(text.ids)}
            if fp8:
                tensors["hidden_states"], tensors[SCALES_KEY] = quantize_tensor_to_fp8(states)
            save_file(tensors, self.state_file(f"hs_{number}"))
        return data

    def read(self, transfer):
        from pathlib import Path
        own = transfer(Path(self.states))
        return [own.get_cached(number)["hidden_states"] for number in range(len(self.texts))]

    def test_bf16(self):
        self.imported("--model", MODEL, "--device", "cpu", data=self.prepare(False), trust=False)
        own = [states.view(torch.uint16).numpy() for states in self.read(hs_connectors.FileTransfer)]
        self.assert_shard("train-00000.h5", own)

    def test_fp8_is_what_speculators_reads_up_to_its_rounding_of_the_scale(self):
        self.imported("--model", MODEL, "--device", "cpu", data=self.prepare(True), trust=False)
        with h5py.File(os.path.join(self.out, "train-00000.h5"), "r") as file:
            ours = bf16_to_float(file["hidden_states"][:])
        own = torch.cat(self.read(hs_connectors.FP8Transfer)).float().numpy()
        np.testing.assert_allclose(ours, own, rtol=2**-7, atol=0)


if datasets:
    datasets.disable_progress_bars()

if __name__ == "__main__":
    for missing, what in ((not os.path.exists(DTRAIN), "$DTRAIN: no import to the end"),
                          (torch is None, "torch and transformers: layers are not verified"),
                          (datasets is None, "pyarrow and datasets: no Arrow data sets"),
                          (hs_connectors is None, "speculators: no dumps by its own functions")):
        if missing:
            print(f"skipped for want of {what}")
    unittest.main()
