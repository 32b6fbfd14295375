"""A small GPT, trained with DDP or FSDP on 1 to 24 ranks that all see the stream of the same 24 lanes.

    torchrun --nproc-per-node 4 examples/gpt.py --steps 60
    torchrun --nproc-per-node 5 examples/gpt.py --steps 120     # goes on from there, on 5 ranks
    torchrun --nproc-per-node 2 examples/gpt.py --steps 120 --fsdp --folder examples/gpt-fsdp

Everything is on the CPU here, so that it runs anywhere. What is worth copying is how a global step is weighted
(`train_step`) and what a checkpoint holds (`save`, `load`); docs/frameworks.md says more.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from contextlib import AbstractContextManager, nullcontext
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from make_corpus import make_corpus
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import zephon as zp

LANES = 24  # fixed for the whole run: the most ranks that it can ever have
CONTEXT, VOCABULARY, WIDTH, HEADS, BLOCKS = 32, 8_192, 32, 2, 2


# Data.


def keep(record: dict[str, Any]) -> bool:
    """Whether there is enough text to learn from."""
    return len(record["text"].strip()) >= 40


def pipeline() -> zp.Pipeline:
    """JSONL in, training batches of 2 sequences out. Under torch.distributed each rank gets the lanes that are its own.

    The source never ends, so that no rank does before the others: the training loop decides.
    """
    corpus = make_corpus(progress=False)
    web = zp.Dataset.from_path("web", corpus.web)
    return (
        zp.Pipeline(zp.StaticMixture(web, seed=17, end="repeat"))
        .filter(keep)
        .tokenize(corpus.tokenizer, add_eos=True)
        .shuffle(buffer_size=64)
        .pack(max_length=CONTEXT, pad_id=1)
        .batch(2)
        .to_training(mask_boundaries=True)
        .options(canonical_replicas=LANES, parallelism=1, output="torch")
    )


# Model.


class Block(nn.Module):
    """Attention and a small network, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        heads = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """The logits of the next token, [samples, width, VOCABULARY]. No token sees another document of its sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, input_ids: Tensor, position_ids: Tensor, segment_ids: Tensor) -> Tensor:
        mask = (segment_ids[:, None, :, None] == segment_ids[:, None, None, :]).tril()
        x = self.tokens(input_ids) + self.positions(position_ids)
        for block in self.blocks:
            x = block(x, mask)
        return F.linear(self.norm(x), self.tokens.weight)


def summed_loss(model: nn.Module, batch: zp.Batch) -> Tensor:
    """The sum, not the mean, over the tokens of a batch: only the whole global step knows what to divide by."""
    logits = model(batch["input_ids"], batch["position_ids"], batch["segment_ids"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")


# Training.


def parallel(model: GPT, sharded: bool) -> nn.Module:
    """The model on all ranks: sharded (FSDP), or a copy on each (DDP)."""
    if not sharded:
        return DistributedDataParallel(model)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def gradients_meet(model: nn.Module, now: bool) -> AbstractContextManager[Any]:
    """Whether the backward pass inside joins the gradients of all ranks: once a step is enough."""
    if isinstance(model, DistributedDataParallel):
        return nullcontext() if now else model.no_sync()
    model.set_requires_gradient_sync(now)
    return nullcontext()


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[zp.Batch]) -> float:
    """One global step. Returns this rank's part of the loss, whose sum over ranks is the mean over all tokens.

    Ranks may have different numbers of batches (24 lanes on 5 ranks: 5, 5, 5, 5, 4), so every loss is divided by the
    tokens of all ranks, and multiplied by the ranks, as DDP and FSDP divide by them when they join the gradients.
    """
    num_tokens = torch.tensor(sum(int(batch["loss_mask"].sum()) for batch in batches if not batch.padding))
    dist.all_reduce(num_tokens)
    turns, part = torch.tensor(len(batches)), 0.0
    if not isinstance(model, DistributedDataParallel):  # FSDP gathers weights in every pass: all make equally many,
        dist.all_reduce(turns, dist.ReduceOp.MAX)  # with weight 0 where a rank has no batch left
    for turn in range(int(turns)):
        weight = 1.0 if turn < len(batches) and not batches[turn].padding else 0.0
        with gradients_meet(model, now=turn == turns - 1):
            loss = summed_loss(model, batches[min(turn, len(batches) - 1)]) * weight / num_tokens
            (loss * dist.get_world_size()).backward()
        part += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return part


# Checkpoints: one file, which any number of ranks can load, with DDP or FSDP.

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def save(file: Path, model: nn.Module, optimizer: torch.optim.Optimizer, data: zp.Pipeline) -> None:
    """Model, optimizer and place in the data. All ranks call it behind the same step; the first one writes."""
    weights, moments = get_state_dict(model, optimizer, options=WHOLE)
    place = data.checkpoint()
    if dist.get_rank() == 0:
        torch.save({"model": weights, "optimizer": moments, "data": place}, file.with_suffix(".part"))
        os.replace(file.with_suffix(".part"), file)  # whole or not at all, whenever the job is killed


def load(file: Path, model: nn.Module, optimizer: torch.optim.Optimizer, data: zp.Pipeline) -> None:
    """What `save` wrote, on any number of ranks."""
    saved = torch.load(file, weights_only=True)
    states = {"model_state_dict": saved["model"], "optim_state_dict": saved["optimizer"]}
    set_state_dict(model, optimizer, **states, options=WHOLE)
    data.load_state_dict(saved["data"])


Part = tuple[float, list[tuple[int, str]]]  # of a rank: its part of the loss, the lane and digest of each batch


def part_of(part: float, batches: list[zp.Batch]) -> Part:
    """What one rank has to tell of a step."""
    return part, [(batch.lane_id, batch.digest()) for batch in batches]


def line(step: int, parts: list[Part]) -> str:
    """A step, its loss, and a digest of what all ranks together were fed, by lane: the same on any number of ranks."""
    fed = sorted((batch for _, batches in parts for batch in batches), key=itemgetter(0))
    digest = hashlib.sha256(repr(fed).encode()).hexdigest()[:16]
    return f"step {step} loss {sum(part for part, _ in parts):.9f} batch {digest}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="of the whole run, those before a restart included")
    parser.add_argument("--save-every", type=int, default=20, help="steps")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "gpt", help="of the checkpoint")
    parser.add_argument("--fsdp", action="store_true", help="shard the model, where the default is a copy on each rank")
    args = parser.parse_args()
    if args.save_every < 1:
        parser.error(f"--save-every {args.save_every}: at least 1 step")

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        args.folder.mkdir(parents=True, exist_ok=True)
        make_corpus()  # where it is missing
    dist.barrier()

    torch.manual_seed(0)  # the same weights on every rank
    model = parallel(GPT(), args.fsdp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data, file = pipeline(), args.folder / "last.pt"
    if file.exists():
        load(file, model, optimizer, data)

    for batches in data.steps():
        step = batches[0].step
        if step >= args.steps:
            break
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, part_of(train_step(model, optimizer, batches), batches))
        if dist.get_rank() == 0:
            print(line(step, parts), flush=True)
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            save(file, model, optimizer, data)
    data.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
