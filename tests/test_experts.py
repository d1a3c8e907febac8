import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from sampling import IN_FULL, marked, sample

from shardwise import (
    experts,
    fsdp,
    marks,
    measure,
    mesh,
    model,
    objective,
    rules,
)
from shardwise.experts.mixture import Experts, gated

SLOW = pytest.mark.slow


def problem(rows, tokens, k, n, skew=0.0, embed=6, mlp=5, seed=0):
    """(x, chosen, weights, stacked); a high skew sends nearly all tokens to the last experts."""
    draw = np.random.default_rng(seed)  # no jax.random: each shape would compile
    normal = lambda *shape: draw.normal(size=shape).astype(np.float32)  # noqa: E731
    scores = draw.gumbel(size=(rows, tokens, n)) + skew * np.arange(n)
    chosen = np.argsort(-scores, axis=-1)[..., :k].astype(np.int32)
    weights = draw.uniform(size=(rows, tokens, k)).astype(np.float32)
    x, *stacked = (
        normal(rows, tokens, embed),
        *(normal(*size) for size in [(n, embed, mlp), (n, embed, mlp), (n, mlp, embed)]),
    )
    return jax.tree.map(jnp.asarray, (x, chosen, weights, stacked))


def by_loops(x, chosen, weights, stacked, capacity):
    """What is defined: every row has queues of its own, in the order of tokens and choices."""
    x, chosen, weights = (np.asarray(v) for v in (x, chosen, weights))
    y, kept = np.zeros(x.shape), np.zeros(chosen.shape, bool)
    n, k = len(stacked[0]), chosen.shape[2]
    size = math.inf if capacity is None else math.ceil(capacity * x.shape[1] * k / n)
    for row in range(x.shape[0]):
        queues = [0] * n
        for token in range(x.shape[1]):
            for choice, e in enumerate(chosen[row, token]):
                kept[row, token, choice] = queues[e] < size
                queues[e] += 1
                if kept[row, token, choice]:
                    gate, up, down = (np.asarray(w[e]) for w in stacked)
                    z = x[row, token] @ gate
                    inner = z / (1 + np.exp(-z)) * (x[row, token] @ up)
                    y[row, token] += weights[row, token, choice] * (inner @ down)
    return y, kept


def on_one(given, *, chosen, capacity, weigh):
    """(sum of what is weighed, kept) on one device, as a function to be differentiated."""
    x, weights, stacked = given
    n = len(stacked[0])
    y, kept = marks.experts(x, chosen, weights, gated, stacked, n, capacity)
    return jnp.sum(y * weigh), (y, kept)


def on_many(meaning, devices, capacity, n, order=None, check_vma=False):
    """The same over a mesh: rows and experts are cut over "expert", tokens over "sequence"."""
    grid = mesh.make(expert=devices[0], sequence=devices[1])
    cut, whole = P("expert", "sequence"), P("expert")

    def local(given, chosen, weigh, numbers):
        index = lambda axis, size: numbers if axis == "sequence" else jnp.arange(size)  # noqa: E731

        def loss(given):
            x, weights, stacked = given
            with marks.bind(experts=meaning, index=index):
                y, kept = marks.experts(x, chosen, weights, gated, stacked, n, capacity)
            return jnp.sum(y * weigh), (y, kept)

        grads, (y, kept) = jax.grad(loss, has_aux=True)(given)
        if devices[1] > 1:
            grads = grads[0], grads[1], jax.lax.psum(grads[2], "sequence")
        return y, kept, grads

    specs = (cut, cut, whole), cut, cut, P("sequence")
    mapped = jax.shard_map(
        local, mesh=grid, in_specs=specs, out_specs=(cut, cut, specs[0]), check_vma=check_vma
    )

    def run(given, chosen, weigh):
        numbers = jnp.arange(chosen.shape[1]) if order is None else order
        return mapped(given, chosen, weigh, numbers)

    return jax.jit(run)


@functools.cache
def expected_of(case):
    """(what is given, how it is weighed, (gradients, (output, kept)) of one device)."""
    rows, tokens, k, n, capacity, skew = case
    x, chosen, weights, stacked = problem(rows, tokens, k, n, skew)
    weigh = jnp.asarray(np.random.default_rng(9).normal(size=x.shape), jnp.float32)
    step = jax.jit(jax.grad(functools.partial(on_one, capacity=capacity), has_aux=True))
    found = step((x, weights, stacked), chosen=chosen, weigh=weigh)
    return (x, chosen, weights, stacked), weigh, found


