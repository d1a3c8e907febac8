"""`objective.check` against losses as they were published, and mistakes that a trace hides."""

import jax
import jax.numpy as jnp
import numpy as np
import published
import pytest
from jax.experimental import pallas
from published import BATCH, DIVIDE, MIX, PARAMS, narrow, nats, net
from sampling import marked

from shardwise import marks, mesh, objective
from shardwise.objective import Indivisible, Mean, oracle

mesh.simulate(8)
KINDS = {"float32": (PARAMS, BATCH), "bfloat16": (narrow(PARAMS), narrow(BATCH))}


def in_kinds(table, quick):
    """Every so many-th in float32, slow a third of the others; some in bfloat16, for its noise."""
    exact, rounded = ([(name, kind) for name in table] for kind in KINDS)
    cases = marked(exact, exact[::quick], len(table) // 3)
    return pytest.mark.parametrize("name, kind", cases + marked(rounded, (), len(table) // 8))


@pytest.fixture(autouse=True)
def as_others_write():
    """Our own code spells ranks out; that of others does not."""
    with jax.numpy_rank_promotion("allow"):
        yield


def test_the_table_is_as_long_as_it_is_said_to_be():
    assert len(DIVIDE) >= 60 and len(MIX) >= 40
    assert all(source for _, source, *_ in (*DIVIDE.values(), *MIX.values()))


@in_kinds(DIVIDE, 12)
def test_a_published_mean_over_rows_is_never_refused(name, kind):
    objective.check(DIVIDE[name][0], *KINDS[kind], **published.with_key(name))


@in_kinds(MIX, 7)
def test_a_published_loss_that_does_not_divide_is_refused(name, kind):
    loss, _, by = MIX[name]
    with pytest.raises(Indivisible, match=r"objective.check: the loss is another where"):
        objective.check(loss, *KINDS[kind], ways=by)


@pytest.mark.parametrize("name", [n for n, (_, _, by) in MIX.items() if "devices" not in by])
def test_groups_of_neighbours_divide_over_devices(name):
    objective.check(MIX[name][0], PARAMS, BATCH, ways=("devices",))


# Kinds that the trace of a loss does not tell, or that only one that is followed far would.


def z(p, b):
    return net(p, b["x"])


def mean_of(x):
    return jnp.mean(x**2)


def kernel(x_ref, out_ref):
    out_ref[...] = x_ref[...] - x_ref[...].mean(0, keepdims=True)


def by_kernel(p, b):
    x = z(p, b)
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return mean_of(pallas.pallas_call(kernel, out_shape=shape, interpret=True)(x))


@jax.custom_vjp
def centred_backwards(x):
    return x


centred_backwards.defvjp(lambda x: (x, None), lambda _, g: (g - g.mean(0, keepdims=True),))


def until_small(p, b):
    """Halved until the mean is small: as often as the part's rows ask for."""
    x = z(p, b) ** 2
    return jax.lax.while_loop(lambda x: x.mean() > 0.01, lambda x: x / 2, x).mean()


def loss_scale(p, b):
    """A scale that is chosen by the size of the mean; of what is below, twice."""
    each = nats(p, b)
    return each.mean() * jnp.where(each.mean() > 2, 1.0, 2.0)


def on_a_mean(p, b):
    each = nats(p, b)
    return jax.lax.cond(each.mean() > 2, lambda: each.mean(), lambda: (each**2).mean())


SILENT = {
    "rows that the batch points to": lambda p, b: mean_of(z(p, b) - z(p, b)[b["negative"]]),
    "rows by a number of the batch": lambda p, b: mean_of(
        z(p, b) - jax.lax.dynamic_index_in_dim(z(p, b), b["negative"][0], 0)
    ),
    "a shift of rows": lambda p, b: jnp.mean(z(p, b) * jnp.roll(z(p, b), 1, axis=0)),
    "neighbours": lambda p, b: mean_of(z(p, b)[1:] - z(p, b)[:-1]),
    "the first row": lambda p, b: mean_of(z(p, b) - z(p, b)[:1]),
    "the last row": lambda p, b: mean_of(z(p, b)[-1]) + nats(p, b).mean(),
    "some rows": lambda p, b: mean_of(z(p, b)[: len(b["x"]) // 2]),
    "every other row": lambda p, b: mean_of(z(p, b)[::2] - z(p, b)[1::2] * 0.5),
    "a condition on a mean": lambda p, b: jnp.mean(z(p, b) * (z(p, b).mean(0) > 0)),
    "a condition on any row": lambda p, b: nats(p, b).mean() * (1 + (nats(p, b) > 3).any()),
    "places in a queue": lambda p, b: jnp.mean(
        nats(p, b) * (jnp.cumsum((b["y"] == 1).astype(jnp.int32)) <= 1)
    ),
    "numbers of rows": lambda p, b: jnp.mean(nats(p, b) * jnp.arange(len(b["x"]))),
    "a power of the number of rows": lambda p, b: nats(p, b).sum() / len(b["x"]) ** 0.5,
    "a share that falls with the rows": lambda p, b: nats(p, b).mean() / (1 + len(b["x"])),
    "a capacity of the number of rows": lambda p, b: jnp.mean(
        jnp.where(jnp.arange(len(b["x"])) < 6, nats(p, b), 0)
    ),
    "a kernel": by_kernel,
    "a backward rule": lambda p, b: mean_of(centred_backwards(z(p, b))),
    "a gradient that is stopped": lambda p, b: jnp.mean(
        z(p, b) * jax.lax.stop_gradient(1 + z(p, b).mean(0))
    ),
    "loss_scale under a where": loss_scale,
    "a cond on a mean": on_a_mean,
    "a while until a mean is small": until_small,
    "numbers that occur": lambda p, b: nats(p, b).mean() * (jnp.diff(jnp.sort(b["y"])) > 0).sum(),
    "a key of its own": lambda p, b: jnp.mean(
        nats(p, b) * jax.random.uniform(jax.random.key(1), (len(b["x"]),))
    ),
}
POINTED = BATCH | {"negative": np.asarray([5, 2, 7, 0, 1, 6, 3, 4], np.int32)}


@in_kinds(SILENT, 3)
def test_what_a_trace_hides_numbers_show(name, kind):
    params, batch = KINDS[kind]
    with pytest.raises(Indivisible):
        objective.check(SILENT[name], params, batch | {"negative": POINTED["negative"]})


HIDDEN = ["clip", "batch_norm", "barlow_twins", "masked_mean", "hard_examples"]
ZEROS = [(name, kind) for name in HIDDEN for kind in KINDS]


@pytest.mark.parametrize("name, kind", marked(ZEROS, [ZEROS[0], ZEROS[4], ZEROS[7]], 4))
def test_parameters_of_zeros_hide_nothing(name, kind):
    dtype = KINDS[kind][0]["w"].dtype
    params = jax.tree.map(lambda x: np.zeros(x.shape, dtype), PARAMS)
    with pytest.raises(Indivisible):
        objective.check(MIX[name][0], params, BATCH)


# A sequence that is cut.


def attended(p, b, x):
    x = x[:, :, None, None]
    x = marks.attend(x, x, x, marks.places(b, *x.shape[:2]))[:, :, 0, 0]
    return Mean(jnp.sum(x**2 * b["weight"]), jnp.sum(b["weight"]))


def of(x):
    """A loss of what stands in the place of tokens."""
    return lambda p, b: attended(p, b, p["w"] * x(b["z"], jnp.arange(b["z"].shape[1])))


def depthwise(x, _):
    kernel = jnp.asarray([0.2, 0.3, 0.5])[:, None, None]
    numbers = ("NWC", "WIO", "NWC")
    padding = [(2, 0)]  # causal, as Mamba's
    found = jax.lax.conv_general_dilated(
        x[..., None], kernel, (1,), padding, dimension_numbers=numbers
    )
    return found[..., 0]


def same_convolution(x, _):
    kernel = jnp.asarray([0.2, 0.5, 0.3])[:, None, None]
    numbers = ("NWC", "WIO", "NWC")
    return jax.lax.conv_general_dilated(
        x[..., None], kernel, (1,), "SAME", dimension_numbers=numbers
    )[..., 0]


def looped(p, b):
    _, x = jax.lax.scan(lambda h, x: (0.9 * h + x, h), jnp.zeros(len(b["z"])), b["z"].T)
    return attended(p, b, x.T * p["w"])


LENGTH = 12
TOKENS = {
    "z": published.drawn(8, LENGTH),
    "weight": (np.arange(8 * LENGTH).reshape(8, LENGTH) % 5 > 0).astype(np.float32),
    "row": np.arange(1, 9, dtype=np.float32),
}
SCALE = {"w": np.float32(0.7)}
SEEING = {
    "rotary positions by arange": of(lambda x, at: x * jnp.cos(at.astype(jnp.float32))),
    "an outer product with frequencies": of(
        lambda x, at: x * jnp.cos(jnp.outer(at, jnp.asarray([1.0, 0.1]))).sum(1)
    ),
    "the first token": of(lambda x, at: jnp.where(at == 0, 0, x)),
    "the first three tokens": of(lambda x, at: jnp.where(at < 3, 2 * x, x)),
    "every third token": of(lambda x, at: jnp.where(at % 3 == 0, 0, x)),
    "iota of floats": of(lambda x, at: x * jax.lax.iota(jnp.float32, len(at))),
    "a causal depthwise convolution": of(depthwise),
    "a convolution of one size": of(same_convolution),
    "a shift": of(lambda x, at: jnp.pad(x[:, 1:], ((0, 0), (0, 1)))),
    "a roll": of(lambda x, at: x - jnp.roll(x, -1, axis=1)),
    "a running sum": of(lambda x, at: jnp.cumsum(x, axis=1)),
    "a mean": of(lambda x, at: x - x.mean(1, keepdims=True)),
    "a sum": of(lambda x, at: x - x.sum(1, keepdims=True)),
    "a maximum": of(lambda x, at: x / jnp.abs(x).max(1, keepdims=True)),
    "own attention": of(lambda x, at: jnp.einsum("bs,bt,bt->bs", x, x, x)),
    "a softmax": of(lambda x, at: jax.nn.softmax(x, axis=1)),
    "a table of positions": of(lambda x, at: x * jnp.linspace(1, 2, 64)[at]),
    "a length": lambda p, b: attended(
        p, b, p["w"] * b["z"] * (jnp.arange(b["z"].shape[1])[None] < b["row"][:, None])
    ),
    "a loop": looped,
    "a square of a sum": lambda p, b: Mean(
        jnp.sum((p["w"] * b["z"]).sum(1) ** 2), b["weight"].sum()
    ),
    "a count of rows": lambda p, b: attended(p, b, p["w"] * b["z"])._replace(count=len(b["z"])),
    "weights of rows": lambda p, b: attended(p, b, p["w"] * b["z"])._replace(count=b["row"].sum()),
    "a sum of means": lambda p, b: Mean((p["w"] * b["z"] ** 2).mean(1).sum(), b["weight"].sum()),
    "a sum over rows": lambda p, b: Mean((p["w"] * b["row"]).sum(), b["weight"].sum()),
}
ALONG = {
    "marks.index": lambda p, b: attended(
        p, b, p["w"] * b["z"] * jnp.sin(marks.index("sequence", b["z"].shape[1]))
    ),
    "a factor of each row": lambda p, b: attended(p, b, p["w"] * b["z"] * b["row"][:, None]),
    "all entries as the count": lambda p, b: attended(p, b, p["w"] * b["z"])._replace(
        count=b["z"].size
    ),
    "marks.total along the sequence": lambda p, b: attended(
        p, b, p["w"] * b["z"] / marks.total(b["weight"].sum(1), ("sequence",))[:, None]
    ),
}


@pytest.mark.parametrize("name", marked(SEEING, [*SEEING][::2]))
def test_tokens_that_see_each_other_outside_marks_are_found(name):
    with pytest.raises(Indivisible, match=r"along its sequence.*marks.attend"):
        objective.check(SEEING[name], SCALE, TOKENS, ways=("sequence",))


@pytest.mark.parametrize("name", ALONG)
def test_tokens_of_their_own_are_let_through(name):
    objective.check(ALONG[name], SCALE, TOKENS, ways=("devices", "microbatches", "sequence"))


# What is said of a loss that is refused: the number, in which division, what looks like it.


def said(loss, params=PARAMS, batch=BATCH, **options):
    with pytest.raises(Indivisible) as error:
        objective.check(loss, params, batch, **options)
    return str(error.value)


REASONS = {
    "reduction_sum": "It is a sum over rows, and one scalar has to be a mean",
    "masked_mean": "divides by a number that it computes from the batch's values",
    "weighted_average": "divides by a number that it computes from the batch's values",
    "at_least_one": "The count is not a bare sum over rows",
    "penalty_in_the_total": "term that is no sum over rows",
    "clip": "Rows of the batch look at each other",
    "batch_norm": "Rows of the batch look at each other",
}


# Of the others tests/test_objective.py has the messages.
@pytest.mark.parametrize("name", marked(REASONS, ["penalty_in_the_total"]))
def test_the_error_says_what_it_looks_like(name):
    assert REASONS[name] in said(MIX[name][0])


def test_the_error_has_both_numbers_the_division_and_what_to_do():
    told = said(MIX["masked_mean"][0], ways=("microbatches",))
    assert "divided into microbatches: the mean is" in told and "return objective.Mean" in told
    whole, parts = (
        float(told.partition(before)[2].split()[0].strip(",."))
        for before in ("the mean is ", "of the whole, and ")
    )
    each, mask = published.token_nats(PARAMS, BATCH), BATCH["mask"]
    assert 0.5 < whole / ((each * mask).sum() / mask.sum()) < 2 and whole != parts
    told = said(MIX["clip"][0], ways=("devices",))
    for remedy in "marks.total", "by='compiler'", "rules.jit", "marks.local(x)", "over devices":
        assert remedy in told


COUNTS = {
    "a constant": (
        lambda p, b: Mean(nats(p, b).sum(), 8.0),
        "The count does not depend on the batch",
    ),
    "one more": (
        lambda p, b: Mean(nats(p, b).sum(), b["mask"].sum() + 1),
        "The count is not a bare sum over rows",
    ),
    "a mean in the total": (
        lambda p, b: Mean(nats(p, b).mean(), b["mask"].sum()),
        "The total is a mean over rows",
    ),
}


@pytest.mark.parametrize("name", COUNTS)
def test_a_count_or_total_of_another_kind_is_named(name):
    loss, told = COUNTS[name]
    assert told in said(loss)


def test_a_loss_that_is_not_finite_is_not_judged():
    with pytest.raises(ValueError, match="not finite"):
        objective.check(lambda p, b: jnp.log(-jnp.abs(nats(p, b)).mean()), PARAMS, BATCH)


def test_what_cannot_be_divided_is_named():
    one = jax.tree.map(lambda x: x[:1], BATCH)
    with pytest.raises(ValueError, match="a batch of 2 rows"):
        objective.check(DIVIDE["cross_entropy"][0], PARAMS, one)
    with pytest.raises(ValueError, match="ways has 'rows'"):
        objective.check(DIVIDE["cross_entropy"][0], PARAMS, BATCH, ways=("rows",))
    with pytest.raises(ValueError, match="the sequence is axis 1"):
        objective.check(lambda p, b: b["r"].mean(), PARAMS, {"r": BATCH["r"]}, ways=("sequence",))


def test_a_rule_of_its_own_is_judged_by_its_gradient_unless_that_is_left_out():
    loss = SILENT["a backward rule"]
    assert "the gradient of " in said(loss)
    objective.check(loss, PARAMS, BATCH, gradient=False)


def test_draws_by_shape_are_judged_by_what_rows_add():
    key = jax.random.key(0)
    objective.check(DIVIDE["dropout"][0], PARAMS, BATCH, key=key)
    case = oracle.Case(DIVIDE["dropout"][0], PARAMS, BATCH, key=key)
    (part,) = oracle.plan(("devices",), BATCH)
    with pytest.raises(Indivisible):  # as of draws by place it is another
        oracle.judge(oracle.compiled(case, part), True)

    def mixing(p, b, key):
        x = z(p, b)
        x = jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x, 0)
        return jnp.mean(jnp.abs(x - x.mean(0)) ** 3)

    assert "look at each other" in said(mixing, key=key)


def test_a_loss_that_takes_its_own_dtype_alone_is_judged_in_it():
    def loop(p, b):
        def add(total, row):
            return total + jnp.tanh(row @ p["w"]).sum(), None

        start = jnp.bfloat16(0)  # a carry in float32 would be an error
        total, _ = jax.lax.scan(add, start, b["x"])
        return total / len(b["x"])

    def uneven(p, b):
        return loop(p, b) * (1 + b["x"][0, 0])

    params, batch = (narrow({k: tree[k]}) for tree, k in ((PARAMS, "w"), (BATCH, "x")))
    objective.check(loop, params, batch)
    with pytest.raises(Indivisible):
        objective.check(uneven, params, batch)


def test_further_arguments_may_be_no_arrays():
    def loss(p, b, name, scale):
        return nats(p, b).mean() * scale if name == "mean" else nats(p, b).sum() * scale

    objective.check(loss, PARAMS, BATCH, "mean", jnp.float32(2))
    with pytest.raises(Indivisible, match="sum over rows"):
        objective.check(loss, PARAMS, BATCH, "sum", jnp.float32(2))


@pytest.mark.slow
def test_optax_ntxent_is_found_by_any_number_of_rows():
    for rows in (1, 2, 4):
        with pytest.raises(Indivisible):
            objective.check(MIX["simclr"][0], PARAMS, BATCH, rows=rows)
