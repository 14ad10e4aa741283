#!/usr/bin/env python3
"""Turns hidden states that other engines wrote into feature shards for dtrain.

    import_features.py --data DIR --layer-ids 2,18,33 --numbering vllm --target DIR --model DIR --out OUT
    import_features.py --documents FILE.jsonl --states DIR ...
    import_features.py --format specforge|deepspec|modelopt --data DIR ...

Reads what speculators, vLLM's hidden-state extraction, SpecForge, DeepSpec and Model-Optimizer write. Start the same
command again to go on after a kill. See tools/README.md.
"""

import argparse
import os
import shutil
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from dtrain_tools import speculators_dump as dump  # noqa: E402
from dtrain_tools.command import Help, check_cutting, exit_status, layer_list, say  # noqa: E402
from dtrain_tools.deepspec_dump import DeepspecDump  # noqa: E402
from dtrain_tools.documents import InputError  # noqa: E402
from dtrain_tools.extraction import settle_folder  # noqa: E402
from dtrain_tools.float8 import quantise_bits  # noqa: E402
from dtrain_tools.import_check import (PROBE_TOKENS, SPREAD_TOKENS, check_layers, check_norm, choose_probes,  # noqa: E402
                                       target_states)
from dtrain_tools.importing import Import, lock_folder, plan_shards  # noqa: E402
from dtrain_tools.mask_check import MaskCheck, end_tokens  # noqa: E402
from dtrain_tools.memory import byte_size  # noqa: E402
from dtrain_tools.modelopt_dump import ModeloptDump, masks_by_tokens  # noqa: E402
from dtrain_tools.shards import Float8, token_bytes  # noqa: E402
from dtrain_tools.specforge_dump import SpecforgeDump  # noqa: E402
from dtrain_tools.target_head import read_target_head  # noqa: E402

# As each engine writes it; Model-Optimizer has scripts of both kinds.
LAST_HIDDEN = {"speculators": "pre_norm", "specforge": "post_norm", "deepspec": "post_norm", "modelopt": None}


def build_parser():
    parser = argparse.ArgumentParser(description="turn states of other engines into feature shards",
                                     formatter_class=Help)
    add = parser.add_argument
    add("--format", default="speculators", choices=sorted(LAST_HIDDEN),
        help="of the dump; speculators also for vLLM's own; modelopt is Model-Optimizer")
    add("--data", metavar="DIR", help="speculators: Arrow data set with input_ids and loss_mask (prepare-data); "
                                         "specforge: folder with rows_*/data_*.ckpt or .ckpt.gz; deepspec: folder with "
                                         "manifest.json; modelopt: folder of .pt")
    add("--documents", metavar="FILE", help='instead of --data: JSON lines {"input_ids", "loss_mask"}; states are '
                                            "found by their token_ids. With modelopt: masks that the files lack")
    add("--states", metavar="DIR", help="files of states; default: DATA/hidden_states")
    add("--layer-ids", type=layer_list, metavar="I,J,...",
        help="layers of the planes, as they were given to the engine, without the last hidden state; deepspec's files "
             "say it")
    add("--numbering", choices=["vllm", "output"],
        help="of --layer-ids. vllm (also speculators, modelopt's script for vLLM): i is the output of layer i - 1; "
             "output (also specforge, modelopt's script for Transformers): of layer i")
    add("--last-hidden", choices=["pre_norm", "post_norm", "absent"],
        help="what the plane after those of --layer-ids is; default: pre_norm of speculators, post_norm of specforge "
             "and deepspec; to be given with modelopt (pre_norm of its script for vLLM, post_norm of that for "
             "Transformers)")
    add("--target", required=True, metavar="DIR", help="target directory, or the model's own")
    add("--model", metavar="DIR", help="Hugging Face model: it is run on a few documents, to verify the layers")
    add("--unverified", action="append", default=[], choices=["layers", "masks"],
        help="layers: take --layer-ids on trust, where the model cannot be run here; masks: import masks that look shifted")
    add("--out", required=True, metavar="DIR", help="folder for shards")
    add("--name", metavar="NAME", help="target_model written in the shards; default: the folder's name of --model or --target")
    add("--missing", default="fail", choices=["fail", "skip"], help="documents without a file of states")
    add("--split-val", type=float, default=0, metavar="X",
        help="texts held out for val-*.h5: a share below 1, or a number")
    add("--seed", type=int, default=0, metavar="N", help="of the split")
    add("--planes", default="bfloat16", choices=["bfloat16", "float8"],
        help="of the shards; float8: e4m3 codes with a scale for each token and layer, 58 %% of the bytes")
    add("--shard-bytes", type=byte_size, default="2GiB", metavar="BYTES", help="about the size of a shard")
    add("--device", default="auto", metavar="NAME", help="of --model: auto, cpu, cuda, cuda:1, ...")
    add("--dtrain", metavar="FILE", help="the program whose data check ends the import; default: on PATH")
    return parser