def compare(case, meaning, devices, order=None, **options):
    (x, chosen, weights, stacked), weigh, (expected, (y, kept)) = expected_of(case)
    *_, n, capacity, _ = case
    moved = lambda v: v if order is None else v[:, order]  # noqa: E731
    sent = (moved(x), moved(weights), stacked), moved(chosen), moved(weigh)
    found = on_many(meaning, devices, capacity, n, order, **options)(*sent)
    np.testing.assert_array_equal(found[1], moved(kept))
    wanted = moved(y), (moved(expected[0]), moved(expected[1]), expected[2])
    for a, b in zip(jax.tree.leaves(found[::2]), jax.tree.leaves(wanted), strict=True):
        # The same sums in another order: a few float32 roundings of the largest entries.
        np.testing.assert_allclose(a, b, rtol=0, atol=5e-6 * max(1, np.abs(b).max()))
    return kept


# rows, tokens, k, experts, capacity, skew
CASES = [
    (8, 7, 2, 8, 1.0, 0.0),
    (8, 7, 2, 8, None, 0.0),
    (4, 9, 3, 12, 1.25, 0.3),
    (8, 6, 2, 16, None, 50.0),
    (4, 5, 1, 4, 1.0, 50.0),
    (8, 6, 4, 8, 2.0, 1.0),
    (4, 5, 1, 8, None, 50.0),  # all tokens to one expert, and none to the others
]


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=SLOW if i % 2 else (), id=str(c)) for i, c in enumerate(CASES)]
)
def test_one_device_does_what_the_loops_do(case):
    rows, tokens, k, n, capacity, skew = case
    x, chosen, weights, stacked = problem(rows, tokens, k, n, skew)
    expected = by_loops(x, chosen, weights, stacked, capacity)
    run = jax.jit(functools.partial(on_one, chosen=chosen, capacity=capacity, weigh=x))
    _, (y, kept) = run((x, weights, stacked))
    np.testing.assert_array_equal(kept, expected[1])
    np.testing.assert_allclose(y, expected[0], rtol=0, atol=1e-5 * np.abs(expected[0]).max())
    if capacity is None:
        assert kept.all()
    if skew == 50 and capacity == 1:  # one expert of four has slots for 2 of 5 tokens
        assert kept.sum() == rows * 2


FORMS = {name: form("expert") for name, form in experts.FORMS.items()}


EACH = [(case, form) for case in CASES for form in FORMS]
QUICK = [(CASES[0], "all_to_all"), (CASES[2], "all_to_all"), (CASES[1], "gather")]
QUICK += [(CASES[1], "ragged")]


@pytest.mark.parametrize(("case", "form"), marked(EACH, QUICK, 8), ids=str)
def test_an_axis_of_experts_equals_one_device(case, form):
    n = min(4, case[0], case[3])
    compare(case, FORMS[form], (n, 1))


@SLOW
@pytest.mark.parametrize("seed", sample(range(12), 4))
def test_random_sizes_equal_one_device(seed):
    draw = np.random.default_rng(seed)
    n = int(draw.choice([1, 2, 4, 8]))
    count = n * int(draw.integers(1, 4))
    case = (
        n * int(draw.integers(1, 3)), int(draw.integers(1, 12)),
        int(draw.integers(1, min(count, 5) + 1)), count,
        [None, 0.5, 1.0, 1.3, float(count)][draw.integers(5)], [0.0, 0.5, 50.0][draw.integers(3)],
    )  # fmt: skip
    for form in FORMS.values():
        compare(case, form, (n, 1))


ZIGZAG = np.array([0, 1, 6, 7, 2, 3, 4, 5])


@pytest.mark.parametrize(
    ("form", "order"),
    [
        ("all_to_all", ZIGZAG),
        pytest.param("all_to_all", None, marks=SLOW),
        pytest.param("gather", ZIGZAG, marks=SLOW),
        pytest.param("ragged", ZIGZAG, marks=SLOW),
        ("local", None),
        pytest.param("local", ZIGZAG, marks=SLOW),
    ],
)
def test_a_cut_sequence_keeps_whom_the_whole_row_keeps(form, order):
    meaning = experts.Exchange("local", None, "sequence")
    if form != "local":
        meaning = dataclasses.replace(FORMS[form], sequence="sequence")
    devices = (1, 4) if form == "local" else (2, 4)
    kept = compare((4, 8, 2, 4, 1.0, 0.7), meaning, devices, order)
    assert 0 < kept.sum() < kept.size


