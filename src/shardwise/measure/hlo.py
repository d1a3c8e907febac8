"""Programs as HLO: computations, each a list of instructions, parsed from the text that a backend
prints of an optimized program, or XLA of a lowered one.
"""

import math
import re
from typing import Any, NamedTuple

import jax
import numpy as np

Groups = tuple[tuple[int, ...], ...]

_COMMENT = re.compile(r"/\*.*?\*/")
# A kernel's metadata may stand on lines of their own, in the middle of its instruction.
_BROKEN = re.compile(r"=\{\n(?:[^\n}][^\n]*\n)*\}")
_COMPUTATION = re.compile(
    r"^(ENTRY )?%?([\w.\-]+)(?: \([^\n]*)? ?\{\n(.*?)^\}", re.MULTILINE | re.DOTALL
)
_ASSIGNMENT = re.compile(r"\s*(ROOT )?%?([^\s=]+) = (.*)$")
_ELEMENT = re.compile(r"%([\w.\-]+)#(\d+)")  # of a tuple, as an operand
_OPCODE = re.compile(r" ?([a-z][\w\-]*)\(")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([^\]]*)\]")
_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|[()\[\]{},]')
# Groups of devices: lists, numbers in an order, and axes of a mesh, whole or a part of one.
_LIST = re.compile(r"\{(\d[\d, >-]*)\}")
_ORDER = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
_IOTA = re.compile(rf"\[([\d,]+)\]<={_ORDER}")
_MESH_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")
_EDGES = "LocalToGlobalShape", "ShardToFullShape"  # where a shard_map ends
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


class Array(NamedTuple):
    """An array's type in a program: its dtype as HLO writes it ("f32", "s32"), and its sizes."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        # A truth value is held as a byte; tokens and opaque handles have no width.
        width = re.match(r"[a-z]+(\d+)", self.dtype.replace("pred", "u8"))
        return -(-self.elements * int(width[1]) // 8) if width else 0


class Instruction(NamedTuple):
    """`name = arrays opcode(operands), attributes`, tuples of arrays flattened."""

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    attributes: dict[str, str]

    def says(self, attribute: str) -> str:
        """The text of an attribute, without quotes around it; "" if there is none."""
        return self.attributes.get(attribute, "").strip('"')

    @property
    def source(self) -> str:
        """The operation that JAX named, in its scopes; "" where the program does not say."""
        named = re.search(r'op_name="([^"]*)"', self.says("metadata"))
        return named[1] if named else ""

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that run when a call, fusion or async start runs."""
        if self.opcode not in ("call", "fusion", "async-start"):
            return ()
        return (self.says("calls") or self.attributes["to_apply"],)

    @property
    def branches(self) -> tuple[str, ...]:
        """Names of the computations of which a conditional runs one."""
        keys = ("branch_computations", "true_computation", "false_computation")
        return tuple(re.findall(r"[^\s%{},]+", ",".join(map(self.says, keys))))


class Computation(NamedTuple):
    """Instructions by name, in program order, and the name of the one that is the result."""

    name: str
    instructions: dict[str, Instruction]
    root: str


class Program(NamedTuple):
    """Computations by name; `devices` run it, and if `scheduled`, in the order of its text.

    `places` are the devices' coordinates, as `topology.Compiled` has them; () if not known.
    """

    computations: dict[str, Computation]
    entry: Computation
    devices: int
    scheduled: bool = False
    places: Groups = ()

    @property
    def instructions(self) -> list[Instruction]:
        return [op for each in self.computations.values() for op in each.instructions.values()]

    @property
    def by_hand(self) -> bool:
        """Whether a lowered program has a `jax.shard_map`, of any axes, in it."""
        return any(op.says("custom_call_target").endswith(_EDGES) for op in self.instructions)


def checked(who: str, program: Any) -> Any:
    """`program`, a `jax.stages.Compiled` or what has its methods; TypeError of `measure.who`."""
    says = hasattr(program, "as_text") and hasattr(program, "memory_analysis")
    if not says or isinstance(program, jax.stages.Lowered | type):
        raise TypeError(
            f"measure.{who} takes a compiled program, and got {type(program).__name__}; pass "
            f"jax.jit(f).lower(*args).compile(), or what topology.compile returns."
        )
    return program


def read(who: str, program: Any) -> Program:
    """A compiled program, or its text, parsed; TypeError for another, of which `who` tells."""
    if isinstance(program, Program):
        return program
    parsed = parse(program if isinstance(program, str) else checked(who, program).as_text())
    return parsed._replace(places=getattr(program, "coordinates", ()))


def lowered(given: jax.stages.Lowered) -> Program:
    """A lowered program as XLA reads it; ValueError for a custom call that may send anything."""
    # Not as_text("hlo"), which on JAX 0.7.2 leaves the configuration of custom calls out.
    program = parse(given.compiler_ir("hlo").as_hlo_module().to_string())
    for op in (op for op in program.instructions if op.opcode == "custom-call"):
        target = op.says("custom_call_target")
        # A TPU kernel says so, and only then, if it copies to other devices.
        if not _LOCAL.fullmatch(target) or "has_communication" in op.says("backend_config"):
            raise ValueError(
                f"measure: whether the custom call {target} sends anything to other devices is not "
                f"known here; measure the parts of the program around it by themselves."
            )
    told = given.compiler_ir().operation.attributes
    devices = [told[f"mhlo.num_{kind}"].value for kind in ("replicas", "partitions")]
    return program._replace(devices=math.prod(devices))


