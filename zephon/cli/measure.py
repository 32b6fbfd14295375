"""One measurement of a TARGET in a process of its own: `zephon.bench.child` with the way to load a user's pipeline."""

from __future__ import annotations

from zephon.bench.child import main
from zephon.cli.target import load_target

if __name__ == "__main__":
    main(load_target)
