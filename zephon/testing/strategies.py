"""Hypothesis strategies for everything a pipeline is made of and run with. The one module that imports hypothesis.

`recipes()` draws pipelines, `executions()` settings that must not matter, `topologies()` groups and their lanes.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from hypothesis import strategies as st

from zephon.ops.chat import TokenizeChat
from zephon.plan.lanes import Topology
from zephon.testing.chats import HAS_CHATS, chats
from zephon.testing.machines import FailAt, Limit, Mean, Ranks, Residue
from zephon.testing.recipes import (
    ID_STRIDE,
    Add,
    Along,
    Change,
    Children,
    DropIds,
    Fail,
    FailLate,
    Keep,
    KeepRandom,
    Merge,
    Noise,
    Pairs,
    Recipe,
    Reverse,
    Rows,
    SortRuns,
    Step,
    Thin,
    Words,
)
from zephon.work.schedule import MixtureSchedule

LONGEST_PASS = 240  # pointers of a drawn pass; an example must stay a matter of milliseconds
NAMES = ("alpha", "beta", "gamma")

Failing = Literal["never", "maybe"]


class Group(NamedTuple):
    """A way to run a pipeline on several groups."""

    dp_degree: int
    mapping_strategy: Literal["contiguous", "interleaved"]

    def options(self, group: int) -> dict[str, Any]:
        """Topology options of one group."""
        return {"dp_degree": self.dp_degree, "dp_group_id": group, "mapping_strategy": self.mapping_strategy}

    def lanes(self, group: int, num_lanes: int) -> list[int]:
        """The lanes of one group."""
        return Topology(num_lanes, self.dp_degree, group, self.mapping_strategy, 1, 0).lanes_of(group)


def topologies(num_lanes: int) -> st.SearchStrategy[Group]:
    """1 .. 8 groups, no more than lanes; they need not divide the lanes."""
    return st.builds(Group, st.integers(1, min(8, num_lanes)), st.sampled_from(["contiguous", "interleaved"]))


@st.composite
def executions(draw: st.DrawFn, recipe: Recipe) -> dict[str, Any]:
    """Execution options: parallelism 1 .. 4, also by operator (which splits stages); task size 1 .. 512; prefetch."""
    names = [node.name for node in recipe.build()._definition.nodes if node.method not in ("batch", "to_training")]
    workers = st.integers(1, 4)
    own = st.dictionaries(st.sampled_from(names), workers, min_size=1) if names else workers
    return {
        "parallelism": draw(st.one_of(workers, own)),
        "task_records": draw(st.one_of(st.integers(1, 8), st.integers(1, 512))),
        "prefetch_batches": draw(st.integers(1, 4)),
    }


@st.composite
def datasets(draw: st.DrawFn, failing: Failing = "never") -> tuple[Rows, ...]:
    """1 to 3 datasets of 0 to 40 rows in 1 to 3 shards, at least one row in all."""
    found = []
    for number in range(draw(st.integers(1, 3))):
        shards = draw(st.lists(st.integers(0, 20), min_size=1, max_size=3))
        if number == 0:
            shards[0] += 1
        rows = st.integers(0, max(0, sum(shards) - 1))
        some = st.lists(rows, max_size=3, unique=True) if sum(shards) else st.just([])
        on_error = draw(st.sampled_from(["skip", "skip", "raise"] if failing == "maybe" else ["skip"]))
        exclude, broken = draw(some), draw(some) if draw(st.integers(0, 3)) == 0 else []
        found.append(Rows(NAMES[number], tuple(shards), number, tuple(sorted(exclude)), tuple(broken), on_error))
    return tuple(found)


@st.composite
def mixtures(draw: st.DrawFn, rows: tuple[Rows, ...], endless: bool = False) -> dict[str, Any]:
    """Arguments of a StaticMixture over datasets: weights, every `end`, every shuffle, chunks of 1 to 40."""
    sizes = [sum(each.shards) for each in rows]
    weights = [draw(st.integers(0, 4)) if size else 0 for size in sizes]
    weights[0] = max(weights[0], 1)
    end = "repeat" if endless else draw(st.sampled_from(["epochs", "stop", "redistribute", "repeat"]))
    changing = end != "redistribute" and draw(st.integers(0, 3)) == 0
    mixture: dict[str, Any] = {
        "weights": draw(_schedules(weights)) if changing else weights if draw(st.booleans()) else None,
        "seed": draw(st.integers(0, 5)),
        "chunk_size": draw(st.one_of(st.integers(1 + endless, 6), st.integers(2, 40))),
        "shuffle": draw(st.sampled_from(["global", "none", "shards", "blocks"])),
        "end": end,
    }
    if end == "epochs":
        mixture["epochs"] = draw(st.integers(1, 2))
    if end == "repeat" and not endless:
        mixture["max_epochs"] = draw(st.integers(1, 3))
    if mixture["shuffle"] == "blocks":
        mixture |= {"block_size": draw(st.integers(1, 5)), "block_span": draw(st.integers(1, 4))}
    return mixture


@st.composite
def _schedules(draw: st.DrawFn, last: list[int]) -> MixtureSchedule:
    """Up to 4 changes between datasets that all keep a weight in the end, so that a pass has one."""
    changes = draw(st.lists(st.integers(1, 90), max_size=4, unique=True).map(sorted))
    points = [[draw(st.integers(0, 4)) if weight else 0 for weight in last] for _ in changes]
    points = [weights if any(weights) else last for weights in points]
    change = draw(st.sampled_from(["steps", "linear"]))
    return MixtureSchedule(list(zip([0, *changes], [*points, last], strict=True)), change=change, ramp_steps=5)  # type: ignore[arg-type]


def _on_error(failing: Failing) -> st.SearchStrategy[str]:
    return st.sampled_from(["skip", "raise"] if failing == "maybe" else ["skip"])


@st.composite
def _failure(draw: st.DrawFn, failing: Failing, rows: tuple[Rows, ...]) -> Step:
    """A function that raises on a few of the ids that there are."""
    ids = [ID_STRIDE * each.number + i for each in rows for i in range(sum(each.shards))]
    bad = frozenset(draw(st.lists(st.sampled_from(ids), min_size=1, max_size=3)))
    if failing == "maybe" and draw(st.integers(0, 2)) == 0:
        key, machine = Residue(7, bad=bad if draw(st.booleans()) else frozenset()), FailAt(draw(st.integers(1, 4)))
        return Step("stateful_map", (machine,), {"key": key})
    settings = {"on_error": draw(_on_error(failing))}
    if draw(st.booleans()):
        return Step("flat_map", (FailLate(bad),), settings)
    return Step("map", (Fail(bad, draw(st.sampled_from([ValueError, KeyError, StopIteration]))),), settings)


_SIMPLE: list[st.SearchStrategy[Step]] = [
    st.builds(lambda n: Step("map", (Add(n),)), st.integers(0, 9)),
    st.just(Step("map", (Change(),))),
    st.just(Step("map", (Noise(),))),
    st.builds(lambda share: Step("filter", (KeepRandom(share),)), st.sampled_from([0.5, 0.9])),
    st.builds(lambda m, r: Step("filter", (Keep(m, r),)), st.integers(2, 7), st.integers(0, 6)),
    st.builds(lambda a, b: Step("flat_map", (Children(min(a, b), max(a, b)),)), st.integers(0, 4), st.integers(0, 4)),
]
_KEYS = st.builds(Residue, st.integers(1, 40), st.sampled_from(["int", "str", "tuple"]))
_STATEFUL: st.SearchStrategy[Step] = st.one_of(
    st.builds(lambda n, key: Step("stateful_map", (Limit(n),), {"key": key, "max_held": 6}), st.integers(1, 3), _KEYS),
    st.builds(
        lambda n, m: Step("stateful_map", (Mean(n),), {"key": Residue(m), "into": "mean", "max_held": 6}),
        st.integers(2, 5),
        st.integers(1, 40),
    ),
    st.builds(
        lambda n, key: Step("stateful_map", (Ranks(n),), {"key": key, "into": "rank", "max_held": 6}),
        st.integers(1, 6),
        _KEYS,
    ),
)
_GROUPING: list[st.SearchStrategy[Step]] = [
    st.builds(lambda n, mode: Step("shuffle", (n, mode)), st.integers(1, 20), st.sampled_from(["reservoir", "block"])),
    st.builds(
        lambda fn, n: Step("map_batches", (fn, n)), st.sampled_from([Reverse(), Thin(), Merge()]), st.integers(1, 7)
    ),
    st.just(Step("apply", (Pairs(),))),
    st.builds(lambda n: Step("apply", (SortRuns(n),)), st.integers(1, 6)),
    _STATEFUL,
]
# None of these drops the same record in every epoch.
_ENDLESS = [*_SIMPLE[:4], _GROUPING[0], *_GROUPING[2:4], st.just(Step("map_batches", (Reverse(), 3)))]


@st.composite
def packs(draw: st.DrawFn, failing: Failing = "never", is_along: bool = False) -> Step:
    """pack, with all its settings. `is_along`: the records have `labels`, and some a `loss_mask`."""
    max_length = draw(st.integers(1, 12))
    settings: dict[str, Any] = {
        "num_bins": draw(st.integers(1, 6)),
        "max_sequences": draw(st.sampled_from([None, None, 1, 3])),
        "min_length": draw(st.sampled_from([1, 1, min(2, max_length)])),
        "homogeneous": draw(st.sampled_from([None, None, "dataset", [["alpha"]]])),
    }
    may_fail = ["error"] if failing == "maybe" else []
    if draw(st.integers(0, 4)) == 0:
        settings |= {"output": "list", "oversize": draw(st.sampled_from(["drop", *may_fail]))}
        return Step("pack", (max_length, draw(st.sampled_from(["first_fit", "best_fit"]))), settings)
    settings |= {"oversize": draw(st.sampled_from(["split", "truncate", "drop", *may_fail])), "pad_id": 7}
    if is_along and draw(st.booleans()):
        settings |= {"fields": {"labels": -100}, "loss_mask": draw(st.sampled_from([None, True, False]))}
    algorithms = ["wrap", "first_fit", "best_fit", "best_fit_wrap"]
    return Step("pack", (max_length, draw(st.sampled_from(algorithms))), settings)


@st.composite
def _tokenized(draw: st.DrawFn, failing: Failing) -> list[Step]:
    """tokenize or tokenize_chat, perhaps something between, and perhaps pack."""
    if HAS_CHATS and draw(st.integers(0, 3)) == 0:
        found = draw(chats())
    else:
        cut = {"max_length": draw(st.integers(1, 5)), "overflow": draw(st.sampled_from(["split", "truncate"]))}
        found = [Step("tokenize", (Words(),), cut if draw(st.booleans()) else {})]
    is_along = draw(st.booleans())
    found += [Step("map", (Along(),))] if is_along else []
    found += draw(st.lists(st.one_of(*_SIMPLE, _GROUPING[0], *_GROUPING[3:]), max_size=2))
    if draw(st.integers(0, 3)):
        found.append(draw(packs(failing, is_along)))
        found += draw(st.lists(st.one_of(*_SIMPLE, *_GROUPING[:2]), max_size=1))
    return found


@st.composite
def steps(draw: st.DrawFn, rows: tuple[Rows, ...], failing: Failing = "never") -> list[Step]:
    """A sensible chain: any operators in any order, and perhaps text to tokens to packs."""
    found: list[Step] = draw(st.lists(st.one_of(*_SIMPLE, *_GROUPING), max_size=3))
    if draw(st.integers(0, 2)) == 0:
        found += draw(_tokenized(failing))
    if draw(st.integers(0, 5)) == 0 or failing == "maybe":
        found.insert(draw(st.integers(0, len(found))), draw(_failure(failing, rows)))
    return found


_TRAINING = st.builds(
    lambda flatten, masked, multiple: Step(
        "to_training", (), {"flatten": flatten, "mask_boundaries": masked, "pad_to_multiple_of": multiple}
    ),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1, 8]),
)


def _makes_tokens(step: Step) -> bool:
    """Whether a batch of what a step makes has input_ids: a pack of whole records has none."""
    if step.method == "apply":
        return isinstance(step.args[0], TokenizeChat)
    return step.method == "tokenize" or (step.method == "pack" and step.settings.get("output") != "list")


@st.composite
def recipes(
    draw: st.DrawFn,
    failing: Failing = "never",
    endless: bool = False,
    max_lanes: int = 8,
    regroups: bool | None = None,
    shares: bool = False,
) -> Recipe:
    """A whole pipeline. `failing`: records may raise without being skipped. `endless`: a pass has no end.

    An endless pass drops nothing for good, so that every lane goes on. `regroups` False: no accumulator but batch.
    `shares`: surely with an ensure_mixture.
    """
    rows = draw(datasets(failing))
    mixture = draw(mixtures(rows, endless).filter(lambda found: _short_enough(rows, found)))
    lanes = draw(st.integers(1, max_lanes))
    if endless:
        rows = tuple(Rows(each.name, each.shards, each.number) for each in rows)
        chain = draw(st.lists(st.one_of(*_ENDLESS), max_size=3))
    elif regroups is False:
        chain = draw(st.lists(st.one_of(*_SIMPLE), max_size=3))
    else:
        chain = draw(steps(rows, failing))
    options = {
        "canonical_replicas": lanes,
        "cycles_per_step": draw(st.integers(1, 3)),
        "flush_every_k_chunks": draw(st.one_of(st.none(), st.integers(0, 8))),
    }
    recipe = Recipe(rows, mixture, (), options)
    if not endless and draw(st.integers(0, 4)) == 0:
        dry = draw(st.lists(st.integers(0, lanes - 1), min_size=1, max_size=2, unique=True))
        chain.insert(0, Step("filter", (DropIds(ids_of_lanes(recipe, dry)),)))
    if shares or (not endless and regroups is not False and draw(st.integers(0, 3)) == 0):
        _hold_shares(draw, recipe, chain, failing)
    if draw(st.integers(0, 9)):
        chain.append(Step("batch", (draw(st.integers(1, 6)), draw(st.booleans()))))
        if chain[:-1] and _makes_tokens(chain[-2]) and draw(st.booleans()):
            chain.append(draw(_TRAINING))
    return Recipe(rows, mixture, tuple(chain), options)


def _hold_shares(draw: st.DrawFn, recipe: Recipe, chain: list[Step], failing: Failing) -> None:
    """Puts an ensure_mixture somewhere, in tokens right behind tokenize."""
    shares = recipe.source().shares
    weights = [draw(st.integers(1, 5)) if drawn else 0 for drawn in shares.drawn]
    settings: dict[str, Any] = {"weights": weights, "buffer_size": draw(st.integers(1, 12))}
    at = draw(st.integers(0, len(chain)))
    tokenized = [i for i, step in enumerate(chain) if step.method == "tokenize"]
    is_counted, is_strict = draw(st.booleans()), draw(st.booleans())
    if tokenized and is_counted:
        at, settings["unit"] = tokenized[0] + 1, "tokens"
    if failing == "maybe" and recipe.options["flush_every_k_chunks"] == 0:  # it wants no windows
        settings["strict"] = is_strict
    chain.insert(at, Step("ensure_mixture", (), settings))


def ids_of_lanes(recipe: Recipe, lanes: list[int]) -> frozenset[int]:
    """The ids of the records that lanes read in the first pass."""
    source = recipe.source()
    ids: set[int] = set()
    for lane in lanes:
        index = 0
        while len(found := source.chunk(lane, recipe.num_lanes, 0, index)):
            ids.update(ID_STRIDE * int(d) + int(row) for d, row in zip(found.dataset, found.row, strict=True))
            index += 1
    return frozenset(ids)


def _short_enough(rows: tuple[Rows, ...], mixture: dict[str, Any]) -> bool:
    length = Recipe(rows, mixture, (), {}).source().length(0)
    return length is None or length <= LONGEST_PASS
