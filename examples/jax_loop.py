"""A training loop in JAX: a small language model, jitted, fed by a pipeline in this process.

    pip install jax
    python examples/jax_loop.py --steps 30

Batches are numpy arrays. `jax.device_put` copies them to an accelerator; on a CPU it may take 32-bit arrays as they
are, and so does `jax.numpy.from_dlpack`: a batch's memory is not used again while JAX holds it. On several
hosts give each process its place, `options(world_size=jax.process_count(), global_rank=jax.process_index(),
aggregate_dir=...)`, and save what `checkpoint()` returns in place of `state_dict()`.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from make_corpus import make_corpus

import zephon as zp

LANES, CONTEXT, VOCABULARY, WIDTH = 8, 64, 8_192, 32
FIELDS = ("input_ids", "labels")
Weights = dict[str, jax.Array]


def keep(record: dict[str, Any]) -> bool:
    """Whether there is enough text to learn from."""
    return len(record["text"].strip()) >= 40


def pipeline() -> zp.Pipeline:
    """Batches of 4 sequences of 64 tokens: one shape, so that one compilation is enough."""
    corpus = make_corpus(progress=False)
    source = zp.StaticMixture(zp.Dataset.from_path("web", corpus.web), seed=17, end="repeat")
    line = zp.Pipeline(source).filter(keep).tokenize(corpus.tokenizer, add_eos=True).shuffle(64)
    return line.pack(CONTEXT, pad_id=1).batch(4).to_training().options(canonical_replicas=LANES)


def first_weights() -> Weights:
    tokens, mix = jax.random.split(jax.random.key(0))
    return {
        "tokens": 0.02 * jax.random.normal(tokens, (VOCABULARY, WIDTH)),
        "mix": 0.3 * jax.random.normal(mix, (2 * WIDTH, WIDTH)),
    }


def summed_loss(weights: Weights, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """(the sum over tokens, the tokens); the next token is guessed from this one and the mean of those before it."""
    x = weights["tokens"][batch["input_ids"]]
    before = jnp.cumsum(x, axis=1) / jnp.arange(1, x.shape[1] + 1)[:, None]
    hidden = jnp.tanh(jnp.concatenate([x, before], axis=-1) @ weights["mix"])
    logs = jax.nn.log_softmax(hidden @ weights["tokens"].T)
    counted = batch["labels"] >= 0
    picked = jnp.take_along_axis(logs, jnp.maximum(batch["labels"], 0)[..., None], axis=-1)[..., 0]
    return -jnp.sum(picked * counted), jnp.sum(counted)


@jax.jit
def gradients(weights: Weights, batch: dict[str, jax.Array]) -> tuple[Any, Weights]:
    return jax.value_and_grad(summed_loss, has_aux=True)(weights, batch)


def train_step(weights: Weights, batches: list[zp.Batch], rate: float = 2.0) -> tuple[Weights, float]:
    """One global step: the gradient of the mean over all tokens of all lanes."""
    total, num_tokens, summed = 0.0, 0, jax.tree.map(jnp.zeros_like, weights)
    for batch in batches:
        on_device = jax.device_put({name: batch[name] for name in FIELDS})
        (loss, tokens), found = gradients(weights, on_device)
        total, num_tokens, summed = total + loss, num_tokens + tokens, jax.tree.map(jnp.add, summed, found)
    return jax.tree.map(lambda w, g: w - rate * g / num_tokens, weights, summed), float(total / num_tokens)


def save(file: Path, weights: Weights, data: zp.Pipeline) -> None:
    """Weights and place in one file, whole or not at all."""
    part = file.with_suffix(".part")
    with part.open("wb") as out:
        np.savez(out, place=json.dumps(data.state_dict()), **weights)
    os.replace(part, file)


def load(file: Path, data: zp.Pipeline) -> Weights:
    """What `save` wrote; the pipeline goes on there."""
    saved = dict(np.load(file))
    data.load_state_dict(json.loads(str(saved.pop("place"))))
    return {name: jnp.asarray(weight) for name, weight in saved.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="of the whole run, those before a restart included")
    parser.add_argument("--file", type=Path, default=Path(__file__).parent / "jax-loop.npz", help="the checkpoint")
    args = parser.parse_args()

    data = pipeline()
    weights = load(args.file, data) if args.file.exists() else first_weights()
    for batches in data.steps():
        step = batches[0].step
        if step >= args.steps:
            break
        weights, loss = train_step(weights, batches)
        print(f"step {step} loss {loss:.6f}", flush=True)
        if (step + 1) % 10 == 0 or step + 1 == args.steps:
            save(args.file, weights, data)
    data.close()


if __name__ == "__main__":
    main()
