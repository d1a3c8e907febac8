"""The plan beside a GPU that is here: memory, seconds and MFU of training steps, and PyTorch's.

`python benchmarks/gpu.py` trains decoders of published sizes on one NVIDIA GPU, each in a process
of its own, by `layouts.step` with two kernels for attention, and by PyTorch (compiled layer by
layer, with its fused attention and AdamW); what it measured it writes to benchmarks/gpu.json.
PyTorch is asked first whether it computes the same loss. Where no GPU is, `--compile` adds what
XLA's compiler says there, and `--table` writes book/judged_on_a_gpu.md. With names it does these
cases alone.
"""

import argparse
import dataclasses
import datetime
import functools
import json
import os
import pathlib
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from plan_cases import Case as Planned
from plan_cases import candidate
from plan_drawn import drawn
from plan_table import table

from shardwise import plan, topology
from shardwise.model import Config
from shardwise.plan import compiling
from shardwise.plan.roles import Roles
from shardwise.plan.seconds import model_flops

ROOT = pathlib.Path(__file__).parents[1]
RECORD = ROOT / "benchmarks" / "gpu.json"
PAGE = ROOT / "book" / "judged_on_a_gpu.md"
CHIPS = "h200:1x1"  # the GPU that was here, as the plan knows it
STEPS = 8
_HELD = dict(dtype=jnp.bfloat16, param_dtype=jnp.float32)
LLAMA = Config(
    vocab=128_256, embed=2048, layers=16, heads=32, kv_heads=8, head_dim=64, mlp=8192,
    tied=True, rope_theta=500_000.0, **_HELD,
)  # fmt: skip
EIGHT = Config(
    vocab=128_256, embed=4096, layers=4, heads=32, kv_heads=8, head_dim=128, mlp=14_336,
    rope_theta=500_000.0, **_HELD,
)  # fmt: skip
QWEN = Config(
    vocab=151_936, embed=1024, layers=28, heads=16, kv_heads=8, head_dim=128, mlp=3072,
    tied=True, qk_norm="head", rope_theta=1e6, **_HELD,
)  # fmt: skip
SMOL = Config(
    vocab=49_152, embed=960, layers=32, heads=15, kv_heads=5, head_dim=64, mlp=2560,
    tied=True, **_HELD,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """A decoder, rows, tokens of a row, the layout, and what computes attention: our tiles, cuDNN's
    kernel, or PyTorch all of the step.
    """

    config: Config
    rows: int
    tokens: int
    roles: Roles
    by: str


AGAIN = Roles(remat=True)


def _cases():
    sizes = {
        "Llama 3.2 1B": (LLAMA, 8, 2048, AGAIN),
        "Llama 3 8B, 4 layers": (EIGHT, 8, 2048, AGAIN),
        "Llama 3.2 1B, kept": (LLAMA, 4, 2048, Roles()),
        "Qwen 3 0.6B": (QWEN, 8, 2048, AGAIN),
        "Llama 3.2 1B, long rows": (LLAMA, 2, 8192, AGAIN),
        "SmolLM2 360M": (SMOL, 16, 2048, Roles(remat=True, products=True)),
    }
    order = [(name, by) for name in sizes for by in ("cudnn", "torch", "tiles")]
    return {f"{name}; {by}": Case(*sizes[name], by) for name, by in order}


@functools.cache
def by_seed() -> dict[str, Case]:
    """Those that a seed drew, each with the attention that the plan takes."""
    found = {}
    for name, x in drawn("here").items():
        whole = plan.Plan(x.config, topology.chips(x.chips), x.batch, x.sequence)
        by = compiling.kernel(whole)
        found[f"{name}; {by}"] = Case(x.config, x.batch, x.sequence, x.roles, by)
    return found


CASES = _cases()
NAMES = [n for name in CASES for n in (name, name.replace("tiles", "without a GPU"))]
NAMES = list(dict.fromkeys(NAMES))


def ours(case: Case) -> dict:
    """A step by `layouts.step` on the GPU: what was compiled, held and took."""
    from shardwise import layouts, measure, mesh
    from shardwise.plan.arrays import ADAMW

    job = compiling.program_of(case.roles, case.config, case.rows, case.tokens, ADAMW)
    layout = compiling.layout_of(case.roles, case.config, mesh.make(data=1), case.by)
    params, state = layouts.init(layout, job.create, job.tx, jax.random.key(0))
    batch = {name: jnp.asarray(x) for name, x in _batch(case).items()}
    step = layouts.step(layout, job.loss, job.tx, check=False)
    began = time.perf_counter()
    compiled = step.lower(params, state, batch).compile()
    took = time.perf_counter() - began
    losses, seconds = [], []
    for _ in range(STEPS):
        began = time.perf_counter()
        params, state, loss = compiled(params, state, batch)
        losses.append(float(loss))
        seconds.append(time.perf_counter() - began)
    device = jax.devices()[0]
    peak = device.memory_stats()["peak_bytes_in_use"]
    return _measured(seconds, losses, peak, device.device_kind) | {
        "needed": measure.bytes_per_device(compiled).total,
        "compiling": round(took),
        "versions": {"jax": jax.__version__},
    }


def pytorch(case: Case) -> dict:
    """The same step by PyTorch: bfloat16 by autocast, each layer compiled, AdamW fused."""
    import torch

    torch.manual_seed(0)
    net = _torch_decoder(case.config, case.roles).cuda()
    net.layers = torch.nn.ModuleList([torch.compile(layer) for layer in net.layers])
    ends = torch.compile(net.ends)
    tx = torch.optim.AdamW(net.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
    batch = {name: torch.as_tensor(x).cuda() for name, x in _batch(case).items()}
    losses, seconds, began = [], [], time.perf_counter()
    for _ in range(STEPS):
        start = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            loss = ends(net.inside(batch["tokens"].long()), batch["targets"].long())
        loss.backward()
        tx.step()
        tx.zero_grad()
        losses.append(float(loss.detach()))
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        if len(seconds) == 1:
            compiling = time.perf_counter() - began
    found = torch.cuda.get_device_name()
    return _measured(seconds, losses, torch.cuda.max_memory_allocated(), found) | {
        "compiling": round(compiling),
        "versions": {"torch": torch.__version__},
    }


def _measured(seconds, losses, peak, kind):
    return {
        "seconds": round(float(np.median(seconds[2:])), 5),
        "apart": round(float(np.ptp(np.percentile(seconds[2:], [25, 75]))), 5),
        "losses": [round(x, 4) for x in losses],
        "peak": peak,
        "device": kind,
        "date": datetime.date.today().isoformat(),
    }


def _batch(case):
    """Random tokens, the same for all; what follows each is its target."""
    shape = case.rows, case.tokens + 1
    text = np.random.default_rng(0).integers(case.config.vocab, size=shape, dtype=np.int32)
    return {
        "tokens": text[:, :-1],
        "targets": text[:, 1:],
        "mask": np.ones((case.rows, case.tokens), np.float32),
    }


def _torch_decoder(config, roles=AGAIN):
    """Our decoder in PyTorch's own words, in float32."""
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    c, wide = config, config.heads * config.head_dim
    assert not c.experts and not c.qkv_bias and c.norms == "before" and c.activation == "silu"

    class Norm(nn.Module):
        def __init__(self, size):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(size))

        def forward(self, x):
            y = x.float()
            y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + c.norm_epsilon)
            return (y * self.scale).to(x.dtype)

    def turned(x, positions):
        half = c.head_dim // 2
        powers = torch.arange(half, device=x.device, dtype=torch.float32) / half
        angle = positions[:, None] * c.rope_theta**-powers
        cos, sin = (f(angle).to(x.dtype)[None, :, None] for f in (torch.cos, torch.sin))
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            line = functools.partial(nn.Linear, bias=False)
            self.attention_norm, self.mlp_norm = Norm(c.embed), Norm(c.embed)
            self.q, self.o = line(c.embed, wide), line(wide, c.embed)
            self.k, self.v = (line(c.embed, c.kv_heads * c.head_dim) for _ in range(2))
            if c.qk_norm:
                self.q_norm, self.k_norm = Norm(c.head_dim), Norm(c.head_dim)
            self.gate, self.up = (line(c.embed, c.mlp) for _ in range(2))
            self.down = line(c.mlp, c.embed)

        def forward(self, x):
            y, b, s = self.attention_norm(x), *x.shape[:2]
            q, k, v = (f(y).view(b, s, -1, c.head_dim) for f in (self.q, self.k, self.v))
            if c.qk_norm:
                q, k = self.q_norm(q), self.k_norm(k)
            positions = torch.arange(s, device=x.device, dtype=torch.float32)
            q, k = (turned(each, positions) for each in (q, k))
            q, k, v = (each.transpose(1, 2) for each in (q, k, v))
            grouped = c.heads != c.kv_heads
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
            x = x + self.o(y.transpose(1, 2).reshape(b, s, wide))
            y = self.mlp_norm(x)
            return x + self.down(F.silu(self.gate(y)) * self.up(y))

    products = [torch.ops.aten.mm.default]
    keep = functools.partial(create_selective_checkpoint_contexts, products)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(c.vocab, c.embed)
            self.layers = nn.ModuleList([Layer() for _ in range(c.layers)])
            self.final_norm = Norm(c.embed)
            self.head = nn.Linear(c.embed, c.vocab, bias=False)
            if c.tied:
                self.head.weight = self.embed.weight
            for weight in self.parameters():
                if weight.ndim == 2:
                    nn.init.normal_(weight, std=0.02)

        def inside(self, tokens):
            x = self.embed(tokens)
            x = x.bfloat16() if torch.is_autocast_enabled() else x
            how = {"context_fn": keep} if roles.products else {}
            for layer in self.layers:
                again = functools.partial(checkpoint, layer, use_reentrant=False, **how)
                x = again(x) if roles.remat else layer(x)
            return x

        def ends(self, x, targets):
            logits = self.head(self.final_norm(x)).float()
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return Net()


