"""tools/import_features.py on caches of DeepSpec and dumps of Model-Optimizer, written here as those lay them out, and on
files that are made to do harm. See test_import.py for what is needed.
"""

import gzip
import json
import os
import struct
import subprocess
import sys
import unittest
import zipfile
from unittest import mock

import numpy as np
from test_import import DTRAIN, MODEL, ROOT, Case, Specforge, Text, needs_dtrain, torch

from dtrain_tools import float8, mask_check, specforge_dump, tensor_file
from dtrain_tools.documents import InputError
from dtrain_tools.tensor_file import bf16_to_float, float_to_bf16, write_tensors
from tiny_model import TinyModel, rms_norm

import h5py  # isort: skip


def post_norm(states):
    """Bits [S, P, H] with the last plane behind the tiny target's final norm."""
    tiny, states = TinyModel(MODEL), states.copy()
    states[:, -1] = float_to_bf16(rms_norm(bf16_to_float(states[:, -1]), tiny.norm, tiny.eps))
    return states


class DumpCase(Case):
    """format: of --format. The dump is the folder self.states."""

    format, numbering = None, "output"

    def run_import(self, *options, layers="1,2,3", numbering=None, **arguments):
        argv = ["--format", self.format, *options]
        return super().run_import(*argv, data=self.states, one_folder=True, layers=layers,
                                  numbering=numbering or self.numbering, **arguments)


