"""The examples as scripts, and the training that they must equal: one process, no framework."""

from __future__ import annotations

import re
from itertools import islice
from typing import Any, NamedTuple

from ..process.helpers import Script
from .jobs import EXAMPLES, example

TOLERANCE = 1e-5  # of a loss: float32 sums in another order
LINE = re.compile(r"^step (\d+) loss (\S+)(?: batch (\w+))?$", re.MULTILINE)


class Line(NamedTuple):
    """What an example prints of a step."""

    step: int
    loss: float
    batch: str


def run(name: str, *arguments: Any, ranks: int | None = None, timeout_s: float = 180.0) -> list[Line]:
    """What an example says of its steps, under torchrun where `ranks` is given; it ends well and leaves nothing."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    argv = [*torchrun, str(EXAMPLES / name), *map(str, arguments)]
    status, out, err = Script("", argv=argv, env=ENVIRONMENT).end(timeout_s)
    assert status == 0, err[-5000:]
    return [Line(int(step), float(loss), batch) for step, loss, batch in LINE.findall(out)]


ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "MPLBACKEND": "Agg"}


def alone(num_lanes: int, num_steps: int, optimizer: Any) -> tuple[list[Line], Any]:
    """(lines, model) of the plainest training: one process that owns all lanes, without torch.distributed."""
    import torch

    gpt, lines, threads = example("gpt"), [], torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = gpt.GPT()
    moves = optimizer(model.parameters())
    with gpt.pipeline().options(canonical_replicas=num_lanes, runner="threads") as data:
        for batches in islice(data.steps(), num_steps):
            num_tokens = sum(int((batch["labels"] >= 0).sum()) for batch in batches)
            loss = torch.stack([gpt.summed_loss(model, batch) for batch in batches]).sum() / num_tokens
            loss.backward()
            moves.step()
            moves.zero_grad()
            [(step, _, digest)] = LINE.findall(gpt.line(batches[0].step, [gpt.part_of(0.0, batches)]))
            lines.append(Line(int(step), loss.item(), digest))
    torch.set_num_threads(threads)
    return lines, model


def check(found: list[Line], wanted: list[Line]) -> None:
    """The same batches, and losses within the tolerance."""
    assert [(line.step, line.batch) for line in found] == [(line.step, line.batch) for line in wanted]
    for line, beside in zip(found, wanted, strict=True):
        assert abs(line.loss - beside.loss) <= TOLERANCE, (line, beside)
