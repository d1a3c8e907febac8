"""The peaks, memory and links of each chip, with the source of each number.

Where nothing else is said, TPUs' FLOP/s, memory and largest slices are Google's, from the page of
each, https://docs.cloud.google.com/tpu/docs/v5e and so on; links, rings and PCIe are from the table
in tpus.md of https://jax-ml.github.io/scaling-book/ at commit 0819a7d8; `usable_hbm` is what libtpu
0.0.23 to 0.0.52 name when they refuse a program. GPUs' FLOP/s, bandwidths and nodes are from that
book's gpus.md at commit 1a55377a, memory and `target` from
https://github.com/openxla/xla/tree/main/xla/backends/gpu/target_config/specs/ 0774019d to
4336d12e.
"""

import dataclasses
from typing import Any

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """A chip's peaks, memory and links, for one chip unless told, in FLOP/s, bytes and bytes/s.

    `flops` has pairs of a dtype's name and the FLOP/s in it: `dict(chip.flops)["bfloat16"]`. A TPU
    has `links` links, two along each of the `dimensions` axes of a torus, and over one it sends
    `link_bandwidth`, and receives as much. An axis closes into a ring from `ring_from` chips on (a
    multiple of it); a slice has `largest` at most. A GPU sends `link_bandwidth` into the switch
    that joins the `node` GPUs of a node (NVLink's); `target` is what XLA is told of one that is not
    there. Into the network between slices, or nodes, a *device* sends `dcn_bandwidth`.

    `host_bandwidth` is PCIe's between a chip and its host, each way, and `host_bytes` the chip's
    part of the host's memory; None where no source says. `usable_hbm` is what the compiler lets a
    program hold on one *device*; the `devices` of a chip, as JAX counts, share its HBM and its
    peak, and of two each sends `core_bandwidth` to the other. `names` are JAX's: of GPUs those with
    these peaks, no board for PCIe or with less memory.
    """

    kind: str
    flops: tuple[tuple[str, float], ...]
    hbm_bytes: int
    hbm_bandwidth: float
    links: int
    link_bandwidth: float
    dcn_bandwidth: float
    names: tuple[str, ...]
    dimensions: int = 0
    ring_from: int | None = None
    largest: int | None = None
    host_bandwidth: float | None = None
    host_bytes: int | None = None
    usable_hbm: int | None = None
    devices: int = 1
    core_bandwidth: float | None = None
    node: int | None = None
    target: tuple[tuple[str, Any], ...] | None = None

    def peak(self, dtype: str = "bfloat16") -> float:
        """The FLOP/s of one device in products of this dtype; a ValueError where none is known."""
        if dtype in (known := dict(self.flops)):
            return known[dtype] / self.devices
        told = f"no peak of {self.kind} in {dtype} is known; known are {', '.join(known)}"
        raise ValueError(f"topology: {told}.")

    def ring_seconds(self, sent: float, inside: int, across: int, bandwidth: float) -> float:
        """The seconds of a gather, scatter or sum in which a device sends `sent` ring bytes.

        `inside` devices of each of `across` slices, or nodes, take part: each sends at `bandwidth`
        to those beside it, and its part of what they have over the data centre's network.
        """
        n = inside * across
        whole = sent * n / (n - 1) if n > 1 else 0.0
        here = whole * (inside - 1) / inside / bandwidth if inside > 1 else 0.0
        return here + whole / inside * (across - 1) / across / self.dcn_bandwidth

    def exchange_seconds(self, sent: float, inside: int, across: int) -> float:
        """The seconds of an all-to-all between GPUs in which each sends `sent` bytes of its own."""
        others, away = inside * across - 1, inside * (across - 1)
        here = sent * (others - away) / others / self.link_bandwidth if others else 0.0
        return here + (sent * away / others / self.dcn_bandwidth if away else 0.0)

    def is_ring(self, size: int) -> bool:
        """Whether an axis of `size` chips closes into a ring."""
        return bool(self.ring_from) and size >= self.ring_from and size % self.ring_from == 0


def _tpu(kind, flops, hbm, bandwidth, link, dcn, usable, pcie, host=None, **more):
    """A TPU: FLOP/s in tera, HBM in GiB, all else in GB."""
    return Chip(
        kind=kind,
        flops=tuple((dtype, tera * 1e12) for dtype, tera in flops.items()),
        hbm_bytes=int(hbm * _GIB),
        hbm_bandwidth=bandwidth * 1e9,
        link_bandwidth=link * 1e9,
        dcn_bandwidth=dcn * 1e9,
        host_bandwidth=pcie and pcie * 1e9,
        host_bytes=host and int(host * 1e9),
        usable_hbm=int(usable * _GIB),
        **more,
    )


