"""Published runs: how fast decoders trained, on what chips, and what share of the peak that was."""

import functools
from typing import NamedTuple

from shardwise.plan.published import PRESETS
from shardwise.plan.seconds import model_flops
from shardwise.topology.slices import CHIPS, Chip, Chips, usual


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
            return next(usual(self.kind, self.chips, self.chips))
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
    """What runs on these chips `Reached`, of mixtures of experts or of others; where fewer than two
    are known, on all TPUs, or GPUs; then of all models.
    """
    family = [run for run in RUNS if bool(CHIPS[run.kind].node) == bool(chip.node)]
    alike = [run for run in family if bool(PRESETS[run.model].config.experts) == mixed]
    same = [run for run in alike if run.kind == chip.kind]
    shares = [run.mfu for run in next(runs for runs in (same, alike, family) if len(runs) > 1)]
    on = chip.kind if len(same) > 1 else "GPUs" if chip.node else "TPUs"
    return Reached(min(shares), max(shares), on)
