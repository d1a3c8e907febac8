"""The bytes that a step needs beside parameters and state, term by term, of TPUs and of GPUs.

Each is what a count of arrays says; `costs.memory` has how many copies of it compilers keep.
"""

import collections
import operator
from collections.abc import Iterable
from typing import NamedTuple

from shardwise.costs.arrays import EXPERT, Part, Share
from shardwise.costs.ledger import WIDE
from shardwise.costs.sent import slots
from shardwise.model import Config

_LANES = 128  # of a TPU's vector registers, to which the last axis of an array is filled up
_FEW = 8192  # tokens: of more, or twice as many, programs for TPUs have copies at the loss
# Of `in_layer`, what GPUs' compiler works on in a backward pass: four arrays of the MLP's width,
# gradients of some heads, and what enters products, whole, with gradients. By least squares too.
_WORKED_ON = 1.0, 2.5, 1.4, 4 / 6


class Terms(NamedTuple):
    """The bytes that a step needs beside parameters and state, by term.

    At any time: `weights` whole, in the dtype of use, of one layer with remat, else of all, for
    GPUs and in stages of the head too, with all layers' shares where they are cast before they are
    gathered; `kept` activations from forward to backward, of all live microbatches; `summed`, the
    gradients of the device's shares where those of microbatches are added up.

    At the loss: `logits`, for TPUs the head, its gradient and the larger of that and the logits, in
    the dtype of use, with the compiler's copies; for GPUs the larger of logits and that gradient;
    of a loss in chunks, for TPUs beside the head, its gradient in float32, a chunk's logits, and
    half of an array like the head. `beside` is what a GPU may have there besides, since
    its compiler times kernels: the logits' gradient, the head's in the dtype of use, and the share
    that is kept.

    In a layer's backward pass: `gradients` of the device's shares, in the dtype of use where layers
    are neither recomputed nor done for one microbatch after another; `layer`, all that one layer's
    backward pass has; `around`, the sum of an activation whole, as tensor's products need it, and
    half of one cut, as it is between them; `ring`, what goes around a context axis, there and
    arriving; `dispatch`, rows on their way to experts and back; `whole`, the gradients of a layer's
    weights before fsdp scatters them, or half of those of experts or beside latent attention. In
    that of latent attention alone: `heads`, q, k, v and output of all heads, filled up to whole
    lanes.

    Of stages: `pending`, what the half of a backward that the stage before waits for leaves to the
    half that yields the weights' gradients; `copied`, the layers' part of it, which the compiler
    holds twice where stages have many layers (of one to three, less of it). `layer`, `ring`,
    `dispatch` and `heads` are as without stages, and no other term is there.
    """

    gradients: float = 0.0
    weights: float = 0.0
    kept: float = 0.0
    layer: float = 0.0
    around: float = 0.0
    logits: float = 0.0
    ring: float = 0.0
    dispatch: float = 0.0
    summed: float = 0.0
    pending: float = 0.0
    copied: float = 0.0
    beside: float = 0.0
    whole: float = 0.0
    heads: float = 0.0


def terms(part: Part, parameters: int, gpu: bool) -> Terms:
    """The `Terms` of a step without stages, of a device that holds `parameters` bytes of these.

    With offload two layers' inputs are kept, one of them on its way. The TPU compiler takes the
    last layer out of the loop and gathers ahead for it: there are three layers' weights, and half
    as much again of `around` and `ring`.
    """
    r, (weights, head), c = part.roles, _weights(part), part.config
    bodies, ahead = (3, 1.5) if r.offload else (1, 1)
    kept = part.layers * part.tokens * _entered(part)
    if r.offload:
        kept *= min(2, part.layers) / part.layers
    elif not r.remat:
        kept = sum(each.layers * sum(in_layer(each, gpu)) for each in part.stacks)
    entered = part.tokens * c.embed * part.itemsize
    return Terms(
        gradients=parameters if r.remat or r.microbatches > 1 else _as_used(part),
        weights=weights * min(bodies, part.layers) + _cast(part) + (head if gpu else 0),
        kept=kept,
        layer=worked_on(part.stacks, gpu),
        around=ahead * (entered + entered / r.tensor / 2) if r.tensor > 1 else 0,
        logits=_logits(part, head, gpu) + (0 if gpu else head),
        ring=ahead * ring_of(part) if r.context > 1 else 0,
        dispatch=dispatch_of(part) if c.experts else 0,
        summed=parameters if r.microbatches > 1 else 0,
        beside=_beside(part, head) if gpu else 0,
        whole=_whole(part) if r.tensor == 1 else 0,  # else products are taken in parts
        heads=part.tokens * filled(part) if c.latent else 0,
    )


