"""What layouts by the compiler ask for, beside what it inserts: each difference has a cause.

What is asked for is written here as collectives, from what each role has to move; their bytes are
what `layouts.predict` says. Arrays of the compiled program for CPU are known again by their
elements; what else a collective does there than was asked has a name, and leaves nothing over.
With stages the compiler has what stands within tasks alone: see `test_pipeline_layouts`.
"""

import collections
import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from sampling import marked

from shardwise import experts, layouts, measure, mesh, model
from shardwise import tree as trees
from shardwise.measure.hlo import Array

mesh.simulate(8)
ROWS, LENGTH, FLOAT, KEY = 16, 24, 4, jax.random.key(7)
CONFIG = model.Config(embed=32, layers=4, heads=16, kv_heads=8, head_dim=2, mlp=48, remat=True)
MIXTURE = dict(experts=8, experts_per_token=2, capacity_factor=0.75, mlp=16)
PASSES = {"all-reduce": 2}
AGREE = 0.02  # of what is asked for along an axis


@dataclasses.dataclass
class Moved:
    """One array of a collective among `n` devices: elements of the whole, and how often it runs."""

    kind: str
    elements: float
    width: float
    times: float
    n: int
    dtype: str = "f32"
    source: str = ""

    def bytes(self, times, width=None):
        """What a device sends, in ring bytes, in so many runs."""
        one = PASSES.get(self.kind, 1) * self.elements * (self.n - 1) / self.n
        one /= self.n if self.kind == "all-to-all" else 1
        return one * (width or self.width) * times


