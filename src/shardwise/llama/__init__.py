"""The decoder's weights as Llama's: Hugging Face's names, in safetensors, in several files.

The folder is one that `LlamaForCausalLM.from_pretrained` reads and its `save_pretrained` writes,
with `config.json`, and `model.safetensors` or several files with their index, without a tokenizer:

    config, params = llama.load(folder)                             # on one device
    config, params = llama.load(folder, rule=rule, mesh=grid)       # cut as the rule says
    llama.save(folder, params, config)

A decoder with dropout, remat or stages has the same weights:
`load(folder, dataclasses.replace(llama.config(folder), remat=True))`. Needs safetensors:
`pip install "shardwise[safetensors]"`.
"""

from shardwise.llama.files import load, save
from shardwise.llama.names import config

__all__ = ["config", "load", "save"]