class Deepspec(DumpCase):
    format = "deepspec"

    def write(self, layer_ids=(1, 2, 3), shards=2, kind="bfloat16", change=None, names=None, **manifest):
        """Texts go to the shards in turn; change(arrays) alters the second one's. -> bits [S, P, H] of each text."""
        expected, files, index = [], [bytearray() for _ in range(shards)], bytearray()
        for number, text in enumerate(self.texts):
            states = post_norm(text.states)
            if kind != "bfloat16":
                import torch as t
                narrow = t.from_numpy(states.view(np.int16)).view(t.bfloat16).to(getattr(t, kind))
                codes = narrow.view(t.uint8).numpy()
                states = narrow.to(t.bfloat16).view(t.int16).numpy().view(np.uint16)
            expected.append(states)
            stored = states if kind == "bfloat16" else codes
            arrays = [text.ids.astype("<i4"), np.ones(len(text.ids), np.uint8), text.mask, stored[:, :-1], stored[:, -1]]
            if change and number == 1:
                change(arrays)
            shard, offsets = number % shards, []
            for array in arrays:
                offsets.append(len(files[shard]))
                files[shard] += array.tobytes()
            index += struct.pack("<QIIQQQQQ", number, shard, len(text.ids), *offsets)
        for number, content in enumerate(files):
            with open(os.path.join(self.states, f"shard-{number:05d}.bin"), "wb") as file:
                file.write(content)
        with open(os.path.join(self.states, "samples.idx"), "wb") as file:
            file.write(index)
        names = names or [f"shard-{n:05d}.bin" for n in range(shards)]
        entry = {"version": 2, "num_samples": len(self.texts), "num_shards": shards, "target_layer_ids": list(layer_ids),
                 "hidden_dtype": kind, "token_dtype": "int32", "mask_dtype": "uint8", "index_record_size": 56,
                 "hidden_size": 128, "target_model_name_or_path": "tiny",
                 "shards": [{"shard_id": n, "file_name": name} for n, name in enumerate(names)], **manifest}
        with open(os.path.join(self.states, "manifest.json"), "w", encoding="utf-8") as file:
            json.dump(entry, file)
        return expected

    @needs_dtrain
    def test_bf16(self):
        expected = self.write()
        self.imported()
        self.assert_shard("train-00000.h5", expected, last_hidden="post_norm")

    @needs_dtrain
    @unittest.skipIf(torch is None, "needs torch")
    def test_float8_has_no_scale(self):
        expected = self.write(kind="float8_e5m2")
        self.imported()
        self.assert_shard("train-00000.h5", expected, last_hidden="post_norm")

    @needs_dtrain
    @unittest.skipIf(torch is None, "needs torch")
    def test_e4m3_stays_as_it_is(self):
        expected = self.write(kind="float8_e4m3fn")
        self.imported("--planes", "float8")
        with h5py.File(os.path.join(self.out, "train-00000.h5"), "r") as file:
            self.assertEqual(file.attrs["dtype"], "float8_e4m3")
            found = float8.dequantise(float8.Float8(file["hidden_states"][:], file["scales"][:], file["last_hidden"][:]))
            np.testing.assert_array_equal(found, bf16_to_float(np.concatenate(expected)))

    @needs_dtrain
    def test_planes_may_become_float8(self):
        expected = np.concatenate(self.write())
        self.imported("--planes", "float8")
        with h5py.File(os.path.join(self.out, "train-00000.h5"), "r") as file:
            found = float8.dequantise(float8.Float8(file["hidden_states"][:], file["scales"][:], file["last_hidden"][:]))
        np.testing.assert_array_equal(found[:, -1], bf16_to_float(expected[:, -1]))
        values = bf16_to_float(expected)
        step = np.maximum(np.abs(values) * 2**-4, np.abs(values).max(axis=2, keepdims=True) / 448 * 2**-9)
        self.assertTrue((np.abs(found - values) <= step * 1.001).all())

    @needs_dtrain
    def test_killed_at_any_moment(self):
        """Killed again and again, at moments that come later and later; then it ends with what one run gives."""
        self.write()
        options = ("--shard-bytes", "100000", "--split-val", "2")
        self.imported(*options)
        whole, self.out = self.out, os.path.join(self.folder, "again")
        command = [sys.executable, os.path.join(ROOT, "tools", "import_features.py"), "--format", "deepspec", "--data",
                   self.states, "--target", MODEL, "--out", self.out, "--dtrain", DTRAIN, "--name", "tiny", "--unverified",
                   "layers", *options]
        kills, wait = 0, 0.1
        while True:
            with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
                try:
                    _, printed = process.communicate(timeout=wait)
                    self.assertEqual(process.returncode, 0, printed)
                    break
                except subprocess.TimeoutExpired:
                    process.kill()
            kills, wait = kills + 1, wait * 1.15
        self.assertGreater(kills, 3)
        names = sorted(name for name in os.listdir(whole) if name.endswith(".h5"))
        self.assertGreater(len(names), 3)
        self.assertEqual(names, sorted(name for name in os.listdir(self.out) if name.endswith(".h5")))
        self.assertFalse(os.path.exists(os.path.join(self.out, "unchecked")))
        for name in names:
            with h5py.File(os.path.join(whole, name), "r") as a, h5py.File(os.path.join(self.out, name), "r") as b:
                for dataset in a:
                    np.testing.assert_array_equal(a[dataset][:], b[dataset][:], f"{name} {dataset}")

    @needs_dtrain
    @unittest.skipIf(torch is None, "needs torch")
    def test_layers_are_those_of_the_manifest(self):
        self.write(layer_ids=(2, 3, 4))
        self.refused("--layer-ids 1,2,3 (output): the manifest says 2,3,4")
        self.refused("plane 0 was declared to be the output of layer 2, but is the output of layer 1", "--model", MODEL,
                     "--device", "cpu", layers="2,3,4", trust=False)
        self.write(layer_ids=(-1, 2, 3))
        self.refused("-1,2,3 (output): the embedding's output", layers=None)

    @unittest.skipIf(torch is None, "needs torch")
    def test_norm_twice(self):
        tiny = TinyModel(MODEL)

        def twice(arrays):
            arrays[4] = float_to_bf16(rms_norm(bf16_to_float(arrays[4]), tiny.norm, tiny.eps))
        self.texts = [max(self.texts, key=lambda text: len(text.ids))] * 2
        self.write(change=twice)
        self.refused("plane 3 was declared to be the final norm's output, but is the final norm's output, normed again",
                     "--model", MODEL, "--device", "cpu", trust=False)

    def test_faults(self):
        length = len(self.texts[1].ids)

        def array(at, value):
            return lambda arrays: arrays.__setitem__(at, value)
        for change, text in ((array(1, np.zeros(length, np.uint8)), "attention_mask: not all 1"),
                             (array(2, np.full(length, 3, np.uint8)), "loss_mask holds 3"),
                             (array(0, np.full(length, 260, "<i4")), "token id 260 is outside")):
            self.write(change=change)
            self.refused(f"{self.states}: sample 1: {text}")
        for manifest, text in (({"version": 1}, "version is 1; 2 is expected"), ({"num_samples": 5}, "num_samples"),
                               ({"num_shards": 3}, "num_shards is 3"), ({"hidden_dtype": "float16"}, "hidden_dtype"),
                               ({"hidden_dtype": ["bfloat16"]}, "hidden_dtype is ['bfloat16']"),
                               ({"hidden_size": 64}, "hidden_size is 64; 128 is expected"),
                               ({"target_layer_ids": "1"}, "target_layer_ids: expected")):
            self.write(**manifest)
            self.refused(text)
        os.remove(os.path.join(self.states, "manifest.json"))
        self.refused("a cache is finished when it has its manifest")

    def test_other_shards_than_the_index(self):
        self.write()
        path = os.path.join(self.states, "shard-00001.bin")
        with open(path, "r+b") as file:
            file.truncate(os.path.getsize(path) - 1)
        self.refused(f"sample 5: last: ends after {path}")
        with open(os.path.join(self.states, "samples.idx"), "r+b") as file:
            file.seek(8)
            file.write(struct.pack("<II", 7, 3))
        self.refused("sample 0: is in shard 7; there are 2")

    def test_a_manifest_that_leads_out_of_the_folder(self):
        for name in ("../secret.bin", "/etc/passwd", "..", ""):
            self.write(shards=1, names=[name])
            self.refused("leaves the folder")

    def test_a_record_that_asks_for_more_than_there_is(self):
        self.write()
        with open(os.path.join(self.states, "samples.idx"), "r+b") as file:
            file.write(struct.pack("<QII", 0, 0, 2**32 - 1))
        self.refused("sample 0: input_ids: ends after")


