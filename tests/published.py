"""Losses as they were published, in a few lines each, and their sources: DIVIDE and MIX.

Each is a function of (params, batch), or (params, batch, key) where it draws. Rows of the batch are
examples, and of what comes in parts (pairs, groups, queries) a row is one whole unless it says so.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from shardwise import marks
from shardwise.objective import Mean

DRAW = np.random.default_rng(0)
ROWS, TOKENS, WIDTH, CLASSES = 8, 6, 5, 7


def drawn(*shape):
    return DRAW.normal(size=shape).astype(np.float32)


PARAMS = {"w": drawn(WIDTH, CLASSES), "b": drawn(CLASSES), "u": drawn(CLASSES, CLASSES)}
PARAMS |= {"head": drawn(CLASSES, 1), "back": drawn(CLASSES, WIDTH)}
BATCH = {
    "x": drawn(ROWS, WIDTH),
    "x2": drawn(ROWS, WIDTH),
    "y": np.arange(ROWS, dtype=np.int32) % 3,
    "s": drawn(ROWS, TOKENS, WIDTH),
    "t": DRAW.integers(0, CLASSES, (ROWS, TOKENS)).astype(np.int32),
    "mask": (DRAW.uniform(size=(ROWS, TOKENS)) > 0.4).astype(np.float32),
    "r": drawn(ROWS),
    "time": DRAW.uniform(size=ROWS).astype(np.float32),
    "noise": drawn(ROWS, WIDTH),
    "event": np.asarray([1, 1, 0, 1, 0, 1, 1, 0], np.float32),
}
DIVIDE: dict = {}
MIX: dict = {}


def divides(source):
    return lambda loss: DIVIDE.setdefault(loss.__name__, (loss, source))[0]


def mixes(source, by=("devices", "microbatches")):
    return lambda loss: MIX.setdefault(loss.__name__, (loss, source, by))[0]


def net(p, x):
    return jnp.tanh(x @ p["w"] + p["b"])


def embed(p, x):
    z = net(p, x) @ p["u"]
    return z / jnp.sqrt((z**2).sum(-1, keepdims=True) + 1e-6)


def score(p, x):
    return (net(p, x) @ p["head"])[..., 0]


def nats(p, b):
    return optax.softmax_cross_entropy_with_integer_labels(net(p, b["x"]), b["y"])


def token_nats(p, b):
    return optax.softmax_cross_entropy_with_integer_labels(net(p, b["s"]), b["t"])


def over_tokens(b, each):
    return Mean((each * b["mask"]).sum(), b["mask"].sum())


def sequence_logp(p, b):
    return -(token_nats(p, b) * b["mask"]).sum(1)


def chosen(p, b):
    half = TOKENS // 2
    each = -token_nats(p, b)
    return each[:, :half].sum(1), each[:, half:].sum(1)


# Means, and sums, over rows that are their own.


@divides("optax.softmax_cross_entropy_with_integer_labels")
def cross_entropy(p, b):
    return nats(p, b).mean()


@divides("Radford et al. 2019, GPT-2: tokens under a mask, in nats")
def language_model(p, b):
    return over_tokens(b, token_nats(p, b))


@divides("Szegedy et al. 2016, label smoothing; optax.smooth_labels")
def smoothed(p, b):
    labels = optax.smooth_labels(jax.nn.one_hot(b["y"], CLASSES), 0.1)
    return optax.softmax_cross_entropy(net(p, b["x"]), labels).mean()


@divides("Lin et al. 2017, focal loss")
def focal(p, b):
    picked = jnp.exp(-nats(p, b))
    return jnp.mean(-((1 - picked) ** 2) * jnp.log(picked))


@divides("Leng et al. 2022, PolyLoss; optax.poly_loss_cross_entropy")
def poly(p, b):
    hot = jax.nn.one_hot(b["y"], CLASSES)
    return optax.losses.poly_loss_cross_entropy(net(p, b["x"]), hot).mean()


@divides("Huber 1964; optax.huber_loss")
def huber(p, b):
    return optax.huber_loss(score(p, b["x"]), b["r"]).mean()


@divides("optax.log_cosh")
def log_cosh(p, b):
    return optax.log_cosh(score(p, b["x"]), b["r"]).mean()


@divides("Cortes and Vapnik 1995; optax.hinge_loss")
def hinge(p, b):
    return optax.hinge_loss(score(p, b["x"]), jnp.sign(b["r"])).mean()


@divides("Graves et al. 2006, CTC; optax.ctc_loss")
def ctc(p, b):
    none = jnp.zeros((len(b["t"]), 3))
    return optax.ctc_loss(net(p, b["s"]), 1 - b["mask"], b["t"][:, :3], none).mean()


@divides("Lafferty et al. 2001, a linear-chain CRF by the forward algorithm")
def crf(p, b):
    z = net(p, b["s"])

    def forward(alpha, unary):
        return jax.nn.logsumexp(alpha[:, :, None] + p["u"][None], axis=1) + unary, None

    alpha, _ = jax.lax.scan(forward, z[:, 0], z[:, 1:].swapaxes(0, 1))
    path = jnp.take_along_axis(z, b["t"][:, :, None], 2)[:, :, 0].sum(1)
    path += p["u"][b["t"][:, :-1], b["t"][:, 1:]].sum(1)
    return jnp.mean(jax.nn.logsumexp(alpha, axis=1) - path)


@divides("Schroff et al. 2015, FaceNet: triplets that are rows")
def triplet(p, b):
    a, pos, neg = (embed(p, b[k]) for k in ("x", "x2", "noise"))
    return jax.nn.relu(((a - pos) ** 2).sum(1) - ((a - neg) ** 2).sum(1) + 0.2).mean()


@divides("Hadsell et al. 2006, contrastive loss of labelled pairs")
def labelled_pairs(p, b):
    d = jnp.sqrt(((embed(p, b["x"]) - embed(p, b["x2"])) ** 2).sum(1) + 1e-6)
    return jnp.mean(b["event"] * d**2 + (1 - b["event"]) * jax.nn.relu(1 - d) ** 2)


@divides("van den Oord et al. 2018, CPC: negatives from the row's own sequence")
def own_negatives(p, b):
    z = embed(p, b["s"])
    return over_tokens(b, -jax.nn.log_softmax(jnp.einsum("bsd,btd->bst", z, z) / 0.1)[:, :, 0])


@divides("He et al. 2020, MoCo: negatives from a queue")
def queue(p, b):
    q, k = embed(p, b["x"]), jax.lax.stop_gradient(embed(p, b["x2"]))
    own = (q * k).sum(1, keepdims=True)
    return -jax.nn.log_softmax(jnp.concatenate([own, q @ p["u"]], 1) / 0.2)[:, 0].mean()


@divides("Grill et al. 2020, BYOL, without batch norm")
def byol(p, b):
    target = jax.lax.stop_gradient(embed(p, b["x2"]))
    return jnp.mean(2 - 2 * (embed(p, b["x"]) * target).sum(1))


@divides("Chen and He 2021, SimSiam")
def simsiam(p, b):
    one, two = embed(p, b["x"]), embed(p, b["x2"])
    halves = (one * jax.lax.stop_gradient(two)).sum(1), (jax.lax.stop_gradient(one) * two).sum(1)
    return -0.5 * jnp.mean(halves[0] + halves[1])


@divides("Caron et al. 2021, DINO: the centre is a state")
def dino(p, b):
    teacher = jax.nn.softmax((embed(p, b["x2"]) - p["b"]) / 0.04)
    return -jnp.mean(
        (jax.lax.stop_gradient(teacher) * jax.nn.log_softmax(embed(p, b["x"]) / 0.1)).sum(1)
    )


@divides("He et al. 2022, MAE: patches normalised one by one, of masked ones the mean")
def masked_autoencoder(p, b):
    x = b["s"]
    x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-6)
    return over_tokens(b, ((net(p, b["s"]) @ p["back"] - x) ** 2).mean(-1))


@divides("Rafailov et al. 2023, DPO; Hugging Face TRL")
def dpo(p, b):
    won, lost = chosen(p, b)
    return -jnp.mean(jax.nn.log_sigmoid(0.1 * (won - lost - b["r"])))


@divides("Azar et al. 2024, IPO")
def ipo(p, b):
    won, lost = chosen(p, b)
    return jnp.mean((won - lost - b["r"] - 1 / 0.2) ** 2)


@divides("Meng et al. 2024, SimPO")
def simpo(p, b):
    won, lost = chosen(p, b)
    return -jnp.mean(jax.nn.log_sigmoid(2 * (won - lost) / 3 - 0.5))


@divides("Hong et al. 2024, ORPO")
def orpo(p, b):
    won, lost = (x / 3 for x in chosen(p, b))
    odds = won - lost - (jnp.log1p(-jnp.exp(won)) - jnp.log1p(-jnp.exp(lost)))
    return jnp.mean(-won - 0.1 * jax.nn.log_sigmoid(odds))


@divides("Zhao et al. 2023, SLiC-HF")
def slic(p, b):
    won, lost = chosen(p, b)
    return jnp.mean(jax.nn.relu(1 - won + lost) - 0.1 * won)


@divides("Stiennon et al. 2020, a reward model of pairs that are rows; Bradley and Terry 1952")
def reward_model(p, b):
    return -jnp.mean(jax.nn.log_sigmoid(score(p, b["x"]) - score(p, b["x2"])))


@divides("Schulman et al. 2017, PPO with advantages from the batch")
def ppo(p, b):
    ratio = jnp.exp(-nats(p, b) + b["time"])
    return -jnp.mean(jnp.minimum(ratio * b["r"], jnp.clip(ratio, 0.8, 1.2) * b["r"]))


@divides("Shao et al. 2024, GRPO with advantages from the batch, a mean for each answer")
def grpo(p, b):
    ratio = jnp.exp(-token_nats(p, b) + b["time"][:, None])
    each = jnp.minimum(ratio, jnp.clip(ratio, 0.8, 1.2)) * b["r"][:, None] * b["mask"]
    return -jnp.mean(each.sum(1) / (b["mask"].sum(1) + 1e-6))


@divides("Yu et al. 2025, DAPO: a mean over tokens")
def dapo(p, b):
    ratio = jnp.exp(-token_nats(p, b) + b["time"][:, None])
    return over_tokens(b, -jnp.minimum(ratio, jnp.clip(ratio, 0.8, 1.28)) * b["r"][:, None])


@divides("Williams 1992, REINFORCE")
def reinforce(p, b):
    return -jnp.mean(sequence_logp(p, b) * b["r"])


@divides("Mnih et al. 2016, A2C with an entropy bonus")
def actor_critic(p, b):
    logp = jax.nn.log_softmax(net(p, b["x"]))
    advantage = b["r"] - score(p, b["x"])
    picked = jnp.take_along_axis(logp, b["y"][:, None], 1)[:, 0]
    entropy = -(jnp.exp(logp) * logp).sum(1)
    return jnp.mean(advantage**2 - picked * jax.lax.stop_gradient(advantage) - 0.01 * entropy)


@divides("Mnih et al. 2015, DQN")
def dqn(p, b):
    target = b["r"] + 0.9 * jax.lax.stop_gradient(net(p, b["x2"]).max(1))
    q = jnp.take_along_axis(net(p, b["x"]), b["y"][:, None], 1)[:, 0]
    return optax.huber_loss(q, target).mean()


@divides("van Hasselt et al. 2016, double DQN")
def double_dqn(p, b):
    best = net(p, b["x2"]).argmax(1)[:, None]
    target = b["r"] + 0.9 * jnp.take_along_axis(embed(p, b["x2"]), best, 1)[:, 0]
    q = jnp.take_along_axis(net(p, b["x"]), b["y"][:, None], 1)[:, 0]
    return jnp.mean((q - jax.lax.stop_gradient(target)) ** 2)


@divides("Dabney et al. 2018, QR-DQN")
def quantile_regression(p, b):
    d = b["r"][:, None, None] + embed(p, b["x2"])[:, None, :] - net(p, b["x"])[:, :, None]
    tau = (jnp.arange(CLASSES) + 0.5)[None, :, None] / CLASSES
    return jnp.mean(jnp.abs(tau - (d < 0)) * optax.huber_loss(d))


@divides("Haarnoja et al. 2018, SAC's actor, with noise from the batch")
def soft_actor(p, b):
    mean, scale = net(p, b["x"])[:, :1], jnp.exp(net(p, b["x"])[:, 1:2])
    action = mean + scale * b["noise"][:, :1]
    return jnp.mean(0.2 * -jnp.log(scale)[:, 0] - score(p, b["x"] + action))


@divides("Hinton et al. 2015, distillation")
def distillation(p, b):
    teacher = jax.nn.softmax(net(p, b["x2"]) / 2)
    student = jax.nn.log_softmax(net(p, b["x"]) / 2)
    return jnp.mean(optax.losses.kl_divergence(student, jax.lax.stop_gradient(teacher)))


@divides("Kingma and Welling 2014, a variational autoencoder, draws by place")
def vae(p, b, key):
    mean, log_var = net(p, b["x"]), 0.1 * embed(p, b["x"])

    def draw(row):
        return jax.random.normal(jax.random.fold_in(key, row), (CLASSES,))

    z = mean + jnp.exp(log_var / 2) * jax.vmap(draw)(marks.index("rows", len(mean)))
    kl = 0.5 * (jnp.exp(log_var) + mean**2 - 1 - log_var).sum(1)
    return jnp.mean(((z @ p["back"] - b["x"]) ** 2).sum(1) + kl)


@divides("Srivastava et al. 2014, dropout by shape")
def dropout(p, b, key):
    z = net(p, b["x"])
    return jnp.mean(jnp.where(jax.random.bernoulli(key, 0.5, z.shape), 2 * z, 0) ** 2)


@divides("Ho et al. 2020, DDPM with noise and times from the batch")
def diffusion(p, b):
    a = b["time"][:, None]
    noisy = jnp.sqrt(a) * b["x"] + jnp.sqrt(1 - a) * b["noise"]
    return jnp.mean((net(p, noisy) @ p["back"] - b["noise"]) ** 2)


@divides("Hang et al. 2023, min-SNR weighting")
def min_snr(p, b):
    a = b["time"] * 0.9 + 0.05
    noisy = jnp.sqrt(a)[:, None] * b["x"] + jnp.sqrt(1 - a)[:, None] * b["noise"]
    snr = a / (1 - a)
    each = ((net(p, noisy) @ p["back"] - b["noise"]) ** 2).mean(1)
    return jnp.mean(jnp.minimum(snr, 5) / snr * each)


@divides("Lipman et al. 2023, flow matching; Liu et al. 2023, rectified flow")
def flow_matching(p, b):
    at = b["time"][:, None]
    z = (1 - at) * b["noise"] + at * b["x"]
    return jnp.mean((net(p, z) @ p["back"] - (b["x"] - b["noise"])) ** 2)


@divides("Vincent 2011, denoising score matching")
def score_matching(p, b):
    slopes = jax.grad(lambda x: score(p, x).sum())(b["x"] + 0.1 * b["noise"])
    return jnp.mean(((slopes + b["noise"] / 0.1) ** 2).sum(1))


@divides("Song et al. 2023, consistency training")
def consistency(p, b):
    at = b["time"][:, None]
    one, two = (net(p, b["x"] + t * b["noise"]) for t in (at, 0.9 * at))
    c = 0.03
    return jnp.mean(jnp.sqrt(((one - jax.lax.stop_gradient(two)) ** 2).sum(1) + c**2) - c)


@divides("Goodfellow et al. 2014, a GAN's discriminator")
def gan(p, b):
    real_, fake = score(p, b["x"]), score(p, b["noise"])
    return jnp.mean(jax.nn.softplus(-real_) + jax.nn.softplus(fake))


@divides("Gulrajani et al. 2017, WGAN-GP")
def gradient_penalty(p, b):
    at = b["x"] + b["time"][:, None] * (b["noise"] - b["x"])
    slopes = jax.vmap(jax.grad(lambda x: score(p, x)))(at)
    penalty = (jnp.sqrt((slopes**2).sum(1) + 1e-12) - 1) ** 2
    return jnp.mean(score(p, b["noise"]) - score(p, b["x"]) + 10 * penalty)


@divides("Mao et al. 2017, LSGAN")
def least_squares_gan(p, b):
    return 0.5 * jnp.mean((score(p, b["x"]) - 1) ** 2 + score(p, b["noise"]) ** 2)


@divides("Devlin et al. 2019, BERT: the masked tokens alone")
def masked_language_model(p, b):
    picked = 1 - b["mask"]
    return Mean((token_nats(p, b) * picked).sum(), picked.sum())


@divides("Chowdhery et al. 2023, PaLM's z-loss")
def z_loss(p, b):
    return over_tokens(b, token_nats(p, b) + 1e-4 * jax.nn.logsumexp(net(p, b["s"]), -1) ** 2)


@divides("Gemma Team 2024: capped logits")
def soft_cap(p, b):
    z = 3 * jnp.tanh(b["s"] @ p["w"] / 3)
    return over_tokens(b, optax.softmax_cross_entropy_with_integer_labels(z, b["t"]))


@divides("DeepSeek-AI 2024, multi-token prediction")
def multi_token(p, b):
    further = optax.softmax_cross_entropy_with_integer_labels(
        net(p, b["s"][:, :-1]) @ p["u"], b["t"][:, 1:]
    )
    one = over_tokens(b, token_nats(p, b))
    return one._replace(total=one.total + 0.3 * (further * b["mask"][:, 1:]).sum())


@divides("Hsu et al. 2024, Liger kernels: the loss in chunks of tokens, each computed again")
def chunked(p, b):
    parts = b["s"].reshape(-1, 3, WIDTH), b["t"].reshape(-1, 3), b["mask"].reshape(-1, 3)

    @jax.checkpoint
    def step(sums, chunk):
        x, t, mask = chunk
        each = optax.softmax_cross_entropy_with_integer_labels(net(p, x), t)
        return (sums[0] + (each * mask).sum(), sums[1] + mask.sum()), None

    return Mean(*jax.lax.scan(step, (0.0, 0.0), parts)[0])


@divides("Vaswani et al. 2017, causal attention")
def attention(p, b):
    z = net(p, b["s"])
    scores = jnp.where(jnp.tril(jnp.ones((TOKENS, TOKENS))) > 0, z @ z.swapaxes(1, 2), -jnp.inf)
    z = jax.nn.softmax(scores) @ z
    return over_tokens(b, optax.softmax_cross_entropy_with_integer_labels(z, b["t"]))


@divides("Gu and Dao 2023, Mamba: a recurrence along the sequence")
def state_space(p, b):
    def step(h, x):
        h = jnp.exp(-jax.nn.softplus(x)) * h + x
        return h, h

    _, h = jax.lax.scan(step, jnp.zeros((len(b["s"]), CLASSES)), net(p, b["s"]).swapaxes(0, 1))
    each = optax.softmax_cross_entropy_with_integer_labels(h.swapaxes(0, 1), b["t"])
    return over_tokens(b, each)


@divides("Zoph et al. 2022, ST-MoE's router z-loss, and the best expert of each token")
def routed(p, b):
    gates = net(p, b["s"])
    best = jax.nn.one_hot(gates.argmax(-1), CLASSES) * jax.nn.softmax(gates)
    z = jnp.einsum("bse,bsd,edc->bsc", best, b["s"], jnp.stack([p["w"]] * CLASSES))
    each = optax.softmax_cross_entropy_with_integer_labels(z, b["t"])
    return over_tokens(b, each + 1e-3 * jax.nn.logsumexp(gates, -1) ** 2)


@divides("Fedus et al. 2022, Switch's balance with marks.total for the shares of the whole batch")
def balance_of_all(p, b):
    probs = jax.nn.softmax(net(p, b["s"]))
    loads = marks.total(
        (jax.nn.one_hot(probs.argmax(-1), CLASSES) * b["mask"][..., None]).sum((0, 1))
    )
    share = loads / loads.sum()
    found = over_tokens(b, token_nats(p, b))
    return found._replace(total=found.total + 0.01 * ((probs * b["mask"][..., None]) @ share).sum())


@divides("Wu and He 2018, group norm")
def group_norm(p, b):
    z = net(p, b["s"])
    z = (z - z.mean((1, 2), keepdims=True)) / jnp.sqrt(z.var((1, 2), keepdims=True) + 1e-5)
    return over_tokens(b, optax.softmax_cross_entropy_with_integer_labels(z, b["t"]))


@divides("Ioffe and Szegedy 2015, batch norm with the means of training; flax.nnx.BatchNorm")
def running_average(p, b):
    norm = nnx.BatchNorm(CLASSES, use_running_average=True, rngs=nnx.Rngs(0))
    return jnp.mean(norm(net(p, b["x"])) ** 3)


@divides("Hoffer et al. 2017, ghost batch norm: marks.local says that it is meant")
def ghost_norm(p, b):
    z = net(p, b["x"])
    z = (z - marks.local(z.mean(0))) / jnp.sqrt(marks.local(z.var(0)) + 1e-5)
    return optax.softmax_cross_entropy_with_integer_labels(z, b["y"]).mean()


@divides("CLIP's pairs of one part: nested marks.local")
def local_pairs(p, b):
    z = embed(p, b["x"])
    scores = marks.local(marks.local(z @ z.T) / 0.1)
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(scores))) + nats(p, b).mean()


@divides("Bishop 1994, a mixture density network")
def mixture_density(p, b):
    z, means = jax.nn.log_softmax(net(p, b["x"])), embed(p, b["x"])
    return -jnp.mean(jax.nn.logsumexp(z - 0.5 * (b["r"][:, None] - means) ** 2, axis=1))


@divides("Nix and Weigend 1994; torch.nn.GaussianNLLLoss")
def gaussian_nll(p, b):
    mean, variance = net(p, b["x"])[:, 0], jax.nn.softplus(net(p, b["x"])[:, 1]) + 1e-3
    return 0.5 * jnp.mean(jnp.log(variance) + (b["r"] - mean) ** 2 / variance)


@divides("torch.nn.PoissonNLLLoss")
def poisson(p, b):
    z = score(p, b["x"])
    return jnp.mean(jnp.exp(z) - b["y"] * z)


@divides("Koenker and Bassett 1978, the pinball loss")
def pinball(p, b):
    d = b["r"] - score(p, b["x"])
    return jnp.mean(jnp.maximum(0.9 * d, -0.1 * d))


@divides("Ridnik et al. 2021, asymmetric loss of many labels")
def asymmetric(p, b):
    q = jax.nn.sigmoid(net(p, b["x"]))
    hot = jax.nn.one_hot(b["y"], CLASSES)
    low = jax.nn.relu(q - 0.05)
    return -jnp.mean(hot * jnp.log(q) + (1 - hot) * low**4 * jnp.log(1 - low))


@divides("Rezatofighi et al. 2019, GIoU in one dimension")
def generalised_overlap(p, b):
    z = net(p, b["x"])
    left, right = z[:, 0], z[:, 0] + jax.nn.softplus(z[:, 1])
    other, end = b["r"], b["r"] + 1
    cut = jax.nn.relu(jnp.minimum(right, end) - jnp.maximum(left, other))
    hull = jnp.maximum(right, end) - jnp.minimum(left, other)
    both = (right - left) + 1 - cut
    return jnp.mean(1 - cut / both + (hull - both) / hull)


@divides("Milletari et al. 2016, V-Net: dice of each image")
def dice_by_image(p, b):
    probs, hot = jax.nn.softmax(net(p, b["s"])), jax.nn.one_hot(b["t"], CLASSES)
    over = (probs * hot).sum(1), (probs + hot).sum(1)
    return jnp.mean(1 - 2 * over[0] / (over[1] + 1e-5))


@divides("Berman et al. 2018, Lovász hinge of each image")
def lovasz_by_image(p, b):
    return jax.vmap(lovasz)(score(p, b["s"]), b["mask"]).mean()


def lovasz(z, labels):
    errors = 1 - z * (2 * labels - 1)
    order = jnp.argsort(-errors)
    labels = labels[order]
    cut = labels.sum() - jnp.cumsum(labels)
    jaccard = 1 - cut / (labels.sum() + jnp.cumsum(1 - labels) + 1e-6)
    slopes = jnp.concatenate([jaccard[:1], jaccard[1:] - jaccard[:-1]])
    return jax.nn.relu(errors[order]) @ jax.lax.stop_gradient(slopes)


@divides("Deng et al. 2019, ArcFace")
def arcface(p, b):
    weights = p["u"] / jnp.linalg.norm(p["u"], axis=0, keepdims=True)
    cosine = jnp.clip(embed(p, b["x"]) @ weights, -0.999, 0.999)
    hot = jax.nn.one_hot(b["y"], CLASSES)
    return optax.softmax_cross_entropy(8 * jnp.cos(jnp.arccos(cosine) + 0.3 * hot), hot).mean()


@divides("Movshovitz-Attias et al. 2017, proxies in the place of rows")
def proxies(p, b):
    d = ((embed(p, b["x"])[:, None] - p["u"][None]) ** 2).sum(2)
    return optax.softmax_cross_entropy_with_integer_labels(-d, b["y"]).mean()


@divides("Rendle et al. 2009, BPR with negatives from the batch's own columns")
def bayesian_ranking(p, b):
    items = p["u"][b["t"]]
    scores = jnp.einsum("bd,btd->bt", net(p, b["x"]), items)
    return -jnp.mean(jax.nn.log_sigmoid(scores[:, :1] - scores[:, 1:]))


@divides("Mikolov et al. 2013, skip-gram with negative sampling")
def skip_gram(p, b):
    centre, around = p["u"][b["t"][:, 0]], p["back"] @ p["w"]
    scores = jnp.einsum("bd,btd->bt", centre, around[b["t"][:, 1:]])
    signs = jnp.where(jnp.arange(TOKENS - 1) == 0, 1.0, -1.0)[None]
    return -jnp.mean(jax.nn.log_sigmoid(signs * scores).sum(1))


@divides("Cao et al. 2007, ListNet; rows are queries")
def listwise(p, b):
    labels = jax.nn.softmax(b["s"][:, :, 0])
    return -jnp.mean((labels * jax.nn.log_softmax(score(p, b["s"]))).sum(1))


@divides("Burges et al. 2005, RankNet; rows are queries")
def pairwise(p, b):
    z, target = score(p, b["s"]), b["s"][:, :, 0]
    better = target[:, :, None] > target[:, None]
    return jnp.mean(jnp.where(better, jax.nn.softplus(z[:, None] - z[:, :, None]), 0))


@divides("Raissi et al. 2019, a physics-informed network")
def physics(p, b):
    def residual(x):
        slope = jax.grad(lambda x: score(p, x))
        return jnp.trace(jax.jacfwd(slope)(x)) + jnp.sin(x[0])

    return jnp.mean(jax.vmap(residual)(b["x"]) ** 2)


@divides("Chen et al. 2018, a neural ODE in Euler's steps")
def neural_ode(p, b):
    z = jax.lax.fori_loop(0, 4, lambda _, z: z + 0.1 * net(p, z) @ p["back"], b["x"])
    return jnp.mean((z - b["x2"]) ** 2)


@divides("Finn et al. 2017, MAML; rows are tasks")
def meta_learning(p, b):
    def task(s, t):
        def inner(w):
            return optax.softmax_cross_entropy_with_integer_labels(s[:3] @ w, t[:3]).mean()

        w = p["w"] - 0.1 * jax.grad(inner)(p["w"])
        return optax.softmax_cross_entropy_with_integer_labels(s[3:] @ w, t[3:]).mean()

    return jax.vmap(task)(b["s"], b["t"]).mean()


@divides("van den Oord et al. 2017, VQ-VAE")
def quantised(p, b):
    z = net(p, b["x"])
    codes = p["u"][((z[:, None] - p["u"][None]) ** 2).sum(2).argmin(1)]
    through = z + jax.lax.stop_gradient(codes - z)
    each = ((through @ p["back"] - b["x"]) ** 2).sum(1)
    each += ((codes - jax.lax.stop_gradient(z)) ** 2).sum(1)
    return jnp.mean(each + 0.25 * ((jax.lax.stop_gradient(codes) - z) ** 2).sum(1))


@divides("Bricken et al. 2023, a sparse autoencoder")
def sparse_autoencoder(p, b):
    codes = jax.nn.relu(b["x"] @ p["w"] + p["b"])
    return jnp.mean(((codes @ p["back"] - b["x"]) ** 2).sum(1) + 1e-2 * jnp.abs(codes).sum(1))


@divides("Gutmann and Hyvärinen 2010, noise-contrastive estimation")
def noise_contrastive(p, b):
    data, noise = score(p, b["x"]), score(p, b["noise"])
    return -jnp.mean(jax.nn.log_sigmoid(data) + jax.nn.log_sigmoid(-noise))


@divides("Gensheimer and Narasimhan 2019, discrete hazards")
def hazards(p, b):
    log_h = jax.nn.log_sigmoid(net(p, b["x"]))
    log_s = jax.nn.log_sigmoid(-net(p, b["x"]))
    before = jnp.arange(CLASSES)[None] < b["y"][:, None]
    at = jnp.take_along_axis(log_h, b["y"][:, None], 1)[:, 0]
    return -jnp.mean((log_s * before).sum(1) + b["event"] * at)


@divides("Zhang et al. 2018, mixup with partners that the batch brings")
def mixup(p, b):
    at = b["time"][:, None]
    z = net(p, at * b["x"] + (1 - at) * b["x2"])
    return optax.softmax_cross_entropy_with_integer_labels(z, b["y"]).mean()


@divides("Krogh and Hertz 1991: a penalty on weights beside a mean over rows")
def weight_penalty(p, b):
    return nats(p, b).mean() + 0.1 * sum(jnp.sum(x**2) for x in jax.tree.leaves(p))


@divides("The same beside a sum: times the count")
def counted_penalty(p, b):
    found = over_tokens(b, token_nats(p, b))
    return found._replace(total=found.total + found.count * 0.1 * jnp.sum(p["w"] ** 2))


@divides("Kendall et al. 2018: tasks weighed by learned variances")
def uncertainty(p, b):
    tasks = nats(p, b).mean(), jnp.mean((score(p, b["x"]) - b["r"]) ** 2)
    return sum(jnp.exp(-p["b"][i]) * x + p["b"][i] for i, x in enumerate(tasks))


@jax.custom_vjp
def clip_rows(x):
    return x


def _clip(_, g):
    return (g / jnp.maximum(1, jnp.linalg.norm(g, axis=-1, keepdims=True)),)


clip_rows.defvjp(lambda x: (x, None), _clip)


@divides("Abadi et al. 2016: gradients clipped row by row, by a rule of its own")
def clipped(p, b):
    return optax.softmax_cross_entropy_with_integer_labels(clip_rows(net(p, b["x"])), b["y"]).mean()


# Rows that look at each other, and means that are none of rows.


@mixes("Chen et al. 2020, SimCLR; optax.ntxent")
def simclr(p, b):
    z = jnp.concatenate([net(p, b["x"]), net(p, b["x2"])])
    return optax.ntxent(z, jnp.tile(jnp.arange(len(b["x"])), 2))


def clip_scores(p, b):
    return embed(p, b["x"]) @ embed(p, b["x2"]).T / 0.1


@mixes("Radford et al. 2021, CLIP; OpenCLIP")
def clip(p, b):
    z = clip_scores(p, b)
    own = jnp.arange(len(z))
    each = optax.softmax_cross_entropy_with_integer_labels
    return 0.5 * (each(z, own).mean() + each(z.T, own).mean())


@mixes("Zhai et al. 2023, SigLIP; big_vision")
def siglip(p, b):
    z = clip_scores(p, b)
    return -jnp.mean(jax.nn.log_sigmoid(z * (2 * jnp.eye(len(z)) - 1)).sum(1))


@mixes("Khosla et al. 2020, SupCon")
def supervised_contrastive(p, b):
    own = jnp.eye(len(b["y"])) > 0
    found = jax.nn.log_softmax(jnp.where(own, -1e9, clip_scores(p, b)))
    same = (b["y"][:, None] == b["y"][None]) & ~own
    return -jnp.mean(jnp.where(same, found, 0).sum(1) / (same.sum(1) + 1e-6))


@mixes("Yeh et al. 2022, decoupled contrastive learning")
def decoupled(p, b):
    z = clip_scores(p, b)
    others = jnp.where(jnp.eye(len(z)) > 0, -1e9, z)
    return jnp.mean(jax.nn.logsumexp(others, 1) - jnp.diagonal(z))


@mixes("Zbontar et al. 2021, Barlow Twins")
def barlow_twins(p, b):
    one, two = (net(p, b[k]) for k in ("x", "x2"))
    one, two = ((z - z.mean(0)) / (z.std(0) + 1e-5) for z in (one, two))
    c = one.T @ two / len(one)
    return ((1 - jnp.diagonal(c)) ** 2).sum() + 5e-3 * (c * (1 - jnp.eye(CLASSES)) ** 2).sum()


@mixes("Bardes et al. 2022, VICReg")
def vicreg(p, b):
    z = net(p, b["x"])
    spread = jax.nn.relu(1 - jnp.sqrt(z.var(0) + 1e-4)).mean()
    return jnp.mean((z - net(p, b["x2"])) ** 2) + spread


@mixes("Ermolov et al. 2021, W-MSE: whitening")
def whitening(p, b):
    z = net(p, b["x"])
    z = z - z.mean(0)
    low = jnp.linalg.cholesky(z.T @ z / len(z) + 0.1 * jnp.eye(CLASSES))
    return jnp.mean(jnp.abs(jax.scipy.linalg.solve_triangular(low, z.T, lower=True)))


@mixes("Wang and Isola 2020, uniformity")
def uniformity(p, b):
    z = embed(p, b["x"])
    return jnp.log(jnp.mean(jnp.exp(-2 * ((z[:, None] - z[None]) ** 2).sum(2))))


@mixes("Hermans et al. 2017, batch-hard triplets")
def batch_hard(p, b):
    z = embed(p, b["x"])
    d = ((z[:, None] - z[None]) ** 2).sum(2)
    same = b["y"][:, None] == b["y"][None]
    far, near = jnp.where(same, d, 0).max(1), jnp.where(same, 9, d).min(1)
    return jax.nn.softplus(far - near).mean()


@mixes("Oh Song et al. 2016, lifted structure")
def lifted(p, b):
    z = embed(p, b["x"])
    d = jnp.sqrt(((z[:, None] - z[None]) ** 2).sum(2) + 1e-6)
    same = b["y"][:, None] == b["y"][None]
    return jnp.mean(
        jax.nn.logsumexp(jnp.where(same, -1e9, 1 - d), 1) + jnp.where(same, d, 0).sum(1)
    )


@mixes("Sohn 2016, N-pairs")
def n_pairs(p, b):
    z = clip_scores(p, b)
    return jnp.mean(jnp.log1p(jnp.exp(z - jnp.diagonal(z)[:, None]).sum(1)))


@mixes("Wang et al. 2019, multi-similarity")
def multi_similarity(p, b):
    s = embed(p, b["x"]) @ embed(p, b["x"]).T
    same = b["y"][:, None] == b["y"][None]
    pos = jnp.log1p(jnp.where(same, jnp.exp(-2 * (s - 0.5)), 0).sum(1)) / 2
    return jnp.mean(pos + jnp.log1p(jnp.where(same, 0, jnp.exp(40 * (s - 0.5))).sum(1)) / 40)


@mixes("Caron et al. 2020, SwAV: Sinkhorn over the batch")
def swav(p, b):
    q = jnp.exp(embed(p, b["x"]) / 0.5)
    for _ in range(3):
        q = q / q.sum(0, keepdims=True)
        q = q / q.sum(1, keepdims=True)
    q = jax.lax.stop_gradient(q)
    return -jnp.mean((q * jax.nn.log_softmax(embed(p, b["x2"]) / 0.1)).sum(1))


@mixes("Ioffe and Szegedy 2015, batch norm; flax.nnx.BatchNorm")
def batch_norm(p, b):
    norm = nnx.BatchNorm(CLASSES, use_running_average=False, rngs=nnx.Rngs(0))
    z = norm(net(p, b["x"]))
    return optax.softmax_cross_entropy_with_integer_labels(z, b["y"]).mean()


@mixes("Salimans et al. 2016, minibatch discrimination")
def minibatch_discrimination(p, b):
    z = net(p, b["x"])
    near = jnp.exp(-jnp.abs(z[:, None] - z[None]).sum(2)).sum(1)
    return jnp.mean(jax.nn.softplus(-score(p, b["x"]) - near))


@mixes("Karras et al. 2018, the minibatch's standard deviation as a feature")
def minibatch_deviation(p, b):
    return jnp.mean(jax.nn.softplus(-score(p, b["x"]) - net(p, b["x"]).std(0).mean()))


@mixes("Jolicoeur-Martineau 2019, the relativistic average GAN")
def relativistic(p, b):
    data, fake = score(p, b["x"]), score(p, b["noise"])
    return jnp.mean(jax.nn.softplus(fake.mean() - data) + jax.nn.softplus(fake - data.mean()))


@mixes("Shazeer et al. 2017, the importance of experts")
def importance(p, b):
    loads = jax.nn.softmax(net(p, b["x"])).sum(0)
    return nats(p, b).mean() + 0.1 * (loads.std() / loads.mean()) ** 2


@mixes("Fedus et al. 2022, Switch's balance of a part's own experts; GShard")
def balance(p, b):
    probs = jax.nn.softmax(net(p, b["s"]))
    share = jax.nn.one_hot(probs.argmax(-1), CLASSES).mean((0, 1))
    return token_nats(p, b).mean() + 0.01 * CLASSES * (share * probs.mean((0, 1))).sum()


@mixes("Fedus et al. 2022: experts of limited capacity, one queue for all rows")
def capacity(p, b):
    gates = jax.nn.softmax(net(p, b["x"]))
    hot = jax.nn.one_hot(gates.argmax(-1), CLASSES, dtype=jnp.int32)
    kept = (jnp.cumsum(hot, 0) * hot).max(-1) <= 1
    return jnp.mean(nats(p, b) * kept)


@mixes("Zhou et al. 2022: experts choose tokens of all rows")
def expert_choice(p, b):
    gates = jax.nn.softmax(net(p, b["x"]))
    weights, rows = jax.lax.top_k(gates.T, len(gates) // 2)
    return (weights * nats(p, b)[rows]).mean()


@mixes("Gretton et al. 2012, MMD")
def mmd(p, b):
    z = jnp.concatenate([net(p, b["x"]), net(p, b["x2"])])
    k = jnp.exp(-((z[:, None] - z[None]) ** 2).sum(2))
    n = len(b["x"])
    return k[:n, :n].mean() + k[n:, n:].mean() - 2 * k[:n, n:].mean()


@mixes("Deshpande et al. 2018, sliced Wasserstein distances")
def sliced_wasserstein(p, b):
    one, two = (jnp.sort(net(p, b[k]), axis=0) for k in ("x", "x2"))
    return jnp.mean((one - two) ** 2)


@mixes("Cuturi 2013; Genevay et al. 2018, Sinkhorn between two batches")
def sinkhorn(p, b):
    cost = ((net(p, b["x"])[:, None] - net(p, b["x2"])[None]) ** 2).sum(2)
    f = jnp.zeros(len(cost))
    for _ in range(5):
        g = -jax.nn.logsumexp(f[:, None] - cost, axis=0)
        f = -jax.nn.logsumexp(g[None] - cost, axis=1)
    return f.mean() + g.mean()


@mixes("Sun and Saenko 2016, deep CORAL")
def coral(p, b):
    one, two = (jnp.cov(net(p, b[k]).T) for k in ("x", "x2"))
    return jnp.mean((one - two) ** 2)


@mixes("Gretton et al. 2005, HSIC")
def hsic(p, b):
    one, two = (net(p, b[k]) @ net(p, b[k]).T for k in ("x", "x2"))
    h = jnp.eye(len(one)) - 1 / len(one)
    return jnp.trace(one @ h @ two @ h) / (len(one) - 1) ** 2


@mixes("Andrew et al. 2013, deep CCA")
def deep_cca(p, b):
    one, two = (net(p, b[k]) - net(p, b[k]).mean(0) for k in ("x", "x2"))
    return -jnp.linalg.norm(one.T @ two) / (jnp.linalg.norm(one) * jnp.linalg.norm(two))


@mixes("Katzman et al. 2018, DeepSurv: Cox's partial likelihood")
def cox(p, b):
    z = score(p, b["x"])
    at_risk = b["time"][None] >= b["time"][:, None]
    return -jnp.mean(b["event"] * (z - jax.nn.logsumexp(jnp.where(at_risk, z[None], -1e9), 1)))


@mixes("Belghazi et al. 2018, MINE: rows shifted by one")
def mine(p, b):
    joint = score(p, b["x"] * b["x2"])
    return -(joint.mean() - jnp.log(jnp.mean(jnp.exp(score(p, b["x"] * jnp.roll(b["x2"], 1, 0))))))


@mixes("Chen et al. 2018, the total correlation of β-TCVAE")
def total_correlation(p, b):
    z = net(p, b["x"])
    each = -0.5 * (z[:, None] - b["x2"][None] @ p["w"]) ** 2
    joint = jax.nn.logsumexp(each.sum(2), axis=1)
    return jnp.mean(joint - jax.nn.logsumexp(each, axis=1).sum(1))


@mixes("Shrivastava et al. 2016, OHEM: the hardest rows")
def hard_examples(p, b):
    return jax.lax.top_k(nats(p, b), 3)[0].mean()


@mixes("Rockafellar and Uryasev 2000, CVaR of a batch")
def value_at_risk(p, b):
    each = jnp.sort(nats(p, b))
    return each[len(each) // 2 :].mean()


@mixes("Rousseeuw 1984, the median of squares")
def median(p, b):
    return jnp.median((score(p, b["x"]) - b["r"]) ** 2)


@mixes("Han et al. 2018, co-teaching: the rows of small loss")
def co_teaching(p, b):
    return nats(p, b)[jnp.argsort(nats(p, b | {"x": b["x2"]}))[:3]].mean()


@mixes("Schulman et al. 2017, PPO as in CleanRL: advantages normalised in the minibatch")
def normalised_advantages(p, b):
    advantage = (b["r"] - b["r"].mean()) / (b["r"].std() + 1e-8)
    return -jnp.mean(jnp.exp(-nats(p, b)) * advantage)


@mixes("Ahmadian et al. 2024, RLOO: groups of two neighbouring rows", by=("microbatches",))
def leave_one_out(p, b):
    r = b["r"].reshape(-1, 2)
    advantage = (r - r[:, ::-1]).reshape(-1)
    return -jnp.mean(sequence_logp(p, b) * advantage)


@mixes("Shao et al. 2024, GRPO: groups of four neighbouring rows", by=("microbatches",))
def group_relative(p, b):
    r = b["r"].reshape(-1, 4)
    advantage = ((r - r.mean(1, keepdims=True)) / (r.std(1, keepdims=True) + 1e-4)).reshape(-1)
    return -jnp.mean(sequence_logp(p, b) * advantage)


@mixes("Ethayarajh et al. 2024, KTO: the batch's mean as a reference")
def kto(p, b):
    gain = sequence_logp(p, b) + 9 - b["r"]
    reference = jax.lax.stop_gradient(jax.nn.relu(gain.mean()))
    return jnp.mean(1 - jax.nn.sigmoid((2 * b["event"] - 1) * 0.1 * (gain - reference)))


@mixes("Cui et al. 2019: classes weighed by how often the batch has them")
def class_balanced(p, b):
    counts = jnp.zeros(CLASSES).at[b["y"]].add(1.0)
    return jnp.mean(nats(p, b) / counts[b["y"]])


@mixes("MONAI DiceLoss(batch=True)")
def dice_of_the_batch(p, b):
    probs, hot = jax.nn.softmax(net(p, b["s"])), jax.nn.one_hot(b["t"], CLASSES)
    return 1 - jnp.mean(2 * (probs * hot).sum((0, 1)) / ((probs + hot).sum((0, 1)) + 1e-5))


@mixes("Berman et al. 2018, Lovász hinge of the batch")
def lovasz_of_the_batch(p, b):
    return lovasz(score(p, b["s"]).reshape(-1), b["mask"].reshape(-1))


@mixes("Bénédict et al. 2022, sigmoid F1")
def soft_f1(p, b):
    q = jax.nn.sigmoid(score(p, b["x"]))
    hits = (q * b["event"]).sum()
    return 1 - 2 * hits / (q.sum() + b["event"].sum())


@mixes("Pearson's correlation; scikit-learn's r2_score")
def correlation(p, b):
    z, r = score(p, b["x"]), b["r"]
    z, r = z - z.mean(), r - r.mean()
    return 1 - (z * r).sum() / jnp.sqrt((z**2).sum() * (r**2).sum())


@mixes("Hu et al. 2017, IMSAT; Liang et al. 2020, SHOT: entropy of the mean prediction")
def diversity(p, b):
    mean = jax.nn.softmax(net(p, b["x"])).mean(0)
    return (mean * jnp.log(mean)).sum() + nats(p, b).mean()


@mixes("Sagawa et al. 2020, group DRO")
def worst_group(p, b):
    hot = jax.nn.one_hot(b["y"], 3)
    return jax.nn.logsumexp((nats(p, b) @ hot) / (hot.sum(0) + 1e-6))


@mixes("Zhang et al. 2018, mixup with the batch the other way round; timm")
def mixup_reversed(p, b):
    z = net(p, 0.7 * b["x"] + 0.3 * b["x"][::-1])
    return optax.softmax_cross_entropy_with_integer_labels(z, b["y"]).mean()


@mixes("Hugging Face Transformers before 4.46: each part divides by its own tokens")
def masked_mean(p, b):
    return (token_nats(p, b) * b["mask"]).sum() / b["mask"].sum()


@mixes("numpy.average with weights; keras sample_weight by 'sum_over_batch_size' of weights")
def weighted_average(p, b):
    return jnp.average(nats(p, b), weights=b["time"])


@mixes("Root mean square error; scikit-learn's root_mean_squared_error")
def root(p, b):
    return jnp.sqrt(jnp.mean((score(p, b["x"]) - b["r"]) ** 2))


@mixes("Perplexity as a loss")
def perplexity(p, b):
    return jnp.exp(nats(p, b).mean())


@mixes("torch.nn.CrossEntropyLoss(reduction='sum')")
def reduction_sum(p, b):
    return nats(p, b).sum()


@mixes("torch.nn.KLDivLoss() divides by all entries: of a sum by a fixed size of the batch")
def fixed_size(p, b):
    return nats(p, b).sum() / ROWS


@mixes("T5X before its loss's denominator was summed: at least one token")
def at_least_one(p, b):
    found = over_tokens(b, token_nats(p, b))
    return found._replace(count=jnp.maximum(found.count, 1))


@mixes("A penalty on weights that is added to a sum")
def penalty_in_the_total(p, b):
    found = over_tokens(b, token_nats(p, b))
    return found._replace(total=found.total + 0.1 * jnp.sum(p["w"] ** 2))


def with_key(name):
    return {"key": jax.random.key(0)} if name in ("vae", "dropout") else {}


narrow = functools.partial(
    jax.tree.map, lambda x: x.astype(jnp.bfloat16) if x.dtype == np.float32 else x
)
