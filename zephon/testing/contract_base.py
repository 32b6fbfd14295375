"""What the checks of operators and of accumulators share: the error, copies, and values that can be compared."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import cloudpickle

from zephon.canonical import canonical_bytes
from zephon.errors import describe
from zephon.ops.base import Node
from zephon.plan.fingerprint import _plain

N = TypeVar("N", bound=Node)


class ContractBroken(AssertionError):
    """An operator or accumulator does not keep what Zephon relies on; the text says what, and the remedy."""


def broken(node: Node, text: str) -> ContractBroken:
    """The error that says `text` of a node."""
    return ContractBroken(f"{type(node).__name__} '{node.name or node.method}' {text}")


def travelled(node: N) -> N:
    """A copy that went through cloudpickle, as to a worker process. Raises ContractBroken where that fails."""
    try:
        copy: N = cloudpickle.loads(cloudpickle.dumps(node))
    except Exception as error:
        raise broken(
            node,
            f"cannot be sent to a worker process: {describe(error)}; open files, locks and models in setup(), and "
            "leave them out in __getstate__",
        ) from error
    return copy


def plain_settings(node: Node) -> bytes:
    """`settings()` as the fingerprint holds it. Raises ContractBroken where it is no plain data."""
    try:
        settings = node.settings()
        plain = {str(name): _plain(value) for name, value in settings.items()}
        json.dumps(plain)
    except Exception as error:
        raise broken(
            node,
            f"gives settings() that are no plain data for the fingerprint: {describe(error)}; return a dict of "
            "strings, numbers, lists and functions that say what the step does",
        ) from error
    return canonical_bytes(plain)


def check_settings(node: Node, use: Callable[[], Any]) -> None:
    """The settings are the same before and after use, and in a copy that travelled: a state would be refused else."""
    copy = travelled(node)
    before = plain_settings(node)
    if plain_settings(copy) != before:
        raise broken(
            node,
            "gives other settings() in a copy that travelled to another process: they hold an address, the time or the "
            "like; override settings() and return plain values",
        )
    use()
    if plain_settings(node) != before:
        raise broken(
            node,
            "gives settings() that change with use, so a state would be refused: keep state in attributes that start "
            "with an underscore, or override settings()",
        )


def content(value: Any, node: Node) -> bytes:
    """A value in bytes that compare. Raises ContractBroken for what cannot be encoded."""
    try:
        return canonical_bytes(value)
    except Exception as error:
        raise broken(node, f"gives a value that cannot be compared or sent on: {describe(error)}") from error
