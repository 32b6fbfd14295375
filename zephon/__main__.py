"""`python -m zephon` is the command `zephon`."""

from __future__ import annotations

from zephon.cli import main

main()
