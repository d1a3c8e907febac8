"""What others have published: sizes of decoders by name, and how fast they were trained."""

import dataclasses
import functools
from typing import NamedTuple

import jax.numpy as jnp

from shardwise import topology
from shardwise.model import Config
from shardwise.plan.seconds import model_flops
from shardwise.topology import CHIPS, Chip, Chips

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
_2 = dict(vocab=32_000, rope_theta=1e4)
_MIXED = dict(experts=8, experts_per_token=2, capacity_factor=1.25, vocab=32_000, rope_theta=1e6)

PRESETS: dict[str, Preset] = {
    "llama3-8b": _preset(_LLAMA3, **_8B),
    "llama3-70b": _preset(_LLAMA3, **_70B),
    "llama3-405b": _preset(_LLAMA3, **_405B),
    "llama2-7b": _preset(_LLAMA2, **_8B | _2 | dict(kv_heads=32, mlp=11_008)),
    "llama2-70b": _preset(_LLAMA2, **_70B | _2),
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


class Run(NamedTuple):
    """A published run in bfloat16: `rate`, the tokens that a chip trained on in a second."""

    model: str
    kind: str
    chips: int
    sequence: int
    rate: float
    source: str

    @property
    def on(self) -> Chips:
        """The chips, in a usual shape; GPUs in nodes as full as they divide."""
        node = CHIPS[self.kind].node
        if not node:
            return next(topology.usual(self.kind, self.chips, self.chips))
        each = max(n for n in range(1, node + 1) if self.chips % n == 0)
        return Chips(self.kind, (each,), self.chips // each)

    @property
    def mfu(self) -> float:
        """The share of the chip's peak, by `model_flops` of a causal mask, as plans count it."""
        flops = model_flops(PRESETS[self.model].config, 1, self.sequence) / self.sequence
        chip = CHIPS[self.kind]
        return flops * self.rate / (chip.peak() * chip.devices)


_RECIPES = "github.com/AI-Hypercomputer/tpu-recipes at c8cfe2f6, training/"
_TITAN = "github.com/pytorch/torchtitan at b5bcd76c, benchmarks/"
_DGXC = "github.com/NVIDIA/dgxc-benchmarking at "
_FMS = "github.com/foundation-model-stack/fms-fsdp at 5a296afe, README.md"
_AUTOMODEL = "github.com/NVIDIA-NeMo/Automodel at 36044ad3, docs/performance-summary.mdx"
RUNS = (
    Run("llama3-405b", "v5p", 512, 8192, 124.618, _RECIPES + "v5p/Llama3.1-405B-MaxText"),
    Run("llama3-8b", "v6e", 8, 8192, 7138.890, _RECIPES + "trillium/Llama3.1-8B-MaxText/v6e-8"),
    Run("llama3-8b", "v6e", 256, 8192, 7207.336, _RECIPES + "trillium/Llama3.1-8B-MaxText/v6e-256"),
    Run("llama3-70b", "v6e", 32, 8192, 920.965, _RECIPES + "trillium/Llama3.1-70B-MaxText/v6e-32"),
    Run("llama3-70b", "v6e", 256, 8192, 960.248, _RECIPES + "trillium/Llama3.1-70B-MaxText"),
    Run("llama2-70b", "v6e", 256, 4096, 905.021, _RECIPES + "trillium/Llama2-70B-MaxText"),
    Run("llama3-405b", "v6e", 512, 8192, 149.482, _RECIPES + "trillium/Llama3.1-405B-MaxText"),
    Run("mixtral-8x7b", "v6e", 256, 4096, 3645.203, _RECIPES + "trillium/Mixtral-8x7B-MaxText"),
    Run("llama3-70b", "tpu7x", 64, 8192, 2686.98, _RECIPES + "ironwood"),
    Run("llama3-405b", "tpu7x", 256, 8192, 499.77, _RECIPES + "ironwood"),
    Run("llama2-7b", "a100", 128, 4096, 4550, _FMS),
    Run("llama2-70b", "a100", 128, 4096, 410, _FMS),
    Run("llama2-7b", "h100", 96, 4096, 9600, _FMS),
    Run("llama2-70b", "h100", 96, 4096, 890, _FMS),
    Run("llama3-8b", "h100", 8, 8192, 6667, _TITAN + "llama3_h100_202412_torchtitan.md (500 W)"),
    Run("llama3-8b", "h100", 128, 8192, 6514, _TITAN + "llama3_h100_202412_torchtitan.md (500 W)"),
    Run("llama3-8b", "h100", 128, 8192, 1_360_683 / 128, _DGXC + "85380ffe, llama3.1/README.md"),
    Run("llama3-70b", "h100", 2048, 8192, 2_288_843 / 2048, _DGXC + "85380ffe, llama3.1/README.md"),
    Run("llama3-405b", "h100", 512, 8192, 105_863 / 512, _DGXC + "60d6fd33, llama3.1/README.md"),
    Run("llama3-70b", "h100", 128, 8192, 1052.266, _DGXC + "85380ffe, maxtext/README_70b.md"),
    Run("llama3-70b", "h100", 64, 8192, 866.77, _AUTOMODEL),
    Run("llama3-405b", "gb200", 128, 8192, 56_092 / 128, _DGXC + "60d6fd33, llama3.1/README.md"),
    Run("llama3-405b", "gb200", 512, 8192, 220_567 / 512, _DGXC + "60d6fd33, llama3.1/README.md"),
)  # fmt: skip


class Reached(NamedTuple):
    """The lowest and the highest MFU of published runs, and on what chips these were."""

    low: float
    high: float
    on: str


@functools.lru_cache
def reached(chip: Chip, mixed: bool = False) -> Reached:
    """What runs on these chips `Reached`, of mixtures of experts or of others.

    Where fewer than two are known, those on all TPUs, or GPUs, count; then those of all models.
    """
    family = "GPUs" if chip.node else "TPUs"
    beside = [run for run in RUNS if bool(CHIPS[run.kind].node) == bool(chip.node)]
    alike = [run for run in beside if bool(PRESETS[run.model].config.experts) == mixed]
    own = [run for run in alike if run.kind == chip.kind]
    runs, on = next(
        (runs, on)
        for runs, on in ((own, chip.kind), (alike, family), (beside, family))
        if len(runs) > 1
    )
    shares = [run.mfu for run in runs]
    return Reached(min(shares), max(shares), on)
