#!/usr/bin/env python3
"""Peak memory of one training step at several max_anchors, everything else equal.

    python3 benchmarks/anchors_memory.py --dtrain build/dtrain [--anchors 64,512,4096]

Needs numpy, h5py and safetensors. One row of 8,192 tokens in 4 documents, every token supervised, so
that all anchors exist. Exit status 1 when the peaks differ by more than 5 %.
"""
import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

import cpu_step


def peak(binary, folder):
    subprocess.run(["rm", "-rf", str(folder / "run")], check=True)
    subprocess.run([binary, "--config", str(folder / "config.yaml")], check=True, stderr=subprocess.DEVNULL)
    line = json.loads(open(folder / "run" / "metrics.jsonl").readline())
    return line["memory_bytes"], line["anchors"], line["seconds"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtrain", required=True)
    parser.add_argument("--anchors", default="64,512,4096")
    arguments = parser.parse_args()
    cpu_step.TOKENS = 8192
    rng, peaks = np.random.default_rng(0), []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        cpu_step.write_target(folder / "target", rng)
        cpu_step.write_shard(folder / "train.h5", rng)
        for anchors in (int(word) for word in arguments.anchors.split(",")):
            cpu_step.write_config(folder, anchors, 1, os.cpu_count())
            bytes_, drawn, seconds = peak(os.path.abspath(arguments.dtrain), folder)
            peaks.append(bytes_)
            print(f"max_anchors {anchors:5d}: {drawn:5.0f} anchors, peak {bytes_ / 2**20:7.1f} MiB, "
                  f"step {seconds:.1f} s", flush=True)
    spread = max(peaks) / min(peaks) - 1
    print(f"spread {100 * spread:.2f} %")
    return 1 if spread > 0.05 else 0


if __name__ == "__main__":
    sys.exit(main())
