"""Names of weights: which of Llama's each of the decoder's parameters is, and how their axes lie.

Letters are the model's, with l for layers: l layers, v vocab, e embed, h heads, k kv_heads,
d head_dim, m mlp. A parameter's are those of its axes. A weight's come in words, one for each axis
of the file's array, and the letters of a word are merged into that axis, the last one fastest:
q_proj, "hd e", is the matrix from embed to all heads, transposed, whose row h * head_dim + d is
entry d of head h. Rotary positions pair entry d with d + head_dim / 2 here and there, so that no
row moves.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from shardwise.model import Config

# The field of Config that has a letter's size.
_FIELDS = dict(v="vocab", e="embed", h="heads", k="kv_heads", d="head_dim", m="mlp", l="layers")


class Weight(NamedTuple):
    """A weight's name, of which "{}" is the layer's number, and the letters of both sides."""

    name: str
    theirs: str
    ours: str

    @property
    def words(self) -> list[str]:
        """The letters of each axis of the file's array."""
        return self.theirs.split()

    @property
    def letters(self) -> str:
        """All letters of the file's array, none of which is layers."""
        return "".join(self.words)

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of the file's array."""
        return tuple(math.prod(sizes[letter] for letter in word) for word in self.words)

    def names(self, config: Config) -> list[str]:
        """The names of the arrays that are this weight: one for each layer, or one."""
        return [self.name.format(i) for i in range(config.layers)] if self.stacked else [self.name]

    @property
    def stacked(self) -> bool:
        """Whether the parameter holds all layers, of which the file's array is one."""
        return self.ours.startswith("l")


EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
_LAYER = "model.layers.{}."

# In the order in which a token passes them: that of the files.
WEIGHTS = {
    "embed/kernel": Weight(EMBEDDING, "v e", "ve"),
    "blocks/attention_norm/scale": Weight(_LAYER + "input_layernorm.weight", "e", "le"),
    "blocks/q/kernel": Weight(_LAYER + "self_attn.q_proj.weight", "hd e", "lehd"),
    "blocks/k/kernel": Weight(_LAYER + "self_attn.k_proj.weight", "kd e", "lekd"),
    "blocks/v/kernel": Weight(_LAYER + "self_attn.v_proj.weight", "kd e", "lekd"),
    "blocks/o/kernel": Weight(_LAYER + "self_attn.o_proj.weight", "e hd", "lhde"),
    "blocks/mlp_norm/scale": Weight(_LAYER + "post_attention_layernorm.weight", "e", "le"),
    "blocks/gate/kernel": Weight(_LAYER + "mlp.gate_proj.weight", "m e", "lem"),
    "blocks/up/kernel": Weight(_LAYER + "mlp.up_proj.weight", "m e", "lem"),
    "blocks/down/kernel": Weight(_LAYER + "mlp.down_proj.weight", "e m", "lme"),
    "final_norm/scale": Weight("model.norm.weight", "e", "e"),
    "head/kernel": Weight(HEAD, "v e", "ev"),
}


def sizes(config: Config) -> dict[str, int]:
    """The size of each letter."""
    return {letter: getattr(config, field) for letter, field in _FIELDS.items()}


def check_dense(config: Config) -> None:
    """Raise ValueError for a decoder that is no Llama."""
    if config.experts:
        raise ValueError(
            f"llama: Config.experts is {config.experts}, and LlamaForCausalLM has one MLP in each "
            f"layer (experts=0); shardwise.checkpoint saves any decoder."
        )
