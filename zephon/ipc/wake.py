"""Wake-ups between processes: an eventfd that counts the frames announced.

The producer writes 1 after it published a frame; the consumer reads the sum, which is how many more frames it may take.
Both calls are system calls on one kernel object: what was stored before the write is seen after the read. That is the
only memory order that the rings lean on.
"""

from __future__ import annotations

import os
import select


class Wake:
    """One direction of one pair of processes. `fd` is inherited by fork; after an exec it is given again."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) if fd is None else fd

    def post(self, frames: int = 1) -> None:
        """Announces frames. Pairs with `take`."""
        os.eventfd_write(self.fd, frames)

    def take(self) -> int:
        """Frames announced since the last call; 0 where none. Never waits. Pairs with `post`."""
        try:
            return os.eventfd_read(self.fd)
        except BlockingIOError:
            return 0

    def wait(self, timeout_s: float) -> bool:
        """Waits for an announcement for at most `timeout_s`, and takes nothing; returns whether there is one."""
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def is_whole(self) -> bool:
        """Whether its descriptor is still its own: user code may have closed it, and opened something else."""
        try:
            return "eventfd" in os.readlink(f"/proc/self/fd/{self.fd}")
        except OSError:
            return False

    def close(self) -> None:
        """Closes the descriptor in this process."""
        os.close(self.fd)
