"""What map, filter and flat_map share: a user's function called once a record."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

from zephon.errors import ConfigError
from zephon.functions import function_name, wants_rng
from zephon.ops.base import OnError, Operator, Rows


def check_on_error(value: str, method: str) -> OnError:
    """The value, or ConfigError."""
    if value in ("raise", "skip"):
        return cast(OnError, value)
    raise ConfigError(f"{method}(on_error={value!r}): it must be 'raise' or 'skip'")


class FunctionOperator(Operator):
    """Calls `fn(record)`, or `fn(record, rng=...)` where it has a parameter of that name.

    `version` names the function's behaviour in the fingerprint in place of a hash of its code.
    """

    def __init__(
        self, fn: Callable[..., Any], name: str | None = None, version: str | None = None, on_error: str = "raise"
    ) -> None:
        if not callable(fn):
            raise ConfigError(f"{self.method}(fn): a function is wanted, not {type(fn).__name__}")
        self.fn, self.version = fn, version
        self.name = name or function_name(fn)
        self.on_error = check_on_error(on_error, self.method)
        self.reasons = ("error",) if on_error == "skip" else ()
        self._keyed = wants_rng(fn)

    def settings(self) -> dict[str, Any]:
        return {
            "type": self.method,
            "code": self.fn if self.version is None else f"version {self.version}",
            "on_error": self.on_error,
        }

    def results(self, rows: Rows) -> Iterator[tuple[int, Any]]:
        """(position, result) of every record on which the function did not raise."""
        fn, name, keyed, at = self.fn, self.name or self.method, self._keyed, rows.at
        for i, (number, record) in enumerate(zip(rows.index, rows.records, strict=True)):
            at[0] = number
            try:
                made = fn(record, rng=rows.rng(i, name)) if keyed else fn(record)
            except BaseException as error:
                rows.let_through(error)
                self.fail(rows, i, error)
            else:
                yield i, made

    def fail(self, rows: Rows, i: int, error: BaseException) -> None:
        """Notes an exception on the i-th record."""
        rows.fail(i, error, self.name or self.method, self.on_error)
