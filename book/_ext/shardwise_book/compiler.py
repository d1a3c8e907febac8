"""How XLA compiles the programs of chapters and tests, most of which run a few times.

Memory, collectives and FLOPs are what they are under XLA's own settings, and results are to
rounding: chapters assert them either way.
"""

import importlib.metadata
import os
from pathlib import Path

# Less optimisation of machine code, and no division of the little there is: half the time.
QUICK = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
# Fusions become machine code by MLIR, which takes as long as all else. The way before it is still
# in these releases, and later ones refuse the flag.
QUICKER = "--xla_cpu_use_fusion_emitters=false"


def flags() -> str:
    """The part of XLA_FLAGS that is ours; XLA reads them when it starts."""
    return f"{QUICK} {QUICKER}" if _version() < (0, 11) else QUICK


def kept(folder: Path) -> dict[str, str]:
    """Variables by which JAX keeps compiled programs in `folder`; empty where it should not.

    From JAX 0.12 on, what is read back may stand still (`mesh.simulate` says more).
    """
    if _version() >= (0, 12):
        return {}
    # Another process may be writing what one reads, which is then compiled as if it were not there.
    quiet = "ignore:Error reading persistent compilation cache:UserWarning"
    return {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONWARNINGS": ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), quiet])),
    }


def _version():
    return tuple(int(part) for part in importlib.metadata.version("jaxlib").split(".")[:2])