def _as_used(part):
    """The bytes of the device's shares, or their gradients, in the dtype of use."""
    return sum(s.elements * min(part.itemsize, s.array.itemsize) for s in part.held())


def worked_on(stacks: Iterable[Part], gpu: bool) -> float:
    """The bytes that the backward pass of the largest of these layers has, but for what `around`
    and `dispatch` count.
    """
    inside = max((in_layer(each, gpu) for each in stacks), key=sum)
    return sum(map(operator.mul, _WORKED_ON, inside)) if gpu else sum(inside)


def _weights(part):
    """(bytes of the layers' parameters, bytes of the head's) as used, gathered or cast, without
    stages. The embedding is read before all else, and gone, unless it is the head too. With remat
    one layer's are there at a time; of stacks that differ, those of the largest layer.
    """
    stacked = [s for s in part.held() if s.array.stacked]
    layers = max(of_a_layer(part, stacked).values())
    if not part.roles.remat:
        layers = sum(map(part.whole, stacked)) * part.itemsize
    return layers, head_of(part)


def head_of(part: Part) -> int:
    """The bytes of the head's parameters, as used."""
    ends = (s for s in part.held() if not s.array.stacked and part.ends(s.array))
    return sum(map(part.whole, ends)) * part.itemsize


def of_a_layer(part: Part, shares: Iterable[Share]) -> collections.Counter[str]:
    """{stack: bytes as used of these arrays, gathered, in one of its layers}."""
    found = collections.Counter()
    for s in shares:
        elements = s.elements * s.stages * s.fsdp // s.array.shape[0]
        found[s.array.path.split("/")[0]] += elements * part.itemsize
    return found


def _cast(part):
    """The bytes of layers' shares in the dtype of use: all are cast before the loop over layers."""
    gathered = (s for s in part.held() if s.array.stacked and s.fsdp > 1)
    return part.itemsize * sum(s.elements for s in gathered if part.itemsize < s.array.itemsize)


def of_vocabulary(part: Part) -> int:
    """The number of logits on a device."""
    return part.tokens * part.config.vocab // part.roles.tensor


def _logits(part, head, gpu):
    """The bytes of logits or, after them, of the head's gradient; of TPUs of both. Of a loss in
    chunks, those of one chunk, the head's gradient in float32, and half of an array like the head
    (some programs have one there, others none).

    Where context cuts no tokens, programs for TPUs have copies of the gathered head beside the
    logits, as their compiler lists them: four of more than 16,384 tokens, or in a loop over
    microbatches one of more than 8,192. Around a tensor axis it takes the head's products in parts,
    which come from both sides: around four devices or more, two parts of each of three products.
    There the logits' gradient lies beside the logits, too, in another order of its axes: of more
    than 8,192 tokens, uncut by context; around two devices of more than 16,384 in eight rows or
    more (a guess, by some ten programs). Of one row and a tied head it lies there too, and no
    copies of the head (a guess, by five).
    """
    logits, r = of_vocabulary(part) * part.itemsize, part.roles
    some, many = (part.tokens > n * _FEW for n in (1, 2))
    if r.loss_chunks > 1:
        return head * (WIDE / part.itemsize + 0.5) + logits / r.loss_chunks
    if gpu:
        return max(logits, head)
    if part.config.tied and part.rows == r.tensor == r.microbatches == 1:
        return head + max(2 * logits, head)
    copies = (head * some if r.microbatches > 1 else head * 4 * many) * (r.context == 1)
    if r.tensor > 1:
        parts = 3 * 2 / r.tensor + (some and r.context == 1)
        copies = logits * (parts if r.tensor >= 4 else many and part.rows >= 8)
    return head + max(logits + copies, head)


