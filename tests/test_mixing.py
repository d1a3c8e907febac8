"""Losses whose rows look at each other are refused where rows are divided; others never are."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import marked

from shardwise import fsdp, layouts, marks, mesh, objective, rules
from shardwise.objective import Mean

mesh.simulate(8)
DRAW = np.random.default_rng(0)
ROWS, TOKENS, WIDTH, CLASSES = 8, 6, 5, 7


@pytest.fixture(autouse=True)
def as_others_write():
    """Our own code spells ranks out; that of others does not."""
    with jax.numpy_rank_promotion("allow"):
        yield


def drawn(*shape):
    return DRAW.normal(size=shape).astype(np.float32)


PARAMS = {"w": drawn(WIDTH, CLASSES), "b": drawn(CLASSES), "u": drawn(CLASSES, CLASSES)}
BATCH = {
    "x": drawn(ROWS, WIDTH),
    "y": np.arange(ROWS, dtype=np.int32) % CLASSES,
    "s": drawn(ROWS, TOKENS, WIDTH),
    "t": DRAW.integers(0, CLASSES, (ROWS, TOKENS)).astype(np.int32),
    "mask": (np.arange(ROWS * TOKENS).reshape(ROWS, TOKENS) % 3 > 0).astype(np.float32),
}


def logits(p, b):
    return jnp.tanh(b["x"] @ p["w"] + p["b"])


def each(p, b):
    return optax.softmax_cross_entropy_with_integer_labels(logits(p, b), b["y"])


def tokens(p, b):
    return jnp.tanh(b["s"] @ p["w"] + p["b"])


def each_token(p, b):
    return optax.softmax_cross_entropy_with_integer_labels(tokens(p, b), b["t"])


def masked(p, b, losses):
    return Mean((losses * b["mask"]).sum(), b["mask"].sum())


# Rows that look at each other, and what the error names.


def similarity(p, b):
    z = logits(p, b)
    z = z / jnp.linalg.norm(z, axis=1, keepdims=True)
    return z @ z.T / 0.1


def contrastive(p, b):
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(similarity(p, b))))


def contrastive_by_labels(p, b):
    labels = jnp.arange(len(b["x"]))
    return optax.softmax_cross_entropy_with_integer_labels(similarity(p, b), labels).mean()


def contrastive_one_hot(p, b):
    return optax.softmax_cross_entropy(similarity(p, b), jnp.eye(len(b["x"]))).mean()


def two_views(p, b):
    z = jnp.concatenate([logits(p, b), logits(p, b | {"x": b["s"][:, 0]})])
    return optax.ntxent(z, jnp.tile(jnp.arange(len(b["x"])), 2))


def supervised_contrastive(p, b):
    same = (b["y"][:, None] == b["y"][None]) & ~jnp.eye(len(b["y"]), dtype=bool)
    found = jax.nn.log_softmax(similarity(p, b))
    return Mean(-jnp.sum(jnp.where(same, found, 0)), b["mask"].sum())


def distances(p, b):
    z = logits(p, b)
    return jnp.mean(jnp.exp(-jnp.sum((z[:, None] - z[None]) ** 2, -1)))


def batch_norm(p, b):
    z = logits(p, b)
    return jnp.mean(jnp.abs((z - z.mean(0)) / jnp.sqrt(z.var(0) + 1e-5)) ** 3)


def batch_norm_of_tokens(p, b):
    z = tokens(p, b)
    z = (z - z.mean((0, 1))) * jax.lax.rsqrt(z.var((0, 1)) + 1e-5)
    return masked(p, b, optax.softmax_cross_entropy_with_integer_labels(z, b["t"]))


def centred(p, b):
    z = tokens(p, b)
    return masked(p, b, (z - z.mean(0)).max(-1))


def scaled_by_maximum(p, b):
    z = tokens(p, b)
    return masked(p, b, (z / jnp.max(jnp.abs(z)))[..., 0] ** 2)


def hard_examples(p, b):
    return jax.lax.top_k(each(p, b), 3)[0].mean()


def hard_examples_by_place(p, b):
    _, places = jax.lax.top_k(jax.lax.stop_gradient(each(p, b)), 3)
    return each(p, b)[places].mean()


def hard_examples_by_order(p, b):
    return each(p, b)[jnp.argsort(each(p, b))[-3:]].mean()


def half_of_sorted(p, b):
    return jnp.sort(each(p, b))[len(b["x"]) // 2 :].mean()


def median(p, b):
    return jnp.median(each(p, b))


def quantile(p, b):
    return jnp.mean(jax.nn.relu(each(p, b) - jnp.quantile(each(p, b), 0.25)))


def above_average(p, b):
    return jnp.mean(each(p, b) * (each(p, b) > each(p, b).mean()))


def weighed_by_rank(p, b):
    return jnp.mean(each(p, b) * each(p, b).argsort().argsort())


def of_high_rank(p, b):
    return jnp.mean(jnp.where(each(p, b).argsort().argsort() >= 3, each(p, b), 0))


def bent_otherwise(p, b):
    return jnp.mean(jnp.cosh(logits(p, b).mean(0)))


def frequencies_of_rows(p, b):
    return jnp.mean(jnp.abs(jnp.fft.fft(logits(p, b), axis=0)))


def windows_of_rows(p, b):
    window = (2, 1), (1, 1), "SAME"
    return jnp.mean(jax.lax.reduce_window(logits(p, b), -jnp.inf, jax.lax.max, *window))


def convolved_rows(p, b):
    smooth = functools.partial(jnp.convolve, v=jnp.ones(3), mode="same")
    return jnp.mean(jnp.tanh(jax.vmap(smooth, 1, 1)(logits(p, b))))


def hardest(p, b):
    return logits(p, b)[jnp.argmax(each(p, b))].sum()


def transport(p, b):
    return jnp.mean((jnp.sort(logits(p, b)[:, 0]) - jnp.sort(b["x"][:, 0])) ** 2)


def running(p, b):
    return jnp.mean(jnp.cumsum(each(p, b)) ** 2)


def recurrent_over_rows(p, b):
    def step(h, x):
        h = jnp.tanh(h @ p["u"] + x)
        return h, h.sum()

    return jax.lax.scan(step, jnp.zeros(CLASSES), logits(p, b))[1].mean()


def global_maml(p, b):
    grads = jax.grad(lambda p: each(p, b).mean())(p)
    return each(jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), b).mean()


def whitening(p, b):
    z = logits(p, b)
    cov = z.T @ z / len(z) + 0.1 * jnp.eye(CLASSES)
    z = jax.scipy.linalg.solve_triangular(jnp.linalg.cholesky(cov), z.T, lower=True).T
    return jnp.mean(jnp.abs(z))


def decorrelation(p, b):
    z = logits(p, b)
    return jnp.sum((z.T @ z / len(z) - jnp.eye(CLASSES)) ** 2)


def balance(p, b):
    probs = jax.nn.softmax(tokens(p, b))
    share = jax.nn.one_hot(probs.argmax(-1), CLASSES).mean((0, 1))
    return each_token(p, b).mean() + 0.01 * CLASSES * jnp.sum(share * probs.mean((0, 1)))


def advantages(p, b):
    reward = tokens(p, b).sum((1, 2))
    advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
    return jnp.mean(advantage * each(p, b))


def dice(p, b):
    probs = jax.nn.softmax(tokens(p, b))
    hot = jax.nn.one_hot(b["t"], CLASSES)
    over = (probs * hot).sum((0, 1)), (probs + hot).sum((0, 1))
    return 1 - jnp.mean(2 * over[0] / over[1])


def class_weights(p, b):
    counts = jnp.zeros(CLASSES).at[b["y"]].add(1.0)
    return jnp.mean(each(p, b) / counts[b["y"]])


def remat_and_jit(p, b):
    return jax.checkpoint(jax.jit(batch_norm))(p, b)


def by_rule(p, b):
    @jax.custom_vjp
    def norm(z):
        return z - z.mean(0)

    norm.defvjp(lambda z: (norm(z), None), lambda _, g: (g,))
    return jnp.mean(norm(logits(p, b)) ** 2)


def within_map(p, b):
    z = logits(p, b)
    return jax.lax.map(lambda row: jnp.exp(z @ row).sum(), z).mean()


def reversed_negatives(p, b):
    z = logits(p, b)
    return jnp.mean(jax.nn.relu(1 - (z * z[::-1]).sum(1)))


def spectral(p, b):
    return jnp.linalg.norm(logits(p, b), 2) / len(b["x"])


def normed_within_vmap(p, b):
    def norm(z):
        mean, square = jax.lax.pmean((z, z**2), "batch")
        return (z - mean) * jax.lax.rsqrt(square - mean**2 + 1e-5)

    return jnp.mean(jnp.abs(jax.vmap(norm, axis_name="batch")(logits(p, b))))


def scaled_within_vmap(p, b):
    scaled = jax.vmap(lambda z: z / jax.lax.pmax(jnp.abs(z), "batch"), axis_name="batch")
    return jnp.mean(scaled(logits(p, b)))


def nnx_batch_norm(p, b):
    model = nnx.BatchNorm(CLASSES, rngs=nnx.Rngs(0), use_running_average=False)
    return jnp.mean(model(logits(p, b)) ** 3)


MIXING = [
    contrastive,
    contrastive_by_labels,
    contrastive_one_hot,
    two_views,
    supervised_contrastive,
    distances,
    batch_norm,
    batch_norm_of_tokens,
    centred,
    scaled_by_maximum,
    hard_examples,
    hard_examples_by_place,
    hard_examples_by_order,
    half_of_sorted,
    median,
    quantile,
    above_average,
    weighed_by_rank,
    of_high_rank,
    bent_otherwise,
    frequencies_of_rows,
    windows_of_rows,
    convolved_rows,
    hardest,
    transport,
    running,
    recurrent_over_rows,
    global_maml,
    whitening,
    decorrelation,
    balance,
    advantages,
    dice,
    class_weights,
    remat_and_jit,
    by_rule,
    within_map,
    reversed_negatives,
    spectral,
    normed_within_vmap,
    scaled_within_vmap,
    nnx_batch_norm,
]


def check(loss, **options):
    objective.check(loss, PARAMS, BATCH, **options)


FEW = {batch_norm, scaled_by_maximum, hard_examples_by_order, recurrent_over_rows, by_rule}


def name_of(case):
    return getattr(case, "__name__", case)


@pytest.mark.parametrize("loss", marked(MIXING, FEW, 14), ids=name_of)
def test_rows_that_look_at_each_other_are_refused(loss):
    with pytest.raises(objective.Indivisible):
        check(loss)


# Losses of rows that each are their own.


def each_mean(p, b):
    return each(p, b).mean()


def layer_norm(p, b):
    z = tokens(p, b)
    z = (z - z.mean(-1, keepdims=True)) / jnp.sqrt(z.var(-1, keepdims=True) + 1e-5)
    return masked(p, b, z[..., 0] ** 2)


def norm_over_tokens(p, b):
    z = tokens(p, b)
    return masked(
        p, b, ((z - z.mean(1, keepdims=True)) / (z.std((1, 2))[:, None, None] + 1)).max(2)
    )


def attention(p, b):
    z = tokens(p, b)
    scores = jnp.where(jnp.tril(jnp.ones((TOKENS, TOKENS))) > 0, z @ z.swapaxes(1, 2), -jnp.inf)
    return masked(p, b, (jax.nn.softmax(scores) @ z).sum(-1) ** 2)


def recurrent(p, b):
    def step(h, x):
        h = jnp.tanh(h @ p["u"] + x)
        return h, optax.l2_loss(h).sum(-1)

    z = tokens(p, b).swapaxes(0, 1)
    return masked(p, b, jax.lax.scan(step, jnp.zeros(z.shape[1:]), z)[1].T)


def convolved(p, b):
    kernel = p["w"][None].repeat(3, 0)
    z = jax.lax.conv_general_dilated(
        b["s"], kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )
    z = jax.lax.reduce_window(z, -jnp.inf, jax.lax.max, (1, 2, 1), (1, 2, 1), "VALID")
    return jnp.mean(z**2)


def mapped(p, b):
    return jax.lax.map(lambda row: optax.l2_loss(row @ p["w"]).sum(), b["x"]).mean()


def summed_by_scan(p, b):
    def step(sums, row):
        found = (jnp.tanh(row["s"] @ p["w"]).max(-1) * row["mask"]).sum()
        return (sums[0] + found, sums[1] + row["mask"].sum()), None

    return Mean(*jax.lax.scan(step, (0.0, 0.0), {k: b[k] for k in ("s", "mask")})[0])


def in_chunks(p, b):
    """A loss in chunks of tokens of all rows, one after the other, rematerialised."""
    z, y = b["s"].reshape(-1, 3, WIDTH), b["t"].reshape(-1, 3)
    mask = b["mask"].reshape(-1, 3)

    @jax.checkpoint
    def step(sums, chunk):
        z, y, mask = chunk
        found = optax.softmax_cross_entropy_with_integer_labels(z @ p["w"], y)
        return (sums[0] + (found * mask).sum(), sums[1] + mask.sum()), None

    return Mean(*jax.lax.scan(step, (0.0, 0.0), (z, y, mask))[0])


def back_in_their_order(p, b):
    z = logits(p, b)
    order = jnp.argsort(z[:, 0])
    return jnp.mean(jnp.tanh(z[order])[jnp.argsort(order)] ** 2 * each(p, b)[:, None])


def of_features(p, b):
    """Orders, frequencies, windows and averages of each row by itself."""
    z = logits(p, b)
    window = jax.lax.reduce_window(z, -jnp.inf, jax.lax.max, (1, 2), (1, 1), "SAME")
    found = z * z.argsort(-1).argsort(-1) + window + jnp.abs(jnp.fft.fft(z))
    return jnp.mean(found * (z > z.mean(-1, keepdims=True)) + jnp.cosh(z))


def vmapped(p, b):
    def one(x, y):
        return -jax.nn.log_softmax(jnp.sort(jnp.tanh(x @ p["w"])))[y]

    return jax.vmap(one)(b["x"], b["y"]).mean()


@jax.custom_vjp
def clipped(x):
    return x


def clip(_, g):
    norm = jnp.linalg.norm(g, axis=-1, keepdims=True)
    return (g / jnp.maximum(norm, 1),)


clipped.defvjp(lambda x: (x, None), clip)


def clipped_rows(p, b):
    return jnp.mean(clipped(logits(p, b)) ** 2)


def focal(p, b):
    chosen = jnp.take_along_axis(jax.nn.softmax(logits(p, b)), b["y"][:, None], 1)[:, 0]
    return jnp.mean(-((1 - chosen) ** 2) * jnp.log(chosen))


def ctc(p, b):
    return optax.ctc_loss(
        tokens(p, b), 1 - b["mask"], b["t"][:, :3], jnp.zeros((len(b["t"]), 3))
    ).mean()


def smoothed(p, b):
    labels = optax.smooth_labels(jax.nn.one_hot(b["y"], CLASSES), 0.1)
    return optax.softmax_cross_entropy(logits(p, b), labels).mean()


def paired(p, b):
    chosen, rejected = each_token(p, b)[:, :3].sum(1), each_token(p, b)[:, 3:].sum(1)
    return -jnp.mean(jax.nn.log_sigmoid(rejected - chosen))


def paired_by_concatenation(p, b):
    both = jnp.concatenate([b["s"][:, 0], b["s"][:, 1]])
    found = optax.l2_loss(jnp.tanh(both @ p["w"])).sum(1)
    chosen, rejected = found[: len(b["s"])], found[len(b["s"]) :]
    return -jnp.mean(jax.nn.log_sigmoid(rejected - chosen))


def segments(p, b):
    def one(z, t):
        sums = jax.ops.segment_sum(z, t, CLASSES)
        return jnp.max(sums / (1 + jnp.abs(sums)), 0).sum()

    return jax.vmap(one)(tokens(p, b), b["t"]).mean()


def embedded(p, b):
    z = jax.nn.one_hot(b["t"], CLASSES) @ p["u"] + p["u"][b["t"]]
    return masked(p, b, jax.nn.logsumexp(z, -1))


def z_loss(p, b):
    z = tokens(p, b)
    return masked(p, b, each_token(p, b) + 1e-4 * jax.nn.logsumexp(z, axis=-1) ** 2)


def in_bfloat16(p, b):
    z = jnp.tanh(b["s"].astype(jnp.bfloat16) @ p["w"].astype(jnp.bfloat16))
    return masked(p, b, z.astype(jnp.float32).max(-1))


def online_softmax(p, b):
    z = tokens(p, b)

    def step(carry, part):
        largest, total = carry
        new = jnp.maximum(largest, part)
        return (new, total * jnp.exp(largest - new) + jnp.exp(part - new)), None

    first = jnp.full(z.shape[:2], -jnp.inf), jnp.zeros(z.shape[:2])
    largest, total = jax.lax.scan(step, first, jnp.moveaxis(z, -1, 0))[0]
    return masked(p, b, largest + jnp.log(total))


def by_place(p, b, key):
    def keep(row):
        return jax.random.bernoulli(jax.random.fold_in(key, row), 0.5, (CLASSES,))

    kept = jax.vmap(keep)(marks.index("rows", len(b["x"])))
    return jnp.mean(jnp.where(kept, logits(p, b), 0) ** 2)


def by_shape(p, b, key):
    z = logits(p, b)
    return jnp.mean(jnp.where(jax.random.bernoulli(key, 0.5, z.shape), z, 0) ** 2)


def penalised(p, b):
    total, count = masked(p, b, each_token(p, b))
    return Mean(total + count * 0.1 * jnp.sum(p["u"] ** 2), count)


def guarded(p, b):
    total, count = masked(p, b, each_token(p, b))
    return Mean(jnp.where(count > 0, total, 0), count)


def one_to_itself(p, b):
    """A matrix of rows and rows in which only the diagonal has anything of the batch."""
    z = each(p, b)
    return jnp.where(jnp.eye(len(z)) > 0, z[:, None], 0).sum() / len(z)


def pooled(p, b):
    """Tokens of all rows in one line, added up to rows by a product with a one-hot code."""
    z = tokens(p, b).reshape(-1, CLASSES)
    hot = jax.nn.one_hot(jnp.arange(len(z)) // TOKENS, len(b["s"]))
    return jnp.mean(jnp.tanh(hot.T @ z) ** 2)


def added_mean(p, b):
    return jnp.mean(each(p, b) + 0.1 * jnp.mean(tokens(p, b) ** 2))


def sorted_by_expert(p, b):
    """Tokens of all rows, grouped by expert and brought back: none depends on another."""
    x = b["s"].reshape(-1, WIDTH)
    chosen = jnp.argmax(x @ p["w"], -1)
    order = jnp.argsort(chosen)
    sizes = jnp.bincount(chosen, length=CLASSES)
    made = jax.lax.ragged_dot(x[order], jnp.stack([p["w"]] * CLASSES), sizes)
    back = jnp.zeros_like(made).at[order].set(made)
    again = made[jnp.argsort(order)]
    return masked(p, b, ((back + again) ** 2).sum(-1).reshape(b["mask"].shape))


def gradient_penalty(p, b):
    slopes = jax.grad(lambda x: (jnp.tanh(x @ p["w"]) ** 2).sum())(b["x"])
    return jnp.mean((jnp.linalg.norm(slopes, axis=1) - 1) ** 2)


def per_row_maml(p, b):
    def task(s, t):
        inner = jax.grad(lambda p: jnp.mean(jnp.tanh(s @ p["w"]) ** 2))(p)
        return jnp.mean(jnp.tanh(s @ (p["w"] - 0.1 * inner["w"])) ** 2)

    return jax.vmap(task)(b["s"], b["t"]).mean()


def searched(p, b):
    """A loop for each row, until it has what it wants."""

    def one(x):
        def go(state):
            return state[0] + 1, state[1] * 0.5

        return jax.lax.while_loop(lambda s: (s[1] > 0.1) & (s[0] < 5), go, (0, jnp.abs(x).sum()))[1]

    return jax.lax.stop_gradient(jax.vmap(one)(b["x"])).mean() + each(p, b).mean()


def not_a_number(p, b):
    z = each(p, b)
    return jnp.where(jnp.any(jnp.isnan(z)), jnp.nan, 1.0) * z.mean()


def nnx_model(p, b):
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(WIDTH, CLASSES, 3, rngs=rngs)
            self.group = nnx.GroupNorm(CLASSES, num_groups=1, rngs=rngs)
            self.batch = nnx.BatchNorm(CLASSES, use_running_average=True, rngs=rngs)
            self.layer = nnx.LayerNorm(CLASSES, rngs=rngs)
            self.attend = nnx.MultiHeadAttention(1, CLASSES, decode=False, rngs=rngs)

        def __call__(self, x):
            return self.attend(self.layer(self.batch(self.group(self.conv(x)))))

    return masked(p, b, Net(nnx.Rngs(0))(b["s"]).max(-1) * p["b"].sum())


RIGHT = [back_in_their_order, of_features]
RIGHT += [each_mean, layer_norm, norm_over_tokens, attention, recurrent, convolved, mapped, vmapped]
RIGHT += [summed_by_scan, in_chunks, clipped_rows, focal, ctc, smoothed, paired, segments]
RIGHT += [paired_by_concatenation, embedded, z_loss, in_bfloat16, online_softmax, by_place]
RIGHT += [by_shape, penalised, guarded, one_to_itself, pooled, added_mean, sorted_by_expert]
RIGHT += [gradient_penalty, per_row_maml, searched, not_a_number, nnx_model]


OFTEN = {in_chunks, clipped_rows, pooled, sorted_by_expert, one_to_itself, by_place}


@pytest.mark.parametrize("loss", marked(RIGHT, OFTEN, 12), ids=name_of)
def test_rows_of_their_own_are_never_refused(loss):
    check(loss, key=jax.random.key(0) if loss in (by_place, by_shape) else None)


PER_ROW = ["l2_loss", "squared_error", "huber_loss", "log_cosh", "cosine_distance"]
PER_ROW += ["softmax_cross_entropy", "safe_softmax_cross_entropy", "sigmoid_binary_cross_entropy"]
PER_ROW += ["sigmoid_focal_loss", "kl_divergence", "hinge_loss"]
PER_ROW += ["kl_divergence_with_log_targets", "poly_loss_cross_entropy", "make_fenchel_young_loss"]
PER_ROW += ["ranking_softmax_loss", "perceptron_loss", "sparsemax_loss", "cosine_similarity"]
PER_ROW += ["absolute_error"]


OF_OPTAX = [name for name in PER_ROW if hasattr(optax.losses, name)]


@pytest.mark.parametrize("name", marked(OF_OPTAX, (), 7))
def test_losses_of_optax_are_of_rows(name):
    function = getattr(optax.losses, name)
    if name == "make_fenchel_young_loss":
        function = function(max_fun=jax.nn.logsumexp)

    def loss(p, b):
        found = tokens(p, b)
        targets = jax.nn.softmax(jax.nn.one_hot(b["t"], CLASSES))
        if name in ("sparsemax_loss", "perceptron_loss"):
            targets = (targets > 0.2).astype(jnp.int32)
        over_rows = jax.vmap(jax.vmap(function))(found, targets)
        return (
            Mean(jnp.sum(over_rows), over_rows.size)
            if name == "ranking_softmax_loss"
            else (function(found, targets).mean())
        )

    check(loss)


# What is meant, what is exact, and what does not count.


@pytest.mark.parametrize("loss", [contrastive, batch_norm, median], ids=name_of)
def test_whole_arrays_are_exact_for_every_loss(loss):
    grid = mesh.make(fsdp=4)
    layout = layouts.Layout(grid, fsdp="fsdp", by="compiler", uneven="replicate")
    found, _ = layouts.value_and_grad(layout, loss)(layouts.place(layout, PARAMS), BATCH)
    np.testing.assert_allclose(found, loss(PARAMS, BATCH), rtol=1e-4)


def test_a_part_of_its_own_is_said_by_a_mark():
    def ghost(p, b):
        z = logits(p, b)
        return jnp.mean(jnp.abs(z - marks.local(z.mean(0))) ** 3)

    def own_pairs(p, b):
        return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(marks.local(similarity(p, b)))))

    def stabilised(p, b):
        z = logits(p, b)
        z = z - marks.local(jax.lax.stop_gradient(z.max()))
        return jnp.mean(jnp.log(jnp.exp(z).sum(1)) - z[:, 0])

    def divided(p, b):
        x = b["x"] / marks.local(b["x"].std(0))
        return jnp.mean((x @ p["w"]) ** 2)

    for loss in own_pairs, stabilised, divided:
        check(loss)
    mean, _ = jax.jit(objective.value_and_grad(ghost, 2))(PARAMS, BATCH)
    halves = [jax.tree.map(lambda x, j=j: x[j::2], BATCH) for j in (0, 1)]
    alone = [jax.jit(ghost)(PARAMS, half) for half in halves]
    np.testing.assert_allclose(mean, (alone[0] + alone[1]) / 2, rtol=1e-5)


def test_totals_and_collectives_of_the_whole_are_exact():
    def by_total(p, b):
        z = logits(p, b)
        spread = marks.total(jnp.sum(z, 0)) / marks.total(jnp.float32(len(z)))
        return jnp.mean(jnp.abs(z - spread) ** 3)

    def by_gather(p, b):
        z = logits(p, b)
        every = jax.lax.all_gather(z, "fsdp", tiled=True)
        return -jnp.mean(jax.nn.log_softmax(z @ every.T)[:, 0])

    def by_mean(p, b):
        z = logits(p, b)
        return jnp.mean(jnp.abs(z - jax.lax.pmean(z.mean(0), "fsdp")) ** 3)

    def by_largest(p, b):
        z = logits(p, b)
        return jnp.mean(z / jax.lax.pmax(jax.lax.stop_gradient(jnp.abs(z).max()), "fsdp"))

    grid = mesh.make(fsdp=4)
    sharded = rules.place(PARAMS, fsdp.rule(), grid)
    for loss in by_total, by_gather, by_mean, by_largest:
        jax.eval_shape(fsdp.value_and_grad(loss, grid), sharded, BATCH)


def test_auxiliary_outputs_may_be_anything():
    def loss(p, b):
        z = logits(p, b)
        jax.debug.print("{}", z.max())
        told = {"std": z.std(), "largest": z.max(), "median": jnp.median(z)}
        return each(p, b).mean(), told

    check(loss, has_aux=True, aux="mean")
    with pytest.raises(objective.Indivisible, match=r"auxiliary output largest"):
        check(loss, has_aux=True)


def test_what_is_local_is_a_part_of_the_total():
    def one_sum(p, b):
        z = logits(p, b)
        one = marks.local(jnp.abs(z - z.mean(0)).sum(1))
        return objective.Mean(one.sum(), jnp.float32(one.size))

    def both(p, b):
        seen = marks.local(jnp.where(each(p, b) > 0, 1.0, 0.0))
        return objective.Mean((each(p, b) * seen).sum(), seen.sum())

    for loss in one_sum, both:
        check(loss)
    with pytest.raises(objective.Indivisible):
        check(
            lambda p, b: objective.Mean(marks.local((p["w"] ** 2).sum()), jnp.float32(b["x"].size))
        )


WHERE = ["closed over", "among the parameters"]


@pytest.mark.parametrize("where", marked(WHERE, WHERE[:1]))
def test_draws_for_rows_from_another_key_are_refused(where):
    key = jax.random.key(3)

    def loss(params, b):
        own = params["seed"] if where == "among the parameters" else key
        z = logits(params, b)
        return jnp.mean(jnp.where(jax.random.bernoulli(own, 0.5, z.shape), z, 0) ** 2)

    def of_features(params, b):
        return jnp.mean((logits(params, b) * jax.random.normal(key, (CLASSES,))) ** 2)

    def of_numbered_rows(params, b):
        keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(marks.index("rows", len(b["x"])))
        return jnp.mean((logits(params, b) * jax.vmap(jax.random.normal)(keys)[:, None]) ** 2)

    with pytest.raises(objective.Indivisible, match="from a key of its own"):
        objective.check(loss, PARAMS | {"seed": key}, BATCH)
    check(of_features)
    check(of_numbered_rows)


# Losses that nobody wrote: steps of rows of their own, and steps that mix them, in any order.

OF_ROWS = {
    "layer": lambda z, p: jnp.tanh(z @ p["u"]),
    "norm": lambda z, p: z / (1 + z.std(1, keepdims=True)),
    "softmax": lambda z, p: jax.nn.softmax(z),
    "sorted features": lambda z, p: jnp.sort(z, axis=1),
    "running features": lambda z, p: jnp.cumsum(z, 1),
    "map": lambda z, p: jax.lax.map(lambda row: row * row.max(), z),
    "product of features": lambda z, p: jnp.einsum("rc,rd->rcd", z, z) @ p["b"],
    "gather": lambda z, p: z + p["u"][jnp.argmax(z, 1)],
    "loop": lambda z, p: jax.lax.fori_loop(0, 2, lambda _, z: jnp.sin(z + p["b"]), z),
    "transposed": lambda z, p: jnp.tanh(p["u"] @ z.T).T,
    "shape": lambda z, p: jnp.tanh(z.reshape(-1, 1) * p["b"]).reshape(len(z), -1, CLASSES).sum(1),
    "remat": lambda z, p: jax.checkpoint(jax.jit(lambda z: jnp.exp(-(z**2))))(z),
}
OVER_ROWS = {
    "mean": lambda z, p: jnp.tanh(z - z.mean(0)),
    "deviation": lambda z, p: z / (1 + z.std(0)),
    "largest": lambda z, p: z / (1 + jnp.abs(z).max()),
    "pairs": lambda z, p: jax.nn.softmax(z @ z.T) @ z,
    "distances": lambda z, p: z + jnp.exp(-((z[:, None] - z[None]) ** 2)).sum(0),
    "running": lambda z, p: jnp.tanh(jnp.cumsum(z, 0)),
    "hard": lambda z, p: z[jax.lax.top_k(z.sum(1), len(z) // 2)[1]],
    "sorted": lambda z, p: z * jnp.sort(z, axis=0),
    "product": lambda z, p: z * jnp.einsum("rc,rd->cd", z, z).sum(0),
    "loop": lambda z, p: jax.lax.scan(lambda h, x: (jnp.tanh(h + x),) * 2, z[0] * 0, z)[1],
    "adapted": lambda z, p: z @ (p["u"] - jax.grad(lambda u: jnp.tanh(z @ u).mean())(p["u"])),
}
ENDS = {
    "mean": lambda z: jnp.mean(z**2),
    "sums": lambda z: Mean(jnp.sum(z**2), z.size),
    "sums of rows": lambda z: Mean(jnp.sum(jax.nn.logsumexp(z, 1)), len(z)),
}
STEPS = {f"{kind} {name}": step for kind, steps in (("rowwise", OF_ROWS), ("mixing", OVER_ROWS))
         for name, step in steps.items()}  # fmt: skip
PLAIN = st.lists(st.sampled_from([n for n in STEPS if "rowwise" in n]), max_size=4)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(PLAIN, st.sampled_from(["", *(n for n in STEPS if "mixing" in n)]), PLAIN,
       st.sampled_from(list(ENDS)))  # fmt: skip
def test_what_is_let_through_is_what_numbers_say(before, mixing, after, end):
    """What mixes is refused, as numbers confirm; what does not is let through, as they do."""

    def loss(p, b):
        z = logits(p, b)
        for name in (*before, *([mixing] if mixing else []), *after):
            z = STEPS[name](z, p)
        return ENDS[end](z)

    if mixing:
        with pytest.raises(objective.Indivisible):
            objective.check(loss, PARAMS, {"x": BATCH["x"]}, gradient=True)
    else:
        objective.check(loss, PARAMS, {"x": BATCH["x"]}, gradient=True)
