"""A plan in words."""

from __future__ import annotations

from zephon.options import Options
from zephon.plan.graph import Plan
from zephon.plan.lanes import Topology
from zephon.work.source import WorkSource


def explain(plan: Plan, topology: Topology, source: WorkSource, options: Options) -> str:
    return ""
