#!/usr/bin/env python3
"""Asks the published code of vLLM and SGLang what it would run of an exported drafter, DFlash or EAGLE-3.

    conformance.py --target DIR [--checkpoint DIR] [--vllm WHERE] [--sglang WHERE] EXPORT ...

No GPU and no serving: each server's own packages resolve the export (arguments, config, draft model class,
weights) in a process of their own, and what comes out is compared with what was trained, a line a fact: OK,
DIFFERS, or NOT READ where the server takes that from elsewhere. WHERE is the Python program that has the
server, or the folders of packages joined by ':'; left out, this Python is asked. TARGET needs config.json
only. Exit status: 0 all is run as trained, 1 something differs, 2 refused input, 77 skipped: a server is not there.
"""

import argparse
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from dtrain_tools import conform, trained  # noqa: E402
from dtrain_tools.command import REFUSED, RUN_FAILED, Help  # noqa: E402
from dtrain_tools.documents import InputError, load_json  # noqa: E402
from dtrain_tools.export_config import kind_of, layout_of  # noqa: E402

SKIPPED = 77


def build_parser():
    parser = argparse.ArgumentParser(description="what vLLM and SGLang would run of an export",
                                     formatter_class=Help)
    add = parser.add_argument
    add("exports", nargs="+", metavar="EXPORT", help="folder that dtrain export wrote")
    add("--target", required=True, metavar="DIR", help="the target: model directory or target directory")
    add("--checkpoint", metavar="DIR", help="the checkpoint that was exported; without it the export is taken at its word")
    add("--vllm", metavar="WHERE", help="Python program with vLLM, or package folders joined by ':'")
    add("--sglang", metavar="WHERE", help="the same of SGLang")
    add("--servers", default="vllm,sglang", metavar="NAMES", help="which to ask")
    return parser


def jobs_of(folders):
    """The probes load each export by themselves; a config.json that is not understood is theirs to refuse."""
    jobs = []
    for folder in folders:
        config = load_json(os.path.join(folder, "config.json"))
        if not os.path.exists(os.path.join(folder, "model.safetensors")):
            raise InputError(f"{folder}: no model.safetensors")
        jobs.append({"folder": os.path.abspath(folder), "layout": layout_of(config), "kind": kind_of(config),
                     "block_size": config.get("block_size") or 2})
    return jobs


def report(answer, jobs, settings):
    """Prints every line. -> whether something differs."""
    differs = False
    for job, result, wanted in zip(jobs, answer["results"], settings):
        print(f"{answer['server']} {answer['version']} (transformers {answer['transformers']}): "
              f"{job['folder']}, {job['layout']} layout")
        for line in conform.compare(wanted, result, job["layout"]):
            print(line)
            differs |= line.state == conform.DIFFERS
    return differs


def run(arguments):
    servers = arguments.servers.split(",")
    unknown = [name for name in servers if name not in conform.SERVERS]
    if unknown:
        raise InputError(f"--servers {','.join(unknown)}: there are {', '.join(conform.SERVERS)}")
    jobs = jobs_of(arguments.exports)
    if arguments.checkpoint:
        settings = [trained.from_checkpoint(arguments.checkpoint, arguments.target)] * len(jobs)
    else:
        settings = [trained.from_export(folder, arguments.target) for folder in arguments.exports]
    print(f"trained: as in {settings[0]['source']}")
    differs = skipped = False
    for server in servers:
        answer = conform.ask(server, getattr(arguments, server), arguments.target, jobs)
        if "missing" in answer:
            print(f"{answer['server']}: SKIPPED, its packages are not there ({answer['missing']}); name them with --{server}")
            skipped = True
        else:
            differs |= report(answer, jobs, settings)
    print("something differs" if differs else "skipped in part" if skipped else "all as trained")
    return RUN_FAILED if differs else SKIPPED if skipped else 0


def main():
    arguments = build_parser().parse_args()
    try:
        return run(arguments)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return RUN_FAILED


if __name__ == "__main__":
    sys.exit(main())
