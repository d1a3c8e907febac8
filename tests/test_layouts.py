"""Every layout, and every pair and triple of roles, is one device: losses, gradients, states."""

import dataclasses
import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from combinations import COMBINED, NAMED, ROLES, layout_of
from flax import nnx
from sampling import IN_FULL, marked, sample
from test_pipeline import outside_of_tasks

from shardwise import (
    checkpoint,
    data,
    experts,
    layouts,
    marks,
    measure,
    mesh,
    model,
    objective,
    rules,
    tensor,
    train,
)
from shardwise import tree as trees
from shardwise.layouts import catalogue, first_call
from shardwise.measure import hlo

CONFIG = model.Config(
    embed=32, layers=4, heads=16, kv_heads=8, head_dim=2, mlp=48, dropout=0.1, remat=True
)
OPTIMIZERS = {
    "momentum": optax.chain(optax.clip_by_global_norm(0.1), optax.trace(0.9), optax.scale(-0.1)),
    "adamw": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
    "adafactor": optax.chain(
        optax.clip_by_global_norm(0.1), optax.adafactor(1e-2, min_dim_size_to_factor=16)
    ),
}
KEY = jax.random.key(7)


@functools.cache
def parts(stages=1, layers=4, mixed=False, remat=True):
    """(the loss, what creates the parameters) of a decoder with so many stages.

    A mixed one has experts, balanced over "rows" or the "batch", and a capacity that drops choices.
    """
    config = dataclasses.replace(CONFIG, stages=stages, layers=layers, remat=remat)
    if mixed:
        mixture = dict(experts=8, experts_per_token=2, capacity_factor=0.75, mlp=16)
        config = dataclasses.replace(config, **mixture)
    graphdef = nnx.split(nnx.eval_shape(lambda: model.Decoder(config, nnx.Rngs(0))))[0]
    loss = functools.partial(model.loss, graphdef=graphdef)
    if mixed:
        loss = functools.partial(model.routed_loss, graphdef=graphdef, over=mixed)
    return loss, functools.partial(_create, config)


def _create(config, key):
    return nnx.state(model.Decoder(config, nnx.Rngs(params=key)))


@functools.cache
def batches():
    """Two batches of real bytes, padded at random, one row wholly masked."""
    found, rng = [], np.random.default_rng(3)
    for batch in itertools.islice(data.batches(16, 32, seed=1), 2):
        real = rng.integers(1, 33, 16)
        real[5] = 0
        found.append(batch | {"mask": (np.arange(32)[None] < real[:, None]).astype(np.float32)})
    return found


@functools.cache
def values(layers=4, mixed=False):
    """Parameters on one device: drawn once, since drawing them is a fifth of what compiles."""
    return jax.jit(parts(1, layers, mixed)[1])(KEY)


def drawn(layout, layers=4, mixed=False, tx=None):
    """Those parameters, and `tx`'s state for them, as a layout has them."""
    params = values(layers, mixed)
    return layouts.init(layout, lambda key: params, tx or optax.identity(), KEY)


@functools.cache
def alone(layers, mixed):
    """What gives the loss and gradients on one device, whatever the optimizer."""
    loss, _ = parts(1, layers, mixed, remat=False)
    return jax.jit(objective.value_and_grad(loss, has_aux=bool(mixed)))


@functools.cache
def one_device(optimizer, layers, mixed, dropout):
    """[(what a step returns beside the parameters, and its state)] of each step."""
    params, function = values(layers, mixed), alone(layers, mixed)
    tx, found = OPTIMIZERS[optimizer], []
    opt_state = jax.jit(tx.init)(params)

    @jax.jit
    def update(grads, opt_state, params):
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for i, batch in enumerate(batches()):
        out, grads = function(params, batch, key=jax.random.key(i) if dropout else None)
        params, opt_state = update(grads, opt_state, params)
        found.append((jax.tree.leaves(out), jax.tree.map(np.asarray, opt_state)))
    return found


def check(layout, optimizer="adamw", dropout=True, remat=True, told=False):
    """Two steps, with padding, and dropout: losses, and the state after the first step, which has
    the gradients in it, as one device has them. Return the compiled step's text, if `told`.
    """
    layers = max(4, layout.size("stage"))
    mixed = layout.expert and ("batch" if layout.microbatches == 1 else "rows")
    loss, _ = parts(layout.size("stage"), layers, mixed, remat)
    tx, theirs = OPTIMIZERS[optimizer], one_device(optimizer, layers, mixed, dropout)
    params, opt_state = drawn(layout, layers, mixed, tx)
    step = layouts.step(layout, loss, tx, has_aux=bool(mixed), check=False)
    given = params, opt_state, batches()[0]
    if told:
        step = step.lower(*given, key=KEY if dropout else None).compile()
    for i, (batch, (expected, state)) in enumerate(zip(batches(), theirs, strict=True)):
        key = jax.random.key(i) if dropout else None
        params, opt_state, *out = step(params, opt_state, batch, key=key)
        for a, b in zip(jax.tree.leaves(out), expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5)
        if mixed and i == 0:
            assert out[1]["dropped"].sum() > 0  # or the capacity would not be seen
        if i == 0:  # later ones differ by more: Adam amplifies rounding
            ours = jax.tree.leaves(layouts.whole(layout, opt_state))
            for a, b in zip(ours, jax.tree.leaves(state), strict=True):
                np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6 * (1 + np.abs(b).max()))
    return step.as_text() if told else None


FAST = {"fsdp, context, tensor"}
# Masks are up to half of what a step takes to compile: these have them, and roles by hand that are
# combined below.
DROPPING = {"fsdp, context, tensor", "stage, fsdp", "stage, fsdp by hand"}
# With these each pair of roles is tried both ways; of the others a sample. What of stages by hand
# is asked below is checked there as well.
STANDING = FAST | {
    "fsdp, expert, context",
    "hybrid",
    "expert",
    "stage, fsdp",
    "stage, fsdp, context by hand",
}
BY_NAME = [*STANDING, *sample([name for name in layouts.LAYOUTS if name not in STANDING], 3)]


@pytest.mark.parametrize("name", marked(sorted(BY_NAME), FAST))
def test_a_layout_is_one_device(name):
    optimizer = "adafactor" if len(name) % 2 and "stage" not in name else "adamw"
    check(layouts.LAYOUTS[name](8), optimizer, IN_FULL or name in DROPPING, remat=name not in FAST)


# The oracle takes as long as a step: each way of dividing a batch, with experts and without.
JUDGED = {
    "experts": lambda: catalogue.over(("stage", "expert"), 4, microbatches=4),
    "tokens": lambda: layout_of(("data", "context", "hand"), 4),
    "tokens of experts": lambda: layouts.LAYOUTS["fsdp, expert, context"](8),
}


BESIDE = [*layouts.LAYOUTS] if IN_FULL else ["hybrid"]  # with tensor and a compiler's axes


