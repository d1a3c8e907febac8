"""Floating-point operations of the matrix products and convolutions in a compiled program."""

import math
import re
from typing import Any

from shardwise.marks import kernel_said

from . import hlo
from .hlo import Instruction
from .trips import Frame, executed

# Targets of custom calls that multiply matrices, or are kernels that nobody can look into.
_PRODUCTS = r"gemm|matmul|dot|conv(?!ert)|fmha|triton|mosaic|tpu_custom_call"


def flops(compiled: Any) -> int:
    """FLOPs that one device performs in the matrix products and convolutions of a program.

    A product counts 2 × output elements × contracted size, a convolution the same over the kernel's
    positions that meet data; in fusions and library calls too, times the trips of the loops around
    them. Of a conditional's branches the one with the most counts. A loop within `marks.turns`
    runs as often as that says, for the device that performs the most.

    Not counted are elementwise work; inner products (no side has an axis of its own) and outer ones
    (nothing is contracted), which some backends compile to elementwise work; on GPUs products with
    a vector; transforms; solvers. What a backend pads is counted as it runs. A Pallas kernel counts
    by `marks.kernels` around it, or else by its `pl.CostEstimate`; cuDNN's attention by the scores
    that its mask lets through.

    Raises:
      TypeError: `compiled` is no `jax.stages.Compiled`, nor what `topology.compile` returns.
      ValueError: a product whose size cannot be read, or one in a loop whose trips depend on data.
    """
    program = hlo.read("flops", compiled)
    return within(Frame(program, program.entry))


def within(frame: Frame, only: Instruction | None = None) -> int | float:
    """FLOPs of one run of a part of a program, or of one instruction in it and what that runs."""
    return sum(each.value * each.times for each in executed(frame, _read, only=only)[0])


def _read(frame: Frame, op: Instruction) -> int | None:
    """FLOPs of one instruction, None of one that is no product."""
    if op.opcode == "dot":
        return _dot(frame, op, op.attributes["lhs_contracting_dims"], op.says("lhs_batch_dims"))
    if op.opcode == "convolution":
        return _convolution(frame, op)
    if op.opcode == "custom-call":
        return _custom_call(frame, op)
    if op.opcode in ("ragged-dot", "scaled-dot"):
        raise _unreadable(op, op.opcode)
    return None


def _dot(frame: Frame, op: Instruction, *axes: str) -> int | None:
    """FLOPs of a product by the axes of its left side that are contracted, and of a batch."""
    sizes, out = frame.operands(op)[0].dims, op.arrays[0].elements
    each = ([sizes[int(i)] for i in re.findall(r"\d+", numbers)] for numbers in axes)
    contracted, batch = map(math.prod, each)
    return 2 * out * contracted if contracted > 1 and out > batch else None


def _custom_call(frame: Frame, op: Instruction) -> int | None:
    """FLOPs of a kernel by a formula, or of a library's product; None of what is no product."""
    target, config = op.says("custom_call_target"), op.says("backend_config")
    if target == "tpu_custom_call":
        if (count := kernel_said(op.source)) is not None:
            return count
        if told := re.search(r'"cost_estimate":\{"flops":"(\d+)"', config):
            return int(told[1])
    if target.startswith("__cudnn$fmha"):
        return _attention(frame, op, config)
    dims = dict(re.findall(r'"lhs_(contracting|batch)_dimensions":\s*\[([^\]]*)\]', config))
    if "contracting" in dims:
        return _dot(frame, op, dims["contracting"], dims.get("batch", ""))
    if re.search(_PRODUCTS, target, re.IGNORECASE):
        raise _unreadable(op, target)
    return None


def _attention(frame: Frame, op: Instruction, config: str) -> int:
    """FLOPs of cuDNN's attention: two products forward and five backward, of all scores, or of the
    half that a causal mask lets through; an error where a window or lengths cut more away.
    """
    target = op.says("custom_call_target")
    scores = re.search(r'"intermediate_tensor_shape":\{"dimensions":\[([^\]]*)\]', config)
    mask = re.search(r'"mask_type":"(NO_MASK|CAUSAL)"', config)
    if not scores or not mask or re.search(r'"sliding_window_length":[1-9]', config):
        raise _unreadable(op, target)
    sizes = math.prod(int(n) for n in re.findall(r"\d+", scores[1]))
    products, halves = 5 if "Backward" in target else 2, 1 if mask[1] == "CAUSAL" else 2
    return products * halves * sizes * frame.operands(op)[0].dims[-1]


def _unreadable(op: Instruction, what: str) -> ValueError:
    return ValueError(
        f"measure.flops: cannot read the size of the product in {op.name}, a {what}; known are "
        f"dot, convolution, and library calls that state their contracted dimensions. Count a "
        f"program compiled for CPU, or the part around it by itself; of a Pallas kernel for TPUs, "
        f"say marks.kernels(pallas_call=FLOPs) around it."
    )


def _convolution(frame: Frame, op: Instruction) -> int:
    """2 × batch × output features × contracted features × positions where the kernel meets data."""
    arrays = *frame.operands(op), op.arrays[0]
    labels = re.match(r"(\w+)_(\w+)->(\w+)", op.attributes["dim_labels"]).groups()
    window = dict(re.findall(r"(\w+)=(\S+)", op.says("window").strip("{}")))
    positions = 1
    for axis in filter(str.isdigit, labels[1]):
        sizes = (x.dims[label.index(axis)] for x, label in zip(arrays, labels, strict=True))
        on_axis = {key: text.split("x")[int(axis)] for key, text in window.items()}
        positions *= _meeting(*sizes, on_axis)
    batch, features = (op.arrays[0].dims[labels[2].index(c)] for c in "bf")
    return 2 * batch * features * arrays[1].dims[labels[1].index("i")] * positions


def _meeting(data: int, kernel: int, out: int, window: dict[str, str]) -> int:
    """Pairs of output and kernel positions on one axis that fall on data, not padding or holes."""
    low = int(window.get("pad", "0_0").split("_")[0])
    keys = "stride", "lhs_dilate", "rhs_dilate"
    stride, spacing, dilation = (int(window.get(key, 1)) for key in keys)
    places = (o * stride + k * dilation - low for o in range(out) for k in range(kernel))
    return sum(0 <= p <= (data - 1) * spacing and p % spacing == 0 for p in places)
