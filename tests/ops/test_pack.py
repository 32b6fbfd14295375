"""pack: equal to documents laid end to end and cut, window by window."""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zephon as zp
from zephon.canonical import canonical_bytes
from zephon.ipc.columns import make_columns
from zephon.ops.accumulator import Accumulator, Held, Key
from zephon.ops.batch import stack_records
from zephon.ops.pack import Pack
from zephon.record import Block, Lineage, record_of

from ..cases.helpers import digests, lost, on, pipeline, resumed, saved

WORKERS = [0, 2]
PAD = -7
Row = tuple[list[int], list[int], list[int], int]


def documents(lengths: list[int], first: int = 0) -> list[dict[str, Any]]:
    """Documents whose tokens run through all of them."""
    starts = np.cumsum([first, *lengths])
    return [{"input_ids": np.arange(at, at + n)} for at, n in zip(starts.tolist(), lengths, strict=False)]


def laid_out(window: list[list[int]], size: int) -> list[Row]:
    """The reference: (tokens, positions, segments, pads) of every sequence of a window."""
    found: list[Row] = []
    cells: list[tuple[int, int, int]] = []  # (token, document, index of the token in the document)
    for number, tokens in enumerate(window):
        cells += [(token, number, i) for i, token in enumerate(tokens)]
    for at in range(0, len(cells), size):
        piece = cells[at : at + size]
        ids, positions, segments = [], [], []
        before, segment, start = None, 0, 0
        for token, number, i in piece:
            if number != before:
                before, segment, start = number, segment + 1, i
            ids.append(token)
            positions.append(i - start)
            segments.append(segment)
        pads = size - len(piece)
        found.append((ids + [PAD] * pads, positions + [0] * pads, segments + [0] * pads, pads))
    return found


def sequences(batches: Any) -> list[Row]:
    """(tokens, positions, segments, pads) of every sequence of the batches."""
    names = ("input_ids", "position_ids", "segment_ids", "num_pad")
    found: list[Row] = []
    for batch in batches:
        assert sorted(batch) == sorted(names)
        assert all(batch[name].dtype == np.int64 for name in names)
        found += zip(*(batch[name].tolist() for name in names), strict=True)
    return found


def policy(tokens: list[int], size: int, oversize: str) -> list[int]:
    if len(tokens) <= size or oversize == "split":
        return tokens
    return tokens[:size] if oversize == "truncate" else []


LENGTHS = st.lists(st.one_of(st.integers(0, 12), st.integers(0, 60)), max_size=30)


@given(
    lengths=LENGTHS,
    size=st.integers(1, 16),
    oversize=st.sampled_from(["split", "truncate", "drop"]),
    chunk=st.integers(1, 7),
    flush=st.integers(1, 3),
    lanes=st.integers(1, 3),
    batch=st.integers(1, 4),
)
def test_it_is_the_plain_layout(
    lengths: list[int], size: int, oversize: str, chunk: int, flush: int, lanes: int, batch: int
) -> None:
    records = documents(lengths or [0])
    line = pipeline(records, chunk_size=chunk).pack(size, oversize=oversize, pad_id=PAD).batch(batch)
    line = on(line, 0).options(canonical_replicas=lanes, flush_every_k_chunks=flush)
    batches = list(line)
    source = line._session.resolved.source
    for lane in range(lanes):
        expected: list[Row] = []
        for first in range(0, len(records) + 1, flush):
            rows = [r for i in range(first, first + flush) for r in source.chunk(lane, lanes, 0, i).row.tolist()]
            window = [policy(records[r]["input_ids"].tolist(), size, oversize) for r in rows]
            expected += laid_out([tokens for tokens in window if tokens], size)
        assert sequences(b for b in batches if b.lane_id == lane) == expected
    check_counts(line.counts()["dropped"], lengths or [0], size, oversize)


def check_counts(dropped: dict[int, dict[str, int]], lengths: list[int], size: int, oversize: str) -> None:
    """Every token and document that is not there is counted."""
    total: dict[str, int] = {}
    for reasons in dropped.values():
        for reason, amount in reasons.items():
            total[reason] = total.get(reason, 0) + amount
    assert total == lost(lengths, size, oversize)