@unittest.skipIf(torch is None, "needs torch")
class Modelopt(DumpCase):
    format = "modelopt"

    def write(self, hidden=post_norm, masks=True, change=None):
        expected = []
        for number, text in enumerate(self.texts):
            states = hidden(text.states)
            tensor = torch.from_numpy(states.view(np.int16)).view(torch.bfloat16)
            data = {"input_ids": torch.from_numpy(text.ids), "hidden_states": tensor[:, -1].clone(),
                    "aux_hidden_states": tensor[:, :-1].reshape(len(text.ids), -1).clone(),
                    "conversation_id": f"conversation-{number}"}
            if masks:
                data["loss_mask"] = torch.from_numpy(text.mask).long()
            if change and number == 1:
                change(data)
            torch.save(data, self.path(number))
            expected.append(states)
        return expected

    def path(self, number):
        return os.path.join(self.states, f"conversation-{number}.pt")

    @needs_dtrain
    def test_script_for_transformers(self):
        expected = self.write()
        self.imported("--last-hidden", "post_norm", "--model", MODEL, "--device", "cpu", trust=False)
        self.assert_shard("train-00000.h5", expected, last_hidden="post_norm")

    @needs_dtrain
    def test_script_for_vllm(self):
        expected = self.write(hidden=np.array)
        self.imported("--last-hidden", "pre_norm", "--model", MODEL, "--device", "cpu", layers="2,3,4", numbering="vllm",
                      trust=False)
        self.assert_shard("train-00000.h5", expected)

    def test_norm_and_numbering_are_asked_for_and_compared(self):
        status, printed = self.run_import()
        self.assertEqual(status, 2)
        self.assertIn("--last-hidden is needed with modelopt", printed)
        self.write(hidden=np.array)
        self.refused("is not behind this target's final norm", "--last-hidden", "post_norm")
        self.write()
        self.refused("behind the target's final norm already", "--last-hidden", "pre_norm")
        self.refused("every wrong plane is off by one", "--last-hidden", "post_norm", "--model", MODEL, "--device", "cpu",
                     numbering="vllm", trust=False)

    @needs_dtrain
    def test_masks_from_elsewhere(self):
        expected = self.write(masks=False)
        self.refused("has no tensor loss_mask", "--last-hidden", "post_norm")
        lines = self.dump(name="elsewhere-{}")
        for number in range(len(self.texts)):
            os.remove(self.state_file(f"elsewhere-{number}"))
        self.imported("--last-hidden", "post_norm", "--documents", lines)
        self.assert_shard("train-00000.h5", expected, last_hidden="post_norm")

    @needs_dtrain
    def test_prompts_that_are_supervised_are_told(self):
        self.write(change=lambda data: data.update(loss_mask=torch.ones(len(data["input_ids"]), dtype=torch.long)))
        self.assertIn("1 documents in which every token is supervised", self.imported("--last-hidden", "post_norm"))

    def test_faults(self):
        length = len(self.texts[1].ids)
        for change, text in (
                (lambda data: data.pop("aux_hidden_states"), "has no tensor aux_hidden_states"),
                (lambda data: data.update(aux_hidden_states=torch.empty(0)), "aux_hidden_states: shape [0]"),
                (lambda data: data.update(hidden_states=torch.zeros(length, 64)), "hidden_states: shape"),
                (lambda data: data.update(loss_mask=torch.ones(length - 1)), f"{length} input_ids but {length - 1} loss")):
            self.write(change=change)
            self.refused(f"{self.path(1)}: {text}", "--last-hidden", "post_norm")

    def test_code_in_a_pickle_is_not_run(self):
        ran = os.path.join(self.folder, "ran")

        class Trap:
            def __reduce__(self):
                return os.mkdir, (ran,)
        self.write(change=lambda data: data.update(trap=Trap()))
        self.refused(f"{self.path(1)}: cannot be loaded", "--last-hidden", "post_norm")
        self.assertFalse(os.path.exists(ran))

    def test_a_tensor_of_more_values_than_bytes(self):
        self.write(change=lambda data: data.update(input_ids=torch.zeros(1, dtype=torch.long).expand(2**40)))
        self.refused(f"{self.path(1)}: input_ids: shape [1099511627776] is of more values than the file holds",
                     "--last-hidden", "post_norm")

    def test_tensors_without_values_of_their_own(self):
        length = len(self.texts[1].ids)
        for name, tensor, text in (
                ("input_ids", torch.empty(length, dtype=torch.long, device="meta"), "without values"),
                ("loss_mask", torch.empty(length, dtype=torch.long, device="meta"), "without values"),
                ("aux_hidden_states", torch.empty(1 << 40, 8, device="meta"), "without values"),
                ("aux_hidden_states", torch.ones(length, 3).to_sparse(), "of layout sparse_coo"),
                ("hidden_states", torch.nested.nested_tensor([torch.ones(length, 2)]), "of layout nested")):
            with self.subTest(name=name, text=text):
                self.write(change=lambda data, name=name, tensor=tensor: data.update({name: tensor}))
                self.refused(f"{self.path(1)}: {name}: a tensor {text}", "--last-hidden", "post_norm")

    def rewrite(self, change):
        """Copies the second document's archive; change(name, bytes, to) writes a member."""
        path = self.path(1)
        with zipfile.ZipFile(path) as archive:
            members = [(entry.filename, archive.read(entry)) for entry in archive.infolist()]
        with zipfile.ZipFile(path, "w") as to:
            for name, content in members:
                change(name, content, to)

    def test_archives_that_are_no_torch_files(self):
        def leaving(name, content, to):
            to.writestr(name, content)
            if name.endswith("data.pkl"):
                to.writestr("../../outside", b"x")

        def packed(name, content, to):
            to.writestr(name, content, compress_type=zipfile.ZIP_DEFLATED)
        for change, text in ((leaving, "leaves the archive"), (packed, "is compressed, as torch never writes it")):
            self.write()
            self.rewrite(change)
            self.refused(text, "--last-hidden", "post_norm")
        self.assertFalse(os.path.exists(os.path.join(self.folder, "outside")))

    def test_pickles_that_are_none(self):
        for content in (b"0.", b"\x80\x02N.", b"\x80\x02]q\x00h\x07.", b"", b"\x80\x02}q\x00(X\x01\x00\x00\x00aK"):
            self.write()
            self.rewrite(lambda name, old, to, content=content: to.writestr(name, content if name.endswith(".pkl") else old))
            self.refused(self.path(1) + ": ", "--last-hidden", "post_norm")

    def test_truncated(self):
        self.write()
        with open(self.path(1), "r+b") as file:
            file.truncate(os.path.getsize(file.name) // 2)
        self.refused(f"{self.path(1)}: cannot be loaded", "--last-hidden", "post_norm")


@unittest.skipIf(torch is None, "needs torch")
class Bomb(Specforge):
    """A small file that unpacks to a large one."""

    def test_is_refused_before_it_has_unpacked(self):
        self.write(suffix=".ckpt.gz")
        with gzip.open(self.path(1, ".ckpt.gz"), "wb") as file:
            for _ in range(64):
                file.write(bytes(1 << 20))
        with mock.patch.object(specforge_dump, "DOCUMENT_TOKENS", 4096):
            self.refused(f"{self.path(1, '.ckpt.gz')}: unpacks to more than 8,388,608 bytes")


@unittest.skipIf(torch is None, "needs torch")
class NoRoom(Specforge):
    def test_a_full_disk_is_no_fault_of_the_file(self):
        self.write(suffix=".ckpt.gz")
        with mock.patch("tempfile.NamedTemporaryFile", lambda **options: open("/dev/full", "wb", buffering=0)):
            status, printed = self.run_import()
        self.assertEqual(status, 1, printed)
        self.assertIn(f"{self.path(0, '.ckpt.gz')} can not be unpacked there: No space left on device", printed)


for _name in [name for name in dir(Specforge) if name.startswith("test_")]:
    setattr(Bomb, _name, None)  # they run in test_import
    setattr(NoRoom, _name, None)


class Tensors(unittest.TestCase):
    """safetensors whose header lies."""

    def test_headers(self):
        import tempfile
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "a.safetensors")
            write_tensors(path, {"x": ("F32", np.zeros((4, 4), np.float32))})
            with open(path, "rb") as file:
                good = file.read()
            body = good[8 + int.from_bytes(good[:8], "little"):]
            for entry in ({"dtype": "F32", "shape": [4, 5], "data_offsets": [0, 64]},
                          {"dtype": "F32", "shape": [-4, -4], "data_offsets": [0, 64]},
                          {"dtype": "F32", "shape": [4, 4], "data_offsets": [-64, 0]},
                          {"dtype": "F32", "shape": [4, 4], "data_offsets": [64, 0]},
                          {"dtype": "F32", "shape": [4, 4]}, {"dtype": ["F32"], "shape": "x", "data_offsets": [0, 64]},
                          {"dtype": "F32", "shape": [2**62, 16], "data_offsets": [0, 2**68]},
                          {"dtype": "U16", "shape": [32], "data_offsets": [0, 64]}, "x"):
                text = json.dumps({"x": entry}).encode()
                with open(path, "wb") as file:
                    file.write(len(text).to_bytes(8, "little") + text + body)
                with self.assertRaises(ValueError, msg=str(entry)):
                    tensor_file.read_tensors(path)
            for text in (b"[1]", b"{", b"\xff\xfe", b"[" * 100000):
                with open(path, "wb") as file:
                    file.write(len(text).to_bytes(8, "little") + text + body)
                with self.assertRaisesRegex(ValueError, "not a safetensors file"):
                    tensor_file.read_tensors(path)
            with open(path, "wb") as file:
                file.write(good[:-1])
            with self.assertRaisesRegex(ValueError, "tensor x ends after the file"):
                tensor_file.read_header(path)


