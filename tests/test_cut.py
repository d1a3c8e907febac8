import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise import marks, measure, model
from shardwise.pipeline import cut
from shardwise.pipeline.cut.stages import CAST

WIDE, ROWS = 8, 4


def assert_close(ours, theirs, rtol=1e-4):
    """Relative to each array's largest entry: sums are taken in another order."""
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * max(np.abs(b).max(initial=0), 1e-6))


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32) / 2


def alone(loss, params, *data):
    """(loss, gradient of its first output) on one device."""
    first = lambda *args: (loss(*args)[0], loss(*args))  # noqa: E731
    (_, out), grads = jax.value_and_grad(first, has_aux=True)(params, *data)
    return out, grads


def forward(loss, params, *data):
    """What the last stage yields; and each stage, its programs, and what it read and kept."""
    parts, shapes = cut.stages(loss, params, *data)
    leaves, data = jax.tree.leaves(params), jax.tree.leaves(data)
    carry, ran = [], []
    for stage in parts:
        assert [(x.shape, x.dtype) for x in carry] == [(x.shape, x.dtype) for x in stage.carry]
        own = [leaves[i] if e is None else leaves[i][slice(*e)] for i, e in stage.rows.items()]
        starts = [jnp.array(stage.starts, jnp.int32)] if stage.starts else []
        read, programs = (own, [data[i] for i in stage.data] + starts), cut.backward(stage)
        carry, kept = jax.jit(programs.forward)(*read, carry)
        ran.append((stage, programs, read, kept))
    return jax.tree.unflatten(jax.tree.structure(shapes), carry), ran


def backward(params, out, ran, halves):
    """The gradient, from the last stage to the first; each backward whole or in halves."""
    sums = [jnp.zeros(x.shape, x.dtype) for x in jax.tree.leaves(params)]
    cots = [jnp.ones(out[0].shape, out[0].dtype)]
    for stage, programs, read, kept in reversed(ran):
        if halves:
            cots, pending = jax.jit(programs.to_input)(*read, kept, cots)
            grads = jax.jit(programs.to_weights)(*read, kept, pending)
        else:
            cots, grads = jax.jit(programs.whole)(*read, kept, cots)
        for (i, ends), g in zip(stage.rows.items(), grads, strict=True):
            sums[i] = sums[i].at[... if ends is None else slice(*ends)].add(g)
    return jax.tree.unflatten(jax.tree.structure(params), sums)


def in_stages(loss, params, *data, halves):
    out, ran = forward(loss, params, *data)
    return out, backward(params, out, ran, halves)


def check(loss, params, *data, rtol=1e-4):
    """One device, stages, and stages with a backward in halves agree: all in one program."""

    @jax.jit
    def every_way(params, *data):
        out, ran = forward(loss, params, *data)
        found = [(out, backward(params, out, ran, halves)) for halves in (False, True)]
        return alone(loss, params, *data), found

    expected, found = every_way(params, *data)
    for each in found:
        assert_close(each, expected, rtol)


# Plain chains, cut anywhere.


def chain(params, x, cuts, depth, scan=False, remat=False, skip=False, tied=False):
    layer = lambda x, w: (jnp.tanh(x @ w["kernel"] + w["bias"][None]), None)  # noqa: E731
    layer = jax.checkpoint(layer) if remat else layer
    x = x @ (params["tied"] if tied else params["first"])
    start, early = 0, x * params["scale"]
    for end in (*cuts, depth):
        part = jax.tree.map(lambda a, s=start, e=end: a[s:e], params["layers"])
        if scan:
            x, _ = jax.lax.scan(layer, x, part)
        else:
            for i in range(end - start):
                x, _ = layer(x, jax.tree.map(lambda a, i=i: a[i], part))
        x = marks.stage_boundary(x) if end < depth else x
        start = end
    x = x + early if skip else x
    x = x @ params["tied"].T if tied else x @ params["last"]
    return jnp.sum(x**2), jnp.float32(x.size)


def chain_params(depth):
    square = (WIDE, WIDE)
    layers = {"kernel": draw(depth, *square), "bias": draw(depth, WIDE, seed=1)}
    rest = {name: draw(*square, seed=i) for i, name in enumerate(("first", "last", "tied"), 2)}
    return {"layers": layers, "scale": np.float32(0.5), **rest}