def parse(text: str) -> Program:
    """The program in an HLO module's text; ValueError where it is none."""
    computations, entry = {}, None
    text = _BROKEN.sub(lambda found: found[0].replace("\n", " "), text)
    for is_entry, name, body in _COMPUTATION.findall(_COMMENT.sub("", text).replace("\r\n", "\n")):
        read, types, root = {}, {}, None
        for line in filter(str.strip, body.splitlines()):
            for of, number in _ELEMENT.findall(line):  # newer XLA's short form
                if of in types and f"{of}#{number}" not in read:
                    of_element = _inside(types[of])[0][int(number)]
                    short = f"{of}#{number} = {of_element} get-tuple-element({of}), index={number}"
                    read[f"{of}#{number}"] = _instruction(short)[2]
            is_root, told, op = _instruction(line)
            read[op.name], types[op.name] = op, told
            root = op.name if is_root else root
        computations[name] = Computation(name, read, root or op.name)
        entry = computations[name] if is_entry else entry
    if entry is None:
        raise ValueError(
            f"measure: no ENTRY computation in this text, which starts {text[:60]!r}; expected an "
            f"HLO module, such as jax.jit(f).lower(*args).compile().as_text()."
        )
    header = text.partition("\n")[0]
    devices = map(int, re.findall(r"\b(?:replica_count|num_partitions)=(\d+)", header))
    return Program(computations, entry, math.prod(devices), "is_scheduled=true" in header)


def _instruction(line: str) -> tuple[bool, str, Instruction]:
    """(whether it is the root, the text of its type, the instruction) of a line."""
    if not (assignment := _ASSIGNMENT.match(line)):
        raise ValueError(f"measure: this line of the HLO is no instruction: {line.strip()!r}")
    is_root, name, rest = assignment.groups()
    # A tuple's type stands in parentheses and holds spaces; any other type holds none.
    end = _inside(rest)[1] if rest.startswith("(") else len(rest.partition(" ")[0])
    if not (opcode := _OPCODE.match(rest, end)):
        raise ValueError(f"measure: no opcode in this line of the HLO: {line.strip()!r}")
    inputs, close = _inside(rest, opcode.end() - 1)
    operands = tuple(part.split()[-1].lstrip("%") for part in inputs)
    attributes = dict(part.split("=", 1) for part in _inside(f"({rest[close:]})")[0] if "=" in part)
    op = Instruction(name, opcode[1], _arrays(rest[:end]), operands, attributes)
    return bool(is_root), rest[:end], op


def _arrays(text: str) -> tuple[Array, ...]:
    if "[?" in text or ",?" in text:
        raise ValueError(f"measure: {text} has a size that is not known; lower with fixed shapes.")
    return tuple(
        Array(dtype, tuple(int(size.lstrip("<= ")) for size in sizes.split(",") if size))
        for dtype, sizes in _ARRAY.findall(text)
    )


def _inside(text: str, start: int = 0) -> tuple[list[str], int]:
    """(the parts between the commas of the bracket that opens at `start`, the place after it)."""
    parts, depth, begin = [], 0, start + 1
    for token in _TOKEN.finditer(text, start):
        depth += (token[0] in "([{") - (token[0] in ")]}")
        if depth == 0 or (depth == 1 and token[0] == ","):
            parts.append(text[begin : token.start()].strip())
            begin = token.end()
        if depth == 0:
            return list(filter(None, parts)), begin
    raise ValueError(f"measure: unbalanced brackets in this line of the HLO: {text.strip()!r}")


def replicas(op: Instruction, devices: int) -> Groups:
    """The groups of numbers below `devices` in the `replica_groups` of an instruction."""
    text, order = op.says("replica_groups"), op.says("device_ids")
    if text in ("", "{}"):
        return (tuple(range(devices)),)
    if iota := _IOTA.fullmatch(text):
        return _tuples(_arranged(*iota.groups()[1:]).reshape(_numbers(iota[1])))
    # The axes stand after the mesh, or after the order of its devices where that is given.
    axes = re.search(r"\{([^{}]*)\}$", order or text)
    if axes and text.startswith("mesh["):
        return _of_mesh(text, order, axes[1])
    if not (groups := lists(text)):
        raise ValueError(
            f"measure.collectives: cannot read the replica groups of {op.name}: {text}; expected "
            f"{{{{0,1}},{{2,3}}}}, [2,2]<=[4] or mesh['a'=2,'b'=2] {{'a'}}."
        )
    return groups


def lists(text: str) -> Groups:
    """The lists of numbers in a text, such as {0,1} or {0->1}."""
    return _tuples(re.findall(r"\d+", found) for found in _LIST.findall(text))


def _of_mesh(text, order, axes):
    """Groups along some axes of a mesh, whole or a part of one: `'a':(before)size`."""
    sizes = {name: int(n) for name, n in re.findall(r"'([^']+)'=(\d+)", text)}
    told = re.search(_ORDER, order)
    ids = _arranged(*told.groups()) if told else np.arange(math.prod(sizes.values()))
    used, shape = {name: parts for name, *parts in _MESH_AXIS.findall(axes)}, []
    for name, whole in sizes.items():
        before, size = used.get(name, ("", "1"))
        inner, outer = int(size or whole), int(before or 1)
        shape += [outer, inner, whole // outer // inner]
    grid = np.moveaxis(ids.reshape(shape), range(1, len(shape), 3), range(-len(sizes), 0))
    return _tuples(grid.reshape(-1, math.prod(shape[1::3])))


def _arranged(shape, transposed):
    """The numbers of `[shape]T(transposed)`, in their order."""
    sizes = _numbers(shape)
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    return (ids.transpose(_numbers(transposed)) if transposed else ids).ravel()


def _numbers(text):
    return [*map(int, text.split(","))]


def _tuples(rows):
    return tuple(tuple(map(int, row)) for row in rows)
