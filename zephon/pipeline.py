"""What the user sees: a chain of operators over a source, and the iteration over its batches."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self

from zephon.batch import Batch
from zephon.checkpoint.restore import Allowed
from zephon.checkpoint.schema import read_state
from zephon.errors import ConfigError
from zephon.identity import mesh_options
from zephon.ops.accumulator import Accumulator, own_copy
from zephon.ops.base import MAX_CHILDREN, Node
from zephon.ops.batch import Batch as BatchNode
from zephon.ops.batch import Formatter
from zephon.ops.chat import ROLES, TokenizeChat
from zephon.ops.ensure_mixture import EnsureMixture, declared_weights
from zephon.ops.filter import Filter
from zephon.ops.flat_map import FlatMap
from zephon.ops.map import Map
from zephon.ops.map_batches import MapBatches
from zephon.ops.pack import Pack
from zephon.ops.shuffle import Mode, Shuffle
from zephon.ops.stateful_map import StatefulMap
from zephon.ops.tokenize import Tokenize
from zephon.ops.training import ToTraining
from zephon.options import Options, nearest
from zephon.plan.fingerprint import node_fields
from zephon.plan.graph import unique_name
from zephon.session import BatchIterator, Definition, Session
from zephon.work.source import WorkSource
from zephon.work.weights import PerDataset

log = logging.getLogger("zephon")


class Pipeline:
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
        self._inherited: tuple[Any, Allowed | None] = (None, None)

    # -- building ------------------------------------------------------------------------------------------------

    def _derive(self, **changes: Any) -> Self:
        """A new pipeline with parts of the definition replaced; a loaded state goes along, to be checked again."""
        new = copy.copy(self)
        fields = {name: getattr(self._definition, name) for name in Definition.__struct_fields__}
        new._definition = Definition(**{**fields, **changes})
        new._opened = None
        if self._opened is not None and self._opened.loaded is not None:
            new._inherited = (self._opened.loaded, self._opened.allow)
        return new

    def _add(self, node: Node) -> Self:
        nodes = self._definition.nodes
        behind = bool(nodes) and isinstance(nodes[-1], (BatchNode, Formatter))
        if behind is not isinstance(node, Formatter):
            name = node.name or node.method
            rule = (
                "batch must be the last step of a pipeline, but for to_training"
                if behind
                else "it formats batches, so batch(...) must come before it"
            )
            raise ConfigError(f"'{name}'{' behind batch' if behind else ''}: {rule}")
        if isinstance(node, ToTraining) and any(isinstance(other, ToTraining) for other in nodes):
            raise ConfigError("'to_training' behind 'to_training': labels would be shifted twice; keep one of the two")
        node.name = unique_name(node, [other.name or "" for other in nodes])
        node.bind([dataset.name for dataset in self._definition.source.datasets])
        return self._derive(nodes=(*nodes, node), steps={**self._definition.steps, node.name: node_fields(node)})

    def apply(self, node: Node, *, name: str | None = None) -> Self:
        """Adds an operator or accumulator of your own, an instance of a subclass of Operator or Accumulator.

        `name`: what it is called in counts, states and messages; else the instance's own `name`, else "apply".
        """
        if not isinstance(node, Node):
            raise ConfigError(f"apply({type(node).__name__}): an Operator or an Accumulator is wanted")
        # One instance may be added twice; an accumulator's state must then be each step's own.
        own = own_copy(node) if isinstance(node, Accumulator) else copy.copy(node)
        own.name = name or own.name
        return self._add(own)

    def filter(
        self, fn: Callable[..., Any], *, name: str | None = None, version: str | None = None, on_error: str = "raise"
    ) -> Self:
        """Keeps the records for which `fn(record)` is true; the rest is counted as `<name>.filtered`."""
        return self._add(Filter(fn, name, version, on_error))

    def map(
        self, fn: Callable[..., Any], *, name: str | None = None, version: str | None = None, on_error: str = "raise"
    ) -> Self:
        """Replaces each record by the dict `fn(record)`."""
        return self._add(Map(fn, name, version, on_error))

    def flat_map(
        self,
        fn: Callable[..., Any],
        *,
        name: str | None = None,
        version: str | None = None,
        on_error: str = "raise",
        max_children: int = MAX_CHILDREN,
    ) -> Self:
        """Replaces each record by the dicts in `fn(record)`, at most `max_children`."""
        return self._add(FlatMap(fn, name, version, on_error, max_children))

    def map_batches(
        self,
        fn: Callable[..., Any],
        size: int,
        *,
        name: str | None = None,
        version: str | None = None,
        on_error: str = "raise",
        max_children: int | None = None,
    ) -> Self:
        """Calls `fn` with lists of `size` records of one lane (fewer at a flush); it gives an iterable of records.

        on_error="skip" drops the whole group for which `fn` raises, and counts its records: `size` of them, or fewer.
        """
        return self._add(MapBatches(fn, size, name, version, on_error, max_children))

    def tokenize(self, tokenizer: Any, field: str = "text", **settings: Any) -> Self:
        """Adds `input_ids`, int64 [tokens], made of the string in `field`.

        tokenizer: a `tokenizer.json`, a Hugging Face folder that holds one, or a callable from str to ids.
        settings: max_length, overflow ("split" or "truncate"), add_bos, add_eos, bos_token, eos_token, name, on_error.
        The file is read now; the pipeline then carries it, and its content is in the fingerprint.
        """
        from zephon.io.tokenizer_file import load_tokenizer

        definition = tokenizer if callable(tokenizer) else load_tokenizer(tokenizer)
        try:
            return self._add(_construct(Tokenize, definition, field, **settings))
        except ConfigError as error:
            at = "" if callable(tokenizer) else f" (tokenizer {tokenizer!r})"
            raise ConfigError(f"{error}{at}") from error.__cause__

    def tokenize_chat(
        self, tokenizer: Any, field: str = "messages", *, template: str | None = None, **settings: Any
    ) -> Self:
        """Adds `input_ids` and `loss_mask` made of the conversation in `field`. See docs/training-batches.md.

        tokenizer: a `tokenizer.json` or a Hugging Face folder that holds one. template: the text of a chat template;
        None: the folder's. settings: loss_on (roles), last_turn_only, max_length, overflow ("drop_first_turns",
        "drop_last_turns", "truncate" or "drop"), tools_field, allow_special, variables, name, on_error.
        """
        from zephon.io.tokenizer_file import load_chat_template, load_tokenizer

        definition = load_tokenizer(tokenizer)
        template = load_chat_template(tokenizer) if template is None else template
        node = _construct(TokenizeChat, definition, template, field, **settings)
        for role in node.loss_on:
            if role not in ROLES:
                log.warning("tokenize_chat(loss_on=...): %r is no usual role; %s", role, nearest(role, ROLES))
        return self._add(node)

    def shuffle(self, buffer_size: int, mode: Mode = "reservoir", *, name: str | None = None) -> Self:
        """Shuffles each lane through a buffer of `buffer_size` records, within a window.

        mode: "reservoir": each record that enters takes the place of a random one, which leaves. "block": the buffer
        fills, and leaves in random order; no record then moves by more than the buffer. docs/shuffling.md compares.
        """
        return self._add(Shuffle(buffer_size, mode, name))

    def ensure_mixture(
        self,
        weights: PerDataset | None = None,
        *,
        buffer_size: int = 1024,
        unit: str = "samples",
        strict: bool = False,
        field: str = "input_ids",
        name: str | None = None,
    ) -> Self:
        """Holds the shares of datasets in each lane, where filters and lengths have changed them.

        weights: shares by dataset name or in order; None: those that the source declares, in its unit.
        buffer_size: records of a lane that may be held back until a dataset that is due comes.
        unit: "samples", or "tokens": then each record counts with the length of `field`.
        strict: a dataset that stays away for longer than the buffer can wait is an error that names it; else others go
        in its place, and `counts()["noted"]` has how many went out of turn. Nothing is ever dropped. At the end of a
        window what is held goes in turn or not, so strict wants options(flush_every_k_chunks=0).
        Behind `pack` a sequence is of the dataset of its first document.
        """
        shares = declared_weights(self._definition.source, weights, unit)
        return self._add(EnsureMixture(shares, buffer_size, unit, strict, field, name))

    def stateful_map(
        self,
        machine: Any,
        *,
        key: Callable[..., Any],
        into: str | None = None,
        name: str | None = None,
        **settings: Any,
    ) -> Self:
        """Lets a `zephon.Machine` decide, lane by lane and in order, on what `key(record)` gives.

        `key` runs in the workers, the machine in the engine: keep it small. A key is None, a bool, int, float, str,
        bytes or a tuple of these, of at most 1 KB. The machine answers True or False (dropped, counted as
        `<name>.dropped`); with `into` a value for the field of that name, or zephon.DROP. docs/stateful_map.md.
        A window begins with a fresh state: to see a lane's whole pass, set `flush_every_k_chunks=0`.
        settings: max_held (1024; records of a lane that may wait for an answer), max_state_bytes (1 MiB; of a machine's
        state of a lane, an error beyond it), version (in place of a hash of the code of machine and key).
        """
        return self._add(_construct(StatefulMap, machine, key, into, name=name, **settings))

    def pack(self, max_length: int, algorithm: str = "wrap", **settings: Any) -> Self:
        """Packs documents into sequences of `max_length` tokens: input_ids, position_ids, segment_ids, num_pad.

        algorithm: "wrap" lays documents end to end and cuts; "first_fit" puts each into the first of `num_bins` open
        sequences with room; "best_fit" fills a sequence with what fits best of `num_bins` (256) waiting documents;
        "best_fit_wrap" also cuts one where nothing fits. docs/packing.md has figures, and how to choose.
        oversize, for documents longer than `max_length`: "split" (the default; loses nothing), "truncate", "drop",
        "error". min_length: shorter documents, and shorter rests of cut ones, are dropped; no shorter piece is cut off.
        max_sequences: most pieces of documents in one sequence.
        homogeneous: "dataset", or groups of dataset names as [["web", "books"], ["code"]] or as a dict: no sequence
        mixes groups (each has `num_bins` of its own). Datasets that no group names are one more group.
        fields: names, or {name: pad value}, of fields with one value for each token that are packed along; a field has
        the dtype of its pad value (0: int64, 0.0: float64, False: bool, np.float32(0): float32).
        loss_mask: None packs the field `loss_mask` (0 or 1, as bool; padding False) wherever a document has one, and
        takes a document without for all ones; True makes one in every sequence; False leaves it behind.
        output: "flat", or "list" of whole records: {"records": [...], "num_pad": n}; `length` then is the field or the
        function that says a record's length (default: that of `field`), and oversize "error" or "drop".
        pad_id, field (of the token ids), name. Whatever is dropped is counted by reason: `pack.oversize_tokens`, ...
        """
        return self._add(_construct(Pack, max_length, algorithm, **settings))

    def batch(self, size: int, drop_last: bool = False, *, name: str | None = None) -> Self:
        """Stacks `size` samples of one lane. The last step of a pipeline, but for `to_training`."""
        return self._add(BatchNode(size, drop_last, name))

    def to_training(self, ignore_index: int = -100, **settings: Any) -> Self:
        """Makes of each batch of tokens what a training step takes. Behind `batch` only. See docs/training-batches.md.

        settings: mask_boundaries (no label across documents), flatten (tokens end to end, no pads), pad_to_multiple_of
        (of the width of rows), pad_id, shift (False: labels stand at their own tokens, for models that shift
        themselves), fields (further fields of one number a token), name. A `loss_mask` of fractions stays weights.
        """
        return self._add(_construct(ToTraining, ignore_index, **settings))

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

    # -- using ---------------------------------------------------------------------------------------------------

    @property
    def _session(self) -> Session:
        if self._opened is None:
            self._opened = Session(self._definition, *self._inherited)
        return self._opened

    def __iter__(self) -> BatchIterator:
        return self._session.iterate()

    def steps(self) -> Iterator[list[Batch]]:
        """This group's batches of one global step at a time.

        After a restore in the middle of a step the first list is short, or empty where only other groups lag behind.
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
        return self._session.state(after)

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


def _construct(kind: type[Any], *args: Any, **settings: Any) -> Any:
    """The node, with a misspelt setting as a ConfigError."""
    known = list(inspect.signature(kind).parameters)
    for name in settings:
        if name not in known:
            raise ConfigError(f"{kind.method}({name}=...): there is no such setting; {nearest(name, known)}")
    try:
        return kind(*args, **settings)
    except TypeError as error:
        raise ConfigError(f"{kind.method}: {error}") from None
