"""The training of gpt.py under Hugging Face Accelerate.

    torchrun --nproc-per-node 2 examples/accelerate_gpt.py --steps 60

Model and optimizer go through `prepare`; the pipeline does not: it knows its rank, and Accelerate would cut it again.
It enters checkpoints by `register_for_checkpointing`, so `save_state` and `load_state` bring it along.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from gpt import GPT, line, part_of, pipeline, summed_loss
from make_corpus import make_corpus

import zephon as zp


class Place:
    """What Accelerate saves of the pipeline. It asks every rank, and writes the first one's answer: that of all."""

    def __init__(self, data: zp.Pipeline) -> None:
        self.state_dict, self.load_state_dict = data.checkpoint, data.load_state_dict


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="of the whole run, those before a restart included")
    parser.add_argument("--save-every", type=int, default=20, help="steps")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "accelerate-gpt")
    args = parser.parse_args()

    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    with accelerator.main_process_first():
        make_corpus(progress=accelerator.is_main_process)  # where it is missing
    set_seed(0)  # the same weights on every rank
    model = GPT()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    data = pipeline()
    accelerator.register_for_checkpointing(Place(data))
    if args.folder.exists():
        accelerator.load_state(args.folder)

    for batches in data.steps():
        step, part = batches[0].step, 0.0
        if step >= args.steps:
            break
        num_tokens = torch.tensor(sum(int(batch["loss_mask"].sum()) for batch in batches if not batch.padding))
        num_tokens = accelerator.reduce(num_tokens, reduction="sum")
        for batch in batches:
            with nullcontext() if batch is batches[-1] else accelerator.no_sync(model):
                loss = summed_loss(model, batch) * (not batch.padding) / num_tokens
                accelerator.backward(loss * accelerator.num_processes)  # gradients are averaged over processes
            part += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(line(step, gather_object([part_of(part, batches)])), flush=True)
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            accelerator.save_state(args.folder)
    data.close()
    accelerator.end_training()


if __name__ == "__main__":
    main()