def check_sources(parser, args):
    if args.format == "modelopt":
        if args.data is None or args.states:
            parser.error("modelopt: --data DIR, and --documents where its files have no masks")
        return
    if (args.data is None) == (args.documents is None):
        parser.error("give either --data or --documents")
    if args.format != "speculators" and (args.documents or args.states):
        parser.error(f"--documents and --states are of --format speculators; {args.format}'s files hold all")


def check_arguments(parser, args):
    check_sources(parser, args)
    if args.format != "deepspec" and not (args.layer_ids and args.numbering):
        parser.error("--layer-ids and --numbering are needed: no file says which layers it holds")
    args.last_hidden = args.last_hidden or LAST_HIDDEN[args.format]
    if args.last_hidden is None:
        parser.error("--last-hidden is needed with modelopt: its script for Transformers writes post_norm, that for "
                     "vLLM pre_norm, and no file says which it was")
    if args.format == "deepspec" and args.last_hidden == "pre_norm":
        parser.error("--last-hidden: deepspec's last hidden states are behind the final norm")
    args.states = args.states or (args.data and os.path.join(args.data, "hidden_states"))
    if args.states is None:
        parser.error("--documents needs --states")
    if (args.model is None) == ("layers" not in args.unverified):
        parser.error("which layer a plane is stands in no file: give --model, whose states are compared, or "
                     "--unverified layers")
    check_cutting(parser, args)
    args.dtrain = args.dtrain or shutil.which("dtrain")
    if args.dtrain is None:
        parser.error("dtrain is not on PATH; give --dtrain FILE (its data check ends the import)")
    if shutil.which(args.dtrain) is None:
        parser.error(f"--dtrain {args.dtrain}: there is no such program")


def take_manifest_layers(args):
    """deepspec's manifest names its layers, and how they count is known."""
    stored = DeepspecDump(args.data, read_target_head(args.target).hidden_size, args.last_hidden).layer_ids
    given = args.layer_ids and [i - (args.numbering == "vllm") for i in args.layer_ids]
    if given and given != stored:
        raise InputError(f"--layer-ids {','.join(map(str, args.layer_ids))} ({args.numbering or 'output'}): the manifest "
                         f"says {','.join(map(str, stored))} (output)")
    args.layer_ids, args.numbering = stored, "output"


def own_numbering(args, head):
    """-> layer ids as shards have them: outputs of decoder layers from 0."""
    if args.format == "deepspec":
        take_manifest_layers(args)
    ids = [i - 1 for i in args.layer_ids] if args.numbering == "vllm" else args.layer_ids
    given = f"--layer-ids {','.join(map(str, args.layer_ids))} ({args.numbering})"
    if -1 in ids:
        raise InputError(f"{given}: the embedding's output; shards hold outputs of decoder layers")
    if sorted(set(ids)) != ids or not 0 <= ids[0] <= ids[-1] < head.layers:
        raise InputError(f"{given}: must ascend within the model's {head.layers} layers")
    if ids[-1] == head.layers - 1 and args.last_hidden == "pre_norm":
        raise InputError(f"{given}: the last is the last hidden state itself; leave it out of --layer-ids")
    return ids


def open_dump(args, head, layers):
    """-> the dump of a format whose files hold all."""
    if args.format == "specforge":
        return SpecforgeDump(args.data, layers, head.hidden_size, args.last_hidden)
    if args.format == "deepspec":
        return DeepspecDump(args.data, head.hidden_size, args.last_hidden, args.planes == "float8")
    masks = masks_by_tokens(dump.Lines(args.documents)) if args.documents else None
    return ModeloptDump(args.data, layers, head.hidden_size, args.last_hidden, masks)


