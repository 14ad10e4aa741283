"""A target that feeds a spool: loads what the manifest describes and writes the shards that spool.py asks for.

Owns the checks that model and manifest belong together. Order, room and waits are spool.py's.
"""

import os

import torch

from dtrain_tools.budget import Budget
from dtrain_tools.command import say
from dtrain_tools.documents import InputError
from dtrain_tools.extraction import Extraction, Shard, check_padding, padding_tolerance, state_attributes
from dtrain_tools.spool import SHARD_SHARE, Manifest, Spool, feed as feed_spool, read_order
from dtrain_tools.target_model import Capture, Target, batch_limit

PADDING_DOCUMENTS = 64  # of the order, among which the shortest and the longest are tried


def feed(args, spread):
    """Until the run of args.config has ended. spread: as Target takes it."""
    order = read_order(args.dtrain, args.config, [*args.set, f"data.spool={os.path.abspath(args.spool)}"])
    manifest = Manifest(order.manifest)
    say(f"{order.end} documents to read, {order.documents} in an epoch; loading the target")
    if args.threads:
        torch.set_num_threads(args.threads)
    target = Target(args.model, args.gguf, args.device, args.dtype, spread)
    check_target(target, manifest, args.model or args.gguf)
    check_lengths(target, order, args.config)
    extraction = Extraction(target, args.spool, manifest.layer_ids, manifest.attributes, say, float8=manifest.float8)
    settings = {"model": args.model, "gguf": args.gguf, "dtype": str(target.dtype), "batch_tokens": args.batch_tokens}
    spool = Spool(args.spool, order, settings, min(args.shard_bytes, order.bytes / SHARD_SHARE),
                  extraction.token_bytes)
    budget = Budget(args.batch_tokens, say)
    say(f"{len(spool.first)} shards of at most {int(spool.bytes.max()):,} bytes, {order.bytes:,} bytes at a time")
    documents = some_documents(order, manifest)
    target.check_logits(documents[0].ids[:64])
    target.check_states(documents[0].ids[:64], manifest.layer_ids)
    with Capture(target, manifest.layer_ids) as capture:
        check_padding(capture, documents, args.teacher_rows, padding_tolerance(target))
    with Capture(target, manifest.layer_ids, manifest.float8) as capture:

        def write(name, documents, ids):
            shard = Shard(name, documents, ids, sum(len(document.ids) for document in documents))
            extraction.write(shard, budget, capture, args.teacher_rows)
        feed_spool(spool, manifest, write, say, args.spool_wait)
    spool.close()
    say(f"{args.spool}: the run has ended")


def check_lengths(target, order, config):
    """Features must not depend on what else a shard holds."""
    limit, kind = batch_limit(target.config)
    if limit and max(order.tokens) > limit:
        raise InputError(f"{config}: a document of {max(order.tokens)} tokens: beyond {limit} tokens the target's rotary "
                         f"embedding ({kind}) depends on the longest text of a batch; data.seq_len {limit} cuts them")


def some_documents(order, manifest):
    return [manifest.document(order.doc_ids[serial], order.tokens[serial])
            for serial in range(min(PADDING_DOCUMENTS, order.end))]


def check_target(target, manifest, name):
    """The states of this model are what the manifest promises."""
    if manifest.layer_ids[-1] >= len(target.layers):
        raise InputError(f"{manifest.path}: layer {manifest.layer_ids[-1]}, but {name} has {len(target.layers)} layers")
    for attribute, value in state_attributes(target, manifest.layer_ids).items():
        promised = manifest.attributes.get(attribute)
        if attribute != "target_layer_ids" and promised != value:
            raise InputError(f"{manifest.path}: {attribute} is {promised}, but {value} with {name}")
