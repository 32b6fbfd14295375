"""What the trainer orders from its launcher, and how that is read again in the processes below."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import msgspec

from zephon.errors import ConfigError, describe
from zephon.ipc.codec import SCRIPT, dump_by_value
from zephon.runners.execute import StageWork


class Orders(msgspec.Struct, frozen=True):
    """The work of each stage, its workers, and the job of the engine process."""

    works: list[StageWork]
    workers: list[int]
    ring_bytes: int
    job: Any


def pack(orders: Orders) -> bytes:
    """The orders, functions of the user's script by value. Raises ConfigError that names what cannot be sent."""
    try:
        raw, script_classes = dump_by_value(orders)
    except Exception as error:
        culprit = _culprit(orders.works)
        raise ConfigError(
            f"{culprit} cannot be sent to another process: {describe(error)}; open files, locks and connections belong "
            "into an operator's setup(); or use runner='threads' or 'inline'"
        ) from error
    return pickle.dumps((raw, dump_by_value(script_classes)[0]))


def _culprit(works: Sequence[StageWork]) -> str:
    for work in works:
        for operator in work.operators:
            try:
                dump_by_value(operator)
            except Exception:
                return f"operator '{operator.name}'"
    return "the pipeline"


def unpack(packed: bytes | memoryview) -> Orders:
    """The orders of `pack`; imports what they need. Raises ConfigError where that fails."""
    raw, script_classes = pickle.loads(packed)
    try:
        orders: Orders = pickle.loads(raw)
        # Instances of the script's classes, exceptions above all, then go back to the trainer by name.
        for name in SCRIPT:
            vars(sys.modules.setdefault(name, ModuleType(name))).update(pickle.loads(script_classes))
    except Exception as error:
        raise ConfigError(
            f"the pipeline cannot be loaded in another process: {describe(error)}; import what your functions need at "
            "the top of a module, or use runner='threads'"
        ) from error
    return orders