def _gpu(kind, tera, bandwidth, nvlink, network, node=8, **target):
    """A GPU: FLOP/s and HBM's bandwidth in tera, links in GB/s."""
    return Chip(
        kind=kind,
        flops=(("bfloat16", tera * 1e12),),
        hbm_bytes=target["device_memory_size"],
        hbm_bandwidth=bandwidth * 1e12,
        links=1,
        link_bandwidth=nvlink * 1e9,
        dcn_bandwidth=network * 1e9,
        node=node,
        target=tuple(target.items()),
        names=(target["name"],),
    )


_TORUS_2D = dict(dimensions=2, links=4, ring_from=16, largest=256)
_TORUS_3D = dict(dimensions=3, links=6, ring_from=4)
_NVIDIA = dict(fpus_per_core=128, shared_memory_per_core=233_472)
_HOPPER = _NVIDIA | dict(core_count=132, major=9, clock_rate_ghz=1.98, l2_cache_size=52_428_800)
# A host's memory is that of a machine with 4 chips, by Google's page on tpu7x.
_TABLE = (
    _tpu(  # the network: 25 GB/s a host of 4 chips, by the scaling book
        "v4", {"bfloat16": 275, "int8": 275}, 32, 1200, 45, 6.25, 30.75, 16,
        names=("TPU v4",), largest=4096, **_TORUS_3D,
    ),
    _tpu(  # the network: 2 × 100 Gb/s a host of 8 chips, which has 384 GB:
        # https://cloud.google.com/kubernetes-engine/docs/concepts/tpus
        "v5e", {"bfloat16": 197, "int8": 393}, 16, 819, 45, 3.125, 15.75, 15, 48,
        names=("TPU v5 lite", "TPU v5e"), **_TORUS_2D,
    ),
    _tpu(  # the network: 50 Gb/s a chip
        "v5p", {"bfloat16": 459, "float8": 459, "int8": 918}, 95, 2765, 90, 6.25, 95.73, 15, 112,
        largest=8960, names=("TPU v5", "TPU v5p"), **_TORUS_3D,
    ),
    _tpu(  # the network: 100 Gb/s a chip, by the page on tpu7x
        "v6e", {"bfloat16": 918, "float8": 918, "int8": 1836}, 32, 1638, 90, 12.5, 31.24, 32, 180,
        names=("TPU v6 lite", "TPU v6e"), **_TORUS_2D,
    ),
    _tpu(  # 50 Gb/s a device; 1,200 GB/s over 6 links both ways, from die to die six times a link
        "tpu7x", {"bfloat16": 2307, "float8": 4614}, 192, 7380, 100, 6.25, 94.74, None,
        names=("TPU7x",), largest=9216, devices=2, core_bandwidth=600e9, **_TORUS_3D,
    ),
    _gpu(  # the network: https://alpha-one-index.github.io/ai-infra-index/ (networking, HDR)
        "a100", 310, 2.0, 300, 25, core_count=108, major=8, clock_rate_ghz=1.41,
        fpus_per_core=64, l2_cache_size=41_943_040, memory_bandwidth=2_039_040_000_000,
        shared_memory_per_core=167_936, device_memory_size=85_100_068_864,
        name="NVIDIA A100-SXM4-80GB",
    ),
    _gpu(
        "h100", 990, 3.4, 450, 50, memory_bandwidth=3_352_320_000_000,
        device_memory_size=84_942_979_072, name="NVIDIA H100 80GB HBM3", **_HOPPER,
    ),
    _gpu(
        "h200", 990, 4.8, 450, 50, memory_bandwidth=4_800_000_000_000,
        device_memory_size=151_397_597_184, name="NVIDIA H200", **_HOPPER,
    ),
    _gpu(
        "b200", 2300, 8.0, 900, 50, core_count=148, major=10, clock_rate_ghz=1.965,
        l2_cache_size=132_644_864, memory_bandwidth=7_672_320_000_000,
        device_memory_size=191_514_411_008, name="NVIDIA B200", **_NVIDIA,
    ),
    _gpu(
        "gb200", 2300, 8.0, 900, 50, node=72, core_count=152, major=10, clock_rate_ghz=2.062,
        l2_cache_size=135_528_448, memory_bandwidth=7_928_064_000_000,
        device_memory_size=197_897_748_480, name="NVIDIA GB200", **_NVIDIA,
    ),
)  # fmt: skip
CHIPS = {chip.kind: chip for chip in _TABLE}


def of_device(kind: str) -> Chip | None:
    """The `Chip` of a device by its `jax.Device.device_kind`; None if `CHIPS` lacks it."""
    return next((chip for chip in CHIPS.values() if kind in chip.names), None)
