"""Residuals of a loss, from its trace: what is kept for the backward pass and is not cheap."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from shardwise import jaxprs, marks
from shardwise.costs.terms import Terms
from shardwise.fsdp.arrays import ArrayLayout
from shardwise.jaxprs import Equation
from shardwise.topology.slices import to_host

# What works entry by entry, or says where an entry comes from.
CHEAP = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh broadcast_in_dim ceil clamp
    concatenate convert_element_type copy cos cosh div eq erf erf_inv erfc exp exp2 expand_dims
    expm1 floor ge gt integer_pow iota is_finite le log log1p logistic lt max min mul name ne
    neg nextafter not or pad pow reduce_precision rem reshape rev round rsqrt select_n
    shift_left shift_right_arithmetic shift_right_logical sign sin sinh slice split sqrt square
    squeeze sub tan tanh transpose xor""".split()
)
PRODUCTS = frozenset(["dot_general", "conv_general_dilated"])
SUMS = frozenset(["reduce_sum", "reduce_max", "reduce_min"])
AT_WORK = PRODUCTS | {"scan", "while"}
_LAST = "what ran again last"
_USED = "optimization_barrier"  # what a parameter as it is used is in a trace
_OPENED = frozenset(jaxprs.CALLS | jaxprs.REMAT | {"cond"})


def residuals(
    mean: Callable[..., Any],
    params: Any,
    laid: Sequence[ArrayLayout],
    batch: Any,
    dtype: Any,
) -> Terms:
    """The bytes that a loss keeps (`kept`), but for what a compiler computes again: with gathered
    or cast weights, without the program's inputs. Beside these there is the gradient of the largest
    array, at the backward pass's beginning, or what a loop has (`logits`); or what the largest
    rematerialised body needs, less what is gone by then (`layer`). `beside` is what a compiler may
    have besides: all that JAX keeps, the rest of that body's, and a second array of the largest.

    `mean(params, batch)` is the loss of a device's rows; `params` and `batch` are shapes, `laid`
    says which parameters are gathered, `dtype` in which they are used.

    Raises:
      ValueError: it moves arrays to the host.
    """
    treedef, is_cut = jax.tree.structure(params), any(s.cut is not None for s in laid)
    at_use = functools.partial(jax.tree.map, lambda x: _taken(x, dtype, is_cut))

    def here(params, batch):
        pairs = zip(jax.tree.leaves(params), laid, strict=True)
        now = [x if s.stacked else _taken(x, dtype, s.cut is not None) for x, s in pairs]
        with marks.bind(use=at_use):
            return mean(jax.tree.unflatten(treedef, now), batch)

    traced = jax.make_jaxpr(here)(params, batch)
    bodies = list(_again(traced.jaxpr))
    closed = _for_backward(_marked(traced), jax.tree.leaves(params), *jax.tree.leaves(batch))
    if to_host(closed.jaxpr):
        raise ValueError(
            "plan.own: the loss, or remat=, moves arrays to the host; what waits there is not "
            "planned for programs of your own. topology.compile tells what a layout of one needs."
        )
    program, outputs = opened(closed)
    found = stored(program, outputs)
    working, more = map(max, zip((0, 0), *map(_working, bodies), strict=True))
    kept, after = sum(s.bytes for s in found), _after_the_last(program)
    gone = sum(s.bytes for s in found if s.step >= after)
    layer, loops = max(working - gone, 0), _in_loops(program, found)
    second = max(_gradient(program, found, at_the_end=False), loops)
    return Terms(
        kept=kept,
        logits=max(_gradient(program, found), loops),
        layer=layer,
        beside=_beyond(program, outputs, found) + more + working - layer + second,
    )


def _beyond(program, outputs, found):
    """The bytes that JAX keeps, but for the program's inputs, beyond what is stored."""
    made = {v for step in program for v in step.outvars}
    whole = sum(map(size, dict.fromkeys(_known(outputs, made))))
    return max(0, whole - sum(s.bytes for s in found))


