"""Zephon: a data loader for training foundation models, whose stream does not depend on how or where it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PLACES = {
    "Accumulator": "zephon.ops.accumulator",
    "Batch": "zephon.batch",
    "DROP": "zephon.ops.stateful_map",
    "Dataset": "zephon.io.dataset",
    "Emitted": "zephon.ops.accumulator",
    "Held": "zephon.ops.accumulator",
    "MISSING": "zephon.record",
    "Machine": "zephon.ops.stateful_map",
    "MixtureSchedule": "zephon.work.schedule",
    "Operator": "zephon.ops.base",
    "Pipeline": "zephon.pipeline",
    "Pointers": "zephon.record",
    "StaticMixture": "zephon.work.static_mixture",
    "WorkSource": "zephon.work.source",
    "FlatSource": "zephon.work.source",
    "errors": "zephon.errors",
    "merge_states": "zephon.checkpoint.merge",
}

__all__ = [  # noqa: RUF022
    "Accumulator",
    "Batch",
    "DROP",
    "Dataset",
    "Emitted",
    "Held",
    "MISSING",
    "Machine",
    "MixtureSchedule",
    "Operator",
    "Pipeline",
    "Pointers",
    "StaticMixture",
    "WorkSource",
    "FlatSource",
    "errors",
    "merge_states",
    "__version__",
]

if TYPE_CHECKING:
    from zephon import errors as errors
    from zephon.batch import Batch as Batch
    from zephon.checkpoint.merge import merge_states as merge_states
    from zephon.io.dataset import Dataset as Dataset
    from zephon.ops.accumulator import Accumulator as Accumulator
    from zephon.ops.accumulator import Emitted as Emitted
    from zephon.ops.accumulator import Held as Held
    from zephon.ops.base import Operator as Operator
    from zephon.ops.stateful_map import DROP as DROP
    from zephon.ops.stateful_map import Machine as Machine
    from zephon.pipeline import Pipeline as Pipeline
    from zephon.record import MISSING as MISSING
    from zephon.record import Pointers as Pointers
    from zephon.work.schedule import MixtureSchedule as MixtureSchedule
    from zephon.work.source import FlatSource as FlatSource
    from zephon.work.source import WorkSource as WorkSource
    from zephon.work.static_mixture import StaticMixture as StaticMixture


def __getattr__(name: str) -> Any:
    """Public names are imported when first used."""
    place = _PLACES.get(name)
    if place is None:
        raise AttributeError(f"module 'zephon' has no attribute {name!r}")
    import importlib

    module = importlib.import_module(place)
    value = module if place == f"zephon.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