def same() -> None:
    """Assert that PyTorch's decoder computes our loss, on parameters copied from ours."""
    import torch
    from flax import nnx

    from shardwise import model

    for like in (LLAMA, QWEN, SMOL):
        sizes = dict(layers=2, embed=64, mlp=96, vocab=256, dtype=jnp.float32)
        config = dataclasses.replace(like, **sizes)
        decoder = model.Decoder(config, nnx.Rngs(0))
        net = _torch_decoder(config)
        for name, to in net.named_parameters():
            value = np.asarray(_named(decoder, name))
            into = value.reshape(to.shape) if value.ndim < 2 or "embed" in name else None
            if into is None:  # theirs are [out, in]
                into = value.reshape(to.shape[1], to.shape[0]).T
            to.data = torch.tensor(into)
        batch = _batch(Case(config, 2, 32, AGAIN, ""))
        with jax.default_matmul_precision("highest"):
            mean = model.loss(decoder, batch)
        tokens, targets = (torch.as_tensor(batch[x]).long() for x in ("tokens", "targets"))
        theirs = net.ends(net.inside(tokens), targets)
        np.testing.assert_allclose(mean.total / mean.count, theirs.detach(), rtol=2e-5)


def _named(decoder, name):
    """The parameter of ours that PyTorch's module calls so."""
    if not name.startswith("layers."):
        part, leaf = name.split(".")
        found = getattr(decoder, part)
        return (found.scale if leaf == "scale" else found.kernel)[...]
    _, number, part, leaf = name.split(".")
    found = getattr(decoder.blocks, part)
    return (found.scale if leaf == "scale" else found.kernel)[...][int(number)]