@given(lengths=LENGTHS, size=st.integers(1, 16), cuts=st.lists(st.integers(0, 30), max_size=4))
def test_how_refs_are_handed_over_does_not_matter(lengths: list[int], size: int, cuts: list[int]) -> None:
    refs = [(i, n, 0) for i, n in enumerate(lengths)]

    def run(stops: list[int]) -> tuple[list[Any], list[int]]:
        pack = Pack(size)
        pack.open(3, Key(1, 3, 0, 0, "pack"))
        groups: list[Any] = []
        triggers: list[int] = []
        at = 0
        for stop in [*stops, len(refs)]:
            emitted = pack.push(3, refs[at:stop])
            groups += emitted.groups
            triggers += [at + trigger for trigger in emitted.triggers]
            at = stop
        return groups + pack.flush(3).groups, triggers

    assert run(sorted({min(cut, len(refs)) for cut in cuts})) == run([])
    assert run(list(range(len(refs)))) == run([])


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("lanes", [1, 3])
def test_a_resume_at_every_batch_and_what_is_between(lanes: int, workers: int) -> None:
    lengths = [(7 * i) % 23 for i in range(60)]
    line = pipeline(documents(lengths), chunk_size=4).shuffle(5).pack(8).shuffle(3).batch(2)
    line = line.options(canonical_replicas=lanes, flush_every_k_chunks=3)
    reference = digests(on(line, 0))
    for cut in range(0, len(reference) + 1, 3):
        part = on(line, workers, task_records=7).take(cut)
        assert digests(part) == reference[:cut]
        assert digests(resumed(line, saved(part))) == reference[cut:]


@pytest.mark.parametrize("workers", WORKERS)
def test_packing_through_a_later_stage_is_the_same(workers: int) -> None:
    """A map behind pack has the sequences built one by one; batch alone builds them in place."""
    line = pipeline(documents([5, 3, 9, 1, 0, 4])).pack(4, pad_id=PAD)
    direct = digests(on(line.batch(2), workers))
    assert digests(on(line.map(lambda record: record).batch(2), workers)) == direct
    assert digests(on(line.map_batches(lambda records: records, 2).batch(2), workers)) == direct
    one = next(iter(on(line.map(lambda record: {k: type(v).__name__ for k, v in record.items()}), workers)))
    assert [one[name] for name in sorted(one)] == [["ndarray"], ["int"], ["ndarray"], ["ndarray"]]


TOKENS: list[Any] = [
    [1, 2, 3],
    (1, 2, 3),
    np.array([1, 2, 3], np.int32),
    np.array([1, 2, 3], np.uint16),
    np.array([1, 2, 3], ">i8"),
    np.array([3, 2, 1])[::-1],
    np.array([1, 0, 2, 0, 3])[::2],
    range(1, 4),
]


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("number", range(len(TOKENS)))
def test_tokens_of_every_kind(number: int, workers: int) -> None:
    line = on(pipeline(2).map(lambda record: {"input_ids": TOKENS[number]}).pack(4, pad_id=PAD).batch(2), workers)
    assert sequences(line) == laid_out([[1, 2, 3]] * 2, 4)


NO_TOKENS: list[Any] = ["text", None, 3, np.int64(3), np.zeros((2, 2), int), [1.5, 2.5], np.array([1.5]), [[1], [2]]]
NO_TOKENS += [["a"], [None], [1, "b"], {1: 2}, {1, 2}, [2**63], np.array([2**63], np.uint64), b"ab"]


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("number", range(len(NO_TOKENS)))
@pytest.mark.parametrize("behind", [False, True])
def test_what_is_no_sequence_of_tokens_is_an_error_of_pack_on_that_record(
    number: int, behind: bool, workers: int
) -> None:
    """Never a value that was cut to fit, and never an error that names only the batch."""

    def make(record: dict[str, Any]) -> dict[str, Any]:
        return {"input_ids": NO_TOKENS[number] if record["id"] == 2 else [1, 2, 3, 4]}

    line = pipeline(4).map(make).pack(4)
    line = on(line.map(lambda record: record) if behind else line, workers)
    iterator = iter(line)
    assert [row[0] for row in sequences([next(iterator), next(iterator)])] == [[1, 2, 3, 4]] * 2
    with pytest.raises(zp.errors.OperatorError, match=r"'pack'.*row 2"):
        next(iterator)