@given(
    depth=st.integers(2, 4),
    at=st.sets(st.integers(1, 3), min_size=1, max_size=3),
    scan=st.booleans(),
    remat=st.booleans(),
    skip=st.booleans(),
    tied=st.booleans(),
)
@settings(max_examples=6)
def test_a_chain_cut_anywhere_equals_one_device(depth, at, scan, remat, skip, tied):
    cuts = sorted(c for c in at if c < depth)
    loss = functools.partial(
        chain, cuts=cuts, depth=depth, scan=scan, remat=remat, skip=skip, tied=tied
    )
    check(loss, chain_params(depth), draw(ROWS, WIDE, seed=9))


def test_rows_and_what_crosses():
    loss = functools.partial(chain, cuts=[1, 3], depth=4)
    params, x = chain_params(4), draw(ROWS, WIDE)
    parts, _ = cut.stages(loss, params, x)
    paths = [jax.tree_util.keystr(k) for k, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
    kernel, first, last = (
        paths.index(p) for p in ("['layers']['kernel']", "['first']", "['last']")
    )
    assert [s.rows[kernel] for s in parts] == [(0, 1), (1, 3), (3, 4)]
    assert [first in s.rows for s in parts] == [True, False, False]
    assert [last in s.rows for s in parts] == [False, False, True]
    assert [s.data for s in parts] == [(0,), (), ()]
    assert [[x.shape for x in s.carry] for s in parts] == [[], [(ROWS, WIDE)], [(ROWS, WIDE)]]
    held = sum(np.prod(x.shape) for s in parts for x in s.params)
    unread = params["tied"].size  # on the first stage, with a gradient of zeros
    assert held == sum(x.size for x in jax.tree.leaves(params)) and unread

    skipping, _ = cut.stages(functools.partial(loss, skip=True), params, x)
    assert [len(s.carry) for s in skipping] == [0, 2, 2]
    tied, _ = cut.stages(functools.partial(loss, tied=True), params, x)
    at = paths.index("['tied']")
    assert [tied[s].rows.get(at, "not here") for s in range(3)] == [None, "not here", None]


def test_rows_read_twice_or_never_stay_whole():
    def overlapping(params, x):
        x = x @ params["w"][0:2].sum(0)
        x = marks.stage_boundary(x)
        return jnp.sum(x @ params["w"][1:3].sum(0)), jnp.float32(1)

    params, x = {"w": draw(3, WIDE, WIDE)}, draw(ROWS, WIDE)
    parts, _ = cut.stages(overlapping, params, x)
    assert [s.rows for s in parts] == [{0: None}, {0: None}]
    check(overlapping, params, x)


@pytest.mark.parametrize("narrow", [[jnp.bfloat16], [jnp.bfloat16, jnp.float16], []])
def test_rows_of_cast_parameters_are_casts_of_rows(narrow):
    """Of one that is cast before it is sliced, a stage holds its rows and casts no others."""

    def loss(params, x):
        cast = params
        for dtype in narrow:
            cast = jax.tree.map(lambda w, dtype=dtype: w.astype(dtype), cast)
        x = jnp.tanh(x @ cast["w"][0:1].sum(0) @ cast["read whole"][0])
        x = marks.stage_boundary(x) @ cast["w"][1:4].sum(0)
        return jnp.sum(x @ cast["read whole"].sum(0)), jnp.float32(1)

    params = {"w": draw(4, WIDE, WIDE), "read whole": draw(2, WIDE, WIDE, seed=1)}
    x, whole, w = draw(ROWS, WIDE), *range(2)
    parts, _ = cut.stages(loss, params, x)
    assert [s.rows for s in parts] == [{whole: None, w: (0, 1)}, {whole: None, w: (1, 4)}]
    for stage, rows in zip(parts, (1, 3), strict=True):
        assert [x.shape[0] for x in stage.params] == [2, rows]
        assert [x.dtype for x in stage.params] == [jnp.float32] * 2
        traced = jax.make_jaxpr(stage.function)(stage.params, stage.inputs, stage.carry)
        cast = [e.invars[0].aval for e in traced.eqns if e.primitive.name == CAST]
        assert {x.shape[0] for x in cast if x.ndim == 3} <= {2, rows}  # 2: what is read whole
    check(loss, params, x, rtol=2e-2 if narrow else 1e-4)  # terms are rounded, then added


def test_parts_of_rows_are_no_rows():
    """Of rows that a stage takes a part of, all stages that read them hold the whole array."""

    def loss(params, x):
        x = marks.stage_boundary(jnp.tanh(x @ params["w"][0:1, :, :WIDE].sum(0)))
        return jnp.sum(x @ params["w"][1:2, :, :WIDE].sum(0)), jnp.float32(1)

    params, x = {"w": draw(2, WIDE, WIDE + 1)}, draw(ROWS, WIDE)
    assert [s.rows for s in cut.stages(loss, params, x)[0]] == [{0: None}, {0: None}]
    check(loss, params, x)


@pytest.mark.parametrize("second", [0, 2])
def test_rows_of_data_begin_where_a_stage_is_told(second):
    def loss(params, x):
        y = marks.stage_boundary(jnp.tanh(x[0:2] @ params["a"]))
        return jnp.sum((y + x[second : second + 2]) @ params["b"]), jnp.float32(1)

    params, x = {"a": draw(WIDE, WIDE), "b": draw(WIDE, WIDE, seed=1)}, draw(ROWS, WIDE, seed=2)
    assert [s.starts for s in cut.stages(loss, params, x)[0]] == [(0,), (second,)]
    check(loss, params, x)


def test_masks_keys_constants_and_integers():
    table = jnp.asarray(draw(16, WIDE))

    def loss(params, batch, key):
        x = (table[batch["tokens"]] + params["e"][batch["tokens"]]) * batch["mask"][:, None]
        x = jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0)
        best = jnp.argmax(x, axis=1)  # an integer that crosses
        x = marks.stage_boundary(jnp.tanh(x @ params["a"]))
        x = marks.stage_boundary(x * batch["mask"][:, None])
        picked = jnp.take_along_axis(x @ params["b"], best[:, None], axis=1)
        return jnp.sum(picked), jnp.sum(batch["mask"]), {"rows": x, "best": best}

    params = {"e": draw(16, WIDE), "a": draw(WIDE, WIDE, seed=1), "b": draw(WIDE, WIDE, seed=2)}
    batch = {"tokens": np.arange(ROWS), "mask": np.array([1, 0, 1, 1], np.float32)}
    check(loss, params, batch, jax.random.key(3))


