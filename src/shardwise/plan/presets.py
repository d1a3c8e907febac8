"""Published sizes of models, by name, each with where it was published."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from shardwise.model import Config

_LLAMA3 = "Grattafiori et al., 2024 (arXiv:2407.21783), Table 3; vocabulary of the released weights"
_LLAMA2 = "Touvron et al., 2023 (arXiv:2307.09288); sizes of the released weights"
_MIXTRAL = "Jiang et al., 2024 (arXiv:2401.04088), Table 1; here with a capacity of 1.25"


class Preset(NamedTuple):
    """A decoder's sizes, held in float32 and used in bfloat16, and their source."""

    config: Config
    source: str


def _preset(source, **sizes):
    held = dict(head_dim=128, dtype=jnp.bfloat16, param_dtype=jnp.float32, norm_epsilon=1e-5)
    return Preset(Config(**held | sizes), source)


_8B = dict(vocab=128_256, embed=4096, layers=32, heads=32, kv_heads=8, mlp=14_336, rope_theta=5e5)
_70B = _8B | dict(embed=8192, layers=80, heads=64, mlp=28_672)
_405B = _8B | dict(embed=16_384, layers=126, heads=128, mlp=53_248)
_MIXED = dict(experts=8, experts_per_token=2, capacity_factor=1.25, vocab=32_000, rope_theta=1e6)

PRESETS: dict[str, Preset] = {
    "llama3-8b": _preset(_LLAMA3, **_8B),
    "llama3-70b": _preset(_LLAMA3, **_70B),
    "llama3-405b": _preset(_LLAMA3, **_405B),
    "llama2-70b": _preset(_LLAMA2, **_70B | dict(vocab=32_000, rope_theta=1e4)),
    "mixtral-8x7b": _preset(_MIXTRAL, **_8B | _MIXED),
}


def preset(name: str) -> Config:
    """The sizes of a published model.

    Raises:
      ValueError: no such name.
    """
    if name not in PRESETS:
        raise ValueError(f"plan: no model {name!r} is known; known are {', '.join(PRESETS)}.")
    return dataclasses.replace(PRESETS[name].config)
