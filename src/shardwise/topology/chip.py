"""The peaks, memory and links of each chip, with the source of each number."""

import dataclasses

GOOGLE = "https://docs.cloud.google.com/tpu/docs/"
# Its table of links stands in tpus.md at commit 0819a7d8, read on 2026-11-22.
SCALING_BOOK = "https://jax-ml.github.io/scaling-book/"
_COMPILER = "what libtpu 0.0.23 to 0.0.52 names as available when it refuses a program"
_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """A chip's peaks; per chip where nothing else is said, in FLOP/s, bytes and bytes/s.

    A TPU's `links` go one way along each side of a torus of `dimensions` axes; an axis closes into
    a ring from `ring_from` chips on (a multiple of it), and is a line below. A GPU has no torus:
    `links` is 1, and `link_bandwidth` is what it sends into its switch.

    `host_bandwidth` is that of PCIe between a chip and its host, each way, and `host_bytes` the
    chip's part of the host's memory; None where no source says. `usable_hbm` is what the compiler
    lets a program hold on one *device*; None where it was not asked. `devices` is the number of JAX
    devices on a chip, which share its HBM and its peak.
    """

    kind: str
    flops: tuple[tuple[str, float], ...]
    hbm_bytes: int
    hbm_bandwidth: float
    links: int
    link_bandwidth: float
    sources: tuple[tuple[str, str], ...]
    dimensions: int = 0
    ring_from: int | None = None
    largest: int | None = None
    dcn_bandwidth: float | None = None
    host_bandwidth: float | None = None
    host_bytes: int | None = None
    usable_hbm: int | None = None
    devices: int = 1

    def peak(self, dtype: str = "bfloat16") -> float:
        """The FLOP/s of one device in products of this dtype.

        Raises:
          ValueError: no peak is known for it.
        """
        known = dict(self.flops)
        if dtype not in known:
            raise ValueError(
                f"topology: no peak of {self.kind} in {dtype} is known; known are "
                f"{', '.join(known)}."
            )
        return known[dtype] / self.devices

    def is_ring(self, size: int) -> bool:
        """Whether an axis of `size` chips closes into a ring."""
        return bool(self.ring_from) and size >= self.ring_from and size % self.ring_from == 0


def _tpu(kind, page, flops, hbm_gib, bandwidth, link, dcn, usable_gib, host=None, **more):
    beside, sources = {}, ()
    if host:
        beside = dict(host_bandwidth=host[0] * 1e9, host_bytes=host[1] and int(host[1] * 1e9))
        sources = (("host_bandwidth", SCALING_BOOK + "tpus"),)
        sources += (("host_bytes", host[2]),) if host[1] else ()
    return Chip(
        kind=kind,
        flops=tuple((dtype, tera * 1e12) for dtype, tera in flops.items()),
        hbm_bytes=int(hbm_gib * _GIB),
        hbm_bandwidth=bandwidth * 1e9,
        link_bandwidth=link[0] * 1e9,
        dcn_bandwidth=dcn[0] * 1e9,
        usable_hbm=int(usable_gib * _GIB),
        sources=(
            ("flops, hbm_bytes, hbm_bandwidth, largest", GOOGLE + page),
            ("link_bandwidth", link[1]),
            ("dcn_bandwidth", dcn[1]),
            ("ring_from", SCALING_BOOK + "tpus"),
            ("usable_hbm", _COMPILER),
            *sources,
        ),
        **beside,
        **more,
    )


def _gpu(kind, tera, hbm_gb, bandwidth, nvlink):
    book = SCALING_BOOK + "gpus"
    return Chip(
        kind=kind,
        flops=(("bfloat16", tera * 1e12),),
        hbm_bytes=int(hbm_gb * 1e9),
        hbm_bandwidth=bandwidth * 1e12,
        links=1,
        link_bandwidth=nvlink * 1e9,
        sources=(("flops, hbm_bytes, hbm_bandwidth, link_bandwidth", book),),
    )


_TORUS_2D = dict(dimensions=2, links=4, ring_from=16, largest=256)
_TORUS_3D = dict(dimensions=3, links=6, ring_from=4)
_LINKS = SCALING_BOOK + "tpus"
_HOSTS = GOOGLE + "tpu7x: RAM of a machine with 4 chips"
_MACHINES = "https://cloud.google.com/kubernetes-engine/docs/concepts/tpus: 384 GB for 8 chips"
_HALF_OF_BOTH_WAYS = GOOGLE + "tpu7x: 1,200 GB/s over 6 links both ways"
_TABLE = (
    _tpu(
        "v4", "v4", {"bfloat16": 275, "int8": 275}, 32, 1200, (45, _LINKS),
        (6.25, SCALING_BOOK + "tpus: 25 GB/s a host, of 4 chips"), 30.75, (16, None), largest=4096,
        **_TORUS_3D,
    ),
    _tpu(
        "v5e", "v5e", {"bfloat16": 197, "int8": 393}, 16, 819, (45, _LINKS),
        (3.125, GOOGLE + "v5e: 2 × 100 Gb/s a host, of 8 chips"), 15.75, (15, 48, _MACHINES),
        **_TORUS_2D,
    ),
    _tpu(
        "v5p", "v5p", {"bfloat16": 459, "float8": 459, "int8": 918}, 95, 2765, (90, _LINKS),
        (6.25, GOOGLE + "v5p: 50 Gb/s a chip"), 95.73, (15, 112, _HOSTS), largest=8960,
        **_TORUS_3D,
    ),
    _tpu(
        "v6e", "v6e", {"bfloat16": 918, "float8": 918, "int8": 1836}, 32, 1638, (90, _LINKS),
        (12.5, GOOGLE + "tpu7x: v6e, 100 Gb/s a chip"), 31.24, (32, 180, _HOSTS), **_TORUS_2D,
    ),
    _tpu(
        "tpu7x", "tpu7x", {"bfloat16": 2307, "float8": 4614}, 192, 7380, (100, _HALF_OF_BOTH_WAYS),
        (12.5, GOOGLE + "tpu7x: 100 Gb/s a chip"), 94.74, largest=9216, devices=2, **_TORUS_3D,
    ),
    _gpu("a100", 310, 80, 2.0, 300),
    _gpu("h100", 990, 80, 3.4, 450),
    _gpu("h200", 990, 141, 4.8, 450),
    _gpu("b200", 2300, 192, 8.0, 900),
)  # fmt: skip
CHIPS = {chip.kind: chip for chip in _TABLE}

# By the names that JAX has for devices. Of GPUs, those whose peaks the table has: a board for PCIe
# or with less memory has another name, and lower peaks.
_OF_DEVICES = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
}


def of_device(kind: str) -> Chip | None:
    """The chip of a device, by its `jax.Device.device_kind`; None where the table lacks it."""
    return CHIPS.get(_OF_DEVICES.get(kind, ""))
