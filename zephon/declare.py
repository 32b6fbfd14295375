"""The operators that a user declares, one method each: what a Pipeline is built of."""

from __future__ import annotations

import copy
import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Self

from zephon.errors import ConfigError
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
from zephon.options import nearest
from zephon.plan.fingerprint import node_fields
from zephon.plan.graph import unique_name
from zephon.session import Definition
from zephon.work.weights import PerDataset

log = logging.getLogger("zephon")


class Declared(ABC):
    """A chain of operators over a source. Immutable: every method that adds a step returns a new object."""

    _definition: Definition

    @abstractmethod
    def _derive(self, **changes: Any) -> Self:
        """A new object with parts of the definition replaced."""

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
