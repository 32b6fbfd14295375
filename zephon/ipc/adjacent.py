"""Arrays that lie side by side in one memory, as one array, without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def in_one_piece(pieces: Sequence[Array]) -> Array | None:
    """Views [n, *shape], each of the same bytes array, as one view, where they lie in it end to end; else None."""
    memory, start = pieces[0].base, address(pieces[0])
    stop = start
    for piece in pieces:
        if piece.base is not memory or address(piece) != stop:
            return None
        stop += piece.nbytes
    if not isinstance(memory, np.ndarray) or memory.dtype != np.uint8:
        return None
    first = address(memory)
    own: Array = memory[start - first : stop - first]
    return own.view(pieces[0].dtype).reshape(-1, *pieces[0].shape[1:])


def address(array: Array) -> int:
    """Where an array begins, in this process."""
    return int(array.__array_interface__["data"][0])