@SLOW
@pytest.mark.parametrize("form", sample(FORMS, 1))
def test_a_cut_sequence_without_drops_equals_one_device(form):
    meaning = dataclasses.replace(FORMS[form], sequence="sequence")
    assert compare((4, 8, 3, 8, None, 1.0), meaning, (4, 2), np.arange(8)[::-1]).all()


@SLOW
@pytest.mark.parametrize(("form", "capacity"), [("all_to_all", 1.0), ("ragged", None)])
def test_the_default_check_of_shard_map_accepts_the_exchange(form, capacity):
    compare((4, 6, 2, 8, capacity, 0.5), FORMS[form], (4, 1), check_vma=True)


def test_who_is_dropped_depends_on_the_row_up_to_the_token_alone():
    x, chosen, weights, stacked = problem(2, 9, 2, 4, skew=1.0)

    @jax.jit
    def run(x, chosen):
        w = weights[: len(chosen)]
        return marks.experts(x, chosen, w, gated, stacked, 4, 0.7)

    y, kept = run(x, chosen)
    assert 0 < kept.sum() < kept.size
    other = run(x.at[0, 5:].set(1.0), chosen.at[0, 5:].set(jnp.array([0, 1])))
    np.testing.assert_array_equal(other[1][0, :5], kept[0, :5])
    np.testing.assert_array_equal(other[0][0, :5], y[0, :5])
    np.testing.assert_array_equal(other[1][1], kept[1])
    np.testing.assert_array_equal(run(x[:1], chosen[:1])[1], kept[:1])


def test_order_in_memory_does_not_matter_where_the_index_is_given():
    x, chosen, weights, stacked = problem(2, 8, 2, 4, skew=1.0)

    @jax.jit
    def run(x, chosen, weights, index=None):
        return marks.experts(x, chosen, weights, gated, stacked, 4, 0.7, index)[1]

    kept = run(x, chosen, weights)
    moved = [np.asarray(v)[:, ZIGZAG] for v in (x, chosen, weights)]
    found = run(*moved, np.broadcast_to(ZIGZAG, (2, 8)))
    np.testing.assert_array_equal(found, kept[:, ZIGZAG])


SENT = [
    ("all_to_all", 4, dict(rows=3, tokens=8, k=2, n=8, capacity=1.0)),
    ("all_to_all", 8, dict(rows=1, tokens=5, k=1, n=16, capacity=1.25)),
    ("all_to_all", 4, dict(rows=2, tokens=4, k=2, n=4, capacity=None)),
    ("gather", 2, dict(rows=2, tokens=4, k=3, n=6, capacity=1.5)),
    ("ragged", 4, dict(rows=3, tokens=5, k=3, n=8, capacity=None)),
    pytest.param("ragged", 2, dict(rows=2, tokens=6, k=2, n=8, capacity=0.5), marks=SLOW),
]


@pytest.mark.parametrize(("form", "devices", "size"), SENT, ids=str)
def test_bytes_sent_are_the_formula(form, devices, size):
    rows, tokens, k, n, capacity = size.values()
    x, chosen, weights, stacked = problem(rows * devices, tokens, k, n)
    run = on_many(FORMS[form], (devices, 1), capacity, n)
    lowered = run.lower((x, weights, stacked), chosen, x)
    given = rows, tokens, x.shape[-1], k, n, devices, capacity, form
    forward = experts.bytes_sent(*given)
    # Back: the activations again, and the gradients of the weights where these were gathered.
    numbers = 0
    if form == "ragged":
        numbers = 4 * n * (devices - 1)
    elif form == "gather" or capacity is None:
        numbers = rows * tokens * k * 4 * (2 if capacity else 1) * (devices - 1)
    assert measure.collectives(lowered).ring_bytes == 2 * forward - numbers
    if form == "ragged":  # offsets are exchanged twice for the same numbers; XLA does it once
        numbers += 2 * 4 * n // devices * (devices - 1)
    assert measure.collectives(lowered.compile()).ring_bytes == 2 * forward - numbers


