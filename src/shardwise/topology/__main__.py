"""Installs XLA's compiler for GPUs beside this JAX, by pip, whose options further words are."""

import subprocess
import sys

from shardwise.topology import gpu

if __name__ == "__main__":
    sys.exit(subprocess.call([*gpu.command(), *sys.argv[1:]]))