@pytest.mark.slow
@pytest.mark.parametrize("name", [*JUDGED, *BESIDE])
def test_a_decoder_s_loss_divides_as_layouts_divide_it(name):
    """As a first step asks, of arrays that are laid out."""
    layout = JUDGED[name]() if name in JUDGED else layouts.LAYOUTS[name](8)
    key, layers = KEY if name == "tokens" else None, max(4, layout.size("stage"))
    mixed = layout.expert and ("batch" if layout.microbatches == 1 else "rows")
    loss, _ = parts(layout.size("stage"), layers, mixed, remat=key is not None)
    if name in JUDGED:
        ways = {"devices"} | ({"microbatches"} if layout.microbatches > 1 else set())
        ways |= {"sequence"} if layout.context else set()
        assert {*first_call.ways_of(layout)} == ways
    params, _ = drawn(layout, layers, mixed)
    given = layout, loss, params, batches()[0]
    assert first_call.judge(*given, key=key, has_aux=bool(mixed)) is None


# With those, each role both by hand and by the compiler, and each pair of roles but for those of
# OTHERWISE; all on eight devices.
QUICK = {
    ("stage", "data", "expert", "hand"),
    ("stage", "data", "context", "compiler"),
    ("fsdp", "expert", "tensor", "compiler"),
}
# These are in test_pipeline_layouts, and the last two in test_explicit and test_experts.
OTHERWISE = {("stage", "fsdp"), ("stage", "tensor"), ("data", "tensor")}
OTHERWISE |= {("data", "fsdp"), ("expert", "context")}


def test_what_is_fast_has_every_pair_of_roles_and_every_role_both_ways():
    chosen = [layouts.LAYOUTS[name](8) for name in FAST]
    ways = [(set(x.roles()), x.by) for x in chosen] + [(set(c[:-1]), c[-1]) for c in QUICK]
    for pair in itertools.combinations(ROLES, 2):
        assert any(set(pair) <= roles for roles, _ in ways) or pair in OTHERWISE, pair
    for role, by in itertools.product(ROLES, ("hand", "compiler")):
        assert any(role in roles for roles, how in ways if how == by), (role, by)


COMBINATIONS = sorted({case[:-1] for case in COMBINED})
# With QUICK and STANDING each pair of roles is tried both ways.
BOTH_WAYS = {
    ("data", "context", "hand"),
    ("data", "fsdp", "compiler"),
    ("stage", "expert", "compiler"),
    ("stage", "tensor", "compiler"),
    ("expert", "context", "compiler"),
    ("stage", "data", "fsdp", "hand"),
    ("stage", "fsdp", "tensor", "hand"),
    ("data", "expert", "tensor", "hand"),
    ("data", "expert", "tensor", "compiler"),
    ("fsdp", "context", "tensor", "compiler"),
}