@pytest.mark.parametrize("workers", WORKERS)
def test_a_missing_field_is_named_with_the_remedy(workers: int) -> None:
    line = on(pipeline([{"input_ids": [1]}, {"text": "no tokens"}]).pack(1), workers)
    iterator = iter(line)
    next(iterator)
    with pytest.raises(KeyError, match=r"'pack'.*row 1.*input_ids.*tokenize"):
        next(iterator)


@pytest.mark.parametrize("workers", WORKERS)
def test_another_field_and_origins(workers: int) -> None:
    records = [{"tokens": list(range(n)), "text": "left behind"} for n in (3, 0, 6, 1)]
    batches = list(on(pipeline(records).pack(4, field="tokens", pad_id=PAD).batch(1), workers))
    assert sequences(batches) == laid_out([[0, 1, 2], [0, 1, 2, 3, 4, 5], [0]], 4)
    assert [[origin[2] for origin in batch.origins[0]] for batch in batches] == [[0, 2], [2], [2, 3]]


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"max_length": 0}, "max_length"),
        ({"max_length": True}, "max_length"),
        ({"max_length": 4.0}, "max_length"),
        ({"max_length": 4, "algorithm": "best"}, "algorithm"),
        ({"max_length": 4, "oversize": "keep"}, "oversize"),
        ({"max_length": 4, "oversize": ""}, "oversize"),
        ({"max_length": 4, "pad_id": 0.5}, "pad_id"),
        ({"max_length": 4, "pad_id": 2**63}, "pad_id"),
        ({"max_length": 4, "pads": 1}, "pads"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(zp.errors.ConfigError, match=word):
        pipeline(3).pack(**settings)


class NoState(Pack):
    state, load = Accumulator.state, Accumulator.load


def test_never_flushing_is_refused_without_a_state() -> None:
    with pytest.raises(zp.errors.ConfigError, match=r"flush_every_k_chunks.*'pack'.*no state\(\) and load\(\)"):
        iter(pipeline(3).apply(NoState(4)).options(flush_every_k_chunks=0))


MASKS = ["none", "all", "some"]


@given(
    data=st.data(),
    size=st.integers(1, 12),
    dtype=st.sampled_from([np.int64, np.int32, np.uint16]),
    masks=st.sampled_from(MASKS),
    loss_mask=st.sampled_from([None, True, False]),
    pad=st.sampled_from([None, -100, 0.5, np.float32(1), True]),
)
def test_a_batch_from_columns_is_the_sequences_stacked(
    data: st.DataObject, size: int, dtype: Any, masks: str, loss_mask: bool | None, pad: Any
) -> None:
    """Whatever documents a sequence takes, from which blocks and in which order, and however these are held."""
    handles = []
    for _ in range(data.draw(st.integers(1, 3))):
        lengths = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=5))
        records = [{**d, "input_ids": d["input_ids"].astype(dtype), "id": 0} for d in documents(lengths, 100)]
        for number, record in enumerate(records):
            record["labels"] = record["input_ids"] % 2
            if masks == "all" or (masks == "some" and number % 2):
                record["loss_mask"] = record["input_ids"] % 2 == data.draw(st.integers(0, 1))
        kept = data.draw(st.sampled_from([records, make_columns(records), make_columns(records)]))
        block = Block(kept, Lineage([], range(len(records))))
        first = data.draw(st.integers(0, len(records) - 1))
        cut = Block(kept[first:], Lineage([], range(len(records) - first)))
        handles += [(block[i], n) for i, n in enumerate(lengths)] + [(cut[i], n) for i, n in enumerate(lengths[first:])]
    groups = groups_of(data, [(handle, n) for handle, n in handles if n], size)
    if not groups:
        return
    pack = Pack(size, pad_id=PAD, loss_mask=loss_mask, fields={} if pad is None else {"labels": pad})
    built = [pack.build([(record_of(handle), a, b) for handle, a, b in parts]) for parts in groups]
    wanted, found = stack_records(built), pack.collate(groups, np.empty)
    assert canonical_bytes({name: found[name] for name in sorted(found)}) == canonical_bytes(wanted)
    for record in built:
        check_along(record, size, masks, loss_mask, pad)


