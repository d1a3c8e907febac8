"""How XLA compiles the programs of chapters and tests, most of which run a few times.

Memory, collectives and FLOPs are what they are under XLA's own settings, and results are to
rounding: chapters assert them either way.
"""

import importlib.metadata

# Less optimisation of machine code, and no division of the little there is: half the time.
QUICK = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
# Fusions to machine code by MLIR take as long as all else; later releases refuse this flag.
QUICKER = "--xla_cpu_use_fusion_emitters=false"
# Simulated devices that wait 40 s for each other in a collective end the process: on a busy machine
# they may only be slow. JAX before 0.10 has no such flag.
PATIENT = "--xla_cpu_collective_call_terminate_timeout_seconds=300"


def flags() -> str:
    """The part of XLA_FLAGS that is ours; XLA reads them when it starts."""
    version = tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2]))
    found = [QUICK, QUICKER if version < (0, 11) else "", PATIENT if version >= (0, 10) else ""]
    return " ".join(filter(None, found))
