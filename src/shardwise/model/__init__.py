"""A decoder in Flax NNX and its loss, written for one device.

Every parameter carries the names of its logical axes (metadata `logical_axes`): vocab, embed,
heads, kv_heads, head_dim and mlp, with experts also experts and router, with latent attention also
latent, query_latent, both_dim, rope_dim and value_dim. The code carries marks:
`marks.attend`, and `marks.constrain` with the names embedding_output, attention_input, attended,
attention_output, mlp_input, mlp_hidden, mlp_output and logits. Of meshes it knows nothing.
"""

from shardwise.layers import Config
from shardwise.model.decoder import Block, Decoder
from shardwise.model.losses import cross_entropy, loss, program, routed_loss

__all__ = ["Block", "Config", "Decoder", "cross_entropy", "loss", "program", "routed_loss"]