def absent(case: Case) -> dict:
    """The bytes that XLA's compiler for GPUs needs where no GPU is, with attention in tiles."""
    whole = plan.Plan(case.config, topology.chips(CHIPS), case.rows, case.tokens)
    needed = compiling.check(planned(case), whole).fit.needed
    return {"needed": needed, "versions": {"jax": jax.__version__}}


def planned(case: Case):
    """The plan's candidate."""
    return candidate(Planned(case.config, CHIPS, case.rows, case.tokens, case.roles))


def recorded() -> dict[str, dict]:
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def write(record: dict[str, dict]) -> None:
    """In the order of `NAMES`, then those drawn."""
    told = (
        f"{json.dumps(n)}: {json.dumps(record[n])}" for n in [*NAMES, *by_seed()] if n in record
    )
    RECORD.write_text("{\n" + ",\n".join(told) + "\n}\n")


PAGE_TEXT = """# The planner beside a real GPU

<!-- Written by `python benchmarks/gpu.py --table`; edits are lost. -->

Decoders of published sizes, trained for {steps} steps on one {device}, {date}, with {versions}:
AdamW with float32 state, products in bfloat16, random tokens. PyTorch is eager around compiled
layers, its attention and AdamW fused; on small sizes it was asserted to compute our loss. We clip
by the global norm as well, which its step leaves out. Seconds are medians of one run. Nothing here
says how several GPUs do together.

## Memory

GiB. *By formula* is what XLA's compiler is expected to need without a GPU, and *up to* what
`shardwise plan` asks to fit. *Compiled* is XLA's own count on this GPU, with *up to* beside it;
the allocator's peak in the run was within {peak:.1%} of that count. *Without a GPU* is what XLA
reserves where it can time no kernel ({absent}), as in {{doc}}`judged_gpus`. On the GPU it needs
more, most where the vocabulary is large: the logits' gradient lies beside the logits. *Up to* was
counted after these programs had been seen, and has 2 % for what the count misses.

{memory}

## Seconds, and MFU

MFU counts what a step has to multiply, with half of attention, over {peak_flops:.0f} TFLOP/s.
Attention by `context.cudnn()`, by our tiles (`context.tiled`), and PyTorch's whole step:

{seconds}

Our tiles are loops of small products, which leave most of a GPU idle: take cuDNN's kernel where
devices see whole sequences, as `shardwise plan` does. Over a context axis attention is still by
tiles.
"""