def occurs(case):
    """By hand or by the compiler, in turn, unless a layout by name has these roles."""
    by = ("hand", "compiler")[COMBINATIONS.index(case[:-1]) // 2 % 2]
    by = by if (*case[:-1], by) in COMBINED else "hand"
    named = {c[:-1] for c in NAMED if len(c) == 3} | {c[:-1] for c in NAMED if c[-1] == by}
    return (case[-1] == by and case[:-1] not in named) or case in QUICK | BOTH_WAYS


TOGETHER = [case for case in COMBINED if occurs(case)]
OTHERS = [case for case in TOGETHER if case not in QUICK | BOTH_WAYS]
TRIED = [*sorted(QUICK), *sorted(BOTH_WAYS), *sample(OTHERS, 1)]


def test_each_pair_is_tried_both_ways_and_each_triple_may_be():
    assert {*TRIED} <= {*TOGETHER}
    assert {case[:-1] for case in (*TOGETHER, *NAMED)} == {*COMBINATIONS}
    standing = [layouts.LAYOUTS[name](8) for name in STANDING]
    cases = [case for case in TRIED if case not in OTHERS]  # whatever the seed
    cases += [(*layout.roles(), layout.by) for layout in standing]
    for first, second, by in (case for case in COMBINED if len(case) == 3):
        assert any({first, second} < {*case} and case[-1] == by for case in cases), (first, second)


@pytest.mark.parametrize(
    ["case"], marked([(c,) for c in TRIED], {(c,) for c in QUICK}), ids="-".join
)
def test_roles_combine(case):
    fast = case in QUICK
    layout = layout_of(case, 4 if len(case) == 3 else 8)
    # By the compiler masks are those of whole arrays, which the layouts by name have.
    optimizer = "momentum" if fast else ("adamw", "adafactor")[COMBINED.index(case) % 2]
    check(layout, optimizer, layout.by_hand, remat=not fast or bool(layout.stage))


def sharing(axis):
    """Stages whose experts lie on an axis that cuts rows too."""
    grid = mesh.make(stage=2, data=2, fsdp=2)
    roles = dict(stage="stage", data="data", fsdp="fsdp", expert=axis)
    return layouts.Layout(grid, **roles, microbatches=2)


SHARED = {
    "fsdp": lambda: layouts.Layout(mesh.make(data=2, fsdp=4), **TWO, expert="fsdp"),
    "data": lambda: layouts.Layout(mesh.make(data=2, fsdp=4), **TWO, expert="data"),
    "data, within stages": lambda: sharing("data"),  # and below along fsdp
}
TWO = dict(data="data", fsdp="fsdp", microbatches=2)


@pytest.mark.parametrize("name", marked(SHARED, (), 1, always=["fsdp"]))
def test_experts_may_lie_on_the_axis_of_another_role(name):
    check(SHARED[name](), "momentum", name != "fsdp", remat=False)


SLICED = [("context", "expert"), ("expert", "tensor"), ("stage", "expert")]


@pytest.mark.slow
@pytest.mark.parametrize("roles", sample(SLICED, 1), ids="-".join)
def test_experts_by_slices_combine_with_other_roles(roles):
    settings = dict(dispatch="ragged", microbatches=4 if "stage" in roles else 1)
    check(catalogue.over(roles, 4, **settings), dropout=False)


def beside_loops(text):
    """(loop, collective) of which XLA:CPU may begin the second while the first still runs.

    It goes by data alone. Collectives of one kind, group and channel meet in the order of their
    beginning: these would meet those within the loop, on one device and not on another.
    """
    program = hlo.parse(text)

    def meets(op):
        kind = (op.opcode, op.says("channel_id"), op.says("replica_groups"))
        found = {kind} if op.says("replica_groups") else set()
        body = op.says("body").lstrip("%")
        for inner in program.computations[body].instructions.values() if body else ():
            found |= meets(inner)
        return found

    for computation in program.computations.values():
        before, loops = {}, []
        for op in computation.instructions.values():
            known = [name for name in op.operands if name in before]
            before[op.name] = {*known}.union(*(before[name] for name in known))
            here = meets(op)
            for loop, there in loops:
                if loop not in before[op.name] and here & there:
                    yield loop, op.name
            loops += [(op.name, here)] if op.opcode == "while" and here else []


RACING = {
    "experts": lambda: sharing("fsdp"),
    "stages": lambda: layouts.LAYOUTS["stage, fsdp by hand"](8),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RACING)
def test_a_task_s_scatters_wait_for_its_loops(name):
    """Of layouts that are one device."""
    text = check(RACING[name](), told=True)
    assert "reduce-scatter" in text
    assert not list(beside_loops(text))
    assert not outside_of_tasks(text)  # with one layer a stage they were


@pytest.mark.slow
@pytest.mark.parametrize("by", sample(["hand", "compiler"], 1))
def test_a_role_may_have_several_axes(by):
    grid = mesh.make(a=2, b=2, c=2)
    check(layouts.Layout(grid, fsdp=("a", "b"), context="c", microbatches=2, by=by), dropout=False)


@dataclasses.dataclass(frozen=True)
class Summed:
    """A stranger's form of attention: all sum K and V, each in its place, and see them whole."""

    axis: str

    def __call__(self, q, k, v, places, mask=marks.causal):
        query = marks.Places(*(x[:, :, None] for x in places))
        key = marks.Places(*(self.whole(x)[:, None] for x in places))
        k, v = (jnp.repeat(self.whole(x), q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        scores = jnp.einsum("bshd,bthd->bhst", q, k) / q.shape[-1] ** 0.5
        weights = jax.nn.softmax(jnp.where(mask(query, key)[:, None], scores, -jnp.inf), axis=-1)
        return jnp.einsum("bhst,bthd->bshd", weights, v)

    def whole(self, x):
        start = jax.lax.axis_index(self.axis) * x.shape[1]
        size = jax.lax.psum(1, self.axis) * x.shape[1]
        zeros = jnp.zeros((x.shape[0], size, *x.shape[2:]), x.dtype)
        return jax.lax.psum(jax.lax.dynamic_update_slice_in_dim(zeros, x, start, 1), self.axis)


@pytest.mark.slow
def test_a_strangers_attention_is_one_device():
    """As CONTRIBUTING.md says: a module and a role, and no line of the package."""
    grid = mesh.make(fsdp=2, context=2)
    layout = layouts.Layout(grid, fsdp="fsdp", context="context", attention=Summed, microbatches=2)
    check(layout, dropout=False, remat=False)


def test_printing_a_layout_tells_what_each_axis_does():
    told = str(layouts.LAYOUTS["fsdp, context, tensor"](8))
    for words in ("by hand", "gathered where it is used", "attention by ring", "heads", "context"):
        assert words in told
    assert layouts.LAYOUTS["fsdp"](8) == layouts.LAYOUTS["fsdp"](8)
    assert len({layouts.LAYOUTS["fsdp"](8), layouts.LAYOUTS["fsdp"](8)}) == 1


GRID = functools.partial(mesh.make, a=2, b=2)
MISTAKES = {
    "no role": (lambda: layouts.Layout(GRID(), fsdp="a"), "axis 'b' of size 2 has no role"),
    "two roles": (lambda: layouts.Layout(GRID(), fsdp="a", data=("a", "b")), "given to data and"),
    "no axis": (lambda: layouts.Layout(GRID(), fsdp="a", data="c"), "no axis 'c'; it has a="),
    "by": (lambda: layouts.Layout(GRID(), data=("a", "b"), by="magic"), "'hand', 'compiler'"),
    "zero": (lambda: layouts.Layout(GRID(), data=("a", "b"), zero=4), "zero=4"),
    "sequence": (
        lambda: layouts.Layout(GRID(), data=("a", "b"), sequence=True),
        "name one, tensor=",
    ),
    "order": (
        lambda: layouts.Layout(GRID(), data="a", context="b", by="compiler", attention="zigzag"),
        "'zigzag' is an order",
    ),
    "expert": (lambda: layouts.Layout(GRID(), expert=("a", "b")), "experts lie along one axis"),
    "attention": (
        lambda: layouts.Layout(GRID(), context=("a", "b"), attention="snake"),
        "'zigzag'",
    ),
    "dispatch": (lambda: layouts.Layout(GRID(), data=("a", "b"), dispatch="mail"), "'gather'"),
    "uneven": (lambda: layouts.Layout(GRID(), data=("a", "b"), uneven="pad"), "'replicate'"),
    "reduce_dtype": (
        lambda: layouts.Layout(GRID(), data=("a", "b"), by="compiler", reduce_dtype=jnp.float32),
        "is that of reductions by hand",
    ),
    "many stages": (lambda: layouts.Layout(GRID(), stage=("a", "b")), "lie along one axis"),
    "microbatches": (lambda: layouts.Layout(GRID(), data=("a", "b"), microbatches=0), "1 or more"),
    "devices": (lambda: catalogue.over(("fsdp", "tensor", "context"), 6), "4, which must divide 6"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named(name):
    make, told = MISTAKES[name]
    with pytest.raises(ValueError, match=told):
        make()


def run(layout, loss, params, batch):
    """What is refused is refused before it runs, and before it is judged."""
    placed = layouts.place(layout, params)
    return layouts.value_and_grad(layout, loss).lower(placed, batch)


def tokens(rows, length):
    whole = np.zeros((rows, length), np.int32)
    return {"tokens": whole, "targets": whole, "mask": whole.astype(np.float32)}


def test_rows_and_sequences_have_to_divide():
    (loss, _), params = parts(1), values()
    for by in ("hand", "compiler"):
        layout = catalogue.over(("fsdp", "context"), 8, by=by)
        with pytest.raises(ValueError, match=r"\(6, 32\) does not split into 4 parts"):
            run(layout, loss, params, tokens(6, 32))
        with pytest.raises(ValueError, match=r"pad it.* 32"):
            run(layout, loss, params, tokens(8, 31))


def squares(params, batch):
    x = marks.stage_boundary(batch["x"] @ params["w"]) @ params["v"]
    return objective.Mean(jnp.sum(x**2), jnp.float32(len(x)))


CALLED = {
    "layouts.value_and_grad": lambda layout: layouts.value_and_grad(layout, squares),
    "layouts.step": lambda layout: functools.partial(
        lambda step, params, batch: step(params, None, batch),
        layouts.step(layout, squares, OPTIMIZERS["adamw"]),
    ),
}


CUTTING = ["fsdp", "fsdp by compiler", "stage", "stage, fsdp", "stage, fsdp by hand"]


@pytest.mark.parametrize("name", CUTTING)
@pytest.mark.parametrize("called", CALLED)
def test_an_error_names_what_was_called(name, called):
    layout = layouts.LAYOUTS[name](4)
    params = {"w": np.ones((8, 8), np.float32), "v": np.ones((8, 8), np.float32)}
    batch, odd = {"x": np.ones((16, 8), np.float32)}, {"x": np.ones((15, 8), np.float32)}
    run, placed = CALLED[called](layout), layouts.place(layout, params)
    with pytest.raises(ValueError, match=rf"^{called}: .*15.*do(es)? not split into \d+"):
        run(placed, odd)
    if layout.by_hand or layout.stage:
        with pytest.raises(ValueError, match=rf"^{called}: the batch is \{{\}}, and has no arrays"):
            run(placed, {})
    if layout.by_hand:
        with pytest.raises(ValueError, match=rf"^{called}: v of shape \(8, 8\) is no array of JAX"):
            run(params, batch)
        with pytest.raises(ValueError, match=rf"^{called}: v .* lies as .*SingleDevice.*expected"):
            run(jax.tree.map(jnp.asarray, params), batch)


@pytest.mark.parametrize("name", ["stage", "stage, fsdp", "stage, fsdp by hand"])
def test_a_loss_without_a_mark_is_told_where_stages_end(name):
    def unmarked(params, batch):
        return jnp.mean((batch["x"] @ params["w"]) ** 2)

    layout, params = layouts.LAYOUTS[name](8), {"w": np.ones((8, 8), np.float32)}
    batch, n = {"x": np.ones((16, 8), np.float32)}, layout.size("stage")
    placed = layouts.place(layout, params)
    asked = {
        "value_and_grad": lambda: layouts.value_and_grad(layout, unmarked)(placed, batch),
        "predict": lambda: layouts.predict(layout, params, batch, loss=unmarked),
    }
    told = rf"1 stages on {n} devices.* no stage boundary.*stage_boundary\(x\) where"
    for called, ask in asked.items():
        with pytest.raises(ValueError, match=rf"^layouts.{called}: .*{told}"):
            ask()


@pytest.mark.parametrize("by", ["hand", "compiler"])
def test_arrays_that_do_not_divide_are_left_whole_and_told_or_refused(by):
    layout = layouts.Layout(mesh.make(fsdp=8), fsdp="fsdp", by=by)
    params, batch = {"bias": jnp.ones(10), "w": jnp.ones((16, 10))}, {"x": jnp.ones((8, 16))}
    placed = layouts.place(layout, params)
    assert placed["bias"].sharding.is_fully_replicated
    assert placed["w"].addressable_shards[0].data.shape == (2, 10)
    with pytest.warns(
        UserWarning, match="1 of 2 arrays stay whole on all 8 devices.*35 bytes more.*5%"
    ):
        predicted = layouts.predict(layout, params, batch)
    assert predicted.whole == {"bias": 35} and "whole bias: 35 bytes" in str(predicted)
    assert predicted.held["parameters"] == 40 + 80
    with pytest.warns(UserWarning, match="layouts.describe: 1 of 2 arrays stay whole"):
        described = layouts.describe(layout, params)
    assert inspect.signature(layouts.describe).return_annotation is type(described)
    assert "no axis divides by 'fsdp'" in described.replicated["bias"]
    with pytest.raises(ValueError, match=r"bias of shape \(10,\).*uneven='replicate'"):
        layouts.place(dataclasses.replace(layout, uneven="error"), params)


ONES = {"w": jnp.ones(8)}
GIVEN = dict(value_and_grad=[abs], value=[abs], place=[ONES], describe=[ONES])
GIVEN |= dict(init=[abs, "tx", KEY], step=[abs, "tx"], predict=[ONES, ONES, "tx"])
GIVEN |= dict(shardings=[ONES, "tx"])


@pytest.mark.parametrize("name", GIVEN)
def test_what_stands_in_the_place_of_a_layout_or_an_optimizer_is_named(name):
    make, given = getattr(layouts, name), GIVEN[name]
    with pytest.raises(TypeError, match=rf"layouts\.{name}: .*abs.* is no Layout; it comes first"):
        make(abs, *given)
    if "tx" in given:
        given = [train.Optimizer() if isinstance(x, str) else x for x in given]
        with pytest.raises(TypeError, match=rf"layouts\.{name}: .* is no optimizer as optax has"):
            make(layouts.Layout(mesh.make(data=8), data="data"), *given)


def test_heads_have_to_divide():
    params = values()
    odd = dataclasses.replace(layouts.LAYOUTS["tensor"](8), cut=("head_dim",))
    with pytest.raises(ValueError, match=r"'head_dim'.* of 2 does not divide") as error:
        layouts.place(odd, params)
    assert "cut= leaves out stays whole" in str(error.value) and "uneven" not in str(error.value)
    with pytest.raises(ValueError, match="no parameter carries one of the logical axes"):
        layouts.place(dataclasses.replace(odd, cut=("experts",)), params)


MIXTURE = dict(experts=6, experts_per_token=2, mlp=16)
UNDIVIDED = {
    "kv_heads": ("tensor", dict(kv_heads=4), r"\('kv_heads'\) of 4 .* a multiple of 8"),
    "mlp": ("tensor", dict(mlp=36), r"\('mlp'\) of 36 .* a multiple of 8"),
    "experts": ("expert", MIXTURE, r"\('experts'\) of 6 .* a multiple of 8"),
    "experts by compiler": ("expert by compiler", MIXTURE, r"\('experts'\) of 6 .* of 8"),
}


@pytest.mark.parametrize("name", UNDIVIDED)
def test_what_does_not_divide_is_told_what_would(name):
    layout, sizes, told = UNDIVIDED[name]
    layout, config = layouts.LAYOUTS[layout](8), dataclasses.replace(CONFIG, **sizes)
    shapes = jax.eval_shape(functools.partial(_create, config), KEY)
    params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    with pytest.raises(ValueError, match=rf"^layouts.place: .*{told}"):
        layouts.place(layout, params)
    with pytest.raises(ValueError, match=rf"^layouts.init: .*{told}"):
        layouts.init(layout, lambda _: params, optax.sgd(1.0), KEY)
    with pytest.raises(ValueError, match=rf"^layouts.predict: .*{told}"):
        layouts.predict(layout, params, tokens(16, 32))


@pytest.mark.parametrize("name", ["fsdp by compiler", "stage, fsdp", "stage, fsdp by hand"])
def test_an_error_of_a_rule_names_what_was_called(name):
    layout = dataclasses.replace(layouts.LAYOUTS[name](8), uneven="error")
    params, told = (
        {"w": np.ones((9, 9), np.float32)},
        r"w of shape \(9, 9\) has no axis that",
    )
    with pytest.raises(ValueError, match=rf"^layouts.place: .*{told} divides over 'fsdp'"):
        layouts.place(layout, params)
    with pytest.raises(ValueError, match=rf"^layouts.init: .*{told} divides over 'fsdp'"):
        layouts.init(layout, lambda key: params, optax.sgd(1.0), KEY)


@pytest.mark.parametrize("name", ["tensor, sequence", "fsdp, tensor"])
def test_a_sequence_between_products_has_to_divide(name):
    layout, (loss, _) = layouts.LAYOUTS[name](8), parts(1)
    n = layout.size("tensor")
    told = rf"a sequence of 31 does not split into {n} parts over \['tensor'\].* to 32"
    with pytest.raises(ValueError, match=told):
        run(layout, loss, values(), tokens(16, 31))


RESTORED = [
    ("fsdp", "fsdp, tensor by compiler"),
    ("fsdp, context, tensor", "zero1"),
    ("tensor", "stage, fsdp"),
    ("stage, fsdp by hand", "fsdp, tensor by compiler"),
]


@pytest.mark.slow
@pytest.mark.parametrize("pair", RESTORED, ids=" to ".join)
def test_a_checkpoint_restores_under_another_layout(pair, tmp_path):
    first, second = (layouts.LAYOUTS[name](8) for name in pair)
    tx = OPTIMIZERS["adamw"]

    def born(layout, other):
        params = jax.tree.map(lambda x: x + other, values())
        found = layouts.init(layout, lambda key: params, tx, KEY)
        return dict(zip(("params", "opt_state"), found, strict=True))

    saved = born(first, 0)
    checkpoint.save(tmp_path, 1, saved)
    restored = checkpoint.restore(tmp_path, born(second, 1), 1)
    for name, tree in saved.items():
        ours = layouts.whole(second, restored[name]), layouts.whole(first, tree)
        for a, b in zip(*map(jax.tree.leaves, ours), strict=True):
            np.testing.assert_array_equal(a, b)


def narrow_stages():
    """A layout of stages by the compiler, in bfloat16, and parameters laid out."""
    roles = dict(stage="stage", tensor="model", by="compiler", microbatches=2)
    layout = layouts.Layout(mesh.make(stage=2, model=2), dtype=jnp.bfloat16, **roles)
    return layout, layouts.place(layout, values())


def test_stages_by_the_compiler_hold_their_own_layers_alone():
    _, placed = narrow_stages()
    held = measure.bytes_on_devices(placed["blocks"]).values()
    own = [x.nbytes // (2 if x.ndim == 2 else 4) for x in jax.tree.leaves(placed["blocks"])]
    assert {*held} == {sum(own)}  # norms' scales are whole along the tensor axis


@pytest.mark.slow
def test_stages_by_the_compiler_cast_their_own_layers():
    """A cast before the layers are cut is a cast after: each stage holds half, as without one."""
    (layout, placed), batch, (loss, _) = narrow_stages(), batches()[0], parts(2, remat=False)

    def narrow(params, batch):
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        return parts(remat=False)[0](params, batch)

    value, grads = jax.jit(objective.value_and_grad(narrow))(values(), batch)
    ours, ours_grads = layouts.value_and_grad(layout, loss, check=False)(placed, batch)
    np.testing.assert_allclose(ours, value, rtol=2e-5)
    pairs = zip(*map(jax.tree.leaves, (layouts.whole(layout, ours_grads), grads)), strict=True)
    for a, b in pairs:  # those of two microbatches are rounded, then added
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-2 * np.abs(b).max())


ROUND = sample([name for name in layouts.LAYOUTS if name not in {*sum(RESTORED, ())}], 5)


@pytest.mark.slow
def test_a_checkpoint_goes_through_layouts_and_comes_back(tmp_path):
    """Each layout restores what the one before saved, and saves it again: bit for bit."""
    made, tx = [layouts.LAYOUTS[name](8) for name in ROUND], OPTIMIZERS["adamw"]
    assert {"expert", "stage", "context"} <= {role for x in made for role in x.roles()}
    assert {x.by for x in made} == {"hand", "compiler"}
    truth, names = None, [*ROUND, ROUND[0]]
    for step, name in enumerate(names, 1):
        layout = layouts.LAYOUTS[name](8)
        params = jax.tree.map(lambda x, step=step: x + step, values(8, "rows"))
        born = layouts.init(layout, lambda key, params=params: params, tx, KEY)
        state = dict(zip(("params", "opt_state"), born, strict=True))
        if truth is not None:
            state = checkpoint.restore(tmp_path, state, step - 1)
        found = [layouts.whole(layout, state[item]) for item in ("params", "opt_state")]
        truth = found if truth is None else truth
        for a, b in zip(*map(jax.tree.leaves, (found, truth)), strict=True):
            np.testing.assert_array_equal(a, b, err_msg=name)
        checkpoint.save(tmp_path, step, state, keep=2)


DOTS = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")


def deep(params, batch):
    """Layers in a scan; with a mean over rows."""

    def layer(x, w):
        return x + jnp.tanh(x @ marks.use(w)), None

    x, _ = jax.lax.scan(marks.layer(layer), batch, params["layers"])
    return jnp.mean((x @ params["head"]) ** 2)


@pytest.mark.parametrize("by", ["hand", "compiler"])
@pytest.mark.parametrize("policy", [layouts.offload, DOTS], ids=["offload", "DOTS"])
def test_activations_may_be_kept_on_the_host(by, policy):
    stacked = dict(stacked=lambda path: path == "layers")
    layout = layouts.Layout(mesh.make(fsdp=8), fsdp="fsdp", by=by, remat=policy, **stacked)
    draw = lambda *shape: np.random.default_rng(4).normal(size=shape).astype(np.float32)  # noqa: E731
    params, batch = {"layers": draw(3, 8, 8) / 3, "head": draw(8, 8)}, draw(16, 8)
    value, grads = jax.jit(jax.value_and_grad(deep))(params, batch)
    function = layouts.value_and_grad(layout, deep, check=False)  # it is traced below
    placed = layouts.place(layout, params)
    # On CPU the compiler drops what it was asked: the host's memory is the device's.
    assert "device_put[" in str(jax.make_jaxpr(function)(placed, batch))
    kept = layouts.value_and_grad(dataclasses.replace(layout, remat=None), deep, check=False)
    assert "device_put[" not in str(jax.make_jaxpr(kept)(placed, batch))
    ours, ours_grads = function(placed, batch)
    np.testing.assert_allclose(ours, value, rtol=1e-5)
    for a, b in zip(*map(jax.tree.leaves, (layouts.whole(layout, ours_grads), grads)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


WITH_VALUE = {
    "polyak": optax.polyak_sgd(),
    "polyak, in two": optax.MultiSteps(optax.polyak_sgd(), 1),  # whose type tells of no `value`
    "plateau": optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau(patience=1, rtol=0.5)),
}
DIVIDED = {
    "hand": dict(fsdp=8),
    "compiler": dict(fsdp=8),
    "stages": dict(stage=2, data=4),
}


def only_value(updates, state, params=None, *, value):
    return jax.tree.map(lambda g: -g * value, updates), state


WITH_VALUE["bare"] = optax.GradientTransformationExtraArgs(optax.identity().init, only_value)


def _of_rows(params, batch):
    hidden = marks.stage_boundary(jnp.tanh(batch @ params["w"]))
    return jnp.mean((hidden @ params["v"] - 1) ** 2)


def _square(key):
    return {"w": jax.random.normal(key, (8, 8)) / 3, "v": jnp.full((8, 8), 0.1)}


@functools.cache
def _three_steps(which):
    """(the batch, one device's parameters after three steps)."""
    tx, params = WITH_VALUE[which], jax.jit(_square)(KEY)
    batch = np.random.default_rng(1).normal(size=(16, 8)).astype(np.float32)

    @jax.jit
    def step(params, state):
        value, grads = jax.value_and_grad(_of_rows)(params, batch)
        updates, state = tx.update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state

    state = jax.jit(tx.init)(params)
    for _ in range(3):
        params, state = step(params, state)
    return batch, params


def _on_eight(name):
    sizes = DIVIDED[name]
    options = dict(by="compiler") if name == "compiler" else {}
    options |= dict(microbatches=2) if "stage" in sizes else {}
    return layouts.Layout(mesh.make(**sizes), **{role: role for role in sizes}, **options)


@pytest.mark.parametrize("name", marked(DIVIDED, {"hand"}, 1))
@pytest.mark.parametrize("which", WITH_VALUE)
def test_an_optimizer_that_asks_for_the_loss_gets_the_mean(name, which):
    layout, tx, (batch, one) = _on_eight(name), WITH_VALUE[which], _three_steps(which)
    params, state = layouts.init(layout, _square, tx, KEY)
    step = layouts.step(layout, _of_rows, tx)
    for _ in range(3):
        params, state, _ = step(params, state, batch)
    pairs = zip(*map(jax.tree.leaves, (layouts.whole(layout, params), one)), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_an_optimizer_that_evaluates_the_loss_again_is_an_error():
    layout, tx = _on_eight("hand"), optax.lbfgs()
    params, state = layouts.init(layout, _square, tx, KEY)
    with pytest.raises(TypeError, match="as a line search does, and a step has no loss for it"):
        layouts.step(layout, _of_rows, tx)(params, state, jnp.ones((16, 8)))


@pytest.mark.parametrize("roles", [("data", "fsdp"), ("fsdp", "context"), ("data", "tensor")])
def test_stages_by_the_compiler_beside_two_roles_are_refused(roles):
    """XLA ends the process: of JAX 0.12 beside data and fsdp, of others beside the rest."""
    grid = mesh.make(stage=2, **dict.fromkeys(roles, 2))
    named = dict(zip(roles, roles, strict=True))
    with pytest.raises(ValueError, match=f"with stages beside {', '.join(roles)}: XLA's"):
        layouts.Layout(grid, stage="stage", by="compiler", **named)
    of_one = mesh.make(**{"stage": 2, roles[0]: 1, roles[1]: 2})
    layouts.Layout(of_one, stage="stage", by="compiler", **named)  # cuts nothing, so it may stand


def test_between_the_two_programs_of_a_stage_nothing_waits_on_the_host():
    layout = layouts.Layout(mesh.make(stage=2, fsdp=4), stage="stage", fsdp="fsdp")
    layout = dataclasses.replace(layout, remat=layouts.offload, microbatches=2)
    (loss, _), tx = parts(2, remat=False), OPTIMIZERS["adamw"]
    params, state = drawn(layout, tx=tx)
    with pytest.raises(ValueError, match=r"offloads to the host, and with stages .* no stages"):
        layouts.step(layout, loss, tx, check=False).lower(params, state, batches()[0])


EXACT = ["data", "zero1", "zero2", "fsdp", "hybrid", "ring", "zigzag", "all_gather", "ulysses"]


@pytest.mark.parametrize(
    "name", marked([*EXACT, "fsdp, context"], {"zero2", "hybrid", "zigzag"}, 4)
)
def test_bytes_on_axes_by_hand_are_the_formula(name):
    layout, (loss, create) = layouts.LAYOUTS[name](8), parts()
    params, batch = jax.eval_shape(create, KEY), batches()[0]
    predicted = layouts.predict(layout, params, batch, OPTIMIZERS["adamw"], remat=CONFIG.remat)
    placed = jax.eval_shape(lambda key: layouts.place(layout, create(key)), KEY)
    lowered = layouts.value_and_grad(layout, loss).lower(placed, batch)
    counted = measure.by_axis(measure.collectives(lowered), layout.mesh)
    assert list(predicted.sent) == list(counted)
    for axes, size in predicted.sent.items():
        np.testing.assert_allclose(size, counted[axes].ring_bytes, rtol=1e-9)


@pytest.mark.parametrize("name", ["zigzag", "ulysses"])
def test_attention_of_layers_that_are_not_stacked_is_counted_in_each(name):
    """Also of layers in two stacks, as the decoder's dense ones are."""
    layout, whole = layouts.LAYOUTS[name](4), jax.eval_shape(parts()[1], KEY)
    apart, blocks = dict(whole), whole["blocks"]
    del apart["blocks"]

    def rows(n):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*n, *x.shape[1:]), x.dtype), blocks)

    def bare(block):
        return dict(block) | {key: block[key]["kernel"] for key in "qkvo"}

    n, names = CONFIG.layers, {key: f"DenseGeneral_{i}" for i, key in enumerate("qkvo")}
    every = [
        {f"layer_{i}": rows(()) for i in range(n)},
        {"dense": rows((1,)), "blocks": rows((n - 1,))},
        {"dense": bare(rows((1,))), "blocks": bare(rows((n - 1,)))},
        {"blocks": {names.get(key, key): x for key, x in blocks.items()}},
        {"layers": [bare(rows(())) for _ in range(n)]},
        {f"block_{i}_{key}": x for i in range(n) for key, x in bare(rows(())).items()},
        bare(blocks),
    ]
    expected = layouts.predict(layout, whole, batches()[0]).sent["context",]
    for more in every:
        assert layouts.predict(layout, apart | more, batches()[0]).sent["context",] == expected


def test_what_latent_attention_sends_along_tensor_is_no_guess():
    sizes = dict(kv_heads=CONFIG.heads, latent=8, head_dim=6, rope_dim=2)
    shapes = jax.eval_shape(model.program(dataclasses.replace(CONFIG, **sizes))[0], KEY)
    with pytest.raises(ValueError, match="tensor axis has no formula"):
        layouts.predict(layouts.LAYOUTS["tensor"](4), shapes, batches()[0])


def test_what_parameters_without_logical_axes_send_along_tensor_is_said_to_be_left_out():
    over = rules.PathRules((r"", jax.sharding.PartitionSpec(None, "model")))
    layout = layouts.Layout(mesh.make(fsdp=2, model=2), fsdp="fsdp", tensor="model", over=over)
    shapes = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32)}
    with pytest.warns(UserWarning, match="tensor is not counted, since .* heads, kv_heads, head_"):
        said = layouts.predict(layout, shapes, jax.ShapeDtypeStruct((8, 8), jnp.float32))
    assert said.sent.keys() == {("fsdp",)} and said.held["parameters"] == 64


@pytest.mark.parametrize("zero, sends", [(1, 2 + 4), (2, 2 + 2 * 2), (3, 2 * (2 + 2))])
def test_bytes_of_bfloat16_parameters_in_microbatches_are_the_formula(zero, sends):
    """Gathered in bfloat16; ZeRO 1 adds up microbatches before it scatters, so in float32."""
    layout = layouts.Layout(mesh.make(fsdp=4), fsdp="fsdp", zero=zero, microbatches=2)
    params, rows = {"w": jnp.ones((256, 256), jnp.bfloat16)}, jnp.ones((8, 256), jnp.bfloat16)

    def loss(params, rows):
        return jnp.mean(jnp.square(rows @ params["w"]).astype(jnp.float32))

    run = layouts.value_and_grad(layout, loss, check=False)
    lowered = run.lower(layouts.place(layout, params), rows)
    counted = measure.by_axis(measure.collectives(lowered), layout.mesh)["fsdp",].ring_bytes
    of_loss = 2 * (3 / 4) * 8  # a total and a count
    assert layouts.predict(layout, params, rows).sent["fsdp",] == counted
    assert counted == sends * 256 * 256 * 3 / 4 + of_loss


def test_what_is_created_is_one_device_s_and_bytes_held_are_the_formula():
    layout, (_, create) = layouts.LAYOUTS["fsdp, context, tensor"](8), parts()
    tx, batch = OPTIMIZERS["adamw"], batches()[0]
    predicted = layouts.predict(layout, jax.eval_shape(create, KEY), batch, tx)
    params, opt_state = layouts.init(layout, create, tx, KEY)
    for a, b in zip(*map(jax.tree.leaves, (params, values())), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)  # wherever they are drawn
    for tree, name in ((params, "parameters"), (opt_state, "state")):
        held = set(measure.bytes_on_devices(tree).values())
        assert held == {predicted.held[name]}
    # Along both, two numbers. All in the mesh's order, as `measure.by_axis` has them.
    every = [("fsdp",), ("fsdp", "context"), ("context",), ("tensor",)]
    assert list(predicted.sent) == every


def test_a_stage_s_sums_along_tensor_are_of_whole_sizes():
    """Also where fsdp cuts what they are read from."""
    layout = layouts.LAYOUTS["stage, fsdp, tensor by hand"](8)
    (loss, create), formula = parts(2, 4), tensor.bytes_sent(2, 8, 32, CONFIG.embed, 2)
    ask = functools.partial(layouts.predict, layout, jax.eval_shape(create, KEY), tokens(16, 32))
    first, last = (ask(loss=loss, stage=place).sent["tensor",] for place in range(2))
    assert first == formula.layers  # the embedding lies whole along tensor, and needs no sum
    assert last == formula.layers + formula.head + formula.loss


def with_statistics(params, batch):
    """A plain tree's loss, with a bias that balances and a running mean, both without gradients."""
    x = marks.stage_boundary(batch["x"] @ params["w"]) + params["bias"][None]
    new = {
        "bias": params["bias"] - 0.1 * jnp.sign(marks.total(jnp.sum(x, axis=0))),
        "mean": 0.9 * params["mean"] + 0.1 * jnp.mean(batch["x"], axis=0),
    }
    found = {"frozen": new, "rows": jnp.float32(len(x))}
    return objective.Mean(jnp.sum((x - params["mean"][:3][None]) ** 2), jnp.float32(len(x))), found


STATISTICS = {"fsdp": 8, "hybrid": 8, "fsdp by compiler": 8, "stage": 2, "stage, fsdp by hand": 4}


@pytest.mark.parametrize("name", marked(STATISTICS, {*STATISTICS} - {"stage, fsdp by hand"}))
def test_what_changes_without_a_gradient_is_put_back(name):
    layout = layouts.LAYOUTS[name](STATISTICS[name])
    pads = layout.by_hand and not layout.stage  # and else an array that does not divide is whole
    layout = dataclasses.replace(layout, microbatches=1, min_size=0 if pads else 100)
    rng = np.random.default_rng(0)
    params = {"bias": np.zeros(3), "mean": np.ones(7), "w": rng.normal(size=(7, 3))}
    params = {path: np.float32(x) for path, x in params.items()}
    batch, tx = {"x": np.float32(rng.normal(size=(16, 7)))}, optax.adamw(0.1)
    frozen = {"bias", "mean"}.__contains__

    def create(key):
        return jax.tree.map(jnp.asarray, params)

    @jax.jit
    def on_one(params, state):
        grad = jax.value_and_grad(lambda p: _divided(with_statistics(p, batch)), has_aux=True)
        (value, found), grads = grad(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates) | found["frozen"], state, value

    ours, state = layouts.init(layout, create, tx, KEY)
    step = layouts.step(layout, with_statistics, tx, frozen=frozen)
    theirs, expected = params, tx.init(params)
    for _ in range(3):
        ours, state, mean, aux = step(ours, state, batch)
        theirs, expected, value = on_one(theirs, expected)
        np.testing.assert_allclose(mean, value, rtol=1e-5)
        assert aux == {"rows": 16}
    for path, x in layouts.whole(layout, ours).items():
        np.testing.assert_allclose(x, theirs[path], rtol=1e-4, atol=1e-6, err_msg=path)


def _divided(out):
    mean, aux = out
    return mean.total / mean.count, aux


def test_new_values_of_what_is_in_shares_are_whole():
    """Of layers that the loss receives in shares, and gathers by `marks.use`."""

    def loss(params, batch):
        layer = lambda x, w: (x * marks.use(w)["scale"][None], None)  # noqa: E731
        x, _ = jax.lax.scan(layer, batch["x"], params)
        new = {"scale": marks.use(params)["scale"] - jnp.arange(3.0)[:, None]}
        return objective.Mean(jnp.sum(x), jnp.float32(len(x))), {"frozen": new}

    layout = dataclasses.replace(layouts.LAYOUTS["fsdp"](8), stacked=lambda path: True)
    create, tx = lambda key: {"scale": jnp.ones((3, 16))}, optax.sgd(0.1)
    params, state = layouts.init(layout, create, tx, KEY)
    assert params["scale"].sharding.shard_shape((3, 16)) == (3, 2)
    step = layouts.step(layout, loss, tx, frozen=lambda path: path == "scale")
    params, *_ = step(params, state, {"x": jnp.ones((8, 16))})
    expected = np.repeat([[1], [0], [-1]], 16, axis=1)
    np.testing.assert_array_equal(layouts.whole(layout, params)["scale"], expected)


def test_a_step_takes_another_tree_of_parameters_next():
    """What it froze of the first is no claim on the second."""

    def loss(params, batch):
        new = {path: x - 1 for path, x in params.items()}
        return objective.Mean(jnp.sum(batch["x"]), jnp.float32(8)), {"frozen": new}

    layout, tx = layouts.LAYOUTS["fsdp by compiler"](8), optax.sgd(0.1)
    step = layouts.step(layout, loss, tx, frozen=lambda path: True)
    for name in ("mean", "other"):
        params, state = layouts.init(layout, lambda key, name=name: {name: jnp.ones(8)}, tx, KEY)
        params, *_ = step(params, state, {"x": jnp.ones((8, 16))})
        np.testing.assert_array_equal(layouts.whole(layout, params)[name], np.zeros(8))


def test_new_values_of_other_arrays_are_refused():
    layout = layouts.LAYOUTS["fsdp"](8)
    params = {"bias": jnp.zeros(3), "mean": jnp.zeros(7), "w": jnp.zeros((7, 3))}
    placed, batch = layouts.place(layout, params), {"x": jnp.zeros((16, 7))}
    tx = optax.sgd(0.1)
    step = layouts.step(layout, with_statistics, tx, frozen=lambda path: path == "bias")
    with pytest.raises(ValueError, match=r"names \{'bias': \(3,\)\}, and the loss returns new"):
        step(placed, layouts.init(layout, lambda key: params, tx, KEY)[1], batch)


def primer(params, batch):
    """A decoder as one finds them: dicts and lists, no names, no marks, a mean over rows.

    Squared ReLU and convolutions over three tokens (So et al., 2021), distances in the scores in
    the place of positions (Press et al., 2022), norms after the sums, a tied head with a bias.
    """
    x = params["wte"][batch["tokens"]]
    b, s, e = x.shape
    back = jnp.arange(s)[:, None] - jnp.arange(s)[None]
    for p in params["h"]:
        q, k, v = (_convolved(t, p["taps"]) for t in jnp.split(x @ p["qkv"], 3, axis=-1))
        q, k, v = (t.reshape(b, s, len(p["slope"]), -1) for t in (q, k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        scores = scores - jnp.exp(p["slope"])[None, :, None, None] * back[None, None]
        scores = jnp.where(back[None, None] >= 0, scores, -1e9)
        y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(b, s, e)
        x = _standardized(x + y @ p["proj"]) * p["g"][0][None, None]
        y = jnp.square(jax.nn.relu(x @ p["fc"] + p["fc_b"][None, None])) @ p["fc2"]
        x = _standardized(x + y) * p["g"][1][None, None]
    logits = x @ params["wte"].T + params["out_b"][None, None]
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][..., None], axis=-1)
    return -jnp.mean(picked)


def _convolved(x, taps):
    padded = jnp.pad(x, ((0, 0), (2, 0), (0, 0)))
    return sum(padded[:, i : i + x.shape[1]] * taps[i][None, None] for i in range(3))


def _standardized(x):
    mean, var = jnp.mean(x, -1, keepdims=True), jnp.var(x, -1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(var + 1e-5)


@functools.cache
def foreign():
    """(parameters, batch, one device's loss, and gradients) of `primer`, with a vocabulary and
    heads that eight devices do not divide."""
    rng, e, vocab, wide = np.random.default_rng(5), 24, 37, 40

    def draw(*shape):
        return (rng.normal(size=shape) * shape[0] ** -0.5).astype(np.float32)

    def block():
        inner = dict(qkv=draw(e, 3 * e), taps=draw(3, e), proj=draw(e, e), g=1 + draw(2, e))
        return inner | dict(slope=draw(3), fc=draw(e, wide), fc_b=draw(wide), fc2=draw(wide, e))

    params = {"wte": draw(vocab, e), "h": [block(), block()], "out_b": draw(vocab)}
    text = rng.integers(0, vocab, (16, 25), dtype=np.int32)
    batch = {"tokens": text[:, :-1], "targets": text[:, 1:]}
    return params, batch, jax.jit(jax.value_and_grad(primer))(params, batch)


UNMARKED = ["data", "fsdp", "zero1", "zero2", "hybrid", "fsdp by compiler", "context by compiler"]


@pytest.mark.parametrize("name", marked(UNMARKED, (), 3, always=["zero2"]))
def test_a_model_that_nobody_here_wrote_needs_no_marks(name):
    params, batch, (mean, grads) = foreign()
    layout = layouts.LAYOUTS[name](8)
    if name == "fsdp by compiler":  # it pads nothing: slopes of 3 and a bias of 37 stay whole
        layout = dataclasses.replace(layout, min_size=38)
    placed = layouts.place(layout, params)
    found, theirs = layouts.value_and_grad(layout, primer)(placed, batch)
    np.testing.assert_allclose(found, mean, rtol=2e-6)
    for a, b in zip(*map(jax.tree.leaves, (layouts.whole(layout, theirs), grads)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6 * np.abs(b).max())


@functools.cache
def biased(stages=1):
    """(the loss, what creates the parameters) of a mixture balanced by its routers' biases."""
    mixture = dict(experts=8, experts_per_token=2, mlp=16, dropout=0.0, router_bias=True)
    mixture |= dict(stages=stages, layers=2, remat=False)
    config = dataclasses.replace(CONFIG, **mixture)
    graphdef = nnx.split(nnx.eval_shape(lambda: model.Decoder(config, nnx.Rngs(0))))[0]

    def loss(params, batch):
        mean, aux = model.routed_loss(params, batch, graphdef=graphdef, balance=0)
        old = marks.use(nnx.filter_state(params, nnx.PathContains("bias")))
        (path, bias), *_ = trees.leaves(old)
        loads = marks.total(aux["loads"])
        return mean, {"frozen": {path: experts.rebalanced(bias, loads, 0.1)}}

    return loss, functools.partial(_create, config)


@functools.cache
def one_device_biased():
    """[(loss, biases)] of two steps."""
    loss, create = biased()
    params, found = jax.jit(create)(KEY), []

    @jax.jit
    def step(params, batch):
        (mean, aux), grads = objective.value_and_grad(loss, has_aux=True)(params, batch)
        ((path, bias),) = aux["frozen"].items()
        params = jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)
        leaves = [bias if p == path else x for p, x in trees.leaves(params)]
        return jax.tree.unflatten(jax.tree.structure(params), leaves), (mean, bias)

    for batch in batches():
        params, out = step(params, batch)
        found.append(out)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", sample(layouts.LAYOUTS, 2))
def test_routers_are_balanced_by_biases(name):
    layout = layouts.LAYOUTS[name](2 ** (name.count(",") + 1) if "stage" in name else 8)
    # The loads are those of the whole batch, which microbatches never see.
    layout = dataclasses.replace(layout, microbatches=1, schedule="1f1b")
    loss, create = biased(layout.size("stage"))
    tx, is_bias = optax.sgd(0.01), lambda path: "bias" in path
    params, state = layouts.init(layout, create, tx, KEY)
    step = layouts.step(layout, loss, tx, frozen=is_bias)
    for batch, (mean, bias) in zip(batches(), one_device_biased(), strict=True):
        params, state, found, _ = step(params, state, batch)
        np.testing.assert_allclose(found, mean, rtol=2e-5)
        ours = [x for path, x in trees.leaves(layouts.whole(layout, params)) if is_bias(path)]
        np.testing.assert_allclose(ours, [bias], atol=1e-6)
