"""TARGET on the command line: `module.py:name` or `package.module:name`.

It names a pipeline, or a function without required arguments that returns one.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from types import ModuleType
from typing import Any

from zephon.errors import ConfigError, ZephonError, describe
from zephon.pipeline import Pipeline

_FORM = "TARGET is module.py:name or package.module:name"


def load_target(target: str) -> Pipeline:
    """The pipeline that TARGET names. Raises ConfigError, or whatever ZephonError the user's code raises."""
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise ConfigError(f"{target!r} names no pipeline: {_FORM}, for example examples/pretrain.py:pipeline")
    is_file = place.endswith(".py") or os.sep in place or "/" in place
    with _Guard(place, f"importing {place}"):
        module = _from_file(place) if is_file else _from_name(place)
    value = _member(module, place, name)
    if isinstance(value, Pipeline):
        return value
    if not callable(value):
        kind = type(value).__name__
        raise ConfigError(f"{target} is of type {kind}: a Pipeline, or a function that returns one, is wanted")
    _check_arguments(value, target)
    with _Guard(place, f"calling {target}"):
        made = value()
    if not isinstance(made, Pipeline):
        kind = type(made).__name__
        raise ConfigError(f"{target}() returned {kind}: a Pipeline is wanted; end the function with `return pipeline`")
    return made


class _Guard:
    """Turns what the user's module raises into a ConfigError that says where in it; lets errors of ours pass."""

    def __init__(self, place: str, doing: str) -> None:
        self._place, self._doing = place, doing

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or isinstance(error, (ZephonError, KeyboardInterrupt)):
            return
        if isinstance(error, ModuleNotFoundError) and error.name and not _looks_for(self._place, error.name):
            raise ConfigError(f"{self._doing}: no module named '{error.name}'{_at(error)}") from error
        if isinstance(error, ModuleNotFoundError):
            raise ConfigError(
                f"no module '{self._place}' (no '{error.name}') in {os.getcwd()} or on Python's path; {_FORM}"
            ) from error
        if isinstance(error, SystemExit):
            raise ConfigError(
                f"{self._doing} ended the program (SystemExit: {error.code}); put what a script does under "
                "`if __name__ == '__main__':`, so that its functions can be imported"
            ) from error
        relative = isinstance(error, ImportError) and "relative import" in str(error)
        remedy = "; a file of a package is named as package.module:name" if relative else ""
        raise ConfigError(f"{self._doing} failed{_at(error)}: {describe(error)}{remedy}") from error


def _looks_for(place: str, name: str) -> bool:
    """Whether the module that is missing is TARGET's own, or a package that it lies in."""
    return place == name or place.startswith(name + ".")


def _at(error: BaseException) -> str:
    """The innermost line of code that is neither Python's import machinery nor ours."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" at {error.filename}, line {error.lineno}"
    own = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<", own + os.sep)) and os.sep + "importlib" + os.sep not in frame.filename
    ]
    return f" at {frames[-1].filename}, line {frames[-1].lineno}" if frames else ""


def _from_name(name: str) -> ModuleType:
    """A module by its dotted name; the current folder comes first, as with `python -m`."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    return importlib.import_module(name)


def _from_file(path: str) -> ModuleType:
    """A module by its file; the file's folder is on the path, as when Python runs it.

    The module keeps the file's name, unless another module has it already (a script called `json.py`).
    """
    file = os.path.abspath(path)
    if not os.path.isfile(file):
        raise ConfigError(f"no file {path}; {_FORM}")
    folder, stem = os.path.dirname(file), os.path.splitext(os.path.basename(file))[0]
    if folder not in sys.path:
        sys.path.insert(0, folder)
    known = sys.modules.get(stem)
    if known is not None and os.path.abspath(getattr(known, "__file__", None) or "") == file:
        return known
    is_free = known is None and stem.isidentifier() and stem not in sys.stdlib_module_names
    name = stem if is_free else f"zephon_target_{stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is no Python file; {_FORM}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _member(module: ModuleType, place: str, name: str) -> Any:
    """The attribute `name`, which may be dotted."""
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            public = [n for n in vars(module) if not n.startswith("_")]
            near = difflib.get_close_matches(name, public, n=1, cutoff=0.5)
            pipelines = [n for n, found in vars(module).items() if isinstance(found, Pipeline)]
            remedy = f"did you mean {near[0]!r}?" if near else f"its pipelines: {', '.join(pipelines) or 'none'}"
            raise ConfigError(f"{place} has no {name!r}; {remedy}")
        value = getattr(value, part)
    return value


def _check_arguments(function: Any, target: str) -> None:
    """A function with required arguments cannot be called here."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # compiled functions without a signature
        return
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if required:
        raise ConfigError(
            f"{target} needs arguments ({', '.join(required)}): give them defaults, or write a function without "
            "arguments that calls it"
        )
