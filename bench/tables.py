"""Puts the results as tables into bench/README.md, between `<!-- table NAME -->` and `<!-- end -->`.

python bench/tables.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import record

from zephon.bench.report import cells, extras, number
from zephon.bench.spec import Row

HERE = Path(__file__).parent
BLOCK = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
HEADS = "workload|system|runner|workers|lanes|rate|unit|of bare|min|max|first s|trainer us|engine us|worker us|PSS MB"


def main() -> None:
    page = HERE / "README.md"
    page.write_text(BLOCK.sub(lambda found: found[1] + table(found[2]) + found[3], page.read_text()))


def table(name: str) -> str:
    """A result as Markdown: where and how it was measured, the rows, what else was seen, the picture."""
    result = json.loads((HERE / "results" / f"{name}.json").read_text())
    rows = [msgspec.convert(row, Row) for row in result["rows"]]
    heads = HEADS.split("|")
    body = [cells(row) for row in rows]
    shown = [i for i in range(len(heads)) if any(line[i] != "-" for line in body)]
    lines = [told(result, rows), "", "| " + " | ".join(heads[i] for i in shown) + " |", "|" + " --- |" * len(shown)]
    lines += ["| " + " | ".join(line[i] for i in shown) + " |" for line in body]
    lines += ["", *(f"- {line}" for line in extras(rows)), "", f"![{name}](results/{name}.png)", ""]
    return "\n".join(lines)


def told(result: dict[str, Any], rows: list[Row]) -> str:
    """Machine, date, command, and how much others used it."""
    others = [row.details["other_cores"] for row in rows if "other_cores" in row.details]
    load = f"; other programs used {number(min(others))} to {number(max(others))} cores meanwhile" if others else ""
    return f"{record.told(result)}{load}."


if __name__ == "__main__":
    main()
