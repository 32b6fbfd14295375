"""What the system lets a process have, read from made-up cgroups of both versions; and the errors about limits."""

from __future__ import annotations

import errno
import os
import re
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from zephon import identity, limits
from zephon.errors import ConfigError
from zephon.io import Dataset
from zephon.limits import (
    cpu_limit,
    import_error,
    limit_error,
    memory_left,
    memory_limit,
    raise_descriptors,
    resource_limit,
)
from zephon.ops.chat_template import ChatTemplate
from zephon.ops.tokenize import make_encoder

MIB = 1 << 20


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of cgroups; this process is in none."""
    root = tmp_path / "cgroup"
    root.mkdir()
    monkeypatch.setattr(limits, "_CGROUP", str(root))
    monkeypatch.setattr(limits, "_OWN", str(tmp_path / "own"))
    return root


def put(folder: Path, **files: str) -> None:
    """Files of a cgroup; a dot in a name is written as two underscores."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_no_cgroups_no_limits(tree: Path) -> None:
    assert (memory_left(), memory_limit(), cpu_limit()) == (None, None, None)
    put(tree, memory__max="max\n", cpu__max="max 100000\n")
    assert (memory_left(), memory_limit(), cpu_limit()) == (None, None, None)


def test_version_2_in_a_container(tree: Path) -> None:
    """The container's own cgroup is the root that it sees. The page cache does not count."""
    (tree.parent / "own").write_text("0::/\n")
    put(tree, memory__max=f"{300 * MIB}\n", memory__stat=f"anon {60 * MIB}\nfile {900 * MIB}\nshmem {40 * MIB}\n")
    put(tree, cpu__max="250000 100000\n")
    assert memory_left() == 200 * MIB
    assert memory_limit() == 300 * MIB
    assert cpu_limit() == 2.5


def test_version_2_the_tightest_of_all_levels_counts(tree: Path) -> None:
    (tree.parent / "own").write_text("0::/slice/job/step\n")
    put(
        tree / "slice", memory__max=f"{900 * MIB}\n", memory__stat=f"anon {880 * MIB}\nshmem 0\n", cpu__max="max 100000"
    )
    put(tree / "slice/job", memory__max=f"{500 * MIB}\n", memory__stat=f"anon {100 * MIB}\nshmem 0\n")
    put(tree / "slice/job", cpu__max="400000 100000\n")
    put(tree / "slice/job/step", memory__max="max\n", memory__stat="anon 0\nshmem 0\n", cpu__max="600000 100000\n")
    assert memory_left() == 20 * MIB
    assert memory_limit() == 500 * MIB
    assert cpu_limit() == 4


@pytest.mark.parametrize("seen_as_root", [False, True])
def test_version_1(seen_as_root: bool, tree: Path) -> None:
    """Where the container sees its own cgroup as the root, the path in /proc leads nowhere."""
    (tree.parent / "own").write_text("9:cpu,cpuacct:/docker/a\n4:memory:/docker/a\n0::/\n")
    put(tree / "memory", memory__limit_in_bytes="9223372036854771712\n", memory__stat="total_rss 5\n")
    place = "" if seen_as_root else "docker/a"
    stat = f"cache 7\nrss 1\ntotal_cache 9\ntotal_rss {60 * MIB}\ntotal_shmem {40 * MIB}\n"
    put(tree / "memory" / place, memory__limit_in_bytes=f"{300 * MIB}\n", memory__stat=stat)
    put(tree / "cpu" / place, cpu__cfs_quota_us="150000\n", cpu__cfs_period_us="100000\n")
    assert (memory_left(), memory_limit(), cpu_limit()) == (200 * MIB, 300 * MIB, 1.5)
    put(tree / "cpu" / place, cpu__cfs_quota_us="-1\n")
    assert cpu_limit() is None


@pytest.mark.parametrize(("quota", "cpus"), [(50_000, 1), (100_000, 1), (250_000, 3), (800_000, 4), (None, 4)])
def test_default_workers_follow_affinity_and_cgroup(
    quota: int | None, cpus: int, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2, 5, 7})
    put(tree, cpu__max=f"{quota or 'max'} 100000\n")
    assert identity.available_cpus() == cpus


