"""What the trainer orders from its launcher, and how that is read again in the processes below."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import msgspec

from zephon.errors import ConfigError, describe
from zephon.io.memory import Encoded
from zephon.ipc.codec import SCRIPT, dump_by_value
from zephon.ops.base import in_words
from zephon.runners.execute import StageWork

MOST_SHARED = 250  # descriptors in one message of a socket


class Orders(msgspec.Struct, frozen=True):
    """The work of each stage, its workers, and the job of the engine process."""

    works: list[StageWork]
    workers: list[int]
    ring_bytes: int
    job: Any


def pack(orders: Orders) -> tuple[bytes, list[int]]:
    """(the orders, functions of the user's script by value; descriptors of what is shared instead of sent).

    The descriptors belong to the datasets. Raises ConfigError that names what cannot be sent.
    """
    fds: list[int] = []

    def apart(value: Any) -> tuple[int, int] | None:
        if not isinstance(value, Encoded) or len(fds) == MOST_SHARED or (fd := value.share()) is None:
            return None
        fds.append(fd)
        return len(fds) - 1, len(value)

    try:
        raw, script_classes = dump_by_value(orders, apart)
    except Exception as error:
        culprit = _culprit(orders.works)
        raise ConfigError(
            f"{culprit} cannot be sent to another process: {describe(error)}; open files, locks and connections belong "
            "into an operator's setup(); or use runner='threads' or 'inline'"
        ) from error
    return pickle.dumps((raw, dump_by_value(script_classes)[0])), fds


def _culprit(works: Sequence[StageWork]) -> str:
    for work in works:
        for operator in work.operators:
            try:
                dump_by_value(operator)
            except Exception:
                return in_words(operator)
    return "the pipeline"


class _Unpickler(pickle.Unpickler):
    """Puts what is shared back in its place."""

    def __init__(self, raw: bytes, fds: Sequence[int]) -> None:
        super().__init__(io.BytesIO(raw))
        self._fds = fds

    def persistent_load(self, pid: tuple[int, int]) -> Encoded:
        index, size = pid
        return Encoded.attach(self._fds[index], size)


def unpack(packed: bytes, fds: Sequence[int]) -> Orders:
    """The orders of `pack`; imports what they need. Raises ConfigError where that fails."""
    raw, script_classes = pickle.loads(packed)
    try:
        orders: Orders = _Unpickler(raw, fds).load()
        # Instances of the script's classes, exceptions above all, then go back to the trainer by name.
        for name in SCRIPT:
            vars(sys.modules.setdefault(name, ModuleType(name))).update(pickle.loads(script_classes))
    except Exception as error:
        raise ConfigError(
            f"the pipeline cannot be loaded in another process: {describe(error)}; import what your functions need at "
            "the top of a module, or use runner='threads'"
        ) from error
    return orders
