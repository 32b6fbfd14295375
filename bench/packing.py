"""How full the sequences of `pack` are, and what it costs: every algorithm, by bins, against offline packing.

    python bench/packing.py                 # the corpus of the demonstration (made where it is missing), and log-normal
    python bench/packing.py --rounds 5      # CPU time is the least of so many runs
    python bench/packing.py --page-only     # the table and the picture again, from bench/results/packing.json

The accumulator runs alone, on lengths, without a payload: one window over all data (K = 0), in pushes of 128 documents.
Writes bench/results/packing.json and packing.png, and the tables in docs/packing.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import re
import sys
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import record

from zephon.ops import bins
from zephon.ops.accumulator import Key, Part
from zephon.ops.pack import Pack

HERE = Path(__file__).parent
RESULT = HERE / "results" / "packing.json"
PAGE = HERE.parent / "docs" / "packing.md"
BLOCK = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
BINS = (64, 256, 1_024, 4_096)
AT_ONCE = 128
WINDOW = 2_048  # documents between two flushes with the default chunk_size and flush_every_k_chunks
TEXTBOOK = "open best fit"
NO_LOOK = "best_fit, LOOK = 1"
Groups = list[list[Part]]


def by_pack(algorithm: str) -> Callable[[list[int], int, int], tuple[Groups, float]]:
    """Packs by Zephon's accumulator; gives the sequences, and the CPU seconds of all pushes."""

    def run(lengths: list[int], max_length: int, num_bins: int) -> tuple[Groups, float]:
        pack = Pack(max_length, algorithm, num_bins=num_bins)
        pack.open(0, Key(0, 0, 0, 0, "pack"))
        refs = [(i, length, 0) for i, length in enumerate(lengths)]
        groups: Groups = []
        begun = time.process_time()
        for at in range(0, len(refs), AT_ONCE):
            groups += pack.push(0, refs[at : at + AT_ONCE]).groups
        seconds = time.process_time() - begun
        return groups + pack.flush(0).groups, seconds

    return run


def no_look(lengths: list[int], max_length: int, num_bins: int) -> tuple[Groups, float]:
    """best_fit that takes the largest piece that fits, and looks no further."""
    look, bins.LOOK = bins.LOOK, 1
    try:
        return by_pack("best_fit")(lengths, max_length, num_bins)
    finally:
        bins.LOOK = look


def open_best_fit(lengths: list[int], max_length: int, num_bins: int) -> tuple[Groups, float]:
    """The textbook's: each document, as it comes, to the fullest open sequence with room; the fullest is let go."""
    done: Groups = []
    free: list[tuple[int, int]] = []
    held: dict[int, list[Part]] = {}
    begun = time.process_time()
    for cursor, length in enumerate(lengths):
        start = length - length % max_length
        done += [[(cursor, at, at + max_length)] for at in range(0, start, max_length)]
        if start == length:
            continue
        at = bisect_left(free, (length - start, -1))
        if at < len(free):
            room, number = free.pop(at)
        else:
            if len(held) == num_bins:
                done.append(held.pop(free.pop(0)[1]))
            room, number = max_length, cursor
        held.setdefault(number, []).append((cursor, start, length))
        room -= length - start
        if room:
            insort(free, (room, number))
        else:
            done.append(held.pop(number))
    return done + list(held.values()), time.process_time() - begun


def offline(lengths: list[int], max_length: int, num_bins: int = 0) -> tuple[Groups, float]:
    """Best-fit decreasing over everything: sorted, longest first."""
    order = sorted(range(len(lengths)), key=lambda i: (-(lengths[i] % max_length), i))
    whole = [length - length % max_length for length in lengths]
    done, seconds = open_best_fit([lengths[i] - whole[i] for i in order], max_length, len(lengths) + 1)
    done = [[(order[i], whole[order[i]] + a, whole[order[i]] + b) for i, a, b in parts] for parts in done]
    return done + [[(i, at, at + max_length)] for i in order for at in range(0, whole[i], max_length)], seconds