def _beside(part, head):
    """The bytes of the logits' gradient, of the head's in the dtype of use, and of the device's
    share of that in the parameters' own.
    """
    ends = (s for s in part.held() if not s.array.stacked and part.ends(s.array))
    shares = sum(s.elements * s.array.itemsize for s in ends)
    logits = of_vocabulary(part) * part.itemsize / part.roles.loss_chunks
    return logits + head + shares


def between(part: Part) -> float:
    """The bytes of a token where it enters a layer, cut over the tensor axis."""
    return part.config.embed * part.itemsize / part.roles.tensor


def _entered(part):
    """The bytes of a token that a recomputed layer keeps: what enters, and on request the products
    to q, k and v, attention's end, gate and up, and of down where a norm follows.
    """
    c, t = part.config, part.roles.tensor
    ends = 1 + (c.norms != "before")
    kept = (c.heads + c.kv_heads) * c.head_dim + c.kv_heads * c.depth
    kept += ends * c.embed + 2 * c.mlp + c.latent + c.query_latent + (c.rope_dim if c.latent else 0)
    return between(part) + (kept * part.itemsize / t if part.roles.products else 0)


def ring_of(part: Part) -> float:
    """The bytes of K, V and their float32 gradients, twice: worked on, and arriving; and of q's."""
    c, used = part.config, part.itemsize
    around = 2 * c.kv_heads * (c.head_dim + c.depth) * (used + WIDE)
    return part.tokens * (around + c.heads * c.head_dim * WIDE) / part.roles.tensor


def dispatch_of(part: Part) -> float:
    """The bytes of rows for their experts and of the results, each way: as chosen, in the dtype of
    use and, for gathers and scatters, in words of 32 bits; in the experts' slots; and of the
    experts' width two arrays that no product is fused with.
    """
    c, used, n = part.config, part.itemsize, part.roles.tensor
    chosen = 2 * c.experts_per_token * c.embed * (used + WIDE)
    return part.tokens * (chosen + 2 * slots(part) * used * (c.embed + c.mlp / n))


def _whole(part):
    """The bytes of the gradients of a layer's weights, whole along fsdp, in the dtype of use.

    Of dense layers they are all there. Of experts, theirs alone, or beside latent attention, it is
    half (by least squares), and none in a loop over microbatches.
    """
    c, cut = part.config, [s for s in part.held() if s.array.stacked and s.fsdp > 1]
    if c.experts and not c.latent:
        cut = [s for s in cut if EXPERT in s.array.names]
    share = 1.0
    if c.experts or c.latent:
        share = 0.5 if part.roles.microbatches == 1 else 0.0
    return share * max(of_a_layer(part, cut).values(), default=0)


def filled(part: Part) -> int:
    """The bytes of a token's q, k, v and attention's output, in lanes of 128 entries."""
    c = part.config
    lanes = sum(-(-size // _LANES) * _LANES for size in (c.head_dim, c.depth))
    return (c.heads + c.kv_heads) * lanes * part.itemsize


def normed(c: Config) -> int:
    """The number of a token's entries in a layer that are normed."""
    heads = (c.heads + c.kv_heads) * c.head_dim if c.qk_norm else c.latent + c.query_latent
    return (4 if c.norms == "both" else 2) * c.embed + heads


def in_layer(part: Part, gpu: bool) -> list[float]:
    """The bytes that one layer keeps for its backward pass, where nothing is recomputed, in as many
    stacks as compilers keep: in each norm three float32 copies, which GPUs' compiler has transposed
    too where they are of one row; what enters products, whole; q, k, v and what attention makes of
    them, but no scores; six arrays of the MLP's width (gate, its sigmoid, up and products of them).
    """
    c, t, used = part.config, part.roles.tensor, part.itemsize
    copies = 6 if gpu and part.rows == t == part.roles.context == 1 else 3
    norms = copies * normed(c) * WIDE / t
    entered = 2 * c.embed + (2 * c.embed * slots(part) if c.experts else 0)
    entered = (entered + c.latent + c.query_latent) * used
    heads = (c.heads + c.kv_heads) * (c.head_dim + c.depth) * used / t + c.heads * WIDE / t
    wide = c.mlp * (slots(part) + c.shared_experts if c.experts else 1)
    return [part.tokens * x for x in (norms, entered, heads, 6 * wide * used / t)]