def _in_loops(program, found):
    """The most bytes that a loop has beside what is stored: its largest product, such as a chunk's
    logits, of which `objective.chunked_sum` has the gradient at once, and the weights, gathered or
    cast, that nothing later reads.
    """
    used = {v for step in program if step.name == _USED for v in step.outvars}
    used -= {s.variable for s in found}

    def needed(loop):
        products = (e.outvars for e in jaxprs.within(loop.origin) if e.primitive.name in PRODUCTS)
        largest = max((size(v) for outvars in products for v in outvars), default=0)
        return largest + sum(size(v) for v in _known(dict.fromkeys(loop.invars), used))

    return max((needed(step) for step in program if step.name == "scan"), default=0)


def _for_backward(run, moving, *rest):
    """The program that yields what JAX keeps of `run` for its gradient to `moving`."""

    def forward(moving, *rest):
        return jax.tree.leaves(jax.vjp(lambda moving: run(moving, *rest), moving)[1])

    return jax.make_jaxpr(forward)(moving, *rest)


def opened(closed: ClosedJaxpr) -> tuple[list[Equation], list[Any]]:
    """(equations, outputs) of a traced program, in which calls, what runs again and conditionals
    are replaced by what stands in them.
    """
    jaxpr = jaxprs.inlined(closed, _OPENED).jaxpr
    return jaxprs.equations(jaxpr), jaxpr.outvars


def _gradient(program, found, at_the_end=True):
    """The bytes of the gradient of the largest array stored, in the dtype that its product had.

    At the end of the forward pass, one of the same size takes the place of its array, when no later
    product needs that: as the gradient of float32 logits does.
    """
    floats = [s for s in found if _is_float(s.variable.aval)]
    if not floats:
        return 0
    largest = max(floats, key=lambda s: size(s.variable))
    found = size(_origin(program, largest.variable))
    needed = any(step.name in AT_WORK for step in program[largest.step + 1 :])
    return 0 if at_the_end and found == largest.bytes and not needed else found


def _again(jaxpr: Any) -> Iterator[Any]:
    """The bodies that run again in the backward pass; those without products a compiler takes into
    what reads them, such as `model.cross_entropy`.
    """
    for eqn in jaxpr.eqns:
        for body in jaxprs.inner(eqn):
            if eqn.primitive.name not in jaxprs.REMAT:
                yield from _again(body)
            elif any(e.primitive.name in AT_WORK for e in jaxprs.every(body)):
                yield body


def _marked(traced):
    """A traced program as a function, with a name on what its last part that runs again yields:
    names are all that a differentiated trace has of such a part.
    """
    closed = jaxprs.inlined(traced, jaxprs.CALLS)
    jaxpr, steps = closed.jaxpr, jaxprs.equations(closed.jaxpr)
    last = [i for i, e in enumerate(jaxpr.eqns) if any(_again(jaxpr.replace(eqns=[e])))][-1:]

    def run(moving, *rest):
        given = *closed.consts, *moving, *rest
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), given, strict=True))
        for i, step in enumerate(steps):
            made = step.run(*jaxprs.read(env, step.invars))
            made = [checkpoint_name(x, _LAST) for x in made] if i in last else made
            env |= zip(step.outvars, made, strict=True)
        return jaxprs.read(env, jaxpr.outvars)

    return run


def _after_the_last(program):
    """The number of the first equation after what runs again; of all where nothing does."""
    names = (i for i, e in enumerate(program, 1) if e.origin.params.get("name") == _LAST)
    return max(names, default=len(program))


def _working(body):
    """(the bytes that a body's own backward pass needs, those that JAX keeps beyond them)."""
    every = dict(enumerate(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in body.invars))
    floats = {i: x for i, x in every.items() if _is_float(x)}
    run = jaxpr_as_fun(ClosedJaxpr(body, ()))

    def of_floats(floats, every):
        return list(filter(_is_float, run(*(every | floats).values())))

    program, outputs = opened(_for_backward(of_floats, floats, every))
    found = stored(program, outputs)
    # Gathered weights have gradients that are whole until they are scattered.
    gathered = sum(s.bytes for s in found if program[s.step].name == _USED)
    needs = sum(s.bytes for s in found) + gathered + _gradient(program, found, at_the_end=False)
    return needs, _beyond(program, outputs, found)


def _taken(x, dtype, is_cut):
    """A parameter as used: a gather or a cast makes a new array, as `_USED` does in a trace."""
    is_cast = dtype is not None and _is_float(x) and x.dtype != dtype
    x = x.astype(dtype) if is_cast else x
    return jax.lax.optimization_barrier(x) if is_cut or is_cast else x


