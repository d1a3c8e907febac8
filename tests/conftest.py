"""Every test sees eight simulated CPU devices, and rank promotion is an error."""

import os

# Most programs here run once: a compiler that optimises machine code less halves the tests' time,
# and leaves memory, collectives and FLOPs as they are. XLA reads this when it starts.
os.environ["XLA_FLAGS"] = f"--xla_backend_optimization_level=0 {os.environ.get('XLA_FLAGS', '')}"

import hypothesis
import jax

pytest_plugins = ["browser"]

# Before anything asks for a device: afterwards JAX refuses another number.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

# Compilation makes the first example slow, and a test that fails must fail again for the next.
hypothesis.settings.register_profile("shardwise", deadline=None, derandomize=True)
hypothesis.settings.load_profile("shardwise")
