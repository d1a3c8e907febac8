"""How XLA compiles the programs of chapters and tests, most of which run a few times.

Memory, collectives and FLOPs are what they are under XLA's own settings, and results are to
rounding: chapters assert them either way.
"""

import importlib.metadata

# Less optimisation of machine code, and no division of the little there is: half the time.
QUICK = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
# Fusions become machine code by MLIR, which takes as long as all else. The way before it is still
# in these releases, and later ones refuse the flag.
QUICKER = "--xla_cpu_use_fusion_emitters=false"


def flags() -> str:
    """The part of XLA_FLAGS that is ours; XLA reads them when it starts."""
    return f"{QUICK} {QUICKER}" if _version() < (0, 11) else QUICK


def _version():
    return tuple(int(part) for part in importlib.metadata.version("jaxlib").split(".")[:2])
