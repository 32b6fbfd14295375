"""Wake-ups: a sum of announcements that never blocks, and a wait with an end."""

from __future__ import annotations

import os
import threading
import time

import pytest

from zephon.ipc.wake import Wake


@pytest.fixture
def wake() -> Wake:
    return Wake()


def test_take_gives_the_sum_once(wake: Wake) -> None:
    assert wake.take() == 0
    wake.post()
    wake.post(5)
    assert wake.take() == 6
    assert wake.take() == 0
    wake.close()


def test_wait_takes_nothing_and_ends_by_itself(wake: Wake) -> None:
    began = time.monotonic()
    assert not wake.wait(0.05)
    assert time.monotonic() - began >= 0.04
    wake.post(2)
    assert wake.wait(10)
    assert wake.wait(0)
    assert wake.take() == 2
    wake.close()


def test_wait_ends_when_another_thread_posts(wake: Wake) -> None:
    poster = threading.Thread(target=wake.post)
    poster.start()
    assert wake.wait(10)
    poster.join()
    wake.close()


def test_posts_from_another_process_are_seen(wake: Wake) -> None:
    pid = os.fork()
    if pid == 0:
        wake.post(3)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert wake.take() == 3
    wake.close()


def test_it_is_not_passed_to_programs_and_close_gives_the_descriptor_back(wake: Wake) -> None:
    assert not os.get_inheritable(wake.fd)
    wake.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        wake.post()
