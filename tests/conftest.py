"""Every test sees eight simulated CPU devices, and rank promotion is an error."""

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
