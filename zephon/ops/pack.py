"""pack: documents of any length into sequences of a bounded one. The operator: policies, groups, counts, states.

How documents are put together is `bins.py`, what a sequence then looks like `sequences.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from zephon.errors import ConfigError, DataError
from zephon.ops.accumulator import Accumulator, Emitted, Held, Key, Part, Ref
from zephon.ops.base import check_count
from zephon.ops.bins import BestFit, Filler, FirstFit, Limits, Wrap
from zephon.ops.sequences import LOSS_MASK, Columns, FlatSequences, ListSequences, pads_of
from zephon.record import Record

ALGORITHMS: dict[str, Callable[[Limits], Filler]] = {
    "wrap": Wrap,
    "first_fit": FirstFit,
    "best_fit": BestFit,
    "best_fit_wrap": lambda limits: BestFit(limits, split=True),
}
SPLITTING = ("wrap", "best_fit_wrap")

_OVERSIZE = {
    "split": (),
    "truncate": ("truncated_documents", "truncated_tokens"),
    "drop": ("oversize_documents", "oversize_tokens"),
    "error": (),
}
"""The policies, and the reasons under which each counts what it loses."""
_SHORT = ("short_documents", "short_pieces", "short_tokens")


class Pack(Accumulator):
    """Sequences of `max_length` tokens; see `Pipeline.pack` for every setting.

    Flat sequences have the fields `input_ids` int64 [max_length], padded with `pad_id`; `position_ids` int64
    [max_length], from 0 at the start of each piece of a document; `segment_ids` int64 [max_length], 1, 2, ... for the
    pieces, 0 on padding; `num_pad`, an int; and those that are packed along. `batch.origins` says what a sequence was
    made of.

    Counted as lost: `empty_documents`; by `oversize`, `truncated_documents` and `truncated_tokens`, or
    `oversize_documents` and `oversize_tokens`; by `min_length`, `short_documents`, `short_pieces` (rests of documents
    that were cut) and `short_tokens` (of both).
    """

    method = "pack"
    measures = True
    batched = True

    def __init__(
        self,
        max_length: int,
        algorithm: str = "wrap",
        oversize: str | None = None,
        pad_id: int = 0,
        field: str = "input_ids",
        name: str | None = None,
        *,
        num_bins: int = 256,
        max_sequences: int | None = None,
        min_length: int = 1,
        homogeneous: str | Mapping[str, Iterable[str]] | Iterable[Iterable[str]] | None = None,
        fields: Iterable[str] | Mapping[str, Any] = (),
        loss_mask: bool | None = None,
        output: str = "flat",
        length: str | Callable[[Record], Any] | None = None,
    ) -> None:
        self.max_length = check_count("max_length", max_length, self.method, most=2**47)
        self.algorithm = _one_of("algorithm", algorithm, ALGORITHMS)
        self.output = _one_of("output", output, ("flat", "list"))
        is_flat = output == "flat"
        usual = "split" if is_flat else "error"
        self.oversize = _one_of("oversize", usual if oversize is None else oversize, _OVERSIZE)
        self.field, self.name = field, name
        self.pad_id = check_count("pad_id", pad_id, self.method, least=-(2**63), most=2**63 - 1)
        self.num_bins = check_count("num_bins", num_bins, self.method, most=2**20)
        self.max_sequences = max_sequences
        if max_sequences is not None:
            check_count("max_sequences", max_sequences, self.method)
        self.min_length = check_count("min_length", min_length, self.method, most=max_length)
        self.groups = _groups(homogeneous)
        self.length, self.loss_mask, self.pads = length, loss_mask, pads_of(fields)
        if loss_mask not in (None, True, False):
            raise ConfigError(f"pack(loss_mask={loss_mask!r}): True, False or None is wanted")
        if loss_mask is not None and LOSS_MASK in self.pads:
            raise ConfigError("pack(loss_mask=..., fields=...): both say how the loss mask is packed; give one")
        self._sequences = self._flat() if is_flat else self._list()
        self.reads = self._sequences.reads
        self.reasons = ("empty_documents", *_OVERSIZE[self.oversize], *(_SHORT if min_length > 1 else ()))
        bound = {} if max_sequences is None else {"max_sequences": max_sequences}
        self._limits = Limits(max_length, num_bins, min_length=min_length, **bound)
        self._group_of: list[int] | None = None  # by dataset; None: each is one of its own
        self._num_groups = 1
        self._fillers: dict[int, dict[int, Filler]] = {}  # by lane and group

    def _flat(self) -> FlatSequences:
        if self.length is not None:
            raise ConfigError(f"pack(length={self.length!r}): only output='list' takes it; others count {self.field!r}")
        return FlatSequences(self.max_length, self.field, self.pad_id, self.pads, self.loss_mask)

    def _list(self) -> ListSequences:
        if self.algorithm in SPLITTING or self.oversize in ("split", "truncate"):
            raise ConfigError(
                f"pack(output='list', algorithm={self.algorithm!r}, oversize={self.oversize!r}): records that are kept "
                "whole cannot be cut; use 'first_fit' or 'best_fit', and oversize='drop' or 'error'"
            )
        if self.pads or self.loss_mask is not None:
            raise ConfigError("pack(output='list'): records keep all their fields; leave fields= and loss_mask= out")
        if self.length is not None and not isinstance(self.length, str) and not callable(self.length):
            raise ConfigError(f"pack(length={self.length!r}): the name of a field or a function is wanted")
        return ListSequences(self.max_length, self.field if self.length is None else self.length)

    def settings(self) -> dict[str, Any]:
        """The first five always; of the others what was set, and matters."""
        plain = {f: getattr(self, f) for f in ("max_length", "algorithm", "oversize", "pad_id", "field")}
        others = {
            "num_bins": self.num_bins if self.algorithm != "wrap" else None,
            "max_sequences": self.max_sequences,
            "min_length": self.min_length if self.min_length > 1 else None,
            "homogeneous": self.groups,
            "fields": {name: [pad.item(), pad.dtype.str] for name, pad in self.pads.items()} or None,
            "loss_mask": self.loss_mask,
            "output": self.output if self.output != "flat" else None,
            "length": self.length,
        }
        return {"type": self.method, **plain, **{k: v for k, v in others.items() if v is not None}}

    def bind(self, datasets: Sequence[str]) -> None:
        if isinstance(self.groups, list):
            self._group_of = _group_of(self.groups, datasets)
        self._num_groups = 1 if self.groups is None else len(set(self._group_of or range(len(datasets))))

    @property
    def most_flushed(self) -> int:
        """How many sequences a flush makes, at most: one, or of as many bins as there are; for each group."""
        return self._num_groups * (1 if self.algorithm == "wrap" else max(self.num_bins, 3))

    def measure(self, record: Record) -> int:
        return self._sequences.measure(record)

    # -- decisions -----------------------------------------------------------------------------------------------

    def open(self, lane: int, key: Key) -> None:
        if isinstance(self.groups, list) and self._group_of is None:
            raise ConfigError("pack(homogeneous=...): it names datasets, so it must be a step of a pipeline")
        self._fillers[lane] = {}

    def _filler(self, lane: int, group: int) -> Filler:
        fillers = self._fillers[lane]
        if group not in fillers:
            fillers[group] = ALGORITHMS[self.algorithm](self._limits)
        return fillers[group]

    def push(self, lane: int, refs: Sequence[Ref]) -> Emitted:
        emitted = Emitted()
        most, least = self.max_length if self.oversize != "split" else 2**63, self.min_length
        is_mixed, group_of = self.groups is None, self._group_of
        filler = self._filler(lane, 0)
        for trigger, (cursor, length, dataset) in enumerate(refs):
            if length > most:
                length = self._oversize(emitted, trigger, length)
            elif length < least:
                length = self._short(emitted, trigger, length)
            if not length:
                continue
            if not is_mixed:
                filler = self._filler(lane, dataset if group_of is None else group_of[dataset])
            filler.add(cursor, length)
            if filler.out or filler.lost:
                self._take(filler, emitted, trigger)
        return emitted

    def _take(self, filler: Filler, emitted: Emitted, trigger: int) -> None:
        """What a filler let go or lost, because of the ref at `trigger`."""
        emitted.groups += filler.out
        emitted.triggers += [trigger] * len(filler.out)
        for length in filler.lost:
            emitted.drop(trigger, "short_pieces")
            emitted.drop(trigger, "short_tokens", length)
        filler.out, filler.lost = [], []

    def _short(self, emitted: Emitted, trigger: int, length: int) -> int:
        """Counts a document of fewer than min_length tokens; none of it is kept."""
        emitted.drop(trigger, "short_documents" if length else "empty_documents")
        if length:
            emitted.drop(trigger, "short_tokens", length)
        return 0

    def _oversize(self, emitted: Emitted, trigger: int, length: int) -> int:
        """Applies the policy; returns the tokens that are kept."""
        most = self.max_length
        if self.oversize == "truncate":
            emitted.drop(trigger, "truncated_documents")
            emitted.drop(trigger, "truncated_tokens", length - most)
            return most
        if self.oversize == "drop":
            emitted.drop(trigger, "oversize_documents")
            emitted.drop(trigger, "oversize_tokens", length)
            return 0
        policies = "'split', 'truncate' or 'drop'" if self.output == "flat" else "'drop'"
        emitted.fail(
            trigger,
            DataError(
                f"a document of {length:,} tokens is longer than max_length={most:,}; "
                f"choose oversize={policies}, or a larger max_length"
            ),
        )
        return 0

    def flush(self, lane: int) -> Emitted:
        emitted = Emitted()
        for _, filler in sorted(self._fillers[lane].items()):
            filler.flush()
            self._take(filler, emitted, 0)
        self._fillers[lane] = {}
        return emitted

    @property
    def holds(self) -> int:
        return self.most_flushed

    def state(self, lane: int) -> Held:
        """Plain: [group, how many parts stand in each open sequence] for every group that holds something."""
        held = [(group, *filler.held()) for group, filler in sorted(self._fillers[lane].items())]
        parts = held[0][1] if len(held) == 1 else list(chain.from_iterable(parts for _, parts, _ in held))
        return Held(parts, [[group, sizes] for group, _, sizes in held])

    def load(self, lane: int, key: Key, held: Held) -> None:
        self.open(lane, key)
        parts, at = list(held.items), 0
        if not isinstance(held.plain, list) or not all(isinstance(group, list) for group in held.plain):
            raise ValueError(f"a list of groups is wanted, not {held.plain!r}")
        for group, sizes in held.plain:
            end = at + sum(sizes)
            if end > len(parts):
                raise ValueError(f"{len(parts):,} parts are held, and the groups have more")
            self._filler(lane, group).load(parts[at:end], sizes)
            at = end
        if at != len(parts):
            raise ValueError(f"{len(parts):,} parts are held, and the groups have {at:,}")

    # -- payload -------------------------------------------------------------------------------------------------

    def group_length(self, group: list[Part]) -> int:
        return self._sequences.length(group)

    def build(self, parts: list[tuple[Record, int, int]]) -> Record:
        return self._sequences.build(parts)

    def collate(self, groups: list[list[Part]], empty: Callable[..., Any]) -> Columns:
        """The batch of these sequences, parts being (handle, start, stop), as `build` and a stack would make it."""
        return self._sequences.collate(groups, empty)


def _one_of(setting: str, value: Any, choices: Iterable[str]) -> str:
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"pack({setting}={value!r}): it must be one of {', '.join(choices)}")
    return value


def _groups(homogeneous: Any) -> str | list[list[str]] | None:
    """The setting `homogeneous` in one form: None, "dataset", or lists of names, all sorted."""
    if homogeneous is None:
        return None
    if homogeneous == "dataset":
        return "dataset"
    groups = homogeneous.values() if isinstance(homogeneous, Mapping) else homogeneous
    found = [_names(group) for group in groups] if isinstance(groups, Iterable) else []
    if not found or not all(found):
        raise ConfigError(
            f"pack(homogeneous={homogeneous!r}): None, 'dataset', or groups of names of datasets are wanted, as "
            "[['web', 'books'], ['code']] or {'text': ['web', 'books'], 'code': ['code']}"
        )
    names = list(chain.from_iterable(found))
    for name in sorted(names):
        if names.count(name) > 1:
            raise ConfigError(f"pack(homogeneous=...): dataset {name!r} is named twice; it can be in one group only")
    return sorted(found)


def _names(group: Any) -> list[str]:
    """The names of a group; none where it is no group."""
    names = [] if isinstance(group, str) or not isinstance(group, Iterable) else list(group)
    return sorted(names) if all(isinstance(name, str) for name in names) else []


def _group_of(groups: list[list[str]], datasets: Sequence[str]) -> list[int]:
    """The number of each dataset's group. Those that no group names are one more group together."""
    number = {name: i for i, group in enumerate(groups) for name in group}
    for name in number:
        if name not in datasets:
            import difflib

            near = difflib.get_close_matches(name, datasets, n=1, cutoff=0.4)
            remedy = f"did you mean {near[0]!r}?" if near else f"the datasets are {', '.join(datasets)}"
            raise ConfigError(f"pack(homogeneous=...): {name!r} is no dataset of this pipeline; {remedy}")
    return [number.get(name, len(groups)) for name in datasets]
