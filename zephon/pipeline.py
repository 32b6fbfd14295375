"""What the user sees: a chain of operators over a source, and the iteration over its batches."""

from __future__ import annotations

import copy
import importlib.util
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, Self

from zephon.batch import Batch
from zephon.checkpoint.restore import Allowed
from zephon.checkpoint.schema import read_state
from zephon.declare import Declared
from zephon.errors import ConfigError
from zephon.identity import mesh_options
from zephon.iterate import BatchIterator
from zephon.options import Options
from zephon.session import Definition, Session
from zephon.work.source import WorkSource

if TYPE_CHECKING:
    from zephon.device.loader import DeviceLoader
    from zephon.torch_loader import TorchDataset

log = logging.getLogger("zephon")


class Pipeline(Declared):
    """A source and a chain of operators; iterating over it gives this group's training batches.

    Immutable: every method that adds or sets something returns a new Pipeline. Each `iter` begins at the pipeline's
    start (the beginning, or the loaded state); after a complete pass the next `iter` is the next pass. One iterator
    is live at a time.
    """

    def __init__(self, source: WorkSource) -> None:
        if not isinstance(source, WorkSource):
            raise ConfigError(
                f"Pipeline(source): a WorkSource is wanted, not {type(source).__name__}; "
                "wrap datasets as zephon.StaticMixture([dataset, ...])"
            )
        self._definition = Definition(source, (), {}, Options())
        self._opened: Session | None = None
        self._lent = ""
        """What iterates in its place, if that was made of it."""
        self._inherited: tuple[Any, Allowed | None] = (None, None)

    def _derive(self, **changes: Any) -> Self:
        """A new pipeline with parts of the definition replaced; a loaded state goes along, to be checked again."""
        new = copy.copy(self)
        fields = {name: getattr(self._definition, name) for name in Definition.__struct_fields__}
        new._definition = Definition(**{**fields, **changes})
        new._opened, new._lent = None, ""
        if self._opened is not None and self._opened.loaded is not None:
            new._inherited = (self._opened.loaded, self._opened.allow)
        return new

    def options(self, *, mesh: Any = None, **settings: Any) -> Self:
        """Changes settings, of three groups: see docs/settings.md. Unknown names are an error.

        mesh: the data-parallel part of a torch DeviceMesh, as device_mesh["dp"], in place of dp_degree and dp_group_id:
        ranks that differ only in other dimensions (tensor, pipeline, context) get the same batches.
        """
        if mesh is not None:
            settings = {**mesh_options(mesh), **settings}
        return self._derive(options=self._definition.options.replace(settings))

    def take(self, n: int) -> Self:
        """A pipeline whose iterator ends after `n` batches of this group. Not part of the definition.

        It is a pipeline of its own: ask *it* for the state, the counts and the metrics; this one does not move.
        """
        if isinstance(n, bool) or not isinstance(n, int) or n < 0:
            raise ConfigError(f"take({n!r}): a whole number of at least 0 is wanted")
        return self._derive(limit=n)

    def to_device(self, device: Any, depth: int = 2) -> DeviceLoader:
        """This pipeline's batches with their numeric arrays as torch tensors on `device`; see docs/torch.md.

        device: as torch takes it ("cuda", "cuda:1", "cpu"); "cuda" is the current one. depth: batches that are copied
        ahead of the user, beside the one that it has. The loader is iterated and asked for state and counts in place of
        the pipeline, which it leaves alone. Raises ConfigError without torch, or without such a device.
        """
        from zephon.device.copies import copies_to
        from zephon.device.loader import DeviceLoader

        loader = DeviceLoader(self._derive(), copies_to(device), depth)
        self._lent = "the loader of to_device()"
        return loader

    # -- using ---------------------------------------------------------------------------------------------------

    @property
    def _session(self) -> Session:
        if self._opened is None:
            self._opened = Session(self._definition, *self._inherited)
        return self._opened

    def __iter__(self) -> BatchIterator:
        return self._session.iterate()

    def __len__(self) -> int:
        """Batches of this group in a whole pass, or as many as `take` allows.

        Raises TypeError where that cannot be known in advance: a step drops or multiplies records, or a source is
        endless and there is no `steps_per_pass`.
        """
        return self._session.num_batches()

    def __getitem__(self, index: Any) -> NoReturn:
        """Batches come in order. Raises TypeError: torch's DataLoader takes anything with a length for a table."""
        raise TypeError(
            "a pipeline has no batch number so and so: iterate; torch's DataLoader takes pipeline.to_torch()"
        )

    def __bool__(self) -> bool:
        """A pipeline is true, however many batches it gives."""
        return True

    def steps(self) -> Iterator[list[Batch]]:
        """This group's batches of one global step at a time.

        After a restore in the middle of a step the first list is short, or empty where only other groups lag behind.
        A step is delivered as a whole: what stops it in its middle leaves the state, and the counts, before it.
        """
        return iter(self).steps()

    @property
    def lanes(self) -> list[int]:
        """The lanes that this group owns, ascending."""
        return self._session.resolved.topology.lanes

    @property
    def batches_per_step(self) -> int:
        """Batches of this group in a whole global step."""
        return self._definition.options.data.cycles_per_step * len(self.lanes)

    def counts(self) -> dict[str, Any]:
        """Samples delivered and records dropped, up to the last delivered sample, over all passes of the run.

        {"delivered": {lane: samples}, "dropped": {lane: {reason: amount}}, "noted": the same for what is no loss};
        reasons are `<operator>.<what>`.
        """
        return self._session.counts()

    def metrics(self) -> dict[str, dict[str, float]]:
        """Seconds of work by name, and totals, of the live or last iterator.

        And "deaths": the worker processes that died and were replaced, by cause: {"SIGSEGV": 3, "exit status 1": 1}.
        """
        return self._session.metrics()

    def explain(self) -> str:
        """The stages, lanes, memory and settings of this pipeline, in words."""
        from zephon.plan.explain import explain

        resolved, definition = self._session.resolved, self._definition
        return explain(resolved.plan, resolved.topology, resolved.source, definition.options)

    def state_dict(self, after: Batch | None = None) -> dict[str, Any]:
        """The place behind the last batch that this pipeline's iterator returned, or behind `after`. Plain data.

        Holds the owned lanes; before the first batch all lanes, at their beginning. `zephon.merge_states` joins those
        of several groups.
        """
        if self._lent and after is None and not self._session.started:
            log.warning("%s reads on its own: ask it for the state; this pipeline is where it began", self._lent)
        return self._session.state(None if after is None else self._session.places(after))

    def load_state_dict(self, state: Mapping[str, Any], allow: Iterable[str] = ()) -> None:
        """Makes `state` the start of the next `iter`. `allow` names fields of the definition that may differ,
        one by one (`datasets.web.rows`) or all of a dataset, an operator or the source (`datasets.web`).

        Raises CheckpointError where the state does not fit; the pipeline then stays as it was.
        """
        if isinstance(allow, str):
            raise ConfigError(f"allow={allow!r}: a list of field names is wanted")
        opened = Session(self._definition, read_state(state), Allowed(allow))
        self._end_iterator("a state was loaded")
        self._opened = opened

    def checkpoint(self, *, group: Any = None, timeout_s: float = 300.0) -> dict[str, Any]:
        """The state of all ranks, the same on each: collective, to be called by all at the same step.

        Through torch.distributed where it is initialised (`group`: the ranks that have a pipeline; None: all), else
        through `options(aggregate_dir=...)`; alone it is `state_dict()`. Raises CheckpointError on every rank where one
        of them has no state, where ranks of one group stand at different places, or where one is not heard of in time.
        """
        return self._session.exchange.checkpoint(self.state_dict, group, timeout_s)

    def to_torch(self) -> TorchDataset:
        """This group's batches as a torch IterableDataset, for `DataLoader(dataset, batch_size=None, num_workers=n)`.

        It starts where the next `iter` of this pipeline would, and is on its own from there: ask *it* for the state.
        Call it on the rank that uses it, after torch.distributed is initialised. docs/torch.md says more.
        """
        if importlib.util.find_spec("torch") is None:
            raise ConfigError("to_torch() needs torch: pip install zephon[torch]")
        from zephon.torch_loader.dataset import Origin, TorchDataset

        self._lent = "the dataset of to_torch()"
        return TorchDataset(Origin.of(self._definition, self._session))

    def _end_iterator(self, reason: str) -> None:
        if self._opened is not None:
            self._opened.end_iterator(reason)

    def close(self) -> None:
        """Ends the live iterator and everything that works for it."""
        self._end_iterator("the pipeline was closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        steps = "".join(f".{node.method}[{node.name}]" for node in self._definition.nodes)
        return f"Pipeline({type(self._definition.source).__name__}){steps}"