@pytest.mark.parametrize("form", ["all_to_all", pytest.param("ragged", marks=SLOW)])
def test_activations_travel_in_their_own_dtype(form):
    x, chosen, weights, stacked = problem(4, 6, 2, 8)
    narrow = jax.tree.map(lambda v: v.astype(jnp.bfloat16), (x, stacked))
    run = on_many(FORMS[form], (4, 1), 1.0, 8)
    lowered = run.lower((narrow[0], weights, narrow[1]), chosen, x)
    sent = experts.bytes_sent(1, 6, 6, 2, 8, 4, 1.0, form, itemsize=2)
    numbers = 4 * 8 * 3 if form == "ragged" else 0
    assert measure.collectives(lowered).ring_bytes == 2 * sent - numbers
    dtypes = {op.dtype for op in measure.collectives(lowered).ops}
    assert dtypes == ({"bf16", "s32"} if numbers else {"bf16"})


@SLOW
def test_rows_in_bfloat16_travel_as_they_are():
    """Each row's product is the same where it is computed: only the order of sums differs."""
    x, chosen, weights, stacked = problem(8, 7, 2, 8, skew=0.4)
    narrow = jax.tree.map(lambda v: v.astype(jnp.bfloat16), (x, weights, stacked))
    weigh = jnp.ones(x.shape, jnp.bfloat16)
    step = jax.jit(jax.grad(functools.partial(on_one, capacity=None), has_aux=True))
    expected, (y, _) = step(narrow, chosen=chosen, weigh=weigh)
    found = on_many(FORMS["ragged"], (4, 1), None, 8)(narrow, chosen, weigh)
    for a, b in zip(jax.tree.leaves(found[::2]), jax.tree.leaves((y, expected)), strict=True):
        a, b = (np.asarray(v, np.float32) for v in (a, b))
        np.testing.assert_allclose(a, b, rtol=0, atol=np.abs(b).max() / 64)  # 8 bits, some sums


def test_all_to_all_wins_while_capacity_times_choices_is_below_the_devices():
    sent = functools.partial(experts.bytes_sent, 1, 64, 1024, 2, 8)
    for n in (2, 4, 8):
        for capacity in (1.0, 1.5, 2.0, 4.0):
            gathered = sent(n, form="gather") - 64 * 2 * 8 * (n - 1)  # activations alone
            exchanged = sent(n, capacity)
            assert (exchanged < gathered) == (2 * capacity < n)
            assert (exchanged == gathered) == (2 * capacity == n)


@pytest.mark.parametrize(
    ("n", "devices", "message"),
    [
        (6, 4, r"6 experts do not divide over the 4 devices.*4 or 8 experts, or .* 1, 2, 3, 6 dev"),
        (2, 4, r"2 experts do not divide over the 4 devices.* take 4 experts, or .* 1, 2 devices"),
    ],
)
def test_experts_that_do_not_divide_are_told_what_would(n, devices, message):
    with pytest.raises(ValueError, match=message):
        experts.bytes_sent(1, 4, 8, 2, n, devices, 1.0)
    x, chosen, weights, stacked = problem(4, 4, 2, n)
    with pytest.raises(ValueError, match=message):
        grid = mesh.make(expert=devices)
        with marks.bind(experts=FORMS["gather"]):
            run = lambda *given: marks.experts(*given, gated, stacked, n)[0]  # noqa: E731
            cut = P("expert")
            jax.shard_map(run, mesh=grid, in_specs=(cut,) * 3, out_specs=cut, check_vma=False)(
                x, chosen, weights
            )


def test_weights_of_all_experts_on_each_device_are_refused():
    x, chosen, weights, stacked = problem(4, 4, 2, 8)
    run = lambda *given: marks.experts(*given, gated, stacked, 8, 1.0)[0]  # noqa: E731
    cut = P("expert")
    mapped = jax.shard_map(
        run, mesh=mesh.make(expert=4), in_specs=(cut,) * 3, out_specs=cut, check_vma=False
    )
    with marks.bind(experts=FORMS["all_to_all"]):
        with pytest.raises(ValueError, match=r"weights of 8 .* each of 4 .* expected those of 2\."):
            mapped(x, chosen, weights)
    with pytest.raises(ValueError, match=r"weights of 8 experts on one device, and 16 experts"):
        marks.experts(x, chosen, weights, gated, stacked, 16)
    with pytest.raises(ValueError, match=r"x \[4, 4, 6\], chosen \[2, 4, 2\].*\[rows, tokens, k\]"):
        marks.experts(x, chosen[:2], weights, gated, stacked, 8)
    with pytest.raises(ValueError, match=r"capacity=0; expected a factor above 0"):
        marks.experts(x, chosen, weights, gated, stacked, 8, 0)


