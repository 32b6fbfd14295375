"""A pipeline as TorchTitan's data loader: (input_dict, labels) of one local batch at a time, saved and loaded with it.

Written to the shape of TorchTitan's `BaseDataLoader` and of `TrainSpec.build_dataloader_fn`; neither TorchTitan nor
torch is imported here. Where a version of TorchTitan builds its loader in another way, construct TitanDataLoader there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from zephon.errors import ConfigError
from zephon.pipeline import Pipeline

INPUTS = {"input": "input_ids"}
"""TorchTitan's names of what the model takes, and the batch's fields."""


class TitanDataLoader:
    """Yields (input_dict, labels) as torch tensors: int64 [local batch size, sequence length] where the pipeline ends
    with `.batch(n).to_training()`.

    pipeline: of all lanes; it is given this rank's data-parallel group here, so that ranks that differ only in other
    dimensions (tensor, pipeline, context) get the same batches. dp_world_size, dp_rank: as TorchTitan gives them.
    inputs: {TorchTitan's name: field}; {"input": "input_ids", "positions": "position_ids"} for models that take
    positions. labels: the field of the labels.

    It is a `Stateful`: TorchTitan's checkpoints hold the place of every lane, and load on another number of ranks.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        dp_world_size: int,
        dp_rank: int,
        inputs: Mapping[str, str] = INPUTS,
        labels: str = "labels",
    ) -> None:
        self.dp_world_size, self.dp_rank = dp_world_size, dp_rank
        self.pipeline = pipeline.options(dp_degree=dp_world_size, dp_group_id=dp_rank, output="torch")
        self._inputs, self._labels = dict(inputs), labels

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Any]]:
        """One pass. Raises ConfigError where ranks have unequal numbers of batches, or a field is no tensor."""
        self._check_lanes()
        for batch in self.pipeline:
            for field in (*self._inputs.values(), self._labels):
                if field not in batch or isinstance(batch[field], list):
                    has = f"the batch has {', '.join(batch)}" if field not in batch else "the batch has a list there"
                    raise ConfigError(
                        f"TorchTitan wants the field {field!r} as a tensor, and {has}: "
                        "end the pipeline with .batch(n).to_training(), or name other fields in inputs= and labels="
                    )
            yield {name: batch[field] for name, field in self._inputs.items()}, batch[self._labels]

    def state_dict(self) -> dict[str, Any]:
        """The places of this group's lanes, behind the last batch that was yielded."""
        return self.pipeline.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on there. An empty state, as TorchTitan may give, changes nothing."""
        if state_dict:
            self.pipeline.load_state_dict(state_dict)

    def check_batch_sizes(self, local_batch_size: int, global_batch_size: int) -> None:
        """Raises ConfigError unless TorchTitan's step takes what a global step of the pipeline has.

        local_batch_size: samples of a batch. global_batch_size: samples of a step; -1: a local batch of each rank.
        """
        state = self.pipeline.state_dict()
        lanes, cycles, size = state["canonical_replicas"], state["cycles_per_step"], state["batch_size"]
        if size != local_batch_size:
            raise ConfigError(f"training.local_batch_size={local_batch_size}, but the pipeline has .batch({size})")
        wanted = global_batch_size if global_batch_size > 0 else local_batch_size * self.dp_world_size
        if (found := lanes * cycles * size) != wanted:
            raise ConfigError(
                f"a step of the pipeline is {lanes} lanes x {cycles} batches x {size} samples = {found}, but a step "
                f"of TorchTitan takes {wanted}: set training.global_batch_size to {found}"
            )

    def _check_lanes(self) -> None:
        lanes = self.pipeline.state_dict()["canonical_replicas"]
        if lanes % self.dp_world_size:
            raise ConfigError(
                f"{lanes} lanes on {self.dp_world_size} data-parallel ranks: TorchTitan takes equally many batches on "
                "every rank, so their number must divide the lanes"
            )


def dataloader_builder(make: Callable[[Any, Any], Pipeline], **fields: Any) -> Callable[..., TitanDataLoader]:
    """A `build_dataloader_fn` for TorchTitan's TrainSpec.

    make: `make(tokenizer, job_config)` gives the pipeline of all lanes; the batch sizes of `job_config.training` are
    then compared with it. fields: `inputs` and `labels` of TitanDataLoader.
    """

    def build(*, dp_world_size: int, dp_rank: int, tokenizer: Any, job_config: Any, **_: Any) -> TitanDataLoader:
        pipeline = make(tokenizer, job_config)
        loader = TitanDataLoader(pipeline, dp_world_size=dp_world_size, dp_rank=dp_rank, **fields)
        training = job_config.training
        loader.check_batch_sizes(training.local_batch_size, getattr(training, "global_batch_size", -1))
        return loader

    return build