def test_marks_of_several_arrays_and_within_jit_are_seen():
    @jax.jit
    def first(params, x):
        return marks.stage_boundary({"x": jnp.tanh(x @ params["a"]), "more": x * params["s"]})

    def loss(params, x):
        both = first(params, x)
        return jnp.sum(both["x"] @ params["b"] + both["more"]), jnp.float32(1)

    params = {"a": draw(WIDE, WIDE), "b": draw(WIDE, WIDE, seed=1), "s": np.float32(2)}
    for _ in range(2):  # jax.jit keeps the trace of `first`
        assert len(cut.stages(loss, params, draw(ROWS, WIDE))[0]) == 2
    expected = in_stages(loss, params, draw(ROWS, WIDE), halves=False)
    jax.clear_caches()
    once = jax.jit(functools.partial(alone, loss))
    assert_close(once(params, draw(ROWS, WIDE)), expected)


def test_a_block_under_jit_counts_each_time_it_is_called():
    """One trace for all three calls; the marks have two leaves each."""

    @jax.jit
    def block(x, w):
        x, y = marks.stage_boundary((jnp.tanh(x @ w), x))
        return x + y

    def loss(params, x):
        for i in range(3):
            x = block(x, params["w"][i])
        return jnp.sum(x**2), jnp.float32(1)

    params, x = {"w": draw(3, WIDE, WIDE)}, draw(ROWS, WIDE)
    for _ in range(2):
        parts = cut.stages(loss, params, x)[0]
        assert len(parts) == 4
        assert [len(s.carry) for s in parts] == [0, 2, 2, 2]
    check(loss, params, x)


def test_a_mark_that_cannot_be_cut_at_is_named():
    def inside(wrap):
        def loss(params, x):
            x = wrap(lambda x: marks.stage_boundary(jnp.tanh(x @ params["a"])))(x)
            return jnp.sum(x), jnp.float32(1)

        return loss

    def scanned(f):
        return lambda x: jax.lax.scan(lambda x, _: (f(x), None), x, None, length=2)[0]

    params, x = {"a": draw(WIDE, WIDE)}, draw(ROWS, WIDE)
    with pytest.raises(ValueError, match="stands within a scan, whose inside cannot be cut; call"):
        cut.stages(inside(scanned), params, x)
    with pytest.raises(ValueError, match=r"stands within a (remat|checkpoint)"):
        cut.stages(inside(jax.checkpoint), params, x)


# The two halves, in FLOPs.


def decoder(scan, remat):
    config = model.Config(
        vocab=32, embed=16, layers=4, heads=2, kv_heads=2, head_dim=8, mlp=48,
        stages=2, scan=scan, remat=remat,
    )  # fmt: skip
    graphdef, params = nnx.split(nnx.eval_shape(lambda: model.Decoder(config, nnx.Rngs(0))))
    tokens = np.random.default_rng(0).integers(32, size=(3, 9))
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "mask": np.ones((3, 8), "f4")}
    return functools.partial(model.loss, graphdef=graphdef), params, batch


