"""Which lanes a group owns: arithmetic on the topology, asked of no other rank."""

from __future__ import annotations

import msgspec

from zephon.errors import ConfigError
from zephon.options import TopologyOptions


class Identity(msgspec.Struct, frozen=True):
    """Who this process is, as a launcher or torch.distributed says."""

    world_size: int = 1
    rank: int = 0
    origin: str = "a single process"


class Topology(msgspec.Struct, frozen=True):
    """A resolved topology: this process's group among `num_groups`, and the lanes of the run."""

    num_lanes: int
    num_groups: int
    group: int
    strategy: str
    world_size: int
    rank: int
    share: int = 0
    num_shares: int = 1
    """Which part of the group's lanes this process feeds, where workers of a torch DataLoader divide them."""

    def lanes_of(self, group: int) -> list[int]:
        """The lanes that a group owns, ascending.

        contiguous: 8 lanes over 3 groups are [0,1,2] [3,4,5] [6,7]; interleaved: lane i to group i mod groups.
        """
        if self.strategy == "interleaved":
            return list(range(group, self.num_lanes, self.num_groups))
        share, extra = divmod(self.num_lanes, self.num_groups)
        start = group * share + min(group, extra)
        return list(range(start, start + share + (group < extra)))

    @property
    def lanes(self) -> list[int]:
        """The lanes of this process's group, or of its share: the j-th lane of a group is in share j mod num_shares."""
        return self.lanes_of(self.group)[self.share :: self.num_shares]


def resolve_topology(
    options: TopologyOptions, canonical_replicas: int | None, identity: Identity | None
) -> tuple[Topology, list[str]]:
    """The topology, and what the user should know of it. Raises ConfigError on a contradiction.

    `identity` is what the environment says, or None; explicit settings that contradict it are an error.
    `canonical_replicas` None: as many lanes as groups.
    """
    world_size, rank = _rank(options, identity)
    num_groups, group = _group(options, world_size, rank)
    num_lanes = canonical_replicas or num_groups
    if num_groups > num_lanes:
        raise ConfigError(
            f"dp_degree={num_groups} is more than canonical_replicas={num_lanes}: a group would own no lane; "
            f"use at most {num_lanes} groups, or start a run with more lanes"
        )
    topology = Topology(num_lanes, num_groups, group, options.mapping_strategy, world_size, rank)
    notices = []
    alone = identity is None and options.world_size is None and options.global_rank is None
    if alone and num_groups > 1 and options.dp_group_id is None:
        notices.append(
            f"dp_degree={num_groups} without dp_group_id, and no launcher says who this process is: it is taken for "
            "group 0; give dp_group_id, or every process gets the same lanes"
        )
    if num_lanes % num_groups:
        most = [g for g in range(num_groups) if len(topology.lanes_of(g)) > num_lanes // num_groups]
        notices.append(
            f"{num_lanes} lanes do not divide among {num_groups} groups: {num_lanes // num_groups + 1} lanes for each "
            f"of {_span(most)}, {num_lanes // num_groups} for the others, which do less work a step"
        )
    return topology, notices


def _rank(options: TopologyOptions, identity: Identity | None) -> tuple[int, int]:
    if identity is None and options.world_size is None and options.global_rank is None:
        return options.dp_degree or 1, options.dp_group_id or 0  # no launcher: the groups stand for the ranks
    world_size = _agreed("world_size", options.world_size, identity, identity.world_size if identity else 1)
    rank = _agreed("global_rank", options.global_rank, identity, identity.rank if identity else 0)
    if rank >= world_size:
        raise ConfigError(f"global_rank={rank} is not below world_size={world_size}")
    return world_size, rank


def _agreed(name: str, given: int | None, identity: Identity | None, seen: int) -> int:
    """The explicit value, which must not contradict the environment's."""
    if given is None:
        return seen
    if identity is not None and given != seen:
        raise ConfigError(
            f"option {name}={given}, but {identity.origin} says {seen}; leave the option unset, or mend one"
        )
    return given


def _group(options: TopologyOptions, world_size: int, rank: int) -> tuple[int, int]:
    """(number of groups, own group)."""
    num_groups, group = options.dp_degree, options.dp_group_id
    if num_groups is not None and num_groups > world_size:
        raise ConfigError(
            f"dp_degree={num_groups} with world_size={world_size}: a group without a rank would lose its lanes; "
            "use at most one group a rank"
        )
    if num_groups is None and group is not None and world_size == 1:
        raise ConfigError(f"dp_group_id={group} without dp_degree: say how many groups there are")
    num_groups = num_groups if num_groups is not None else world_size
    if group is None:
        if num_groups not in (1, world_size) and world_size > 1:
            raise ConfigError(
                f"dp_degree={num_groups} with world_size={world_size}: say which group this rank is in (dp_group_id)"
            )
        group = rank if num_groups > 1 else 0
    if group >= num_groups:
        raise ConfigError(f"dp_group_id={group} is not below dp_degree={num_groups}")
    return num_groups, group


def _span(numbers: list[int]) -> str:
    return f"groups {numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"group {numbers[0]}"