ALGORITHMS: dict[str, Callable[[list[int], int, int], tuple[Groups, float]]] = {
    "wrap": by_pack("wrap"),
    "first_fit": by_pack("first_fit"),
    TEXTBOOK: open_best_fit,
    NO_LOOK: no_look,
    "best_fit": by_pack("best_fit"),
    "best_fit_wrap": by_pack("best_fit_wrap"),
}


def figures(groups: Groups, lengths: list[int], max_length: int) -> dict[str, float]:
    """The share of tokens that are no padding; the documents cut in vain, as a share of all."""
    pieces: dict[int, int] = {}
    for parts in groups:
        for cursor, _, _ in parts:
            pieces[cursor] = pieces.get(cursor, 0) + 1
    assert sum(stop - start for parts in groups for _, start, stop in parts) == sum(lengths)
    cut = sum(pieces[i] > -(-length // max_length) for i, length in enumerate(lengths) if length)
    return {"efficiency": sum(lengths) / (len(groups) * max_length), "cut": cut / len(lengths)}


def in_windows(run: Any, lengths: list[int], max_length: int, num_bins: int) -> float:
    """The efficiency where all is let go behind each window."""
    cuts = range(0, len(lengths), WINDOW)
    made = sum(len(run(lengths[at : at + WINDOW], max_length, num_bins)[0]) for at in cuts)
    return sum(lengths) / (made * max_length)


def measure(lengths: list[int], max_length: int, rounds: int) -> dict[str, Any]:
    """All algorithms on one corpus."""
    rows = []
    for name, run in ALGORITHMS.items():
        for num_bins in BINS:
            runs = [run(lengths, max_length, num_bins) for _ in range(rounds)]
            found = figures(runs[0][0], lengths, max_length)
            found["us"] = min(seconds for _, seconds in runs) / len(lengths) * 1e6
            found["windows"] = in_windows(run, lengths, max_length, num_bins)
            rows.append({"algorithm": name, "num_bins": num_bins, **found})
            if name == "wrap":
                break
    best = figures(offline(lengths, max_length)[0], lengths, max_length)
    return {
        "max_length": max_length,
        "documents": len(lengths),
        "mean": sum(lengths) / len(lengths),
        "offline": best["efficiency"],
        "offline_windows": in_windows(offline, lengths, max_length, 0),
        "rows": rows,
    }


def demo_lengths(folder: str | None) -> list[int]:
    """Tokens of each document of the demonstration's corpus, in an order drawn by seed."""
    from tokenizers import Tokenizer

    sys.path.append(str(HERE.parent / "examples"))
    import make_corpus

    corpus = make_corpus.make_corpus(folder or make_corpus.DEFAULT_FOLDER)
    tokenizer = Tokenizer.from_file(str(corpus.tokenizer))
    lengths: list[int] = []
    for shard in sorted([*corpus.web.glob("*.jsonl"), *corpus.code.glob("*.jsonl")]):
        texts = [json.loads(line)["text"] for line in shard.read_text(encoding="utf-8").splitlines()]
        lengths += [len(each.ids) for each in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    random.Random(0).shuffle(lengths)
    return [length for length in lengths if length]


def log_normal() -> list[int]:
    """40,000 documents, median 600 tokens, sigma 1: a mean of 1,000 and a long tail."""
    rng = random.Random(0)
    return [max(1, int(rng.lognormvariate(6.4, 1.0))) for _ in range(40_000)]


def table(result: dict[str, Any], name: str) -> str:
    """One corpus as Markdown."""
    found = result["corpora"][name]
    lines = [
        f"{found['documents']:,} documents of {found['mean']:,.0f} tokens on average, sequences of "
        f"{found['max_length']:,}. Offline best-fit decreasing over everything: {found['offline']:.2%} is no padding; "
        f"over windows of {WINDOW:,} documents: {found['offline_windows']:.2%}.",
        "",
        "| algorithm | bins | no padding | against offline | documents cut | us a record | in windows |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in found["rows"]:
        bins_ = "-" if row["algorithm"] == "wrap" else f"{row['num_bins']:,}"
        kind = row["algorithm"] if row["algorithm"] in (TEXTBOOK, NO_LOOK) else f"`{row['algorithm']}`"
        against = 100 * (row["efficiency"] / found["offline"] - 1)
        lines.append(
            f"| {kind} | {bins_} | {row['efficiency']:.2%} | {against:+.2f} % | {row['cut']:.1%} | {row['us']:.2f} | "
            f"{row['windows']:.2%} |"
        )
    return "\n".join(lines) + "\n"


def write_page(result: dict[str, Any]) -> None:
    """Puts the tables into the page."""

    def filled(block: re.Match[str]) -> str:
        text = record.told(result) + ".\n" if block[2] == "machine" else table(result, block[2])
        return block[1] + text + block[3]

    PAGE.write_text(BLOCK.sub(filled, PAGE.read_text()))


COLOURS = {
    "wrap": "#9aa4af",
    "first_fit": "#d9822b",
    TEXTBOOK: "#b58900",
    NO_LOOK: "#8250df",
    "best_fit": "#1f6feb",
    "best_fit_wrap": "#2da44e",
}


def save_plot(result: dict[str, Any], path: Path) -> None:
    """Padding above, cut documents below, by bins; a column a corpus."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    corpora = result["corpora"]
    figure, axes = pyplot.subplots(
        2, len(corpora), figsize=(4.2 * len(corpora), 6.4), layout="constrained", sharex=True
    )
    for column, (name, found) in enumerate(corpora.items()):
        _draw(axes[0][column], found, "padding, % of tokens", lambda row: 100 * (1 - row["efficiency"]))
        axes[0][column].axhline(100 * (1 - found["offline"]), color="#000", lw=1, ls="--", label="offline, all data")
        axes[0][column].set_title(f"{name}: sequences of {found['max_length']:,}", fontsize=9)
        _draw(axes[1][column], found, "documents cut, %", lambda row: 100 * row["cut"])
        axes[1][column].set_xlabel("num_bins", fontsize=8)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw(axis: Any, found: dict[str, Any], title: str, value: Callable[[dict[str, Any]], float]) -> None:
    for name, colour in COLOURS.items():
        rows: Sequence[dict[str, Any]] = [row for row in found["rows"] if row["algorithm"] == name]
        places = [row["num_bins"] for row in rows] if len(rows) > 1 else [BINS[0], BINS[-1]]
        values = [value(row) for row in rows] if len(rows) > 1 else [value(rows[0])] * 2
        style = "--" if name in (TEXTBOOK, NO_LOOK) else ":" if name == "wrap" else "-"
        axis.plot(places, values, style, color=colour, marker="o" if len(rows) > 1 else None, ms=3, lw=1.4, label=name)
    axis.set_xscale("log", base=2)
    axis.set_xticks(BINS, [f"{n:,}" for n in BINS], fontsize=8)
    axis.tick_params(axis="y", labelsize=8)
    axis.set_ylabel(title, fontsize=8)
    axis.set_ylim(bottom=0)
    axis.spines[["top", "right"]].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", help="folder of the demonstration's corpus")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--page-only", action="store_true")
    arguments = parser.parse_args()
    if not arguments.page_only:
        demo, drawn = demo_lengths(arguments.corpus), log_normal()
        result = {
            "machine": record.machine(),
            "date": datetime.date.today().isoformat(),
            "command": f"python bench/packing.py --rounds {arguments.rounds}",
            "corpora": {
                "demo-2048": measure(demo, 2_048, arguments.rounds),
                "demo-512": measure(demo, 512, arguments.rounds),
                "log-normal": measure(drawn, 2_048, arguments.rounds),
            },
        }
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    result = json.loads(RESULT.read_text())
    save_plot(result, RESULT.with_suffix(".png"))
    write_page(result)


if __name__ == "__main__":
    main()
