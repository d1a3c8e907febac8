"""Lowered StableHLO, read into the same form and words as optimized HLO.

Here stand the collectives that were written by hand, in the dtypes in which they were written;
those that the compiler inserts, and the dtypes that its backend prefers, appear in HLO only.
"""

import math
import re

import jax
import numpy as np

from .program import Array, Computation, Instruction, Program

# Regions that combine two scalars, or order them: nothing in them is counted.
_SCALAR_REGIONS = ("all_reduce", "reduce_scatter", "reduce", "reduce_window", "scatter",
                   "select_and_scatter", "sort", "map")  # fmt: skip
_INLINE_REGIONS = {"sdy.manual_computation", "sdy.named_computation"}
_BRANCHES = {"stablehlo.case", "stablehlo.if"}
_CALLS = {"func.call": "callee", "stablehlo.composite": "decomposition"}
# Custom calls that keep to their own device, by what they are for: libraries, TPU's own algorithms,
# placement, Python on the host, kernels.
_LOCAL = re.compile(
    r"""(lapack|cublas|cusolver|cusparse|hipblas|hipsolver|hipsparse|rocsolver|cu|hip)_\w+
    | Cholesky | Eigh | Qr | LuDecomposition | ProductOfElementaryHouseholderReflectors
    | ApproxTopK | PartialReduce | TopK | mhlo\.\w+ | chlo\.\w+ | stablehlo\.dynamic_\w+
    | __cudnn\$\w+ | __op\$block_scaled_dot
    | Sharding | SPMDFullToShardShape | SPMDShardToFullShape | LayoutConstraint | xla\.sdy\.\w+
    | annotate_device_placement | AllocateBuffer | CreateBuffer | Pin | Unpin | shape_assertion
    | xla_(\w+_)?python_(cpu|gpu|tpu)_callback
    | __gpu\$xla\.gpu\.triton | triton_kernel_call(_ffi)? | tpu_custom_call""",
    re.VERBOSE,
)
_DTYPES = {"i1": "pred", "complex<f32>": "c64", "complex<f64>": "c128"}


def read(lowered: jax.stages.Lowered) -> Program:
    """The program of a `jax.stages.Lowered`; ValueError where it cannot be counted."""
    module = lowered.compiler_ir("stablehlo")
    reader = _Reader(module)
    for op in module.body.operations:
        if op.operation.name == "func.func":
            reader.block(op.attributes["sym_name"].value, op.regions[0].blocks[0])
    told = module.operation.attributes
    kinds = ("mhlo.num_replicas", "mhlo.num_partitions")
    devices = math.prod(told[kind].value for kind in kinds if kind in told)
    return Program(reader.computations, "main", devices)


