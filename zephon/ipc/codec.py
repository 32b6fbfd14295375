"""Objects as bytes: pickle where it can, else by value, so that what a user typed in a script or a function travels.

pickle sends a class or function by the name of its module. What stands in `__main__`, or inside a function, has no such
name in another process; cloudpickle sends its code instead, and on the way back finds the class that was there first.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import cloudpickle
import numpy as np

PROTOCOL: Final = 5
SCRIPT: Final = ("__main__", "__mp_main__")  # the second is what multiprocessing calls a script in a spawned process

_FORMS: Final = frozenset("cbB?hHiIlLqQnNfdP")  # of items of a memoryview that `cast` takes

Apart = Callable[[Any], Any]


class ByValue(cloudpickle.CloudPickler):  # type: ignore[misc]
    """Pickles what is in no module by value. `script_classes`: the script's classes that it met, by name.

    A file that is open for reading is refused like any other: cloudpickle would read all of it, and send the text.
    """

    def __init__(self, file: io.BytesIO, apart: Apart | None = None) -> None:
        super().__init__(file, PROTOCOL)
        self.script_classes: dict[str, type] = {}
        self._apart = apart

    def persistent_id(self, obj: Any) -> Any:
        """Called by pickle for every object: what takes the place of one that travels apart."""
        return self._apart(obj) if self._apart is not None else None

    def reducer_override(self, obj: Any) -> Any:
        """Called by pickle for everything that is no plain value."""
        for name in ("stdout", "stderr"):  # whatever stands there, in a notebook something that no process can be sent
            if obj is getattr(sys, name):
                return getattr, (sys, name)
        if isinstance(obj, io.TextIOWrapper):
            raise TypeError(f"cannot pickle the open file {obj.name!r}")
        if isinstance(obj, type) and obj.__module__ in SCRIPT and "." not in obj.__qualname__:
            self.script_classes[obj.__name__] = obj
        return super().reducer_override(obj)


def dump_by_value(value: Any, apart: Apart | None = None) -> tuple[bytes, dict[str, type]]:
    """(bytes for `pickle.loads`, the script's classes in it). Raises what pickle raises.

    `apart`: what it returns for an object, unless None, goes in its place; the reader's `persistent_load` gets it.
    """
    buffer = io.BytesIO()
    pickler = ByValue(buffer, apart)
    with _script_by_value():
        pickler.dump(value)
    return buffer.getvalue(), pickler.script_classes


@contextmanager
def _script_by_value() -> Iterator[None]:
    """cloudpickle sends `__main__` by value by itself, and a spawned process's script where it is told so."""
    script = sys.modules.get(SCRIPT[1])
    told = script is None or script.__name__ in cloudpickle.list_registry_pickle_by_value()
    if script is None or told:
        yield
        return
    cloudpickle.register_pickle_by_value(script)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(script)


def dump(value: Any) -> bytes:
    """A value for `pickle.loads`; by value where pickle fails. Raises what pickle raises."""
    try:
        return pickle.dumps(value, PROTOCOL)
    except Exception:
        return dump_by_value(value)[0]


def send_whole() -> None:
    """For a process of the tree: what pickle would change, or not take, arrives there as under the other runners.

    numpy pickles its text scalars without the nulls at their end; a memoryview travels as one of a copy.
    """
    copyreg.pickle(np.str_, lambda text: (np.str_, (text[:],)))
    copyreg.pickle(np.bytes_, lambda raw: (np.bytes_, (raw[:],)))
    copyreg.pickle(memoryview, lambda view: (_view, (view.tobytes(), view.format, view.shape)))


def _view(raw: bytes, form: str, shape: tuple[int, ...]) -> Any:
    """A memoryview of a copy."""
    view: Any = memoryview(raw)
    return view.cast(form, shape) if raw and form in _FORMS else view