@pytest.mark.parametrize(
    ("scan", "remat"),
    [
        pytest.param(False, False, marks=pytest.mark.slow),
        pytest.param(True, False, marks=pytest.mark.slow),
        (True, True),
        pytest.param(False, True, marks=pytest.mark.slow),
    ],
)
def test_halves_of_the_decoder_add_up(scan, remat):
    """The weights' half does nothing again, and the input's half makes no weight gradient."""
    loss, params, batch = decoder(scan, remat)
    stage = cut.stages(loss, params, batch)[0][1]
    programs = cut.backward(stage)
    assert programs.undivided == ()
    given = stage.params, stage.inputs
    _, kept = jax.eval_shape(programs.forward, *given, stage.carry)
    cots = [stage.outputs[0]]
    _, pending = jax.eval_shape(programs.to_input, *given, kept, cots)
    calls = {
        "B": (programs.whole, *given, kept, cots),
        "I": (programs.to_input, *given, kept, cots),
        "W": (programs.to_weights, *given, kept, pending),
    }
    compiled = {kind: jax.jit(f).lower(*args).compile() for kind, (f, *args) in calls.items()}
    flops = {kind: measure.flops(c) for kind, c in compiled.items()}
    assert abs(flops["I"] + flops["W"] - flops["B"]) <= 0.01 * flops["B"]
    if not remat:  # with it, the forward is computed again, in the half that comes first
        assert flops["I"] <= 0.6 * flops["B"]
    if not scan:
        assert products(compiled["W"]) & {(16, 48), (48, 16)}
        assert not products(compiled["I"]) & {(16, 48), (48, 16)}


def products(compiled):
    """The shapes of a compiled program's products; one of 16 × 48 is a weight's gradient."""
    found = re.findall(r"= f32\[([\d,]+)\]\S* dot\(", compiled.as_text())
    return {tuple(map(int, shape.split(","))) for shape in found}


def test_what_cannot_be_cut_in_two_is_named():
    @jax.custom_vjp
    def product(x, w):
        return x @ w

    def both(residuals, g):
        x, w = residuals

        def body(i, sums):
            return sums[0] + g @ w.T / 2, sums[1] + x.T @ g / 2

        return jax.lax.while_loop(
            lambda state: state[0] < 2,
            lambda state: (state[0] + 1, body(0, state[1])),
            (0, (jnp.zeros_like(x), jnp.zeros_like(w))),
        )[1]

    product.defvjp(lambda x, w: (x @ w, (x, w)), both)

    def loss(params, x):
        x = marks.stage_boundary(x @ params["a"])
        return jnp.sum(product(x, params["b"])), jnp.float32(1)

    params = {"a": draw(WIDE, WIDE), "b": draw(WIDE, WIDE, seed=1)}
    parts, _ = cut.stages(loss, params, draw(ROWS, WIDE))
    assert cut.backward(parts[1]).undivided == ("while",)
    check(loss, params, draw(ROWS, WIDE))


def test_a_scan_whose_gradient_of_weights_is_what_it_sends_back_stays_whole_and_is_named():
    def loss(params, x):
        x = marks.stage_boundary(x @ params["a"])
        x, _ = jax.lax.scan(lambda x, b: (jnp.tanh(x + b), None), x, params["b"])
        return jnp.sum(x), jnp.float32(1)

    params = {"a": draw(WIDE, WIDE), "b": draw(3, ROWS, WIDE, seed=1)}
    parts, _ = cut.stages(loss, params, draw(ROWS, WIDE))
    assert cut.backward(parts[1]).undivided == ("scan",)
    check(loss, params, draw(ROWS, WIDE))


# What the user's code leaves behind: effects, names, source lines.


class Heard:
    """Counts what is said by name, in `jax.debug.callback`s of any trace."""

    def __init__(self):
        self.counts = collections.Counter()

    def say(self, name, x):
        jax.debug.callback(lambda _: self.counts.update([name]), x)

    def during(self, run):
        self.counts.clear()
        jax.block_until_ready(run())
        jax.effects_barrier()
        return dict(self.counts)