def list_documents(args, head, layers, masks):
    """-> documents, read(document, limit) -> ids and states, what identifies the dump."""
    if args.format != "speculators":
        files = open_dump(args, head, layers)
        return files.list_documents(head.vocab_size, say, masks), files.read, files.fingerprint()
    has_last = args.last_hidden != "absent"
    if not os.path.isdir(args.states):
        raise InputError(f"{args.states}: no such folder (--states)")
    if args.data:
        rows, find = dump.Rows(args.data), dump.files_by_row(args.states)
    else:
        rows, find = dump.Lines(args.documents), dump.files_by_tokens(args.states)
    documents = dump.list_documents(rows, find, layers + has_last, head, args.missing == "skip", say, masks)

    def read(document, limit=None):
        if args.planes == "float8" and limit is None:
            return dump.read_float8(document, has_last)
        return dump.read(document, limit)
    return documents, read, rows.fingerprint()


def probe(args, documents, read, head, layer_ids):
    """Refuses a wrong declaration, and documents that it does not fit, before anything is written."""
    model = None
    if args.model:
        from dtrain_tools.target_model import Target
        model = Target(args.model, None, args.device)
    longest, spread = choose_probes(documents)
    for document in longest:
        ids, bits = read(document, PROBE_TOKENS)
        check_norm(document.path, bits, args.last_hidden, head.norm)
        if model:
            worst = check_layers(document.path, bits, layer_ids, args.last_hidden, target_states(model, ids))
            say(f"{document.path}: planes are the layers declared, to {worst:.3f} of their size")
    if model and spread:
        worst = 0.0
        for document in spread:
            ids, bits = read(document, SPREAD_TOKENS)
            worst = max(worst, check_layers(document.path, bits, layer_ids, args.last_hidden, target_states(model, ids)))
        say(f"{len(spread)} more of {len(documents)} documents, spread evenly, {SPREAD_TOKENS} tokens of each: planes are the "
            f"layers declared, to {worst:.3f} of their size")


def reader_of(read, layers, float8):
    """read(document) as shards take states."""
    def states_of(document):
        ids, states = read(document)
        return ids, quantise_bits(states, layers) if float8 and not isinstance(states, Float8) else states
    return states_of


def settings_of(args, layer_ids, fingerprint):
    """What must not change when an import goes on."""
    kept = ("data", "documents", "states", "last_hidden", "missing", "split_val", "seed", "shard_bytes", "target", "planes")
    return {"import": args.format, **{name: getattr(args, name) for name in kept}, "layer_ids": layer_ids,
            "documents_fingerprint": fingerprint}


def run(args):
    head = read_target_head(args.target)
    layer_ids = own_numbering(args, head)
    masks = None if "masks" in args.unverified else MaskCheck(end_tokens(args.target))
    documents, read, fingerprint = list_documents(args, head, len(layer_ids), masks)
    if masks:
        masks.refuse_shifted()
    probe(args, documents, read, head, layer_ids)
    settle_folder(args.out, settings_of(args, layer_ids, fingerprint))
    with lock_folder(args.out):
        convert(args, head, layer_ids, documents, read)


def convert(args, head, layer_ids, documents, read):
    """All documents into shards, which are checked and released."""
    attributes = {"target_model": args.name or os.path.basename(os.path.abspath(args.model or args.target)),
                  "target_layer_ids": layer_ids, "hidden_size": head.hidden_size, "vocab_size": head.vocab_size,
                  "last_hidden": args.last_hidden, "created_by": "dtrain tools/import_features.py",
                  "dataset": os.path.basename(os.path.abspath(args.data or args.documents))}
    float8 = args.planes == "float8"
    of_states = token_bytes(len(layer_ids), args.last_hidden != "absent", head.hidden_size, float8)
    shards = plan_shards(documents, args.split_val, args.seed, max(1, int(args.shard_bytes // (of_states + 5))))
    job = Import(args.out, attributes, reader_of(read, len(layer_ids), float8), say, float8)
    job.run(shards)
    job.bless(shards, args.dtrain, args.target)
    say(f"{args.out}: {len(documents)} documents in {len(shards)} shards, checked")
    if args.last_hidden == "absent":
        say("the shards have no last hidden state, so no teacher: only ce_data can be trained, and whether states and "
            "tokens are aligned was " + ("verified by --model" if args.model else "NOT verified"))
    if not args.model:
        say("which layers the planes are was NOT verified (--unverified layers)")


def main():
    parser = build_parser()
    args = parser.parse_args()
    check_arguments(parser, args)
    return exit_status(run, args)


if __name__ == "__main__":
    sys.exit(main())
