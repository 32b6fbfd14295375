"""Boards: the same contract in a folder, under a file URL and in a bucket of a real S3 server."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.object_store import BUCKET, object_store
from zephon.errors import CheckpointError, ConfigError
from zephon.io.board import Board, open_board


@pytest.fixture(params=["folder", "file", "s3"])
def where(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A place for boards, in the three ways of writing it."""
    if request.param == "s3":
        with object_store(monkeypatch):
            yield f"s3://{BUCKET}/some/prefix/"
    else:
        place = tmp_path / "a folder, 100% new"
        yield str(place) if request.param == "folder" else place.as_uri()


def test_messages(where: str) -> None:
    """They are replaced whole, are seen by who opens the board later, and belong to one board of several."""
    board = open_board(where, "job")
    assert board.read("call") is None
    board.write("call", b"")
    assert board.read("call") == b""
    board.write("call", bytes(range(256)) * 1000)
    assert open_board(where, "job").read("call") == bytes(range(256)) * 1000
    assert open_board(where, "other").read("call") is None


def test_who_reads_meanwhile_sees_a_whole_message(where: str) -> None:
    board, over = open_board(where, "job"), threading.Event()
    texts = [bytes([i]) * 200_000 for i in range(2)]
    board.write("result", texts[0])

    def write() -> None:
        for i in range(20):
            board.write("result", texts[i % 2])
        over.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = set()
    while not over.is_set():
        seen.add(board.read("result"))
    writer.join()
    assert seen <= set(texts)


def refused(board: Board) -> str:
    with pytest.raises(CheckpointError) as caught:
        board.write("call", b"1")
    return str(caught.value)


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    board = open_board(str(tmp_path / "meet"), "job")
    (tmp_path / "meet" / "job").rmdir()
    assert board.read("call") is None
    assert refused(board).startswith(f"aggregate_dir: {tmp_path}/meet/job cannot be reached: FileNotFoundError: ")


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigError, match=r"aggregate_dir: .*/file/job cannot be used: (FileExists|NotADirectory)Error"
    ):
        open_board(str(tmp_path / "file"), "job")


def test_a_bucket_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with object_store(monkeypatch):
        text = refused(open_board("s3://nobody/prefix", "job"))
    assert text.startswith("aggregate_dir: s3://nobody/prefix/job cannot be reached: FileNotFoundError: ")
    assert "\n" not in text


def test_a_url_of_nothing() -> None:
    pytest.importorskip("obstore")
    with pytest.raises(ConfigError, match=r"aggregate_dir: cloud://bucket/job cannot be used: .*Unable to recognise"):
        open_board("cloud://bucket", "job")


def test_a_message_that_is_replaced_on_nfs_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server has let go of the file that this client has just opened."""
    board = open_board(str(tmp_path), "job")
    board.write("call", b"1")
    number = errno.ESTALE

    def read(path: Path) -> bytes:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "read_bytes", read)
    assert board.read("call") is None  # the next look finds the new one
    number = errno.EIO
    with pytest.raises(CheckpointError, match=r"cannot be reached: OSError: .*Input/output error"):
        board.read("call")


def test_a_full_disk_keeps_no_part_of_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board = open_board(str(tmp_path), "job")

    def write(path: Path, message: bytes) -> int:
        path.open("wb").close()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", write)
    assert "No space left" in refused(board)
    assert not list((tmp_path / "job").iterdir())


@pytest.mark.parametrize("name", ["../x", "/abs", "a/../b", ".", "a//b", "job/"])
def test_a_job_stays_in_the_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run_id='.*': a name is wanted, which is a folder below aggregate_dir"):
        open_board(str(tmp_path), name)
    open_board(str(tmp_path), "team/job-17").write("call", b"1")
    assert (tmp_path / "team" / "job-17" / "call").exists()
