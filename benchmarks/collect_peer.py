#!/usr/bin/env python3
"""Downloads the wheels that against_speculators.py needs on a machine with PyTorch but no network.

    python3 benchmarks/collect_peer.py [FOLDER]                  FOLDER: .peer by default
    for wheel in FOLDER/*.whl; do python3 -m zipfile -e $wheel SITE; done        there; PYTHONPATH=SITE

For x86-64 Linux and Python 3.12 unless --python says another. torch, transformers, triton, pandas and the rest
of what speculators imports are taken from that machine.
"""
import argparse
import subprocess
import sys

PACKAGES = ("speculators==0.9.0 hs-connectors==0.9.0 pydantic==2.14.4 pydantic-core==2.50.5 annotated-types "
            "typing-inspection typing-extensions pydantic-settings python-dotenv loguru==0.7.3 datasets==5.1.0 multiprocess "
            "dill openai==3.57.0 httpx2==2.16.2 httpcore2==2.16.2 anyio idna truststore jiter distro sniffio").split()
PLATFORMS = [f"manylinux{name}_x86_64" for name in ("_2_28", "_2_27", "_2_17", "2014", "1")]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", default=".peer")
    parser.add_argument("--python", default="3.12")
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:",
               "--implementation", "cp", "--python-version", arguments.python, "-d", arguments.folder]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    return subprocess.run(command + PACKAGES, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