class _Reader:
    def __init__(self, module):
        self.computations = {}
        self.names = {}  # MLIR value -> instruction name, unique in the program
        self.fresh = 0
        self.meshes = {
            op.attributes["sym_name"].value: str(op.attributes["mesh"])
            for op in module.body.operations
            if op.operation.name == "sdy.mesh"
        }

    def block(self, name, block, loop=None):
        """Read a block as a computation: what a loop carries is one tuple, as in HLO."""
        body = {}
        carry = self.add(body, "parameter", (), ("0",)) if loop else None
        for i, value in enumerate(block.arguments):
            if loop:
                self.element(body, value, carry, i)
            else:
                arrays = (_array(value.type),)
                self.names[value] = self.add(body, "parameter", arrays, (str(i),))
        *operations, last = list(block.operations)
        for op in operations:
            self.operation(body, op)
        results = tuple(self.names[value] for value in last.operands)
        single = len(results) == 1 and loop != "body"
        root = results[0] if single else self.add(body, "tuple", (), results)
        self.computations[name] = Computation(name, body, root)
        return name

    def operation(self, body, op):
        name = op.operation.name
        results = list(op.results)
        operands = tuple(self.names[value] for value in op.operands)
        arrays = tuple(_array(value.type) for value in results)
        opcode = name.rpartition(".")[2].replace("_", "-")
        attributes = {}
        if name == "stablehlo.while":
            condition, do = (
                self.block(self.unused(part), region.blocks[0], loop=part)
                for part, region in zip(("condition", "body"), op.regions, strict=True)
            )
            operands = (self.add(body, "tuple", (), operands),)
            named = re.match(r'loc\("([^"]*)"', str(op.location))
            metadata = f'op_name="{named[1]}"' if named else ""
            attributes = {"condition": condition, "body": do, "metadata": metadata}
        elif name in _CALLS:
            opcode, attributes = "call", {"calls": op.attributes[_CALLS[name]].value}
        elif name in _INLINE_REGIONS:
            inner = self.block(self.unused(opcode), op.regions[0].blocks[0])
            opcode, attributes = "call", {"calls": inner}
        elif name in _BRANCHES:
            inner = [self.block(self.unused("branch"), r.blocks[0]) for r in op.regions]
            opcode, attributes = "conditional", {"branch_computations": ",".join(inner)}
        elif name == "stablehlo.custom_call":
            opcode = _custom_call(op)
        elif name == "stablehlo.constant":
            value = re.match(r"dense<(-?\d+)>", str(op.attributes["value"]))
            operands = (value[1],) if value else ()
        elif len(op.regions) and name.removeprefix("stablehlo.") not in _SCALAR_REGIONS:
            raise ValueError(
                f"measure: how often {name} runs its regions is not known here; compile the "
                f"program and count in the result: lowered.compile()."
            )
        else:
            attributes = self.attributes(op)
        result = self.add(body, opcode, arrays, operands, attributes)
        if len(results) == 1 and name != "stablehlo.while":
            self.names[results[0]] = result
            return
        for i, value in enumerate(results):
            self.element(body, value, result, i)

    def element(self, body, value, whole, index):
        """Read a value as an element of a tuple."""
        arrays, at = (_array(value.type),), {"index": str(index)}
        self.names[value] = self.add(body, "get-tuple-element", arrays, (whole,), at)

    def attributes(self, op):
        """The attributes that are read later, as HLO would print them."""
        found, given = {}, op.attributes
        if "comparison_direction" in given:
            found["direction"] = re.search(r"\b[A-Z]{2}\b", str(given["comparison_direction"]))[0]
        if "source_target_pairs" in given:
            found["source_target_pairs"] = _listed(given["source_target_pairs"])
        if "replica_groups" in given:
            found["replica_groups"] = self.groups(given["replica_groups"])
        return found

    def groups(self, attribute) -> str:
        """Replica groups as HLO writes them: listed, or along the axes of a mesh."""
        text = str(attribute)
        if re.search(r": tensor<\d+x\d+xi64>", text):
            return _listed(attribute)
        symbol = re.search(r"mesh = @([\w.$-]+)", text)
        sizes = self.meshes[symbol[1]] if symbol else text
        sizes = re.findall(r'"([^"]+)"\s*=\s*(\d+)', sizes)
        axes = re.findall(r'axis_ref<name = "([^"]+)"', text)
        if not sizes or not axes or "sub_axis" in text:
            raise ValueError(f"measure: these replica groups cannot be read: {text}")
        mesh = ",".join(f"'{name}'={size}" for name, size in sizes)
        used = ",".join(f"'{name}'" for name in axes)
        return f"mesh[{mesh}] {{{used}}}"

    def add(self, body, opcode, arrays, operands, attributes=None):
        name = self.unused(opcode)
        body[name] = Instruction(name, opcode, arrays, operands, attributes or {})
        return name

    def unused(self, stem: str) -> str:
        self.fresh += 1
        return f"{stem}.{self.fresh}"


def _custom_call(op) -> str:
    """HLO's name for a `stablehlo.custom_call`; ValueError where it may send, for all we know."""
    target = op.attributes["call_target_name"].value
    if target == "ragged_all_to_all":
        return "ragged-all-to-all"
    config = str(op.attributes["backend_config"]) if "backend_config" in op.attributes else ""
    # A TPU kernel says so, and only then, if it copies to other devices.
    if not _LOCAL.fullmatch(target) or "has_communication" in config:
        raise ValueError(
            f"measure: whether the custom call {target} sends anything to other devices is not "
            f"known here; measure the parts of the program around it by themselves."
        )
    return "custom-call"


def _listed(attribute):
    """A table of numbers as HLO writes it; printed by MLIR, more than a hundred are hexadecimal."""
    rows = [",".join(map(str, row)) for row in np.asarray(attribute)]
    return "{" + ",".join(f"{{{row}}}" for row in rows) + "}"


def _array(mlir_type):
    text = str(mlir_type)
    tensor = re.match(r"tensor<((?:\d+x)*)([^,]+?)(?:, .*)?>$", text)
    if "?" in text:
        raise ValueError(f"measure: {text} has a size that is not known; lower with fixed shapes.")
    if tensor is None:
        return Array("token", ())
    dtype = tensor[2]
    name = _DTYPES.get(dtype) or re.sub(r"^i(?=\d)", "s", re.sub(r"^ui", "u", dtype)).lower()
    return Array(name, tuple(int(size) for size in tensor[1].split("x") if size))