class Stored(NamedTuple):
    """A variable, the number of the step that makes it, and the bytes that are stored of it."""

    variable: Any
    step: int
    bytes: int


def stored(program: Sequence[Equation], outputs: Sequence[Any]) -> list[Stored]:
    """The smallest set of variables, in bytes, from which the outputs follow by cheap steps; in the
    order of the program, which `opened` makes of a trace.

    Cheap is what works entry by entry, which a compiler fuses into what reads it: it is done again
    in the backward pass rather than kept. The program's inputs are there anyway. By a minimum cut
    between what is not cheap, such as products, sums and loops, and the outputs, as PyTorch's
    min-cut partitioner does. A product that is made wider and then indexed, as logits are for many
    a loss, is stored wide: the compiler takes the one step for a part of the other.
    """
    made_by = {v: step for step in program for v in step.outvars}
    kept = set(_known(outputs, made_by))
    cheap, _ = jaxprs.needed([step for step in program if step.name in CHEAP], kept, ())
    variables = dict.fromkeys([*kept, *_known((v for s in cheap for v in s.invars), made_by)])
    sizes = _sizes(program, variables, made_by)
    chosen = set(_cut(sizes, made_by, kept)) if sizes else ()
    each = ((i, v) for i, step in enumerate(program) for v in step.outvars)
    return [Stored(v, i, sizes[v]) for i, v in each if v in chosen]


def _known(atoms, known):
    """The atoms that are variables, and of those the known."""
    return [v for v in jaxprs.variables(atoms) if v in known]


def _origin(program, v):
    """The variable, not cheap, of as many entries as `v`, from which `v` follows entry by entry."""
    made_by = {v: step for step in program for v in step.outvars}
    while v in made_by and made_by[v].name in CHEAP:
        known = _known(made_by[v].invars, made_by)
        if not (same := [u for u in known if u.aval.size == v.aval.size]):
            break
        v = same[0]
    return v


def _is_float(x):
    return jnp.issubdtype(x.dtype, jnp.inexact)


def size(v: Any) -> int:
    """The bytes of a variable."""
    return v.aval.size * v.aval.dtype.itemsize


def _sizes(program, variables, made_by):
    """The bytes of each variable, as it is stored."""
    found = {v: size(v) for v in variables}
    for step in (step for step in program if step.name == "convert_element_type"):
        (wide,) = step.outvars
        for v in _known(step.invars, found):
            if made_by[v].name in PRODUCTS and _is_float(v.aval) and _is_written(program, wide):
                found[v] = max(found[v], size(wide))
    return found


def _is_written(program, variable):
    """Whether anything reads a variable otherwise than entry by entry, or in sums."""
    fused = {variable}
    for step in program:
        if _known(step.invars, fused):
            if step.name in CHEAP:
                fused.update(step.outvars)
            elif step.name not in SUMS:
                return True
    return False


def _cut(sizes, made_by, kept):
    """The variables of the minimum cut: each is two nodes, and the edge between them its size."""
    from scipy.sparse import csgraph, csr_array  # a tenth of what a run imports, and no run cuts

    number = {v: i for i, v in enumerate(sizes)}
    n = len(sizes)
    source, sink = 2 * n, 2 * n + 1
    unit = sum(sizes.values()) // 2**30 + 1  # scipy's capacities are of 32 bits
    edges = {(i, n + i): -(-sizes[v] // unit) for v, i in number.items()}
    never = sum(edges.values()) + 1
    for v, i in number.items():
        if made_by[v].name in CHEAP:
            edges |= {(n + number[u], i): never for u in _known(made_by[v].invars, number)}
        else:
            edges[source, i] = never
        if v in kept:
            edges[n + i, sink] = never
    ends, most = np.array(list(edges), np.int32).T, np.array(list(edges.values()), np.int32)
    graph = csr_array((most, tuple(ends)), shape=(2 * n + 2, 2 * n + 2))
    left = graph - csgraph.maximum_flow(graph, source, sink).flow
    left.data = np.maximum(left.data, 0)
    left.eliminate_zeros()
    reached = set(csgraph.breadth_first_order(left, source, return_predecessors=False).tolist())
    return [v for v, i in number.items() if i in reached and n + i not in reached]