@pytest.mark.parametrize(
    ("ranks", "parents", "cpus"),
    [
        ("", set(range(8)), 8),
        ("1", set(range(8)), 8),
        ("2", set(range(8)), 4),
        ("3", set(range(8)), 2),
        ("16", set(range(8)), 1),
        ("0", set(range(8)), 8),
        ("two", set(range(8)), 8),
        ("4", set(range(32)), 8),  # bound to a part of what the launcher has
        ("4", set(range(4)), 2),  # a launcher that is bound itself
    ],
)
def test_the_ranks_of_a_machine_divide_its_cpus(
    ranks: str, parents: set[int], cpus: int, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: parents if pid else set(range(8)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert identity.available_cpus() == cpus


def test_the_ranks_of_a_machine_divide_the_time_of_its_container(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    put(tree, cpu__max="400000 100000\n")
    assert identity.available_cpus() == 2


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (OSError(errno.EMFILE, "x"), "open files here; raise that (ulimit -n), lower parallelism"),
        (OSError(errno.ENFILE, "x"), "fs.file-max"),
        (BlockingIOError(errno.EAGAIN, "x"), "processes and threads here, and a container may"),
        (RuntimeError("can't start new thread"), "ulimit -u"),
        (MemoryError("x"), "MemoryError: x: give the container more memory, or lower ring_bytes"),
        (OSError(errno.ENOMEM, "x"), "give the container more memory, or lower ring_bytes"),
        (OSError(errno.ENOSPC, "x"), "no room is left"),
    ],
)
def test_a_limit_has_a_remedy(error: BaseException, wanted: str) -> None:
    found = limit_error(error, "the launcher")
    assert found is not None
    assert str(found).startswith("the launcher hit a limit of the system: ")
    assert wanted in str(found)


def test_what_is_no_limit_is_left_alone() -> None:
    assert limit_error(OSError(errno.EPIPE, "x"), "the launcher") is None
    assert limit_error(RuntimeError("no thread"), "the launcher") is None


def test_the_number_is_that_of_this_process() -> None:
    soft, _ = resource_limit("NOFILE")
    assert soft == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert re.search(rf"\b{soft:,} open files", str(limit_error(OSError(errno.EMFILE, "x"), "it")))
    assert resource_limit("NO_SUCH_THING") == (None, None)


def test_a_limit_of_the_address_space_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (307_200_000, 307_200_000))
    assert "is 307,200,000 bytes here; raise that (ulimit -v), or lower" in str(limit_error(MemoryError("x"), "it"))


ABSENT = ModuleNotFoundError("No module named 'pyarrow'", name="pyarrow")


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (ABSENT, "needs pyarrow, which is not installed: pip install 'zephon[parquet]'"),
        (
            ModuleNotFoundError("No module named 'numexpr'", name="numexpr"),  # something that pyarrow wants
            "needs pyarrow, which is installed, but its import failed: ModuleNotFoundError: No module named 'numexpr'",
        ),
        (
            ImportError("libarrow.so: failed to map segment from shared object"),
            "import failed: ImportError: libarrow.so: failed to map segment from shared object; give the contain",
        ),
        (OSError("libarrow.so: cannot open shared object file"), "cannot open shared object file; mend that install"),
        (MemoryError(), "which is installed, but its import failed: MemoryError; give the container more memory"),
    ],
)
def test_a_library_that_is_absent_is_told_from_one_that_fails(error: Exception, wanted: str) -> None:
    found = import_error(error, "pyarrow", "reading Parquet", "zephon[parquet]")
    assert str(found).startswith("reading Parquet needs pyarrow, which is")
    assert wanted in str(found)
    assert ("pip" in str(found)) is (error is ABSENT)


def broken_package(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of that name which is there, and cannot be imported."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text("raise ImportError('its library: failed to map segment')")
    for module in [m for m in sys.modules if m.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.syspath_prepend(folder)


@pytest.mark.parametrize("broken", [True, False])
@pytest.mark.parametrize("library", ["pyarrow", "tokenizers", "jinja2"])
def test_every_library_that_is_wanted(
    library: str, broken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if broken:
        broken_package(tmp_path, library, monkeypatch)
    else:
        monkeypatch.setitem(sys.modules, library, None)
    wanted = "installed, but its import failed: ImportError: its library" if broken else "not installed: pip install"
    with pytest.raises(ConfigError, match=f"needs {library}, which is {wanted}"):
        USES[library](tmp_path)


def read_parquet(folder: Path) -> None:
    (folder / "rows.parquet").write_bytes(b"PAR1")
    Dataset.from_path("toy", folder / "rows.parquet")


USES: dict[str, Callable[[Path], object]] = {
    "pyarrow": read_parquet,
    "tokenizers": lambda _: make_encoder("{}"),
    "jinja2": lambda _: ChatTemplate("{{ messages }}", {}, []),
}


def test_descriptors_are_raised_as_far_as_the_hard_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 256))
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: asked.append(pair))
    for wanted in (60, 100, 1000):
        raise_descriptors(wanted)
    assert asked == [(100, 256), (256, 256)]
