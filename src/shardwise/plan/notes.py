"""Notes on the numbers of a plan: what is exact, what is estimated, and what is left out."""

from collections.abc import Iterable

from shardwise.plan.planning import Candidate, Plan

_EXACT = "Parameters and state are exact; the rest of a device's memory is "
_ROOFLINE = (
    "Seconds are a roofline: products at the chip's peak; they wait for activations and tokens, "
    "and all else is sent beside them. At most: nothing waits. Norms, softmax, starts of kernels, "
    "the latency of collectives and devices that lag are left out. MFU counts "
)
NOTES = (
    f"{_EXACT}a formula, fitted to the chips' compiler. Scores of attention are never kept.",
    f"{_ROOFLINE}the half of attention that a causal mask lets through.",
)
NOTES_OF_OWN = (
    f"{_EXACT}what JAX keeps for the backward pass, less what follows from the rest entry by "
    "entry, and the largest gradient, or what a loop or a rematerialised layer has.",
    f"{_ROOFLINE}three times the forward pass, or both passes where that is less.",
)
NOTE_OF_HOST = "With offload, what enters layers waits on the host between the passes."
NOTE_OF_DOCUMENTS = (
    "MFU counts attention within documents; seconds, and a run's MFU, a whole row's."
)
NOTE_OF_GPUS = (
    "Of a GPU's memory a program has what JAX takes when it starts: three quarters, or the share "
    "that XLA_CLIENT_MEM_FRACTION says. NCCL and CUDA need theirs beside it. "
)
NOTE_OF_KERNELS = (
    "On a GPU the compiler chooses kernels by timing them, and may then have gradients of logits "
    "and head beside the logits: so much is asked to fit, but of stages. cuDNN's kernel takes rows "
    "of one document."
)
NOTE_OF_OWN_ON_GPUS = (
    "On a GPU a program may have all that JAX keeps, a layer's gradients beside the loss's, and a "
    "second array of the largest: so much is asked to fit."
)


def of(plan: Plan, shown: Iterable[Candidate]) -> tuple[str, ...]:
    """What has to be known of the numbers of a plan."""
    told = NOTES_OF_OWN if plan.own else NOTES
    on_gpus = NOTE_OF_GPUS + (NOTE_OF_OWN_ON_GPUS if plan.own else NOTE_OF_KERNELS)
    more = {NOTE_OF_DOCUMENTS: plan.document, on_gpus: plan.chips.chip.node}
    more[NOTE_OF_HOST] = any(c.roles.offload for c in shown)
    return (*told, *(note for note, holds in more.items() if holds))
