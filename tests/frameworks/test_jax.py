"""examples/jax_loop.py, where jax is installed: an interrupted run is the uninterrupted one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import zephon as zp

jax = pytest.importorskip("jax")
pytest.importorskip("tokenizers")

from .examples import run  # noqa: E402


def test_the_loop_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    whole = run("jax_loop.py", "--steps", 5, "--file", tmp_path / "whole.npz")
    parts = run("jax_loop.py", "--steps", 3, "--file", tmp_path / "parts.npz")
    parts += run("jax_loop.py", "--steps", 5, "--file", tmp_path / "parts.npz")
    assert [line.step for line in whole] == [0, 1, 2, 3, 4]
    assert parts == whole


@pytest.mark.parametrize("take", [jax.device_put, jax.numpy.from_dlpack])
def test_memory_stays_while_jax_holds_it(take: object) -> None:
    """On a CPU jax takes a batch's memory as it is: what it holds must not become another batch."""
    assert callable(take)
    rows = zp.Dataset.from_list("toy", [{"id": i} for i in range(400)])
    line = zp.Pipeline(zp.StaticMixture(rows, seed=1)).map(wide).batch(8)
    held = []
    with line.options(canonical_replicas=1, runner="process", parallelism=1) as pipeline:
        for batch in pipeline:
            held = [*held[-12:], (take(batch["wide"]), batch["id"].copy())]
            del batch
            for array, ids in held:
                assert (np.asarray(array)[:, [0, -1]] == ids[:, None]).all()


def wide(record: dict[str, int]) -> dict[str, object]:
    return {**record, "wide": np.full(20_000, record["id"], np.float32)}
