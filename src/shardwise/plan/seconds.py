"""The least seconds of a step: arithmetic, memory and links as a roofline, each term shown."""

import collections
import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

from shardwise.costs.arrays import Part, Roles
from shardwise.costs.ledger import Sent
from shardwise.costs.memory import Memory
from shardwise.costs.sent import slots
from shardwise.model import Config
from shardwise.plan import links
from shardwise.plan.links import Way
from shardwise.topology.slices import Chips

# What the next product waits for; all else can be sent while products run.
WAITED = ("activations", "tokens", "stages")


class Transfer(NamedTuple):
    """What is `sent`; `over` which links, a `Way` for each of its roles; and its `seconds`."""

    sent: Sent
    over: tuple[Way, ...]
    seconds: float


@dataclasses.dataclass(frozen=True)
class Step:
    """The seconds of a step on the busiest stage, and what they are made of.

    `arithmetic` at the chip's peak; `weights`, to read them from HBM for every microbatch;
    `update`, to read and write parameters and state; `transfers`, each with what is `sent`, `over`
    which links, and its `seconds`. `bubble` is the share of a step that devices wait for other
    stages. `host` is how long activations take to the host; their way back takes as long again.
    """

    arithmetic: float
    weights: float
    update: float
    transfers: tuple[Transfer, ...]
    bubble: float
    host: float = 0.0

    @property
    def hidden(self) -> float:
        """The seconds of transfers that can run beside products: all but those in `waited`."""
        return sum(t.seconds for t in self.transfers if t.sent.kind not in WAITED)

    @property
    def waited(self) -> float:
        """The seconds of "activations", "tokens" and "stages", as if no product ran beside them."""
        return sum(t.seconds for t in self.transfers if t.sent.kind in WAITED)

    @property
    def seconds(self) -> float:
        """The seconds of a step whose products wait for activations and tokens, and no more."""
        work = max(self.arithmetic, self.weights) + self.waited
        work = max(work, self.hidden + self.waited)
        # Beside the host: a quarter of the FLOPs is the forward pass, which writes; the rest reads.
        work = max(work / 4, self.host) + max(3 * work / 4, self.host)
        return work / (1 - self.bubble) + self.update

    @property
    def in_turn(self) -> float:
        """The seconds of a step in which nothing runs beside anything else."""
        work = max(self.arithmetic, self.weights) + self.hidden + self.waited + 2 * self.host
        return work / (1 - self.bubble) + self.update

    @property
    def bound(self) -> float:
        """The least seconds of any program, all transfers beside products and beside each other."""
        longest = max((t.seconds for t in self.transfers), default=0.0)
        work = max(self.arithmetic, self.weights, longest, self.host)
        return work / (1 - self.bubble) + self.update

    @property
    def binds(self) -> str:
        """What takes longest: "arithmetic", "weights", "host", or transfers' roles: "data × fsdp".

        Products and what is hidden behind them run at once: those that are done sooner do not bind.
        Where all that is hidden takes longer together, its parts count, however short each is.
        """
        terms = collections.Counter({"host": 2 * self.host})
        products = {"arithmetic": self.arithmetic, "weights": self.weights}
        exposed = self.hidden > max(products.values())
        terms.update({} if exposed else products)
        for t in (t for t in self.transfers if exposed or t.sent.kind in WAITED):
            terms[" × ".join(t.sent.roles)] += t.seconds
        return max(terms, key=terms.get)


def model_flops(
    config: Config, batch: int, sequence: int, causal: bool = True, document: int | None = None
) -> float:
    """The FLOPs of a step that MFU counts (Chowdhery et al., 2022, appendix B).

    They are six for each weight that a token is multiplied with, and those of attention over all
    pairs of tokens, or over the half that a `causal` mask lets through; none is computed again.
    Pairs are of one document, if rows are packed with documents of `document` tokens each.
    """
    tokens = batch * sequence
    pairs = tokens * (document or sequence) / (2 if causal else 1)
    weights = sum(c.layers * _layer_weights(c, c.experts_per_token) for c in config.stacks)
    weights += config.embed * config.vocab
    scores = config.layers * config.heads * (config.head_dim + config.depth)
    return 6 * weights * tokens + 6 * scores * pairs