def page(record: dict[str, dict]) -> str:
    """The book's page: what the record has, beside the formula as it is."""
    sizes = {
        n.partition(";")[0]: c
        for n, c in CASES.items()
        if f"{n.partition(';')[0]}; cudnn" in record
    }
    peak, gib = topology.CHIPS[CHIPS.partition(":")[0]].peak(), 2**30
    rows, took, off = [], [], []
    for name, case in sizes.items():
        found = planned(case)
        here, tiles, theirs, without = (
            record.get(f"{name}; {by}") for by in ("cudnn", "tiles", "torch", "without a GPU")
        )
        told = f"{name}, {_size(case)}"
        off += [x["peak"] / x["needed"] - 1 for x in (here, tiles) if x]
        least, most, real = found.memory.total, found.memory.most, here["needed"]
        sizes_of = (least, most, real, without["needed"], theirs and theirs["peak"])
        least, most, real, without, theirs_of = (f"{x / gib:.1f}" if x else "" for x in sizes_of)
        beside = f"{real} ({found.memory.most / here['needed'] - 1:+.0%})"
        rows.append((told, least, most, beside, without, theirs_of))
        flops = model_flops(case.config, case.rows, case.tokens)
        cells = [
            f"{1e3 * x['seconds']:.0f} ms, {flops / peak / x['seconds']:.0%}" if x else ""
            for x in (here, tiles, theirs)
        ]
        took.append((told, *cells, f"{found.mfu_bound:.0%}"))
    runs = [said for said in record.values() if "seconds" in said]
    absent = {x["versions"]["jax"] for n, x in record.items() if n.endswith("without a GPU")}
    of_memory = "of", "by formula", "up to", "compiled", "without a GPU", "PyTorch's peak"
    return PAGE_TEXT.format(
        steps=STEPS,
        device=" and ".join(sorted({said["device"] for said in runs})),
        date=" and ".join(sorted({said["date"] for said in runs})),
        versions=" and ".join(sorted({f"{k} {v}" for x in runs for k, v in x["versions"].items()})),
        absent=f"jax {', '.join(sorted(absent))}",
        peak=max(map(abs, off)),
        peak_flops=peak / 1e12,
        memory=table(of_memory, rows),
        seconds=table(("of", "cuDNN's", "tiles", "PyTorch", "the plan's bound"), took),
    )


def _size(case):
    again = ", but for products" if case.roles.products else ", recomputed"
    return f"{case.rows} × {case.tokens:,}{again if case.roles.remat else ''}"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of cases; all by default")
    parser.add_argument("--case", help="this one, here; its line of JSON")
    parser.add_argument("--same", action="store_true", help="only: is PyTorch's loss ours?")
    parser.add_argument("--compile", action="store_true", help="what XLA says without a GPU")
    parser.add_argument("--table", action="store_true", help="only write the page")
    asked = parser.parse_args(argv)
    if asked.same:
        same()
    elif asked.case:
        case = CASES.get(asked.case) or by_seed()[asked.case]
        print(json.dumps((pytorch if case.by == "torch" else ours)(case)))
    elif asked.compile:
        for name in (n for n in NAMES if n.endswith("without a GPU")):
            case = CASES[name.replace("without a GPU", "cudnn")]
            write(recorded() | {name: absent(case)})
            print(name, recorded()[name], flush=True)
    elif asked.table:
        PAGE.write_text(page(recorded()))
    else:
        jax.config.update("jax_platforms", "cpu")  # or this process would hold the GPU's memory
        _all(asked.names or [*CASES, *by_seed()])
    return 0


def _all(names):
    here = [sys.executable, __file__]
    subprocess.run([*here, "--same"], check=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    for name in names:
        run = subprocess.run([*here, "--case", name], stdout=subprocess.PIPE, text=True)
        if run.returncode:
            print(f"{name} failed", flush=True)
            continue
        write(recorded() | {name: json.loads(run.stdout.splitlines()[-1])})
        print(f"{name}: {recorded()[name]}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