def test_capacity_is_rounded_up_once():
    assert experts.slots(1.25, 8, 2, 8) == 3
    assert experts.slots(1.1, 10, 1, 1) == 10  # never more than the row's tokens
    assert experts.slots(0.07, 100, 1, 1) == 7  # though 0.07 · 100 is above 7 in floating point


SMALL = model.Config(
    vocab=17, embed=12, layers=2, heads=2, kv_heads=1, head_dim=6, mlp=8, experts=4,
    experts_per_token=2, capacity_factor=1.0,
)  # fmt: skip


@functools.cache
def decoder(config):
    return nnx.split(nnx.jit(lambda: model.Decoder(config, nnx.Rngs(0)))())


def batch_of(rows=8, tokens=6, seed=1):
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, tokens + 1, (rows, 1))
    text = draw.integers(0, SMALL.vocab, (2, rows, tokens)).astype(np.int32)
    mask = (np.arange(tokens)[None] < lengths).astype(np.float32)
    return {"tokens": text[0], "targets": text[1], "mask": mask}


@functools.cache
def one_device(config):
    """((mean, aux), gradients) of a decoder."""
    graphdef, params = decoder(config)
    loss = functools.partial(model.routed_loss, graphdef=graphdef)
    return jax.jit(objective.value_and_grad(loss, has_aux=True))(params, batch_of())


def close(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6 * max(1, np.abs(b).max()))


CONFIGS = [
    SMALL,
    dataclasses.replace(SMALL, capacity_factor=None, shared_experts=2, remat=True),
    dataclasses.replace(SMALL, router="sigmoid", router_bias=True, scan=False, stages=2),
    dataclasses.replace(SMALL, experts_per_token=1),
]


@SLOW
@pytest.mark.parametrize("config", [CONFIGS[2], *sample([*CONFIGS[:2], CONFIGS[3]], 1)])
def test_fsdp_trains_a_decoder_with_experts_as_one_device_does(config):
    graphdef, params = decoder(config)
    loss = functools.partial(model.routed_loss, graphdef=graphdef)
    batch, expected, grid = batch_of(), one_device(config), mesh.make(fsdp=4)
    stacked = rules.place(params, fsdp.rule(), grid)
    (mean, aux), grads = fsdp.value_and_grad(loss, grid, has_aux=True)(stacked, batch)
    close(((mean, aux), grads), expected)
    assert aux["loads"].sum() == 2 * config.experts_per_token * batch["mask"].sum()
    dropped = np.asarray(aux["dropped"])
    assert (dropped > 0).all() if config.capacity_factor else (dropped == 0).all()
    for path, g in nnx.to_flat_state(expected[1]):  # the router learns, its bias never by gradient
        assert np.any(np.asarray(jax.tree.leaves(g)[0])) == ("bias" not in path), path


@pytest.mark.parametrize("k", [1, 2])
def test_the_router_learns_from_what_experts_return(k):
    config = dataclasses.replace(SMALL, experts_per_token=k, capacity_factor=None)
    layer, params = nnx.split(nnx.jit(lambda: Experts(config, nnx.Rngs(0)))())
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, 12)), jnp.float32)
    grads = jax.jit(jax.grad(lambda p: jnp.sum(nnx.merge(layer, p)(x)[0] ** 2)))(params)
    assert jnp.abs(grads["router"]["kernel"][...]).max() > 1e-3


