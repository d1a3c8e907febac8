"""`python -m shardwise.topology`: XLA's compiler for GPUs, installed beside this JAX, by pip.

Further words are pip's options.
"""

import subprocess
import sys

from shardwise.topology import gpu

if __name__ == "__main__":
    sys.exit(subprocess.call([*gpu.command(), *sys.argv[1:]]))