def _layer_weights(c, rows):
    """The number of a layer's weights that a token meets; `rows` of it go to experts."""
    attention = c.embed * (c.heads + c.kv_heads) * (c.head_dim + c.depth)
    if c.latent:
        plain, entered = c.head_dim - c.rope_dim, c.query_latent or c.embed
        attention = c.heads * (entered * c.head_dim + c.latent * (plain + c.depth))
        attention += c.embed * (c.query_latent + c.latent + c.rope_dim + c.heads * c.depth)
    wide = rows + c.shared_experts if c.experts else 1
    return attention + c.embed * c.experts + 3 * c.embed * c.mlp * wide


def flops(part: Part) -> float:
    """The FLOPs of a device in a step on this stage: with slots and with what remat does again.

    Remat multiplies again by all matrices of a layer but the MLP's last one, where its result is
    just added: no gradient needs that. Attention's scores are never kept, so its backward pass has
    five products where its forward one has two; masked tiles are left out.
    """
    c, r, tokens, work = part.config, part.roles, part.tokens * part.roles.microbatches, 0
    for each in part.stacks:
        s, weights, again = each.config, _layer_weights(each.config, slots(each)), 0
        if r.remat and not r.products:
            added = s.embed * s.mlp * (s.shared_experts if s.experts else 1)
            again = weights - (added if s.norms == "before" else 0)
        work += each.layers * (6 * weights + 2 * again) * tokens
    work += 6 * c.embed * c.vocab * tokens if part.is_last else 0
    scores, again = part.layers * c.heads * tokens * part.sequence / 2, 1 + r.remat
    work += 2 * scores * ((again + 3) * c.head_dim + (again + 2) * c.depth)
    return work / r.tensor


def step(
    roles: Roles, chips: Chips, memory: Memory, sent: Iterable[Sent], flops: float, read: float
) -> Step:
    """The `Step` of a device that holds `memory` and sends `sent`, with so many `flops`.

    `read` are the bytes of weights that the products of a microbatch's forward pass read; backward
    they are read twice more, and once where the pass is done again.
    """
    chip, m = chips.chip, roles.microbatches
    bandwidth = chip.hbm_bandwidth / chip.devices
    again = roles.remat and not roles.products
    moved = 2 * (memory.parameters + memory.state) + memory.terms.gradients + memory.terms.summed
    ways = links.lay(chips, tuple(roles.axes.items()))
    return Step(
        arithmetic=flops / chip.peak("bfloat16"),  # of other dtypes no peaks are compared
        weights=(3 + again) * m * read / bandwidth,
        update=moved / bandwidth,
        transfers=tuple(_transfer(s, chip, ways) for s in sent),
        bubble=bubble(roles.stage, m),
        host=m * memory.host * chip.devices / chip.host_bandwidth if memory.host else 0.0,
    )


def read(part: Part) -> float:
    """The bytes of the weights that a microbatch's products read."""
    c, n = part.config, part.roles.expert
    layer = sum(s.layers * _layer_weights(s.config, s.config.experts // n) for s in part.stacks)
    head = c.embed * c.vocab * part.roles.loss_chunks if part.is_last else 0  # for each chunk
    return (layer + head) * part.itemsize / part.roles.tensor


def _transfer(sent, chip, ways):
    over = tuple(ways[role] for role in sent.roles)
    if sent.kind in ("stages", "attention"):
        took = links.hop_seconds(chip, over[0], sent.bytes)
    elif sent.kind == "tokens" and sent.roles == ("expert",):
        took = links.exchange_seconds(chip, over[0], sent.bytes)
    else:
        took = links.ring_seconds(chip, over, sent.bytes)
    return Transfer(sent, over, took)


def bubble(stages: int, microbatches: int) -> float:
    """The share of a step that a stage waits: (p - 1)/(m + p - 1) (Narayanan et al., 2021)."""
    return (stages - 1) / (microbatches + stages - 1)