@pytest.mark.parametrize("k", [1, 2])
def test_a_choice_among_experts_that_are_alike_is_one_of_them(k):
    """Several choices have weights that add up to 1; one alone has the router's score."""
    config = dataclasses.replace(SMALL, experts_per_token=k, capacity_factor=None)
    layer = nnx.jit(lambda: Experts(config, nnx.Rngs(0)))()
    for stacked in (layer.gate, layer.up, layer.down):
        stacked.kernel[...] = jnp.repeat(stacked.kernel[...][:1], config.experts, axis=0)
    x = np.random.default_rng(1).normal(size=(2, 3, 12)).astype(np.float32)
    router, gate, up, down = (
        np.asarray(each.kernel[...]) for each in (layer.router, layer.gate, layer.up, layer.down)
    )
    z, scores = x @ gate[0], np.exp(x @ router)
    weight = 1 if k == 2 else (scores / scores.sum(-1, keepdims=True)).max(-1, keepdims=True)
    expected = weight * ((z / (1 + np.exp(-z)) * (x @ up[0])) @ down[0])
    np.testing.assert_allclose(layer(jnp.asarray(x))[0], expected, rtol=1e-4, atol=1e-5)


@SLOW
@pytest.mark.parametrize("changes", [dict(scan=False, stages=2, remat=True)], ids=str)
def test_how_a_decoder_with_experts_runs_does_not_change_it(changes):
    close(one_device(dataclasses.replace(SMALL, **changes)), one_device(SMALL))


def test_the_balance_of_a_batch_is_refused_in_microbatches():
    graphdef, params = decoder(SMALL)
    loss = functools.partial(model.routed_loss, graphdef=graphdef)
    with pytest.raises(ValueError, match=r"taken in 2 microbatches.*over='rows'.*by a bias"):
        jax.eval_shape(objective.value_and_grad(loss, 2, has_aux=True), params, batch_of())


@SLOW
def test_the_balance_of_rows_is_exact_in_microbatches():
    graphdef, params = decoder(SMALL)
    grid = mesh.make(fsdp=2)
    stored = rules.place(params, fsdp.rule(), grid)
    loss = functools.partial(model.routed_loss, graphdef=graphdef)
    how = dict(microbatches=2, has_aux=True)
    with pytest.raises(ValueError, match=r"taken in 2 microbatches"):
        fsdp.value_and_grad(loss, grid, **how)(stored, batch_of())
    loss = functools.partial(loss, over="rows")
    expected = jax.jit(objective.value_and_grad(loss, has_aux=True))(params, batch_of())
    (mean, aux), grads = fsdp.value_and_grad(loss, grid, **how)(stored, batch_of())
    close(((mean, aux), grads), expected)
    objective.check(lambda *given: loss(*given)[0], params, batch_of())


def test_the_penalty_is_switchs_formula_over_real_tokens():
    chosen = np.asarray(problem(3, 7, 2, 5, skew=0.4)[1])
    penalty = jax.jit(experts.penalty, static_argnames="over")
    drawn = np.exp(np.random.default_rng(3).normal(size=(3, 7, 5))).astype(np.float32)
    probabilities, mask = drawn / drawn.sum(-1, keepdims=True), batch_of(3, 7)["mask"]
    real = np.asarray(mask, bool)
    f = np.bincount(np.asarray(chosen)[real].ravel(), minlength=5) / (2 * real.sum())
    p = np.asarray(probabilities)[real].mean(0)
    found = penalty(chosen, probabilities, mask) / mask.sum()
    np.testing.assert_allclose(found, 5 * (f * p).sum(), rtol=1e-5)
    each = (tuple(v[i : i + 1] for v in (chosen, probabilities, mask)) for i in range(3))
    rows = [penalty(*row) for row in each]
    found = penalty(chosen, probabilities, mask, over="rows")
    np.testing.assert_allclose(found, sum(rows), rtol=1e-5)
    even = jnp.tile(jnp.arange(4)[None, :, None], (1, 1, 1))
    assert penalty(even, jnp.full((1, 4, 4), 0.25), jnp.ones((1, 4))) == 4
    with pytest.raises(ValueError, match="over='tokens'; expected 'batch' or 'rows'"):
        experts.penalty(chosen, probabilities, mask, over="tokens")


def test_biases_even_out_a_skewed_router():
    noise = jax.random.normal(jax.random.key(0), (4, 64, 8))
    scores = jax.nn.sigmoid(noise + jnp.arange(8)[None, None] / 2.0)
    mask, bias = jnp.ones((4, 64)), jnp.zeros(8)

    @jax.jit
    def step(bias):
        found = experts.loads(jax.lax.top_k(scores + bias[None, None], 2)[1], mask, 8)
        return experts.rebalanced(bias, found, 0.01), found

    first = step(bias)[1]
    for _ in range(200):
        bias, last = step(bias)
    assert first.sum() == last.sum() == 4 * 64 * 2
    assert first.max() > 2 * 64 and last.max() < 1.3 * 64 and last.min() > 0.7 * 64
    assert experts.rebalanced(jnp.zeros(3), jnp.array([1, 2, 3])).tolist() == pytest.approx(
        [0.001, 0, -0.001]
    )