@pytest.mark.parametrize("remat", [False, True])
def test_effects_run_once_where_they_are_computed(remat):
    heard = Heard()

    @jax.custom_vjp
    def backwards(x):
        return x

    def told(_, g):
        heard.say("cotangent", g)
        return (g,)

    backwards.defvjp(lambda x: (x, None), told)

    def layer(x, w):
        heard.say("layer", x)
        return jnp.tanh(backwards(x) @ w), None

    def loss(params, x):
        heard.say("batch alone", x)
        x = x @ params["first"]
        heard.say("first", x)
        x = marks.stage_boundary(x)
        heard.say("parameter alone", params["w"][0])
        body = jax.checkpoint(layer) if remat else layer
        x, _ = jax.lax.scan(body, x, params["w"])
        x = marks.stage_boundary(backwards(x))
        jax.lax.cond(x.sum() > 1e9, lambda: None, lambda: heard.say("branch", x))
        heard.say("last", x)
        return jnp.sum(x**2), jnp.float32(len(x))

    params, x = {"first": draw(WIDE, WIDE), "w": draw(2, WIDE, WIDE)}, draw(ROWS, WIDE)
    expected = heard.during(lambda: alone_once(loss, params, x))
    assert len(expected) == 7
    assert expected["cotangent"] == 3 and expected["layer"] == (4 if remat else 2)
    for halves in (False, True):
        found = heard.during(lambda h=halves: in_stages(loss, params, x, halves=h))
        assert found == expected, halves
    parts = cut.stages(loss, params, x).stages
    assert [len(s.params) for s in parts] == [1, 1, 0]  # a print draws no parameter elsewhere


def alone_once(loss, params, *data):
    return jax.jit(jax.value_and_grad(lambda *args: loss(*args)[0]))(params, *data)


def test_an_ordered_effect_is_refused_by_name():
    def loss(params, x):
        x = marks.stage_boundary(x @ params["a"])
        jax.debug.print("{}", x.sum(), ordered=True)
        return jnp.sum(x), jnp.float32(1)

    with pytest.raises(ValueError, match="asks for an order, OrderedDebugEffect in debug_"):
        cut.stages(loss, {"a": draw(WIDE, WIDE)}, draw(ROWS, WIDE))


def test_names_and_source_lines_are_the_losses_own():
    @jax.jit
    def inner(x, w):
        with jax.named_scope("mixing"):
            return jnp.tanh(x @ w)

    def layer(x, w):
        with jax.named_scope("layer"):
            return jnp.sin(x @ w), None

    def loss(params, x):
        x = marks.stage_boundary(x)
        with jax.named_scope("tower"):
            x = inner(x, params["a"])
        x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["w"])
        return jnp.sum(x), jnp.float32(1)

    params = {"a": draw(WIDE, WIDE), "w": draw(2, WIDE, WIDE)}
    stage = cut.stages(loss, params, draw(ROWS, WIDE)).stages[1]
    for name, lowered in lowered_programs(stage).items():
        text = lowered.as_text(debug_info=True)
        assert "mixing" in text and "tower" in text and "jit(inner)" in text, name
        assert "layer" in text, name
        places = set(re.findall(r'loc\("([^"]*\.py)"', text))
        assert any(place.endswith("test_cut.py") for place in places), name
        named = [line for line in text.splitlines() if "dot_general" in line and "loc(" in line]
        named = [n for n in named if "stablehlo" not in n]
        assert named and all("mixing" in n or "layer" in n for n in named), (name, named)


def lowered_programs(stage):
    programs = cut.backward(stage)
    given = stage.params, stage.inputs
    _, kept = jax.eval_shape(programs.forward, *given, stage.carry)
    cots = [stage.outputs[i] for i in stage.seeds]
    _, pending = jax.eval_shape(programs.to_input, *given, kept, cots)
    calls = {
        "F": (programs.forward, *given, stage.carry),
        "B": (programs.whole, *given, kept, cots),
        "I": (programs.to_input, *given, kept, cots),
        "W": (programs.to_weights, *given, kept, pending),
    }
    return {kind: jax.jit(f).lower(*args) for kind, (f, *args) in calls.items()}


def test_the_example_in_the_docstring_runs():
    loss = functools.partial(chain, cuts=[1], depth=2)
    example = [line for line in cut.__doc__.splitlines() if line.startswith("    ")]
    space = {"cut": cut, "loss": loss, "params": chain_params(2), "batch": draw(ROWS, WIDE)}
    exec("\n".join(line.strip() for line in example), space)
    assert len(space["parts"]) == 2 and isinstance(space["halves"], cut.Halves)


def test_a_mark_around_nothing_is_named():
    def loss(params, x):
        marks.stage_boundary({})
        return jnp.sum(x @ params["a"]), jnp.float32(1)

    with pytest.raises(ValueError, match="stage_boundary was given no array"):
        cut.stages(loss, {"a": draw(WIDE, WIDE)}, draw(ROWS, WIDE))
