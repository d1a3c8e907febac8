"""Every test sees eight simulated CPU devices, and rank promotion is an error."""

import gc
import os

import hypothesis
import jax

pytest_plugins = ["browser"]

# Most programs here run once: a compiler that optimises machine code less, and does not divide the
# little there is, takes half the time, and leaves memory, collectives and FLOPs as they are.
QUICK = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
# Fusions become machine code by MLIR, which takes as long as all else. The way before it is still
# in these releases, and compares and counts the same; chapters, and the newest stack, go the new.
QUICKER = "--xla_cpu_use_fusion_emitters=false" if jax.__version_info__ < (0, 11) else ""
# XLA reads its flags when it starts: before anything asks for a device.
os.environ["XLA_FLAGS"] = " ".join([QUICK, QUICKER, os.environ.get("XLA_FLAGS", "")])

# JAX keeps what it traced: millions of objects, which the collector would go through again and
# again, a tenth of the tests' time.
gc.set_threshold(2000, 20, 50)

# Before anything asks for a device: afterwards JAX refuses another number.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

# Compilation makes the first example slow, and a test that fails must fail again for the next.
hypothesis.settings.register_profile("shardwise", deadline=None, derandomize=True)
hypothesis.settings.load_profile("shardwise")