def groups_of(data: st.DataObject, full: list[Any], size: int) -> list[list[Any]]:
    """Sequences of at most `size` tokens out of documents, in order or as they come."""
    groups: list[list[Any]] = []
    for _ in range(data.draw(st.integers(1, 4)) if full else 0):
        groups.append([])
        filled = 0
        ordered = data.draw(st.booleans())
        for handle, n in full if ordered else data.draw(st.lists(st.sampled_from(full), min_size=1, max_size=6)):
            start = data.draw(st.integers(0, n - 1))
            stop = data.draw(st.integers(start + 1, n)) if not ordered else n
            stop = min(stop, start + size - filled)
            if stop > start:
                groups[-1].append((handle, start, stop))
                filled += stop - start
    return groups


def check_along(record: dict[str, Any], size: int, masks: str, loss_mask: bool | None, pad: Any) -> None:
    """The fields that are packed along have their dtype, the values of their tokens, and their padding."""
    end = size - record["num_pad"]
    if pad is not None:
        labels = record["labels"]
        assert labels.dtype == np.asarray(pad).dtype
        assert labels.shape == (size,)
        assert (labels[:end] == record["input_ids"][:end] % 2).all()
        assert (labels[end:] == pad).all()
    if loss_mask is False or (loss_mask is None and masks == "none"):
        assert "loss_mask" not in record
    elif loss_mask or masks == "all":
        mask = record["loss_mask"]
        assert mask.dtype == np.bool_
        assert not mask[end:].any()
        assert masks != "none" or mask[:end].all()


def test_other_fields_do_not_travel() -> None:
    """What pack leaves behind never leaves the worker: also what could not be sent to another process."""
    records = [{**record, "id": i} for i, record in enumerate(documents([5, 3, 9, 2]))]
    line = pipeline(records, chunk_size=2).map(with_a_lock).pack(4, pad_id=PAD).batch(2)
    wanted = sequences(line.options(runner="inline"))
    assert sequences(line.options(runner="threads", parallelism=2)) == wanted
    assert len(wanted) == 5
    if sys.platform == "linux":
        assert sequences(line.options(runner="process", parallelism=2)) == wanted


def with_a_lock(record: dict[str, Any]) -> dict[str, Any]:
    return {**record, "lock": threading.Lock()}


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("algorithm", ["wrap", "best_fit_wrap"])
def test_what_belongs_to_a_token_stays_with_it(algorithm: str, workers: int) -> None:
    """Also where a document is cut, and where it comes without a loss mask."""
    records: list[dict[str, Any]] = [{**r, "labels": -r["input_ids"]} for r in documents([5, 3, 9, 1, 4], 1)]
    for record in records[::2]:
        record["loss_mask"] = [int(token) % 2 for token in record["input_ids"]]
    masked = {int(token) for record in records[::2] for token in record["input_ids"] if not token % 2}
    line = pipeline(records).pack(4, algorithm, pad_id=0, fields={"labels": np.int32(7)}, loss_mask=True).batch(2)
    tokens = []
    for batch in on(line, workers):
        assert {k: str(v.dtype) for k, v in batch.items() if k in ("labels", "loss_mask")} == {
            "labels": "int32",
            "loss_mask": "bool",
        }
        for token, label, mask in zip(
            *(batch[k].reshape(-1) for k in ("input_ids", "labels", "loss_mask")), strict=True
        ):
            assert (label, mask) == ((-token, token not in masked) if token else (7, False))
            tokens += [int(token)] if token else []
    assert sorted(tokens) == list(range(1, 23))


