"""`zephon explain TARGET`: what a pipeline will do, in words, without reading a record."""

from __future__ import annotations

from typing import Annotated

import typer

from zephon.cli.target import load_target


def explain(
    target: Annotated[
        str, typer.Argument(help="module.py:name or package.module:name of a pipeline, or of a function that makes one")
    ],
) -> None:
    """Show stages, lanes, memory and settings of a pipeline."""
    print(load_target(target).explain())
