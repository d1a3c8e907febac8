"""ZeRO 1 and 2: however the loss reads what is gathered, its gradient is one device's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampling import marked

from shardwise import fsdp, marks, measure, mesh, objective, rules
from shardwise.fsdp import using

mesh.simulate(8)
GRID = mesh.make(fsdp=4)
WIDE = 8  # four devices do not divide the other axis, nor a bias along it


def layer(x, w):
    return x + jnp.tanh(x @ w["up"] + w["bias"][None]) @ w["down"]


def used(params, x):
    body = jax.checkpoint(lambda x, w: (layer(x, marks.use(w)), None))
    return jax.lax.scan(body, x, params["stack"])[0]


def kept(params, x):
    return jax.lax.scan(lambda x, w: (layer(x, marks.use(w)), None), x, params["stack"])[0]


def outside(params, x):
    return jax.lax.scan(lambda x, w: (layer(x, w), None), x, params["stack"])[0]


def at_once(params, x):
    whole = marks.use({name: w[1:] for name, w in params["stack"].items()})
    for i in range(len(whole["up"])):
        x = layer(x, jax.tree.map(lambda w, i=i: w[i], whole))
    return x


def shared(params, x):
    """Of two stacks, whose arrays have the same paths at `use`; one is read outside it too."""
    for name in ("stack", "other"):
        x = jax.lax.scan(lambda x, w: (layer(x, marks.use(w)), None), x, params[name])[0]
    return x + jnp.sum(params["other"]["up"])


def jitted(params, x):
    """Layers one by one, in a function that JAX traces once."""
    run = jax.jit(lambda x, w: layer(x, marks.use(w)))
    for i in range(3):
        x = run(x, jax.tree.map(lambda w, i=i: w[i], params["stack"]))
    return x


def alone(params, x):
    """Of an array that is no stack."""
    return x * marks.use({"scale": params["scale"]})["scale"][None]


READ = [used, kept, outside, at_once, shared, jitted, alone]
FAST = {(used, 2, 2), (outside, 1, 1), (shared, 2, 2), (alone, 1, 2)}
CASES = [(read, zero, m) for read in READ for zero in (1, 2) for m in (1, 2)]


def drawn(layers=3, seed=0):
    rng = np.random.default_rng(seed)

    def stack(layers):
        shapes = dict(up=(layers, WIDE, 7), bias=(layers, 7), down=(layers, 7, WIDE))
        return {name: np.float32(rng.normal(size=shape) / 3) for name, shape in shapes.items()}

    params = {"stack": stack(layers), "other": stack(2), "scale": np.float32(rng.normal(size=WIDE))}
    rows = {
        "x": np.float32(rng.normal(size=(16, WIDE))),
        "mask": np.float32(rng.integers(0, 2, 16)),
    }
    return params, rows


def loss_of(read):
    def loss(params, batch):
        each = jnp.sum(read(params, batch["x"]) ** 2, axis=-1) * batch["mask"]
        return objective.Mean(jnp.sum(each), jnp.sum(batch["mask"]))

    return loss


def is_stack(path):
    return path.startswith(("stack", "other"))


def check(read, params, batch, zero=2, microbatches=1, rtol=2e-5, **options):
    """The gradient is one device's; what is returned is the function and its arguments."""
    loss, given = loss_of(read), dict(zero=zero, microbatches=microbatches, **options)
    expected = jax.jit(objective.value_and_grad(loss))(params, batch)
    rule = fsdp.rule(stacked=is_stack)
    function, placed = (
        fsdp.value_and_grad(loss, GRID, rule, **given),
        rules.place(params, rule, GRID),
    )
    ours = jax.tree.leaves(function(placed, batch))
    for a, b in zip(ours, jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * max(np.abs(b).max(), 1e-6))
    return function, (placed, batch)


@pytest.mark.parametrize(
    ("read", "zero", "microbatches"),
    marked(CASES, FAST, 8),
)
def test_what_is_gathered_before_is_read_as_on_one_device(read, zero, microbatches):
    check(read, *drawn(), zero, microbatches)


@pytest.mark.slow
def test_more_layers_than_a_dtype_numbers():
    params, batch = drawn(using.LAYERS + 1)
    params["stack"] = jax.tree.map(lambda x: x / 100, params["stack"])
    check(used, params, batch)


def test_a_dtype_that_cannot_number_the_layers_is_refused():
    def narrow(params, x):
        def body(x, w):
            w = marks.use(jax.tree.map(lambda a: a.astype(jnp.float8_e4m3fn), w))
            return layer(x, jax.tree.map(lambda a: a.astype(jnp.float32), w)), None

        return jax.lax.scan(body, x, params["stack"])[0]

    params, batch = drawn(17)
    with pytest.raises(ValueError, match=r"cast to float8_e4m3fn before marks.use.* 17 layers"):
        check(narrow, params, batch)


@pytest.mark.slow
@pytest.mark.parametrize("dtypes", [dict(dtype=jnp.bfloat16), dict(reduce_dtype=jnp.bfloat16)])
def test_other_dtypes(dtypes):
    check(used, *drawn(), rtol=4e-2, **dtypes)


def test_a_layer_is_gathered_once_and_its_gradient_scattered_where_it_is_made():
    function, given = check(used, *drawn())
    ops = measure.collectives(function.lower(*given)).ops
    kinds = ("all-gather", "reduce-scatter")
    trips = {kind: max(op.trips for op in ops if op.kind == kind) for kind in kinds}
    assert trips == {"all-gather": 1, "reduce-scatter": 3}
