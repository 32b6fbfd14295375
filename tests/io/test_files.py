"""Which files, in which order, under which names: case A12, and every path that has to be refused."""

from __future__ import annotations

import glob
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from zephon.errors import ConfigError, DataError
from zephon.io import Dataset

ROOT = Path(__file__).parents[2]
SHARDS = ["a/2", "a/10", "B/1", "b/1", "b/c/1"]
ORDER = ["B/1.jsonl", "a/10.jsonl", "a/2.jsonl", "b/1.jsonl", "b/c/1.jsonl"]


def write(folder: Path, shards: list[str] = SHARDS) -> Path:
    """Shards of three rows, made on disk in the order of the list; a row tells its shard."""
    for name in shards:
        path = folder / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps({"id": f"{name}:{i}"}) + "\n" for i in range(3)))
    return folder


def ids(dataset: Dataset) -> list[str]:
    return [record["id"] for record in dataset.read(range(dataset.num_rows))]


def load(path: Any, **settings: Any) -> Dataset:
    return Dataset.from_path("web", path, **settings)


@pytest.fixture
def copies(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Copy A made in order, copy B in reverse order and on another file system, if there is one."""
    there = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=there) as other:
        yield write(tmp_path / "A"), write(Path(other), SHARDS[::-1])


EXPECTED = [f"{name.removesuffix('.jsonl')}:{i}" for name in ORDER for i in range(3)]


def test_a12_folders(copies: tuple[Path, Path]) -> None:
    for folder in copies:
        made = load(folder)
        assert list(made.shard_names) == ORDER
        assert ids(made) == EXPECTED
    assert load(copies[0]).fingerprint() == load(copies[1]).fingerprint()


def test_a12_globs(copies: tuple[Path, Path]) -> None:
    for folder in copies:
        made = load(f"{folder}/**/*.jsonl")
        assert list(made.shard_names) == ORDER
        assert made.fingerprint() == load(folder).fingerprint()


def test_a12_listings_in_reverse(copies: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    class Reversed:
        def __init__(self, found: Any) -> None:
            with found:
                self.entries = sorted(found, key=lambda entry: entry.name, reverse=True)

        def __enter__(self) -> Iterator[Any]:
            return iter(self.entries)

        def __exit__(self, *_: object) -> None:
            return None

        def __iter__(self) -> Iterator[Any]:
            return iter(self.entries)

    listdir, scandir, find = os.listdir, os.scandir, glob.glob
    monkeypatch.setattr(os, "listdir", lambda *args: sorted(listdir(*args), reverse=True))
    monkeypatch.setattr(os, "scandir", lambda *args: Reversed(scandir(*args)))
    monkeypatch.setattr(glob, "glob", lambda *args, **options: sorted(find(*args, **options), reverse=True))
    for folder in copies:
        assert ids(load(folder)) == EXPECTED
        assert ids(load(f"{folder}/**/*.jsonl")) == EXPECTED


SCRIPT = """
import json, sys
from zephon.io import Dataset
made = [Dataset.from_path("web", path) for path in sys.argv[1:]]
print(json.dumps([[data.shard_names, data.fingerprint(), data.read(range(data.num_rows))] for data in made]))
"""


def test_a12_locales(copies: tuple[Path, Path]) -> None:
    write(copies[0], ["ü/ß", "ś/I", "z"])
    outputs = []
    for locale, extra in [("C", {}), ("C", {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}), ("en_US.UTF-8", {})]:
        env = {**os.environ, "LC_ALL": locale, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error", **extra}
        command = [sys.executable, "-c", SCRIPT, str(copies[0]), f"{copies[0]}/**/*.jsonl"]
        outputs.append(subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout)
    folder, pattern = json.loads(outputs[0])
    assert folder == pattern
    assert folder[0] == [*ORDER, "z.jsonl", "ü/ß.jsonl", "ś/I.jsonl"]
    assert outputs[1:] == outputs[:1] * 2


def test_a12_another_shard_is_noticed(copies: tuple[Path, Path]) -> None:
    before = load(copies[0]).fingerprint()
    write(copies[0], ["a/0"])
    added = load(copies[0]).fingerprint()
    (copies[0] / "a/0.jsonl").unlink()
    (copies[0] / "a/2.jsonl").rename(copies[0] / "a/3.jsonl")
    renamed = load(copies[0]).fingerprint()
    (copies[0] / "a/3.jsonl").rename(copies[0] / "a/2.jsonl")
    with (copies[0] / "a/2.jsonl").open("a") as file:
        file.write(" ")
    resized = load(copies[0]).fingerprint()
    hashes = {content["hash"] for content in (before, added, renamed, resized)}
    assert len(hashes) == 4


def test_a_list_keeps_its_order(tmp_path: Path) -> None:
    write(tmp_path)
    made = load([tmp_path / "b", f"{tmp_path}/a/*.jsonl", str(tmp_path / "B/1.jsonl")])
    assert list(made.shard_names) == ["b/1.jsonl", "b/c/1.jsonl", "a/10.jsonl", "a/2.jsonl", "B/1.jsonl"]
    assert made.fingerprint() != load([tmp_path / "a", tmp_path / "b", tmp_path / "B"]).fingerprint()
    assert load([tmp_path]).fingerprint() == load((tmp_path,)).fingerprint() == load(tmp_path).fingerprint()
    assert load([tmp_path / "a/2.jsonl", tmp_path / "a/10.jsonl"]).shard_names == ("2.jsonl", "10.jsonl")


def test_how_a_path_is_written_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    wanted = load(tmp_path / "data").fingerprint()
    for path in ("data", "data/", "./data//", "data/a/..", f"{tmp_path}/data/", "~/data", b"data", Path("data")):
        assert load(path).fingerprint() == wanted, path
    assert load("data/**").fingerprint() == load(f"{tmp_path}/data/**/*.jsonl").fingerprint() == wanted
    assert load("data/a/2.jsonl").shard_names == ("2.jsonl",)
    monkeypatch.chdir(tmp_path / "data")
    assert load(".").fingerprint() == wanted
    assert load("**/*.jsonl").fingerprint() == wanted


def test_a_dataset_keeps_its_files_when_the_process_goes_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    made = load("data")
    monkeypatch.chdir("/")
    assert ids(made) == EXPECTED


def test_what_a_folder_does_not_give(tmp_path: Path) -> None:
    write(tmp_path, ["x", ".hidden", "_partial", ".git/x", "_temporary/x", "deep/er/.x", "deep/er/y"])
    (tmp_path / "_SUCCESS").touch()
    (tmp_path / "README.md").touch()
    (tmp_path / "info.json").write_text("{}")
    (tmp_path / "model.bin.gz").touch()
    (tmp_path / "upper.JSONL").write_text('{"id": 1}\n')
    (tmp_path / "new.ndjson").write_text('{"id": 1}\n')
    (tmp_path / "folder.jsonl").mkdir()
    assert load(tmp_path).shard_names == ("deep/er/y.jsonl", "new.ndjson", "upper.JSONL", "x.jsonl")


def test_what_a_glob_gives(tmp_path: Path) -> None:
    write(tmp_path, ["x", "y", "_partial", ".hidden"])
    assert load(f"{tmp_path}/*").shard_names == ("x.jsonl", "y.jsonl")
    assert load(f"{tmp_path}/_p*").shard_names == ("_partial.jsonl",)
    assert load(f"{tmp_path}/[xz].jsonl").shard_names == ("x.jsonl",)


def test_a_file_whose_name_looks_like_a_glob(tmp_path: Path) -> None:
    write(tmp_path, ["a[1]", "a1"])
    assert ids(load(tmp_path / "a[1].jsonl")) == ["a[1]:0", "a[1]:1", "a[1]:2"]


def test_files_that_are_named_may_end_in_json_or_in_anything_with_fmt(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"id": 1}\n')
    (tmp_path / "b.txt").write_text('{"id": 2}\n')
    assert ids(load(tmp_path / "a.json")) == [1]
    assert ids(load(f"{tmp_path}/*.json")) == [1]
    assert ids(load(f"{tmp_path}/*", fmt="jsonl")) == [1, 2]
    assert ids(load([tmp_path / "b.txt"], fmt="jsonl")) == [2]


def test_linked_files_and_folders_are_followed(tmp_path: Path) -> None:
    write(tmp_path / "real", ["x", "deep/y"])
    (tmp_path / "data").mkdir()
    (tmp_path / "data/all").symlink_to(tmp_path / "real")
    (tmp_path / "data/z.jsonl").symlink_to(tmp_path / "real/x.jsonl")
    assert load(tmp_path / "data").shard_names == ("all/deep/y.jsonl", "all/x.jsonl", "z.jsonl")
    (tmp_path / "real/deep/up").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match="is a link to one that holds it"):
        load(tmp_path / "data")


@pytest.mark.skipif(sys.platform != "linux", reason="file names of any bytes")
def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    write(tmp_path, ["a", "b"])
    os.rename(os.fsencode(tmp_path / "a.jsonl"), os.path.join(os.fsencode(tmp_path), b"a\xff.jsonl"))
    made = load(tmp_path, exclude=[("a\\xff.jsonl", 1)])
    assert made.shard_names == ("a\\xff.jsonl", "b.jsonl")
    assert ids(made)[:3] == ["a:0", "a:1", "a:2"]
    json.dumps(made.fingerprint()).encode()


def refused(path: Any, says: str, **settings: Any) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        load(path, **settings)
    assert "dataset 'web'" in str(caught.value)


def test_paths_without_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/a.json").touch()
    (tmp_path / "other/b.csv").touch()
    refused(tmp_path / "absent", "there is no file or folder")
    refused(tmp_path / "absent.jsonl", "there is no file or folder")
    refused(tmp_path / "empty", r"no file that ends in \.jsonl or \.ndjson or \.parquet or \.pq in folder")
    refused(tmp_path / "other", r"it holds files that end in \.csv, \.json; name files with another suffix by a glob")
    refused(f"{tmp_path}/*.jsonl", "no file matches")
    refused(f"{tmp_path}/o*", "it matches 1 folders: add '/\\*\\*/\\*.jsonl'")
    refused([], "no path was given")
    refused(3, "3 is a int, not a path")
    refused([tmp_path / "other/a.json", None], "None is a NoneType, not a path")
    refused("s3://bucket/data", "is a URL; this version reads local files")
    os.symlink(tmp_path / "absent", tmp_path / "empty/x.jsonl")
    refused(tmp_path / "empty", "is a broken link or not a regular file")
    refused(tmp_path / "empty/x.jsonl", "is neither a folder nor a readable regular file")
    refused(f"{tmp_path}/other/a.json/", "is neither a folder nor a readable regular file")


def test_a_file_named_twice_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    refused([tmp_path, tmp_path / "a/2.jsonl"], "2.jsonl' is listed twice")
    refused([f"{tmp_path}/a/2.jsonl", f"{tmp_path}/a/../a/2.jsonl"], "is listed twice")


@pytest.mark.parametrize(
    ("suffix", "tool"), [(".gz", "gunzip"), (".zst", "unzstd"), (".bz2", "bunzip2"), (".xz", "unxz")]
)
def test_compressed_files_are_refused(tmp_path: Path, suffix: str, tool: str) -> None:
    write(tmp_path, ["plain"])
    packed = tmp_path / f"x.jsonl{suffix}"
    packed.write_bytes(b"")
    for path in (tmp_path, packed, f"{tmp_path}/*", [tmp_path / "plain.jsonl", packed]):
        refused(path, f"is compressed; this version reads plain files.*`{tool} ")
    refused(packed, "is compressed", fmt="jsonl")


def test_mixed_and_unknown_formats_are_refused(tmp_path: Path) -> None:
    write(tmp_path, ["x"])
    (tmp_path / "y.parquet").touch()
    (tmp_path / "notes.md").touch()
    refused(tmp_path, r"several formats: jsonl \('.*x\.jsonl'\), parquet \('.*y\.parquet'\)")
    refused(tmp_path / "notes.md", "the suffix of '.*notes.md' says nothing about its format")
    refused(f"{tmp_path}/*", "several formats|says nothing")
    assert load(tmp_path, fmt="jsonl").shard_names == ("x.jsonl",)


def test_parquet_that_is_none_is_an_error_that_names_it(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "y.parquet").write_bytes(b"")
    with pytest.raises(DataError, match=r"dataset 'web', shard y\.parquet: not a Parquet file that can be read"):
        load(tmp_path)