TABLE = {
    "vocab": None, "embed": None, "heads": None, "kv_heads": None, "head_dim": None, "mlp": None,
    "router": None, "experts": "expert",
}  # fmt: skip


@SLOW
@pytest.mark.parametrize(
    "config", CONFIGS[: 1 + IN_FULL], ids=["capacity", "dropless"][: 1 + IN_FULL]
)
def test_the_compiler_cuts_experts_by_rule(config):
    graphdef, params = decoder(config)
    loss = functools.partial(model.routed_loss, graphdef=graphdef)
    run, expected = objective.value_and_grad(loss, has_aux=True), one_device(config)
    grid, rule = mesh.make(expert=4), rules.LogicalRules(TABLE)
    compiled = rules.jit(run, grid, in_rules=(rule, P("expert")))
    close(compiled(params, batch_of()), expected)
    spec = {row.path: tuple(row.spec) for row in rules.describe(rule, params, grid).rows}
    assert spec["blocks/experts/gate/kernel"][:2] == (None, "expert")
    assert "expert" not in spec["blocks/experts/router/kernel"]


def is_cut(path):
    return "experts" in path and not {"gate", "up", "down"}.isdisjoint(path)


def by_hand(loss, params, batch, meaning, devices):
    """(mean, aux, gradients): rows and experts cut over one axis, all other weights whole."""
    flat = nnx.to_flat_state(params)
    specs = [P(None, "expert") if is_cut(path) else P() for path, _ in flat]

    def local(arrays, batch):
        def total(arrays):
            pairs = [(path, v.replace(a)) for (path, v), a in zip(flat, arrays, strict=True)]
            meanings = {"total": lambda x, axes: jax.lax.psum(x, "expert"), "experts": meaning}
            with marks.bind(**meanings):
                mean, aux = loss(nnx.from_flat_state(pairs), batch)
            return mean.total, (mean.count, aux)

        (found, (count, aux)), grads = jax.value_and_grad(total, has_aux=True)(arrays)
        found, count, aux = jax.lax.psum((found, count, aux), "expert")
        grads = [
            g if is_cut(path) else jax.lax.psum(g, "expert")
            for (path, _), g in zip(flat, grads, strict=True)
        ]
        return found / count, aux, [g / count for g in grads]

    run = jax.shard_map(
        local, mesh=mesh.make(expert=devices), in_specs=(specs, P("expert")),
        out_specs=(P(), P(), specs), check_vma=False,
    )  # fmt: skip
    return jax.jit(run)([v[...] for _, v in flat], batch)


@SLOW
@pytest.mark.parametrize(
    ("config", "form"),
    [
        (CONFIGS[0], "all_to_all"),
        (CONFIGS[0], "gather"),
        (CONFIGS[1], "ragged"),
        (CONFIGS[2], "all_to_all"),
    ],
    ids=["capacity", "gathered", "ragged", "biased"],
)
def test_a_decoder_on_an_axis_of_experts_equals_one_device(config, form):
    graphdef, params = decoder(config)
    loss = functools.partial(model.routed_loss, graphdef=graphdef)
    (mean, aux), grads = one_device(config)
    expected = mean, aux, [v[...] for _, v in nnx.to_flat_state(grads)]
    close(by_hand(loss, params, batch_of(), FORMS[form], 4), expected)


def test_meanings_are_values():
    assert experts.all_to_all("expert") == experts.all_to_all("expert")
    assert hash(experts.gather("a")) == hash(experts.gather("a"))
    assert experts.gather("a") != experts.all_to_all("a")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts_per_token": 5}, r"experts_per_token=5 must be from 1 to experts=4"),
        ({"experts": 0, "shared_experts": 1}, r"shared_experts=1 must be 0 where experts=0"),
        ({"router": "tanh"}, r"router='tanh' must be 'softmax' or 'sigmoid'"),
        ({"capacity_factor": 0}, r"capacity_factor=0 must be above 0, or None"),
    ],
)
def test_sizes_that_do_not_fit_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **changes)