class Masks(unittest.TestCase):
    """Conversations <start> user \\n ... <end> \\n <start> assistant \\n answer <end> \\n, in which masks are shifted."""

    START, END, USER, ASSISTANT, LINE = 1, 2, 3, 4, 5

    def check(self, shift, ends=(2,), with_end=True, thinks=False):
        random, check = np.random.default_rng(3), mask_check.MaskCheck(ends)
        for _ in range(12):
            ids, mask = [], []
            for _ in range(2):
                answer = ([6] if thinks else []) + random.integers(10, 99, 9).tolist()
                question = random.integers(10, 99, 5).tolist()
                prompt = [self.START, self.USER, self.LINE, *question, self.END, self.LINE, self.START, self.ASSISTANT,
                          self.LINE]
                ids += [*prompt, *answer, self.END, self.LINE]
                mask += [0] * len(prompt) + [1] * len(answer) + [int(with_end), 0]
            check.add(np.array(ids), np.roll(np.array(mask, dtype=np.uint8), shift))
        check.refuse_shifted()

    def test_right_masks(self):
        for with_end in (True, False):
            for thinks in (True, False):
                self.check(0, with_end=with_end, thinks=thinks)

    def test_shifted_masks(self):
        for thinks in (True, False):
            with self.assertRaisesRegex(InputError, "shifted to the left"):
                self.check(-1, thinks=thinks)
        with self.assertRaisesRegex(InputError, "shifted to the right"):
            self.check(1)

    def test_nothing_is_said_without_ends(self):
        self.check(1, ends=())

    def test_end_tokens(self):
        self.assertEqual(mask_check.end_tokens(MODEL), {257})


@needs_dtrain
class ShiftedMask(Case):
    def test_is_refused_and_may_be_taken(self):
        """Texts of four turns each, cut from the tiny target's."""
        texts = []
        for text in self.texts:
            mask = np.zeros(len(text.ids), np.uint8)
            ids = text.ids.copy()
            for begin in range(10, len(ids) - 20, 20):
                ids[begin - 5], ids[begin - 2], ids[begin - 1] = 11, 10, 11
                mask[begin - 1:begin + 7] = 1  # from the header's last token on
                ids[begin + 7] = 257
            texts.append(Text(ids, mask, text.states))
        self.texts = texts
        self.dump()
        self.refused("loss_mask is shifted to the left")
        # What these texts say is not what their states are of, so only the verdict on masks is looked at.
        self.assertNotIn("loss_mask is shifted", self.run_import("--unverified", "masks")[1])


if __name__ == "__main__":
    if not os.path.exists(DTRAIN):
        print("skipped for want of $DTRAIN: no import to the end")
    unittest.main()