WRONG: list[Any] = [
    ({"loss_mask": [1, 0]}, r"loss_mask.*\(2,\).*3 tokens"),
    ({"loss_mask": 1}, r"loss_mask.*\(\).*3 tokens"),
    ({"loss_mask": [1, 0.5, 0]}, r"loss_mask.*float64.*bool"),
    ({"loss_mask": [1, 2, 0]}, r"loss_mask.*int64.*bool"),
    ({"loss_mask": "abc"}, r"loss_mask.*shape"),
    ({"loss_mask": ["a", "b", "c"]}, r"loss_mask.*do not fit"),
    ({"labels": [1, 2, 3, 4]}, r"labels.*\(4,\).*3 tokens"),
    ({"labels": [1.5, 2, 3]}, r"labels.*float64.*int16"),
    ({"labels": [1, 2, 40_000]}, r"labels.*int64.*int16"),
    ({"labels": np.zeros((3, 2), int)}, r"labels.*\(3, 2\)"),
    ({}, r"no field 'labels'"),
]


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("number", range(len(WRONG)))
def test_a_field_that_does_not_match_its_tokens_is_an_error_of_that_record(number: int, workers: int) -> None:
    """Found where lengths are taken, in the worker; what came before it is delivered."""
    wrong, words = WRONG[number]
    good = {"input_ids": [1, 2, 3], "labels": [1, 2, 3], "loss_mask": [1, 0, 1]}
    bad = {"input_ids": [1, 2, 3], **({"labels": [1, 2, 3]} if "labels" not in wrong and wrong else {}), **wrong}
    line = on(pipeline([good, good, bad]).pack(3, fields={"labels": np.int16(0)}), workers)
    iterator = iter(line)
    next(iterator), next(iterator)
    with pytest.raises(zp.errors.OperatorError, match=rf"(?s)'pack'.*row 2\b.*{words}"):
        next(iterator)


LOST: list[tuple[Any, Any]] = [
    ([1e300, 2.0, 3.0], np.float32(0)),
    ([np.inf, 2.0, -1e39], np.float32(0)),
    (np.array([1, 7e4, 3], np.float32), np.float16(0)),
    ([1, 70_000, 3], np.float16(0)),
    ([1, 2049, 3], np.float16(0)),
    ([2**24 + 1, 2, 3], np.float32(0)),
    ([2**53 + 1, 2, 3], 0.0),
    ([-(2**53) - 1, 2, 3], 0.0),
    ([2**63 - 1, 2, 3], 0.0),
    (np.array([2**64 - 1, 2, 3], np.uint64), 0.0),
    (np.array([2**63, 2, 3], np.uint64), 0),
    ([-1, 2, 3], np.uint64(0)),
    ([1.0, 2.0, 3.0], 0),
    ([np.nan, 1.0, 0.0], False),
]
HELD: list[tuple[Any, Any]] = [
    ([0.1, 1e-300, 3.0], np.float32(0)),
    ([np.inf, np.nan, -np.inf], np.float32(0)),
    ([3.4028235e38, 2.0, 3.0], np.float32(0)),
    ([2048, -4096, 65_504], np.float16(0)),
    ([2**53, -(2**63), 2**60], 0.0),
    (np.array([2**63, 2, 3], np.uint64), np.float32(0)),
    ([True, False, True], np.float16(0)),
    ([True, False, True], np.int8(0)),
    (np.array([1, 2, 3], ">i4"), np.int64(0)),
    (np.array([1, 2, 3], ">i4"), np.float32(0)),
    ([-128, 127, 0], np.int8(0)),
    ([1.0, 0.0, 1.0], False),
]


