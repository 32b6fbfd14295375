"""The contract kit: the package's own operators and accumulators keep the contract, every kind of breach is named."""

from __future__ import annotations

import random
import re
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

import zephon as zp
from zephon.ops.accumulator import Accumulator, Emitted, Held, Key, Part, Ref
from zephon.ops.base import Operator, Rows
from zephon.ops.ensure_mixture import EnsureMixture
from zephon.ops.filter import Filter
from zephon.ops.flat_map import FlatMap
from zephon.ops.map import Map
from zephon.ops.map_batches import GroupBy, MapBatches
from zephon.ops.pack import Pack
from zephon.ops.shuffle import Shuffle
from zephon.ops.stateful_map import Machine
from zephon.ops.tokenize import Tokenize
from zephon.record import Record
from zephon.testing import contracts, recipes
from zephon.testing.contracts import ContractBroken, check_accumulator, check_machine, check_operator
from zephon.testing.machines import Limit, Mean, Ranks, Residue

RECORDS: list[Record] = [
    {
        "id": i,
        "text": "word " * (i % 7),
        "input_ids": np.arange(i % 6),
        "labels": np.arange(i % 6) * i,
        "tags": ["a", i],
    }
    for i in range(25)  # not a multiple of what any accumulator here groups
]

# -- what keeps the contract -------------------------------------------------------------------------------------------


def noisy(record: Record, rng: np.random.Generator) -> Record:
    return {**record, "noise": float(rng.random())}


def cut(record: Record) -> list[Record]:
    return [{**record, "piece": word} for word in record["text"].split()]


