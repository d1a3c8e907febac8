"""Which values of a traced program follow from which of its inputs."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Literal

Labels = frozenset
NOTHING: Labels = frozenset()
LOCAL = "shardwise local"  # the name of what marks.local says is made of one part alone

# These run their inner program once, on their own inputs in their order.
CALLS = {"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2", "shard_map"}


class Step(NamedTuple):
    """An equation of a program in which calls are opened."""

    name: str
    inputs: tuple
    outputs: tuple
    params: dict


class _Variable:
    """A variable of an opened call: its program may be called again, and is not that one then."""

    def __init__(self, aval):
        self.aval = aval


def steps(jaxpr: Any) -> tuple[list[Step], list]:
    """(the program's equations with calls opened, its outputs as these name them)."""
    names: dict = {}
    return list(_opened(jaxpr, names, top=True)), [_named(v, names) for v in jaxpr.outvars]


def every(
    jaxpr: Any, labels: Sequence[Labels], visit: Callable[[Step, list[Labels]], None] | None = None
) -> tuple[list[Step], list, dict]:
    """(steps, outputs, the labels of each variable), of inputs that have these labels.

    A value has the labels of all that it follows from. `visit(step, labels of its inputs)` sees
    every step, those of inner programs too. What stands within a custom_vjp or custom_jvp follows
    from all that goes in: its rule may do anything.
    """
    found, outputs = steps(jaxpr)
    env = dict(zip(jaxpr.invars, labels, strict=True))
    for step in found:
        given = [label_of(env, v) for v in step.inputs]
        if visit is not None:
            visit(step, given)
        env.update(zip(step.outputs, _through(step, given, visit), strict=True))
    return found, outputs, env


def label_of(env: dict, v: Any) -> Labels:
    """A variable's labels; a literal, or a constant of the program, has none."""
    return NOTHING if isinstance(v, Literal) else env.get(v, NOTHING)


def _follow(jaxpr, labels, visit):
    _, outputs, env = every(jaxpr, labels, visit)
    return [label_of(env, v) for v in outputs]


def _through(step, given, visit):
    everything = NOTHING.union(*given)
    if is_local(step.name, step.params):  # a number to the batch as any other, and each part's own
        own = {LOCAL} if everything & {"batch", "rows"} else NOTHING
        return [everything - {"batch", "rows"} | own] * len(step.outputs)
    if step.name == "shard_map":
        return _follow(_inner(step.params), given, visit)
    if step.name == "scan":
        return _scan(step, list(given), visit)
    for body in programs(step.params):
        _follow(body, [everything] * len(body.invars), visit)
    return [everything] * len(step.outputs)


def _scan(step, given, visit):
    body = _inner(step.params)
    carries = scan_carries(step.inputs, step.outputs, body)
    while True:
        out = _follow(body, given, None)
        carried = [a | b for a, b in zip(given[carries], out, strict=False)]
        if carried == given[carries]:
            return out if visit is None else _follow(body, given, visit)
        given[carries] = carried


def is_local(name: str, params: dict) -> bool:
    """Whether an equation is `marks.local`, as `trace` marks it."""
    return name == "name" and LOCAL in str(params.get("name", ""))


def scan_carries(inputs: Sequence, outputs: Sequence, body: Any) -> slice:
    """Which inputs of a scan are carried round.

    Counted by ranks, since JAX's versions tell them in different ways: what is stacked has one
    axis more outside than inside.
    """
    ys = sum(_rank(a) > _rank(b) for a, b in zip(outputs, body.outvars, strict=True))
    xs = sum(_rank(a) > _rank(b) for a, b in zip(inputs, body.invars, strict=True))
    return slice(len(inputs) - xs - (len(body.outvars) - ys), len(inputs) - xs)


def _rank(v):
    return len(v.aval.shape)


def _inner(params):
    found = params.get("jaxpr", params.get("call_jaxpr"))
    return getattr(found, "jaxpr", found)


def programs(params: dict) -> Iterator:
    """The inner programs of a step."""
    for value in params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            one = getattr(one, "jaxpr", one)
            if hasattr(one, "eqns"):
                yield one


def _opened(jaxpr, names, top=False):
    for eqn in jaxpr.eqns:
        inputs = tuple(_named(v, names) for v in eqn.invars)
        if eqn.primitive.name in CALLS - {"shard_map"}:
            body = _inner(eqn.params)
            inside = dict(zip(body.invars, inputs, strict=True))
            yield from _opened(body, inside)
            names.update(zip(eqn.outvars, (_named(v, inside) for v in body.outvars), strict=True))
        elif eqn.primitive.name == "cond":
            yield from _branches(eqn, inputs, names, top)
        else:
            outputs = tuple(v if top else _Variable(v.aval) for v in eqn.outvars)
            names.update(zip(eqn.outvars, outputs, strict=True))
            yield Step(eqn.primitive.name, inputs, outputs, eqn.params)


def _branches(eqn, inputs, names, top):
    """All of its branches, and for each output the choice."""
    cases = []
    for branch in eqn.params["branches"]:
        inside = dict(zip(branch.jaxpr.invars, inputs[1:], strict=True))
        yield from _opened(branch.jaxpr, inside)
        cases.append([_named(v, inside) for v in branch.jaxpr.outvars])
    for v, *chosen in zip(eqn.outvars, *cases, strict=True):
        names[v] = v if top else _Variable(v.aval)
        yield Step("select_n", (inputs[0], *chosen), (names[v],), {})


def _named(v, names):
    return v if isinstance(v, Literal) else names.get(v, v)