@pytest.mark.parametrize(("values", "pad"), LOST)
def test_values_that_the_dtype_of_a_field_would_change_are_an_error(values: Any, pad: Any) -> None:
    line = on(pipeline([{"input_ids": [1, 2, 3], "w": values}]).pack(3, fields={"w": pad}), 0)
    dtypes = f"'w' holds {np.asarray(values).dtype} values that do not fit {np.asarray(pad).dtype}"
    with pytest.raises(zp.errors.OperatorError, match=rf"'pack' failed on lane 0, dataset 'toy'.*row 0: .*{dtypes}"):
        list(line)


@pytest.mark.parametrize(("values", "pad"), HELD)
def test_values_that_fit_the_dtype_of_a_field_are_packed(values: Any, pad: Any) -> None:
    (sample,) = on(pipeline([{"input_ids": [1, 2, 3], "w": values}]).pack(4, fields={"w": pad}), 0)
    (row,) = sample["w"]
    assert row.dtype == np.asarray(pad).dtype
    assert canonical_bytes(row) == canonical_bytes(np.array([*np.asarray(values), pad]).astype(row.dtype))


def two(**settings: Any) -> zp.Pipeline:
    """Documents of three datasets, told by their tokens: 1, 2, 3."""
    sets = [zp.Dataset.from_list(name, [{"input_ids": [i] * n} for n in (1, 2, 3, 4) * 6]) for i, name in NAMES]
    return zp.Pipeline(zp.StaticMixture(sets, seed=1, chunk_size=16)).pack(6, **settings).options(canonical_replicas=1)


NAMES = [(1, "web"), (2, "books"), (3, "code")]


@pytest.mark.parametrize("algorithm", ["wrap", "first_fit", "best_fit", "best_fit_wrap"])
@pytest.mark.parametrize(
    ("homogeneous", "groups"),
    [
        (None, [{1, 2, 3}]),
        ("dataset", [{1}, {2}, {3}]),
        ([["web", "books"], ["code"]], [{1, 2}, {3}]),
        ({"prose": ["web", "books"]}, [{1, 2}, {3}]),
        ([["code"]], [{1, 2}, {3}]),
    ],
)
def test_sequences_do_not_mix_groups(algorithm: str, homogeneous: Any, groups: list[set[int]]) -> None:
    line = on(two(algorithm=algorithm, homogeneous=homogeneous).batch(2), 0)
    rows = sequences(line)
    assert sum(6 - pads for *_, pads in rows) == 3 * 6 * 10
    found = [set(ids[: 6 - pads]) for ids, _, _, pads in rows]
    assert all(any(each <= group for group in groups) for each in found)
    assert any(len(each) > 1 for each in found) == any(len(group) > 1 for group in groups)
    part = on(line, 2).take(7)
    assert digests(part) + digests(resumed(line, saved(part))) == digests(on(line, 0))


@pytest.mark.parametrize("workers", WORKERS)
def test_a_list_keeps_records_whole(workers: int) -> None:
    records = [{"id": i, "image": np.full((2, i % 3 + 1), i), "patches": i % 5 + 1, "text": "x" * i} for i in range(30)]
    line = pipeline(records).pack(8, "best_fit", output="list", length="patches", num_bins=4).batch(2)
    seen = []
    for batch in on(line, workers):
        for found, num_pad in zip(batch["records"], batch["num_pad"].tolist(), strict=True):
            assert sum(record["patches"] for record in found) == 8 - num_pad
            seen += found
    assert sorted(record["id"] for record in seen) == list(range(30))
    for record in seen:
        assert record.keys() == records[0].keys()
        assert (record["image"] == records[record["id"]]["image"]).all()
        assert record["text"] == "x" * record["id"]
    by_function = pipeline(records).pack(8, "best_fit", output="list", length=lambda r: r["patches"], num_bins=4)
    assert digests(on(by_function.batch(2), 0)) == digests(on(line, 0))