@pytest.mark.parametrize(
    "operator",
    [
        Map(noisy),
        Map(recipes.Change(), name="change"),  # in place, but nothing inside the record
        Filter(lambda record: record["id"] % 3, name="third"),
        FlatMap(cut),
        Tokenize(recipes.Words(), max_length=3),
        Tokenize(recipes.Words(), max_length=3, overflow="truncate"),
        Map(lambda record: {"x": 1 // record["id"]}, on_error="skip"),
    ],
    ids=lambda operator: operator.name or operator.method,
)
def test_good_operators(operator: Operator) -> None:
    check_operator(operator, RECORDS)


def bound(pack: Pack) -> Pack:
    pack.bind(["a", "b"])
    return pack


@pytest.mark.parametrize(
    "make",
    [
        lambda: Shuffle(5),
        lambda: Shuffle(1),
        lambda: Shuffle(1000),
        lambda: Shuffle(5, "block"),
        lambda: EnsureMixture({"a": 2, "b": 1}, 4),
        lambda: EnsureMixture({"a": 1, "b": 9}, 6, "tokens"),
        lambda: EnsureMixture({"a": 1, "b": 9}, 2, strict=True),
        lambda: Pack(8),
        lambda: Pack(3),
        lambda: Pack(3, oversize="truncate"),
        lambda: Pack(3, oversize="drop"),
        lambda: Pack(3, oversize="error"),
        lambda: Pack(4, min_length=2, max_sequences=2),
        lambda: Pack(4, "first_fit", num_bins=2),
        lambda: Pack(4, "first_fit", "truncate", num_bins=3, max_sequences=2, homogeneous="dataset"),
        lambda: Pack(7, "best_fit", num_bins=3),
        lambda: Pack(3, "best_fit", min_length=2, num_bins=1, homogeneous="dataset"),
        lambda: Pack(7, "best_fit_wrap", num_bins=4, fields={"labels": -100}),
        lambda: Pack(4, "best_fit_wrap", "drop", num_bins=3, min_length=2, max_sequences=2),
        lambda: bound(Pack(9, "best_fit", num_bins=3, homogeneous=[["b"]])),
        lambda: Pack(9, "first_fit", num_bins=3, output="list", length="id", oversize="drop"),
        lambda: GroupBy(MapBatches(recipes.Reverse(), 5)),
        recipes.Pairs,
        lambda: recipes.SortRuns(4),
    ],
)
def test_good_accumulators(make: Callable[[], Accumulator]) -> None:
    check_accumulator(make, RECORDS)
    check_accumulator(make, RECORDS[:2], lanes=2, seed=5)


@pytest.mark.parametrize(
    ("machine", "into"), [(Limit(2), None), (Mean(4), "mean"), (Ranks(3), "rank"), (Ranks(40), "rank")]
)
def test_good_machines(machine: Machine, into: str | None) -> None:
    check_machine(lambda: machine, Residue(5), RECORDS, into)
    check_machine(lambda: machine, Residue(5), RECORDS[:2], into, lanes=2, seed=5)


class OneForAll(Limit):
    """A machine that counts over all lanes."""

    counts: ClassVar[dict[Any, int]] = {}

    def push(self, state: dict[Any, int], key: Any) -> bool:
        return super().push(self.counts, key)


class Forgets(Limit):
    """A machine whose state says nothing."""

    def state(self, state: dict[Any, int]) -> Any:
        return {}


class Shares(Limit):
    """A machine with one state for all lanes and windows."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        object.__setattr__(self, "whole", {})

    def init(self, lane: int) -> dict[Any, int]:
        return self.whole  # type: ignore[attr-defined, no-any-return]


class Chance(Limit):
    """A machine that throws a coin."""

    def push(self, state: dict[Any, int], key: Any) -> bool:
        return random.random() < 0.5


class Unsorted(Limit):
    """A machine whose state is a set."""

    def init(self, lane: int) -> Any:
        return set()

    def push(self, state: Any, key: Any) -> bool:
        state.add(key)
        return True


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: OneForAll(1), "two instances with the same key let different things go|remembers|across lanes"),
        (lambda: Forgets(1), "does not go on where its state was taken"),
        (lambda: Unsorted(1), r"raised in state\(\): .*of type set, which would come back as a list"),
        (
            lambda: Chance(1),
            "let different things go; let the machine decide by its state and the keys of records alone, ",
        ),
        (lambda: Shares(1), "remembers something of the window before|keeps state across lanes"),
    ],
)
def test_bad_machines(make: Callable[[], Machine], says: str) -> None:
    with pytest.raises(ContractBroken, match=says):
        check_machine(make, Residue(5), RECORDS)


def test_examples_of_the_docstring() -> None:
    """They run as they stand, also in a pipeline."""
    blocks = re.split(r"\n(?=    import zephon as zp\n)", contracts.__doc__ or "")[1:]
    names: dict[str, Any] = {}
    for block in blocks:
        code = "\n".join(line for line in block.split("\n") if not line or line.startswith("    "))
        exec(textwrap.dedent(code), names)
    assert len(blocks) == 2
    zp = names["zp"]
    source = zp.StaticMixture(zp.Dataset.from_list("d", [{"text": "Ab"}, {"text": ""}, {"text": "Cd"}]), shuffle="none")
    pipeline = zp.Pipeline(source).apply(names["Lower"]()).apply(names["Pairs"]()).options(runner="inline")
    assert [batch["text"] for batch in pipeline] == [["ab cd"]]
    assert pipeline.counts()["dropped"] == {0: {"lower.filtered": 1}}


# -- operators that break it -------------------------------------------------------------------------------------------


class Op(Operator):
    """One operator for one function."""

    method = "op"

    def __init__(self, fn: Callable[..., Any] = lambda record: record, reasons: tuple[str, ...] = ()) -> None:
        self._fn, self.reasons = fn, reasons

    def process(self, record: Record) -> Any:
        return self._fn(record)


class Claims(Op):
    """Two for one, and says that it is one for one."""

    one_to_one = True

    def process(self, record: Record) -> Any:
        return [record, dict(record)]


class Counting(Op):
    def __init__(self) -> None:
        super().__init__()
        self._calls = 0

    def process(self, record: Record) -> Record:
        self._calls += 1
        return {**record, "call": self._calls}


class CountingInPublic(Op):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def process(self, record: Record) -> Record:
        self.calls += 1
        return record


class Previous(Op):
    """Looks at the record before, and forgets it where a task ends: alone, each record gives the same."""

    def run(self, rows: Rows) -> None:
        before = 0
        for record in rows.records:
            record["before"], before = before, record["id"]


class OneResult(Op):
    """Fills the same list for every record."""

    def __init__(self) -> None:
        super().__init__()
        self._words: list[str] = []

    def process(self, record: Record) -> Record:
        self._words[:] = [str(record["id"])]
        return {**record, "words": self._words}


class Forgetful(Op):
    """Knows something that does not travel."""

    def __init__(self) -> None:
        super().__init__()
        self._known = 7

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_known": 0}

    def process(self, record: Record) -> Record:
        return {**record, "known": self._known}


class Locked(Op):
    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()


class Dated(Op):
    def settings(self) -> dict[str, Any]:
        return {"made": time.perf_counter_ns()}


class BadSettings(Op):
    def settings(self) -> dict[str, Any]:
        return {"lock": threading.Lock()}


class NoSetup(Op):
    def setup(self) -> None:
        raise FileNotFoundError("vocabulary.txt")


class Uneven(Op):
    def run(self, rows: Rows) -> None:
        rows.records = rows.records[:0]


class Backwards(Op):
    def run(self, rows: Rows) -> None:
        rows.records, rows.index = rows.records[::-1], list(rows.index)[::-1]


def append(record: Record) -> Record:
    record["tags"].append("seen")
    return record


@pytest.mark.parametrize(
    ("operator", "message"),
    [
        (Op(lambda record: {**record, "x": random.random()}), "is not deterministic"),
        (Op(lambda record: {**record, "x": time.perf_counter_ns()}), "is not deterministic"),
        (Claims(), "says one_to_one, and makes 2 records of record 0"),
        (Counting(), "keeps state between calls"),
        (CountingInPublic(), r"settings\(\) that change with use"),
        (Previous(), "when other records come with it"),
        (OneResult(), "share something that a later record changes"),
        (Forgetful(), "travelled by cloudpickle"),
        (Locked(), "cannot be sent to a worker process"),
        (Dated(), r"other settings\(\) in a copy"),
        (BadSettings(), "no plain data for the fingerprint"),
        (NoSetup(), r"raised in setup\(\): FileNotFoundError: vocabulary"),
        (Uneven(), "must stay of one length"),
        (Backwards(), "reordered the records"),
        (Op(append), "changes a value inside record 0 in place"),
        (Op(lambda record: None), r"reason 'filtered', which it does not declare: .* reasons = \('filtered',\)"),
        (Op(lambda record: 7), "does not take record 0: .* returned int"),
        (Op(lambda record: [record, 7]), "does not take record 0: .* a child is of type int"),
        (Op(lambda record: record["nothing"]), "does not take record 0: .*KeyError"),
    ],
)
def test_broken_operators(operator: Operator, message: str) -> None:
    with pytest.raises(ContractBroken, match=message):
        check_operator(operator, RECORDS)


@pytest.mark.parametrize("number", [2, 20, 40])
def test_a_flush_that_loses_is_found_where_records_leave_no_rest(number: int) -> None:
    with pytest.raises(ContractBroken, match="lost records"):
        check_accumulator(LosesPairs, [{"id": i, "text": "word"} for i in range(number)])


def test_wrong_use() -> None:
    with pytest.raises(ContractBroken, match=r"no zephon\.Operator"):
        check_operator(len, RECORDS)  # type: ignore[arg-type]
    with pytest.raises(ContractBroken, match="needs records"):
        check_operator(Op(), [])
    with pytest.raises(ContractBroken, match=r"no zephon\.Accumulator"):
        check_accumulator(dict, RECORDS)  # type: ignore[arg-type]
    with pytest.raises(ContractBroken, match="needs two lanes"):
        check_accumulator(lambda: Shuffle(3), RECORDS, lanes=1)
    assert issubclass(ContractBroken, AssertionError)


# -- accumulators that break it ----------------------------------------------------------------------------------------


class Runs(Accumulator):
    """A sound one: runs of three. Each subclass breaks one thing."""

    method = "runs"
    batched = True
    measures = True
    size = 3

    def __init__(self) -> None:
        self._held: dict[int, list[Part]] = {}

    def measure(self, record: Record) -> int:
        return 1 + len(record["text"])

    def open(self, lane: int, key: Key) -> None:
        self._held[lane] = []

    def push(self, lane: int, refs: Sequence[Ref]) -> Emitted:
        emitted = Emitted()
        for trigger, (cursor, length, _) in enumerate(refs):
            self._held[lane].append((cursor, 0, length))
            if len(self._held[lane]) == self.size:
                emitted.add(trigger, self._held[lane])
                self._held[lane] = []
        return emitted

    def flush(self, lane: int) -> Emitted:
        emitted = Emitted()
        if self._held[lane]:
            emitted.add(0, self._held[lane])
        self._held[lane] = []
        return emitted

    def build(self, parts: list[tuple[Record, int, int]]) -> Record:
        return {"ids": [record["id"] for record, _, _ in parts]}


def test_the_sound_ones() -> None:
    check_accumulator(Runs, RECORDS)
    check_accumulator(Kept, RECORDS)
    check_accumulator(AllPlain, RECORDS)


class MixesLanes(Runs):
    """One buffer for all lanes."""

    def open(self, lane: int, key: Key) -> None:
        self._held.setdefault(0, [])

    def push(self, lane: int, refs: Sequence[Ref]) -> Emitted:
        return super().push(0, refs)

    def flush(self, lane: int) -> Emitted:
        return super().flush(0)


class CountsOverLanes(Runs):
    """Groups by lane, but how long they are depends on a count over all lanes."""

    def __init__(self) -> None:
        super().__init__()
        self._pushed = 0

    def open(self, lane: int, key: Key) -> None:
        super().open(lane, key)
        self._pushed = 0

    def push(self, lane: int, refs: Sequence[Ref]) -> Emitted:
        emitted = Emitted()
        for trigger, (cursor, length, _) in enumerate(refs):
            self._held[lane].append((cursor, 0, length))
            self._pushed += 1
            if self._pushed % 5 == 0:
                emitted.add(trigger, self._held[lane])
                self._held[lane] = []
        return emitted


class CutsMatter(Runs):
    """Lets everything go at the end of each push."""

    def push(self, lane: int, refs: Sequence[Ref]) -> Emitted:
        emitted = super().push(lane, refs)
        if self._held[lane] and len(refs) > 1:
            emitted.add(len(refs) - 1, self._held[lane])
            self._held[lane] = []
        return emitted


class Loses(Runs):
    """Forgets what is held at a flush."""

    def flush(self, lane: int) -> Emitted:
        self._held[lane] = []
        return Emitted()


class LosesPairs(Loses):
    """Forgets what is held at a flush, in windows that a whole number of groups may fill."""

    size = 2


class LosesUnits(Runs):
    """Emits all but the last unit of each record."""

    def push(self, lane: int, refs: Sequence[Ref]) -> Emitted:
        return super().push(lane, [(cursor, length - 1, component) for cursor, length, component in refs])


class Doubles(Runs):
    """Emits the last record of a group again at the flush."""

    def flush(self, lane: int) -> Emitted:
        emitted = super().flush(lane)
        for group in list(emitted.groups):
            emitted.add(0, group[-1:])
        return emitted


class Overlaps(Runs):
    """Two pieces of one record with a common unit."""

    def push(self, lane: int, refs: Sequence[Ref]) -> Emitted:
        emitted = Emitted()
        for trigger, (cursor, length, _) in enumerate(refs):
            emitted.add(trigger, [(cursor, 0, length), (cursor, length - 1, length)])
        return emitted


class TooFar(Runs):
    def push(self, lane: int, refs: Sequence[Ref]) -> Emitted:
        return super().push(lane, [(cursor, length + 1, component) for cursor, length, component in refs])


class HoldsOn(Runs):
    """A flush lets one group go and keeps another."""

    size = 100

    def flush(self, lane: int) -> Emitted:
        emitted = Emitted()
        if self._held[lane]:
            emitted.add(0, self._held[lane][:2])
        self._held[lane] = self._held[lane][2:]
        return emitted


class Leaks(Runs):
    """What is left at a flush begins the next window."""

    def __init__(self) -> None:
        super().__init__()
        self._later: dict[int, list[Part]] = {}

    def open(self, lane: int, key: Key) -> None:
        self._held[lane] = self._later.pop(lane, [])

    def flush(self, lane: int) -> Emitted:
        emitted = Emitted()
        emitted.groups, self._later[lane] = [[part] for part in self._held[lane][1:]], self._held[lane][:1]
        for part in self._held[lane][:1]:
            emitted.add(0, [part])  # delivered now, and once more later
        emitted.triggers, self._held[lane] = [0] * len(emitted.groups), []
        return emitted


class NoReset(Runs):
    """open keeps what is held: only a flush empties it."""

    def open(self, lane: int, key: Key) -> None:
        self._held.setdefault(lane, [])


class CountsOn(Runs):
    """A running number that open does not reset decides where groups end."""

    def __init__(self) -> None:
        super().__init__()
        self._number: dict[int, int] = {}

    def push(self, lane: int, refs: Sequence[Ref]) -> Emitted:
        emitted = Emitted()
        for trigger, (cursor, length, _) in enumerate(refs):
            self._held[lane].append((cursor, 0, length))
            self._number[lane] = self._number.get(lane, 0) + 1
            if self._number[lane] % 4 == 0:
                emitted.add(trigger, self._held[lane])
                self._held[lane] = []
        return emitted


class FallingTriggers(Runs):
    def push(self, lane: int, refs: Sequence[Ref]) -> Emitted:
        emitted = Emitted()
        for trigger, (cursor, length, _) in reversed(list(enumerate(refs))):
            emitted.add(trigger, [(cursor, 0, length)])
        return emitted


class TriggerTooLarge(Runs):
    def push(self, lane: int, refs: Sequence[Ref]) -> Emitted:
        emitted = super().push(lane, refs)
        emitted.triggers = [trigger + 1 for trigger in emitted.triggers]
        return emitted


class NoTriggers(Runs):
    def push(self, lane: int, refs: Sequence[Ref]) -> Emitted:
        emitted = super().push(lane, refs)
        emitted.triggers = []
        return emitted


class EmptyGroup(Runs):
    def flush(self, lane: int) -> Emitted:
        emitted = Emitted()
        emitted.add(0, self._held[lane])
        self._held[lane] = []
        return emitted


class NotPreserving(Runs):
    preserves = True


class ChangesRefs(Shuffle):
    """Says that it preserves, and changes a length."""

    measures = True
    measure = Runs.measure

    def push(self, lane: int, refs: Sequence[Ref]) -> Emitted:
        return super().push(lane, [(cursor, length + 1, component) for cursor, length, component in refs])


class SecretDrop(Runs):
    def push(self, lane: int, refs: Sequence[Ref]) -> Emitted:
        emitted = Emitted()
        for trigger in range(len(refs)):
            emitted.drop(trigger, "boring")
        return emitted


class ZeroDrop(SecretDrop):
    reasons = ("boring",)

    def push(self, lane: int, refs: Sequence[Ref]) -> Emitted:
        emitted = Emitted()
        for trigger in range(len(refs)):
            emitted.drop(trigger, "boring", 0)
        return emitted


class Random(Runs):
    """Draws from a global."""

    def push(self, lane: int, refs: Sequence[Ref]) -> Emitted:
        emitted = Emitted()
        for trigger, (cursor, length, _) in enumerate(refs):
            self._held[lane].append((cursor, 0, length))
            if random.random() < 0.5:
                emitted.add(trigger, self._held[lane])
                self._held[lane] = []
        return emitted


class InTheClass(Runs):
    """State in the class, so that copies share it."""

    shared: ClassVar[dict[int, list[Part]]] = {}

    def __init__(self) -> None:
        super().__init__()
        self._held = InTheClass.shared

    def __deepcopy__(self, memo: Any) -> InTheClass:
        return InTheClass()


class NotCopied(Runs):
    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()


class OpenState(Runs):
    """State in public attributes, which the default settings() would take for a definition."""

    def __init__(self) -> None:
        super().__init__()
        self.windows = 0

    def open(self, lane: int, key: Key) -> None:
        super().open(lane, key)
        self.windows += 1


class Nothing(Runs):
    def push(self, lane: int, refs: Sequence[Ref]) -> Emitted:
        return None  # type: ignore[return-value]


class RaisesInFlush(Runs):
    def flush(self, lane: int) -> Emitted:
        raise ZeroDivisionError("no tokens")


class MeasuresText(Runs):
    def measure(self, record: Record) -> int:
        return record["text"]  # type: ignore[no-any-return]


class MeasuresOnce(Runs):
    def measure(self, record: Record) -> int:
        record["measured"] = True
        return 1


class MeasureRaises(Runs):
    def measure(self, record: Record) -> int:
        return len(record["tokens"])


class BuildsList(Runs):
    def build(self, parts: list[tuple[Record, int, int]]) -> Record:
        return [record for record, _, _ in parts]  # type: ignore[return-value]


class BuildsInPlace(Runs):
    def build(self, parts: list[tuple[Record, int, int]]) -> Record:
        parts[0][0]["tags"].append("first")
        return {"tags": parts[0][0]["id"]}


class BuildsByChance(Runs):
    def build(self, parts: list[tuple[Record, int, int]]) -> Record:
        return {"x": random.random()}


class BuildRaises(Runs):
    def build(self, parts: list[tuple[Record, int, int]]) -> Record:
        return parts[0][0]["nothing"]  # type: ignore[no-any-return]


class BadLength(Runs):
    def group_length(self, group: list[Part]) -> int:
        return 0.5  # type: ignore[return-value]


class Kept(Runs):
    """A sound one with a state."""

    def state(self, lane: int) -> Held:
        return Held(self._held[lane].copy())

    def load(self, lane: int, key: Key, held: Held) -> None:
        self._held[lane] = list(held.items)


class ForgetsItsState(Kept):
    def load(self, lane: int, key: Key, held: Held) -> None:
        self._held[lane] = []


class LiveState(Kept):
    def state(self, lane: int) -> Held:
        return Held(self._held[lane])


class OddPlain(Kept):
    def state(self, lane: int) -> Held:
        return Held(self._held[lane].copy(), object())


class SetInPlain(Kept):
    """Deep inside, where no later decision meets it."""

    def state(self, lane: int) -> Held:
        return Held(self._held[lane].copy(), {"seen": [1, {"names": [{"a", "b"}]}]})


class TupleInPlain(Kept):
    def state(self, lane: int) -> Held:
        return Held(self._held[lane].copy(), [[1, (2, 3)]])


class TooLargeInPlain(Kept):
    def state(self, lane: int) -> Held:
        return Held(self._held[lane].copy(), {"hash": 2**70})


class NotHeld(Kept):
    def state(self, lane: int) -> Held:
        return {"items": self._held[lane].copy()}  # type: ignore[return-value]


class AllPlain(Kept):
    """All that a state carries."""

    plain: ClassVar[Any] = {"a": [None, True, 1, -(2**63), 2**64 - 1, 0.5, "b", b"c", [], {}], (1, b"d"): {2: [[3]]}}

    def state(self, lane: int) -> Held:
        return Held(self._held[lane].copy(), self.plain)

    def load(self, lane: int, key: Key, held: Held) -> None:
        assert held.plain == self.plain
        super().load(lane, key, held)


class HoldsOthers(Kept):
    def state(self, lane: int) -> Held:
        return Held([("nobody", 0, 1)])


class OtherCollate(Pack):
    """Builds another record than what its batches hold."""

    def build(self, parts: list[tuple[Record, int, int]]) -> Record:
        return {**super().build(parts), "num_pad": -1}


class ReadsMore(Pack):
    """Builds of a field that it does not say it reads."""

    def build(self, parts: list[tuple[Record, int, int]]) -> Record:
        return {**super().build(parts), "first": parts[0][0]["id"]}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (MixesLanes, "keeps state across lanes"),
        (CountsOverLanes, "keeps state across lanes"),
        (CutsMatter, "depends on how refs are cut"),
        (Loses, "lost records: .* and 0 were counted"),
        (LosesUnits, "lost records"),
        (Doubles, "doubled a record"),
        (Overlaps, "doubled a record"),
        (TooFar, r"emitted the range 0\.\.\d+ of a record of length"),
        (HoldsOn, r"still holds something after flush\(\)"),
        (Leaks, "not pushed in this window"),
        (NoReset, r"does not reset in open\(\)"),
        (CountsOn, "remembers something of the window before"),
        (FallingTriggers, "falling triggers"),
        (TriggerTooLarge, "gave the trigger 1 for 1 refs"),
        (NoTriggers, "groups and 0 triggers"),
        (EmptyGroup, r"emitted \[\]: a group is a list of at least one"),
        (NotPreserving, "says preserves = True and emitted"),
        (lambda: ChangesRefs(4), "refs must leave unchanged"),
        (SecretDrop, r"reason 'boring', which it does not declare.* reasons = \('boring',\)"),
        (ZeroDrop, "drops 0 for 'boring'"),
        (Random, "two instances with the same key"),
        (InTheClass, "shares state with its copies"),
        (NotCopied, r"cannot be copied by copy\.deepcopy"),
        (OpenState, r"settings\(\) that change with use"),
        (Nothing, r"returned NoneType from push\(\)"),
        (RaisesInFlush, r"raised in flush\(\): ZeroDivisionError: no tokens"),
        (MeasuresText, r"from measure\(\): a whole number"),
        (MeasuresOnce, r"measure\(\) that is no function of the record"),
        (MeasureRaises, r"raised in measure\(\) on record 0: KeyError"),
        (BuildsList, r"returned list from build\(\)"),
        (BuildsInPlace, r"changes the records that it is given in build\(\)"),
        (BuildsByChance, r"build\(\) that is no function of the pieces"),
        (BuildRaises, r"raised in build\(\): KeyError"),
        (BadLength, r"gave the length 0\.5 from group_length\(\)"),
        (lambda: ReadsMore(8), r"raised in build\(\): KeyError"),
        (ForgetsItsState, "does not go on where its state was taken"),
        (LiveState, "changes a state that it gave away"),
        (
            OddPlain,
            r"Held\.plain is of type object, which would come back as something else, or not at all",
        ),
        (
            SetInPlain,
            r"Held\.plain\['seen'\]\[1\]\['names'\]\[0\] is of type set, which would come back as a list; give None",
        ),
        (TupleInPlain, "is of type tuple, which would come back as a list"),
        (TooLargeInPlain, r"Held\.plain\['hash'\] is a whole number beyond 64 bits"),
        (NotHeld, r"state\(\) returned dict: a zephon\.Held is wanted"),
        (HoldsOthers, "holds .*: refs or parts are wanted"),
        (lambda: OtherCollate(8), r"another batch from collate\(\)"),
    ],
)
def test_broken_accumulators(make: Callable[[], Accumulator], message: str) -> None:
    with pytest.raises(ContractBroken, match=message):
        check_accumulator(make, RECORDS)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (SetInPlain, "Held.plain['seen'][1]['names'][0] is of type set, which would come back as a list"),
        (TooLargeInPlain, "Held.plain['hash'] is a whole number beyond 64 bits"),
        (NotHeld, "state() returned dict: a zephon.Held is wanted"),
    ],
)
def test_an_engine_refuses_a_state_that_cannot_be_kept(make: Callable[[], Accumulator], says: str) -> None:
    """It names the accumulator, which need not be the first of its row."""
    rows = [{**record, "id": i} for i, record in enumerate(RECORDS * 100)]
    source = zp.StaticMixture(zp.Dataset.from_list("rows", rows), seed=1)
    pipeline = zp.Pipeline(source).shuffle(4).apply(make(), name="mine").batch(4)
    with pytest.raises(zp.errors.OperatorError) as failure:
        list(pipeline.options(canonical_replicas=1, runner="inline", flush_every_k_chunks=0))
    assert "operator 'mine' failed on lane 0, at a state" in str(failure.value)
    assert says in str(failure.value)
