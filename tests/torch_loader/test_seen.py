"""What the trainer knows of its workers: of what arrived, in whatever order, only what was returned counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from tests.laws.harness import examples
from zephon.errors import CheckpointError
from zephon.flow.progress import LaneState
from zephon.torch_loader.seen import KEPT, Place, Seen

ITERATION = (0, 3, 5, 0)


def place(worker: int, number: int, start: bool = True) -> Place:
    """Batch `number` of a worker that has the lane of its number; its lane then stands at number + 1."""
    own = {worker: LaneState(samples=number)} if start else {}
    return Place("toy", ITERATION, worker, number, {worker: LaneState(samples=number + 1)}, own)


@examples(0.5)
@given(data=st.data(), had=st.lists(st.integers(0, KEPT + 9), min_size=3, max_size=3))
def test_what_arrived_ahead_does_not_count(data: st.DataObject, had: list[int]) -> None:
    """Three workers with so many batches each; these arrive in each one's order, and twice."""
    seen, left, came = Seen(range(3)), list(had), [0, 0, 0]
    order = data.draw(st.permutations([worker for worker in range(3) for _ in range(had[worker])]))
    for worker in order:
        seen.note(place(worker, came[worker], start=not came[worker]))
        seen.note(place(worker, came[worker], start=not came[worker]))
        came[worker] += 1
    assert came == left
    for worker in range(3):
        for number in range(had[worker]):
            counts = [min(had[other], number + (other <= worker)) for other in range(3)]
            wanted = {other: LaneState(samples=counts[other]) for other in range(3)}
            forgotten = any(had[other] - KEPT > number + (other <= worker) for other in range(3))
            if forgotten or not all(had):
                with pytest.raises(CheckpointError, match=f"more than {KEPT}|not been heard of"):
                    seen.behind(place(worker, number))
            else:
                assert seen.behind(place(worker, number)) == wanted


def test_a_worker_that_was_not_heard_of_is_named() -> None:
    seen = Seen([0, 1, 2])
    seen.note(place(1, 4))
    with pytest.raises(CheckpointError, match=r"lanes \[0, 2\] have not been heard of"):
        seen.behind(place(1, 4))
    with pytest.raises(CheckpointError, match="long over"):
        seen.behind(place(1, 4)._replace(iteration=(0, 3, 5, 1)))