@pytest.mark.parametrize("length", [-1, 1.5, None, True, "three"])
def test_a_length_that_is_none_is_an_error_of_that_record(length: Any) -> None:
    line = on(pipeline([{"n": 1}, {"n": length}]).pack(1, "first_fit", output="list", length="n"), 0)
    iterator = iter(line)
    next(iterator)
    with pytest.raises(zp.errors.OperatorError, match=r"'pack'.*row 1\b.*length of a record"):
        next(iterator)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"num_bins": 0}, "num_bins"),
        ({"max_sequences": 0}, "max_sequences"),
        ({"min_length": 0}, "min_length"),
        ({"min_length": 5}, "min_length"),
        ({"homogeneous": "datasets"}, "homogeneous"),
        ({"homogeneous": ["toy"]}, "homogeneous"),
        ({"homogeneous": []}, "homogeneous"),
        ({"homogeneous": 3}, "homogeneous"),
        ({"homogeneous": [["toys"]]}, r"'toys'.*did you mean 'toy'"),
        ({"homogeneous": [["toy"], ["toy"]]}, "'toy' is named twice"),
        ({"fields": "labels"}, "fields"),
        ({"fields": {"labels": "x"}}, "labels"),
        ({"fields": ["num_pad"]}, "num_pad"),
        ({"loss_mask": "yes"}, "loss_mask"),
        ({"loss_mask": True, "fields": ["loss_mask"]}, "loss_mask"),
        ({"output": "dict"}, "output"),
        ({"length": "n"}, "length"),
        ({"output": "list"}, r"cannot be cut.*'first_fit' or 'best_fit'"),
        ({"output": "list", "algorithm": "best_fit", "oversize": "truncate"}, "cannot be cut"),
        ({"output": "list", "algorithm": "best_fit", "fields": ["labels"]}, "fields"),
        ({"output": "list", "algorithm": "best_fit", "length": 3}, "length"),
    ],
)
def test_the_other_settings_are_checked(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(zp.errors.ConfigError, match=word):
        pipeline(3).pack(4, **settings)


def test_groups_need_a_pipeline() -> None:
    with pytest.raises(zp.errors.ConfigError, match="step of a pipeline"):
        Pack(4, homogeneous=[["web"]]).open(0, Key(1, 0, 0, 0, "pack"))


def test_decisions_need_no_payload() -> None:
    """Cursors may be anything: here numbers, with no record behind them."""
    pack = Pack(10, "best_fit", num_bins=2)
    pack.open(0, Key(1, 0, 0, 0, "pack"))
    emitted = pack.push(0, [(cursor, length, 0) for cursor, length in enumerate([6, 7, 4, 3, 9, 25])])
    assert emitted.groups == [[(0, 0, 6), (2, 0, 4)], [(5, 0, 10)], [(5, 10, 20)], [(1, 0, 7), (3, 0, 3)]]
    assert emitted.triggers == [3, 5, 5, 5]


def test_the_order_of_names_is_no_setting() -> None:
    one = Pack(8, homogeneous=[["web", "code"], ["books"]], fields=["labels", "kinds"])
    other = Pack(8, homogeneous={"b": {"books"}, "a": {"code", "web"}}, fields={"kinds": 0, "labels": 0})
    assert canonical_bytes(one.settings()) == canonical_bytes(other.settings())


@pytest.mark.parametrize(
    ("items", "plain"),
    [([], None), ([], [3]), ([(0, 0, 2)], []), ([(0, 0, 2)], [[0, [2]]]), ([(0, 0, 8)], [[0, [1]]])],
)
@pytest.mark.parametrize("algorithm", ["wrap", "first_fit", "best_fit"])
def test_what_is_no_state_is_refused(algorithm: str, items: list[Any], plain: Any) -> None:
    with pytest.raises(ValueError, match=r"held|wanted|open|waits"):
        Pack(8, algorithm).load(0, Key(1, 0, 0, 0, "pack"), Held(items, plain))


def test_settings_of_old_definitions_are_what_they_were() -> None:
    """A state of a version that had `wrap` alone fits."""
    assert Pack(8).settings() == {
        "type": "pack",
        "max_length": 8,
        "algorithm": "wrap",
        "oversize": "split",
        "pad_id": 0,
        "field": "input_ids",
    }
