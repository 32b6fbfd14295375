"""Which records, in what order: pure arithmetic."""

from zephon.work.schedule import MixtureSchedule
from zephon.work.source import DatasetLike, FlatSource, WorkSource
from zephon.work.static_mixture import StaticMixture

__all__ = ["DatasetLike", "FlatSource", "MixtureSchedule", "StaticMixture", "WorkSource"]