class Asked:
    """What a step has to move: {axes: [Moved]}."""

    def __init__(self, layout, config, shapes):
        self.layout, self.config = layout, config
        self.found = collections.defaultdict(list)
        self.m, self.layers = layout.microbatches, config.layers
        self.rows = (*layout.context, *layout.rows)
        self.width = 2 if layout.dtype == jnp.bfloat16 else 4
        for path, x, box in trees.walk(shapes):
            self.parameter(path, x, set(trees.axis_names(box) or ()))
        self.loss()
        self.attention()
        self.activations()
        self.tokens()

    def add(self, axes, kind, elements, times, width=None):
        if (n := self.parts(axes)) > 1 and times:
            self.found[tuple(axes)].append(Moved(kind, elements, width or self.width, times, n))

    def parameter(self, path, x, names):
        """Layers are gathered forward, and again where they are recomputed."""
        layout, is_layer = self.layout, path[0] == "blocks"
        apart = layout.expert if "experts" in names else ()
        size = x.size // (layout.size("tensor") if names & {*layout.cut} else 1)
        size //= (layout.size("expert") if apart else 1) * (self.config.layers if is_layer else 1)
        times = self.layers if is_layer else 1
        over = [name for name in self.rows if name not in (*layout.fsdp, *apart)]
        if layout.fsdp:
            self.add(layout.fsdp, "all-gather", size, (1 + is_layer) * times * self.m)
            self.add(layout.fsdp, "reduce-scatter", size, times * self.m)
        self.add(over, "all-reduce", size // layout.size("fsdp"), times, FLOAT)

    def loss(self):
        """The total and the count."""
        self.add(self.rows, "all-reduce", 1, 2, FLOAT)

    def attention(self):
        """K and V, and what is known of tokens, in both forward passes; dK and dV in float32."""
        c, layout = self.config, self.layout
        tokens = ROWS // self.parts(layout.rows) * LENGTH // self.m
        keys = tokens * c.kv_heads // layout.size("tensor") * c.head_dim
        times = self.layers * self.m
        self.add(layout.context, "all-gather", keys, 2 * 2 * times)
        self.add(layout.context, "all-gather", tokens, 3 * 2 * times, FLOAT)
        self.add(layout.context, "reduce-scatter", keys, 2 * times, FLOAT)

    def activations(self):
        """Megatron's, what layers done again send before attention's sum and for it, and the
        loss's maximum, sum and target.
        """
        layout, cut = self.layout, self.parts(self.layout.rows) * self.layout.size("context")
        tokens = ROWS * LENGTH // cut // self.m
        size, m, layers = tokens * self.config.embed, self.m, self.layers
        times = m * (5 * layers + 2)
        if layout.sequence:
            self.add(layout.tensor, "all-gather", size, m * (6 * layers + 2))
            self.add(layout.tensor, "reduce-scatter", size, times)
            self.add(layout.tensor, "all-reduce", self.config.embed, 2 * self.layers + 1, FLOAT)
        else:
            self.add(layout.tensor, "all-reduce", size, times)
        self.add(layout.tensor, "all-reduce", tokens, 3 * self.m, FLOAT)

    def tokens(self):
        """To their experts and back, in both forward passes and the backward."""
        c, layout = self.config, self.layout
        if layout.expert:
            rows = ROWS // self.parts([n for n in layout.rows if n not in layout.expert])
            slots = experts.slots(c.capacity_factor, LENGTH, c.experts_per_token, c.experts)
            size = c.experts * rows * slots * c.embed
            self.add(layout.expert, "all-to-all", size, 6 * self.layers)

    def parts(self, axes):
        return math.prod(self.layout.mesh.shape[name] for name in axes)


def made(found):
    """[Moved] of a program's collectives, each array of a combined one by itself."""
    for op in found.ops:
        arrays = [Array(*a) for a in op.arrays]
        if op.kind == "all-to-all":  # in as many arrays as devices, or one
            arrays = [Array(arrays[0].dtype, (sum(a.elements for a in arrays),))]
        n = op.group_size or 2  # a permute sends what it has: as one of two devices gathers
        whole = n if op.kind in ("all-gather", "all-to-all") or op.group_size is None else 1
        for a in arrays:
            width = a.bytes / max(a.elements, 1)
            given = op.kind, a.elements * whole, width, op.trips, n
            yield Moved(*given, a.dtype, op.source.rsplit("/", 2)[-1])


WIDER, AGAIN, LESS = "in a wider dtype", "again", "not done"
INDICES, ANEW, CHOICES = "indices", "laid out anew", "what routers choose from"
WEIGHTS, ACTIVATIONS = "weights, and not activations", "activations, and not weights"
LEFT = "left over"
RULES = (  # which kinds are known again as which
    lambda ours, theirs: ours == theirs,
    lambda ours, theirs: ours == "all-reduce" and theirs != "all-reduce",
    lambda ours, theirs: (ours, theirs) == ("all-gather", "all-to-all"),
)


def causes(asked, found, layout, shapes):
    """{cause: bytes more than were asked for}, all of the difference."""
    more, met = collections.Counter(), {x.elements for x in asked}
    asked, found = ([dataclasses.replace(x) for x in group] for group in (asked, found))
    for rule, ours, theirs in itertools.product(RULES, found, asked):
        if ours.elements == theirs.elements and rule(ours.kind, theirs.kind):
            _match(ours, theirs, more)
    known = {AGAIN: met} | of_other_things(layout, shapes)
    for ours in found:
        more[_unasked(ours, known)] += ours.bytes(ours.times)
    for theirs in asked:
        more[LESS] -= theirs.bytes(theirs.times)
    return {cause: size for cause, size in more.items() if size}


def _match(ours, theirs, more):
    times = min(ours.times, theirs.times)
    ours.times, theirs.times = ours.times - times, theirs.times - times
    alike = ours.bytes(times, theirs.width)
    if ours.kind != theirs.kind:
        more[f"{ours.kind} in place of {theirs.kind}"] += alike - theirs.bytes(times)
    more[WIDER] += ours.bytes(times) - alike


def _unasked(ours, known):
    """The cause of what nobody asked for, or not so often."""
    if ours.dtype[0] in "sup":
        return INDICES
    for cause, elements in known.items():
        if ours.elements in elements:
            return cause
    if ours.kind in ("all-to-all", "collective-permute"):
        return ANEW
    return CHOICES if ours.source.endswith("top_k") else LEFT


def of_other_things(layout, shapes):
    """{cause: elements}: of a parameter, or a layer of it, and of all activations of some width."""
    f, t, c = layout.size("fsdp"), layout.size("tensor"), config_of(layout)
    weights = {
        x.size / (c.layers if path[0] == "blocks" else 1) / n
        for path, x, _ in trees.walk(shapes)
        for n in (1, f, t, f * t)
    }
    tokens = ROWS * LENGTH // layout.microbatches
    widths = (c.embed, c.mlp, c.vocab)
    return {WEIGHTS: weights, ACTIVATIONS: {tokens * w // n for w in widths for n in (1, t)}}


def config_of(layout):
    stages, mixture = layout.size("stage"), MIXTURE if layout.expert else {}
    return dataclasses.replace(CONFIG, stages=stages, layers=max(4, stages), **mixture)


def built(layout):
    """(the loss, what creates the parameters, a batch)."""
    config = config_of(layout)
    graphdef = nnx.split(nnx.eval_shape(lambda: model.Decoder(config, nnx.Rngs(0))))[0]
    loss = functools.partial(model.routed_loss if layout.expert else model.loss, graphdef=graphdef)
    text = np.zeros((ROWS, LENGTH), np.int32)
    batch = {"tokens": text, "targets": text, "mask": np.ones(text.shape, np.float32)}
    return loss, lambda key: nnx.state(model.Decoder(config, nnx.Rngs(params=key))), batch


def counted(layout, loss, create, batch):
    """{axes: [Moved]} of the compiled program."""
    mixed = bool(layout.expert)
    placed = layouts.init(layout, create, optax.identity(), KEY)[0]
    function = layouts.value_and_grad(layout, loss, has_aux=mixed, check=False)
    compiled = jax.jit(function).lower(placed, batch).compile()
    found = measure.by_axis(measure.collectives(compiled), layout.mesh)
    return {axes: list(made(part)) for axes, part in found.items()}


HELD = {name: {} for name in layouts.LAYOUTS if not layouts.LAYOUTS[name](8).by_hand}
CASES = {name: {} for name in HELD if not layouts.LAYOUTS[name](8).stage}
CASES["fsdp by compiler, bfloat16"] = dict(dtype=jnp.bfloat16)
HELD |= CASES | {"fsdp, tensor by compiler, zero1": dict(zero=1)}
FAST = {"fsdp, tensor by compiler"}


def layout_of(name):
    known = max((n for n in layouts.LAYOUTS if name.startswith(n)), key=len)
    return dataclasses.replace(layouts.LAYOUTS[known](8), **HELD[name])


@pytest.mark.parametrize("name", marked(CASES, FAST))
def test_what_the_compiler_sends_is_what_is_asked_or_has_a_cause(name):
    layout = layout_of(name)
    loss, create, batch = built(layout)
    shapes = jax.eval_shape(create, KEY)
    found = counted(layout, loss, create, batch)
    asked = Asked(layout, config_of(layout), shapes).found
    said = layouts.predict(layout, shapes, batch, remat=True).sent
    for axes in {*asked, *found, *said}:
        told, sent = asked.get(axes, []), found.get(axes, [])
        tokens = sum(x.bytes(x.times) for x in told if x.kind == "all-to-all")
        most, count = (sum(x.bytes(x.times) for x in group) for group in (told, sent))
        np.testing.assert_allclose(said.get(axes, 0) + tokens, most, rtol=1e-9)
        why = causes(told, sent, layout, shapes)
        np.testing.assert_allclose(count - most, sum(why.values()), atol=1e-6)
        assert abs(why.get(LEFT, 0)) <= AGREE * most, (axes, most, count, why)


@pytest.mark.parametrize("name", marked(HELD, {"fsdp, tensor by compiler, zero1"}))
def test_bytes_held_are_the_formula(name):
    layout, tx = layout_of(name), optax.adamw(1e-3)
    loss, create, batch = built(layout)
    held = layouts.init(layout, create, tx, KEY)
    given = dict(loss=loss, has_aux=bool(layout.expert))
    found = layouts.predict(layout, jax.eval_shape(create, KEY), batch, tx, **given)
    for tree, part in zip(held, ("parameters", "state"), strict=True):
        assert set(measure.bytes_on_devices(tree).values()) == {found.held[part]}
