"""What a pipeline is, field by field: compared on restore, and refused by the name of what differs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from zephon.canonical import canonical_bytes
from zephon.errors import ConfigError, describe
from zephon.functions import code_hash, python_version
from zephon.ops.base import Node, in_words
from zephon.ops.batch import Batch
from zephon.options import DataOptions
from zephon.plan.graph import Plan
from zephon.work.source import WorkSource

Fingerprint = dict[str, Any]


def node_fields(node: Node) -> dict[str, Any]:
    """The settings of one step as plain data. To be taken when the step is declared: functions may change later."""
    fields = {name: _setting(node, name, value) for name, value in node.settings().items()}
    if isinstance(node, Batch):
        del fields["size"]  # places count samples, so it may change
    return fields


def _setting(node: Node, name: str, value: Any) -> Any:
    """One setting of a step as plain data. Raises ConfigError for what has no content to compare."""
    try:
        return _bounded(value)
    except Exception as error:
        raise ConfigError(
            f"{in_words(node)}, {name!r}: {describe(error)}; a step's public attributes are its definition, which a "
            f"state compares, so each must be a plain value or a function: make it private (_{name}), opened in an "
            "operator's setup(), or let settings() say what decides the step"
        ) from error


def fingerprint(source: WorkSource, steps: Mapping[str, dict[str, Any]], plan: Plan, data: DataOptions) -> Fingerprint:
    """The readable definition: plain data that decides the stream. Seed, lanes, batch shape are kept apart.

    `steps`: what `node_fields` said of each step, by name, in order. What says how a pass ends is there if it is set.
    """
    ends = {"last_step": data.last_step, "steps_per_pass": data.steps_per_pass}
    return {
        "python": python_version(),
        "source": {
            **{name: _of_source(name, value) for name, value in source.fingerprint().items()},
            "datasets": _bounded([dataset.name for dataset in source.datasets]),  # their order breaks ties
        },
        "datasets": _datasets(source),
        "operators": dict(steps),
        "order": list(steps),
        "flush_every_k_chunks": plan.flush_every,
        **{name: value for name, value in ends.items() if value is not None},
    }


LONGEST_FIELD = 2_048  # bytes; a larger one enters by its hash
LONGEST_WEIGHTS = 16_384  # a restore reads them where they were changed
LONGEST_TABLE = 32_768  # bytes of all datasets; beyond it the table enters by its hash, so that a state stays small


def _datasets(source: WorkSource) -> dict[str, Any]:
    """The datasets by name, field by field; thousands of them together."""
    table = {d.name: {k: _bounded(v) for k, v in d.fingerprint().items()} for d in source.datasets}
    if len(json.dumps(table)) <= LONGEST_TABLE:
        return table
    return {"all": {"number": len(table), "rows": sum(d.num_rows for d in source.datasets), "hash": _hash(table)}}


def _of_source(name: str, value: Any) -> Any:
    if name == "mean_tokens":  # a restore reads them; the source bounds their number
        return value
    return _bounded(value, LONGEST_WEIGHTS if name == "weights" else LONGEST_FIELD)


def _bounded(value: Any, most: int = LONGEST_FIELD) -> Any:
    plain = _plain(value)
    return plain if len(canonical_bytes(plain)) <= most else _hash(plain)


def _hash(value: Any) -> str:
    return f"content {hashlib.blake2b(canonical_bytes(value), digest_size=16).hexdigest()}"


def _plain(value: Any) -> Any:
    """A value as JSON can carry it: functions and classes by the hash of their code, the rest by content."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)):
        return value if abs(value) < 2**53 else repr(value)  # NaN too: what every form of a state carries exactly
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and len(value) <= 64:
        return [_plain(item) for item in value]
    if callable(value):
        return f"code {code_hash(value)}"
    return _hash(value)


class Difference:
    """A field whose value is not the state's."""

    def __init__(self, field: str, was: Any, now: Any) -> None:
        self.field, self.was, self.now = field, was, now

    def __str__(self) -> str:
        return f"{self.field}: the state has {short(self.was)}, this pipeline {short(self.now)}"


class Words(str):
    """A value in words: shown as it stands."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


ABSENT = Words("(absent)")


def differences(was: Fingerprint, now: Fingerprint) -> list[Difference]:
    """Every field that differs, by the name that `allow` takes: `clean.code`, `source.weights`, `datasets.web.rows`."""
    before, after = _flat(was), _flat(now)
    fields = dict.fromkeys([*before, *after])
    return [
        Difference(field, before.get(field, ABSENT), after.get(field, ABSENT))
        for field in fields
        if canonical_bytes(before.get(field, ABSENT)) != canonical_bytes(after.get(field, ABSENT))
    ]


def _flat(value: Fingerprint) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for group, fields in value.items():
        if group == "operators":
            for operator, settings in fields.items():
                prefix = f"operators.{operator}" if operator in value else operator  # one named "source", say
                flat |= {f"{prefix}.{name}": setting for name, setting in settings.items()}
        elif group == "datasets":
            for dataset, settings in fields.items():
                flat |= {f"datasets.{dataset}.{name}": setting for name, setting in settings.items()}
        elif group == "source":
            flat |= {f"source.{name}": setting for name, setting in fields.items()}
        elif group != "python":
            flat[group] = fields
    return flat


def group_of(field: str) -> str:
    """What the field is one of: `datasets.web` of `datasets.web.rows`, `clean` of `clean.code`; else itself."""
    return field.rpartition(".")[0] or field


def is_code(difference: Difference) -> bool:
    """Whether both values are hashes of code."""
    return all(isinstance(value, str) and value.startswith("code ") for value in (difference.was, difference.now))


def short(value: Any) -> str:
    """A value in at most 120 characters, but for words."""
    text = repr(value)
    return text if isinstance(value, Words) or len(text) <= 120 else text[:117] + "..."
