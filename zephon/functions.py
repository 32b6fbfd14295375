"""The identity of a user's function: what a fingerprint stores so that a changed definition is noticed on restore.

`code_hash` walks from a callable to everything of the user's that decides its result, and hashes what it finds in an
order that depends on the program alone: never on the hash seed, the process, a line number or a file name.

The walk is a queue of nodes (functions, classes, instances). A node is numbered when it is first met and written
when its turn comes, so a cycle is a repeated number and a long chain of helpers does not deepen the recursion.
Plain values (numbers, text, containers of them) are written where they stand.

Two rules bound the walk. What user code holds *by value* (closure, default, partial, instance state) is followed,
with the code of functions. What it reaches *by global name*, and every class, is followed inside its own module and
is a qualified name outside of it; so is all of Python's own library, whose text changes with each patch release.
"""

from __future__ import annotations

import copyreg
import dis
import functools
import hashlib
import inspect
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from zephon.canonical import canonical_bytes

# Flags of a code object that change what a call does; others tell where and how the text was compiled.
_FLAGS = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_GENERATOR | inspect.CO_COROUTINE
_FLAGS |= inspect.CO_ITERABLE_COROUTINE | inspect.CO_ASYNC_GENERATOR

# Entries of a class's namespace that say where it stands or what was derived from the others.
# fmt: off
_DERIVED = frozenset((
    "__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__firstlineno__", "__static_attributes__",
    "__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__", "__orig_bases__",
    "__parameters__", "__type_params__", "__match_args__", "__dataclass_params__", "__dataclass_fields__",
    "__abstractmethods__", "_abc_impl", "__slotnames__",
))
# fmt: on

_COMPILED = (
    types.MemberDescriptorType,
    types.GetSetDescriptorType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
)

_LIBRARY = str(functools.__file__).rpartition("functools")[0]
_FOREIGN = ("site-packages", "dist-packages")
_DEEPEST = 50  # containers inside containers that are written where they stand


def code_hash(fn: Callable[..., Any]) -> str:
    """The identity of what `fn` does, as 64 hexadecimal digits (sha256).

    It changes with the bytecode, constants, names, defaults, closure values, the functions and classes of the same
    module that are used by name, module-level constants that are used, the state of a bound instance and the
    arguments of a partial. It does not change with the hash seed, a moved line, a renamed file, comments, the
    docstring, annotations or the function's own name, nor between `__main__` and an imported module.

    Not seen: functions reached through another module (`helpers.clean`), what a name will be bound to later, and
    the inside of compiled code; there the name stands for the thing. A function whose result depends on these, or
    on a global that changes while it runs, should be given a `version=`. Bytecode differs between minor versions of
    Python: compare `python_version()` too.
    """
    walk = _Walk()
    walk.value(fn, _home(fn))
    walk.finish()
    return walk.digest.hexdigest()


def function_name(fn: Callable[..., Any]) -> str | None:
    """The function's `__name__`; None for a lambda, a partial and whatever else has no name of its own."""
    name = getattr(fn, "__name__", None)
    return name if isinstance(name, str) and name.isidentifier() else None


def wants_rng(fn: Callable[..., Any]) -> bool:
    """Whether `fn` can be called with `rng=` and leaves it open: a named parameter, not bound by a partial."""
    if isinstance(fn, functools.partial) and "rng" in fn.keywords:
        return False
    try:
        parameter = inspect.signature(fn).parameters.get("rng")
    except (TypeError, ValueError):  # compiled functions without a signature
        return False
    return parameter is not None and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)


def python_version() -> str:
    """`major.minor` of the running Python, for example "3.11": code hashes compare only within one."""
    return f"{sys.version_info[0]}.{sys.version_info[1]}"


def _home(thing: Any) -> str:
    """The module in which a function, a class or an instance's class was written."""
    if isinstance(thing, types.FunctionType):
        return str(thing.__globals__.get("__name__", ""))
    if isinstance(thing, types.MethodType):
        return _home(thing.__func__)
    return str((thing if isinstance(thing, type) else type(thing)).__module__)


def _is_library(module: str) -> bool:
    """Whether the module is Python's own. A user's file of the same name lies elsewhere."""
    if module == "builtins":
        return True
    if module.partition(".")[0] not in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is None or (file.startswith(_LIBRARY) and not file.removeprefix(_LIBRARY).startswith(_FOREIGN))


def _qualified(thing: Any) -> str:
    """`module.qualname` of a function, class or builtin; of the type where the thing has no name."""
    name = getattr(thing, "__qualname__", None)
    if not isinstance(name, str):
        thing = type(thing)
        name = thing.__qualname__
    module = getattr(thing, "__module__", None)
    return f"{module if isinstance(module, str) else 'builtins'}.{name}"


def _wrapped(value: Any) -> Any:
    """What a compiled wrapper passes on to (functools.lru_cache, compilers of one function); None if it is none."""
    inside = getattr(value, "__dict__", None)
    return inside.get("__wrapped__") if isinstance(inside, dict) and callable(value) else None


def _array_bytes(value: Any) -> bytes | None:
    """The content of an array or tensor, canonical; None for other values, and for a tensor that cannot be read."""
    if not isinstance(value, np.generic) and not callable(getattr(type(value), "__array__", None)):
        return None
    try:
        return canonical_bytes(value)
    except Exception:  # whatever another package's tensor raises
        return None


def _atom(value: Any) -> bytes | None:
    """Canonical bytes of a value without parts; None for others. Types are told apart: 1, 1.0 and True differ."""
    if value is None or isinstance(value, (bool, types.EllipsisType, types.NotImplementedType)):
        return repr(value).encode()
    if type(value) is int:
        return b"int " + hex(value).encode()  # decimal text of a huge int is refused by Python
    if type(value) in (float, complex):
        return f"{type(value).__name__} {value!r}".encode()
    if type(value) is str:
        return b"str " + value.encode("utf-8", "surrogatepass")
    if type(value) is bytes:
        return b"bytes " + value
    return None


def _sort_key(value: Any) -> bytes:
    """A key that puts the members of a set, or the keys of a dict, in the same order in every process."""
    atom = _atom(value)
    if atom is not None:
        return atom
    if isinstance(value, tuple):
        return b"tuple " + b"\0".join(map(_sort_key, value))
    if isinstance(value, frozenset):
        return b"frozenset " + b"\0".join(sorted(map(_sort_key, value)))
    code = getattr(value, "__code__", None)
    return _qualified(value).encode() + (code.co_code if isinstance(code, types.CodeType) else b"")


def _global_names(instructions: Iterable[dis.Instruction]) -> list[str]:
    """Names that the code reads from its module and never rebinds: what it rebinds is state, not definition."""
    read: set[str] = set()
    bound: set[str] = set()
    for instruction in instructions:
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            read.add(instruction.argval)
        elif instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            bound.add(instruction.argval)
    return sorted(read - bound)


def _wrapper_parts(value: Any) -> list[Any] | None:
    """What a callable that only passes on to others is made of; None if it is no such callable."""
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, (functools.partial, functools.partialmethod)):
        return [value.func, value.args, dict(value.keywords)]
    if isinstance(value, (staticmethod, classmethod)):
        return [value.__func__]
    if isinstance(value, property):
        return [value.fget, value.fset, value.fdel]
    if isinstance(value, functools.cached_property):
        return [value.func]
    if isinstance(value, types.BuiltinFunctionType):
        return [value.__name__, value.__self__]
    wrapped = _wrapped(value)
    return None if wrapped is None else [wrapped]


class _Walk:
    """One traversal. `home` is, everywhere, the module whose code holds or reads the value."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        self._number: dict[int, int] = {}
        self._alive: list[Any] = []  # keeps what was numbered alive: a freed object's id may come again
        self._queue: deque[tuple[Any, str]] = deque()

    def finish(self) -> None:
        """Writes the nodes in the order in which they were met, with those that they meet."""
        while self._queue:
            thing, home = self._queue.popleft()
            self._part("node", str(self._number[id(thing)]))
            if isinstance(thing, types.FunctionType):
                self._function(thing)
            elif isinstance(thing, type):
                self._class(thing, home)
            else:
                self._instance(thing, home)

    def value(self, value: Any, home: str, depth: int = 0) -> None:
        """Writes what is held by value, inside `depth` containers."""
        atom = _atom(value)
        if atom is not None:
            self._part("atom", atom)
        elif isinstance(value, types.FunctionType):
            self._held_function(value)
        elif isinstance(value, type):
            self._type(value, home)
        elif isinstance(value, types.ModuleType):
            self._part("module", value.__name__)
        elif isinstance(value, types.CodeType):
            self._code(value, {}, home)
        elif isinstance(value, _COMPILED):
            self._part("compiled", _qualified(value))
        elif type(value) in (tuple, list, set, frozenset, dict) and depth < _DEEPEST:
            self._container(value, home, depth + 1)
        else:
            self._object(value, home, depth)

    def _part(self, *parts: str | bytes) -> None:
        """Adds to the digest, each part behind its length, so that parts cannot run together."""
        for text in parts:
            data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
            self.digest.update(len(data).to_bytes(8, "big"))
            self.digest.update(data)

    def _again(self, thing: Any) -> bool:
        """Writes the number of `thing`. Returns whether it had one."""
        known = id(thing) in self._number
        if not known:
            self._number[id(thing)] = len(self._number)
            self._alive.append(thing)
        self._part("ref", str(self._number[id(thing)]))
        return known

    def _node(self, thing: Any, home: str) -> None:
        if not self._again(thing):
            self._queue.append((thing, home))

    def _container(self, value: Any, home: str, depth: int) -> None:
        self._part(type(value).__name__, str(len(value)))
        # Only what can change has an identity that the program decides: equal constant tuples may be one object or two.
        if isinstance(value, (list, set, dict)) and self._again(value):
            return
        if isinstance(value, dict):
            value = [part for key in sorted(value, key=_sort_key) for part in (key, value[key])]
        elif isinstance(value, (set, frozenset)):
            value = sorted(value, key=_sort_key)
        for item in value:
            self.value(item, home, depth)

    def _object(self, value: Any, home: str, depth: int) -> None:
        parts = _wrapper_parts(value)
        if parts is not None:
            self._part("wrapper", type(value).__name__)
            owner = _home(value.__self__) if isinstance(value, types.MethodType) else home
            for part in parts:
                self.value(part, owner, depth)
            return
        content = _array_bytes(value)
        if content is None:
            self._node(value, home)
        else:
            self._part("array", content)

    def _held_function(self, function: types.FunctionType) -> None:
        """A function of a library made by its decorators keeps the user's function in its closure."""
        if _is_library(_home(function)):
            self._named_function(function, lambda cell: not _is_library(_home(cell)))
        else:
            self._node(function, _home(function))

    def _named_function(self, function: types.FunctionType, follow: Callable[[Any], bool]) -> None:
        """A function that is its name, and the callables in its closure that `follow` picks."""
        # Not `__module__` and `__qualname__`: functools.wraps sets them to the user's.
        self._part("name", f"{_home(function)}.{function.__code__.co_qualname}")
        for cell in function.__closure__ or ():
            value = _cell_value(cell)
            if callable(value) and follow(value):
                self.value(value, _home(value))

    def _function(self, function: types.FunctionType) -> None:
        home = _home(function)
        self._part("function")
        self._code(function.__code__, function.__globals__, home)
        self.value(function.__defaults__, home)
        self.value(function.__kwdefaults__, home)
        for cell in function.__closure__ or ():
            self.value(_cell_value(cell), home)

    def _code(self, code: types.CodeType, names: dict[str, Any], home: str) -> None:
        """Bytecode with the constants where they are loaded (so an unused docstring has no place), then globals."""
        self._part("code", code.co_exceptiontable, str(code.co_flags & _FLAGS))
        self._part(str(code.co_argcount), str(code.co_posonlyargcount), str(code.co_kwonlyargcount))
        for group in (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars):
            self._part(" ".join(group))
        instructions = list(dis.get_instructions(code))
        for instruction in instructions:
            loads_constant = instruction.opcode in dis.hasconst
            self._part(f"{instruction.opcode} {'' if loads_constant else instruction.arg}")
            if not loads_constant:
                continue
            constant = code.co_consts[instruction.arg or 0]  # `argval` does not know the names of keyword arguments
            if isinstance(constant, types.CodeType):
                self._code(constant, names, home)
            else:
                self.value(constant, home)
        for name in _global_names(instructions):
            if name in names:  # else a builtin, or not bound yet: its name is among co_names
                self._part("global", name)
                self._global(names[name], home)

    def _global(self, value: Any, home: str) -> None:
        """Writes what is read by name: whole if it belongs to the same module or is plain, else by its name."""
        if isinstance(value, types.FunctionType):
            if home in (_home(value), value.__module__):
                self._held_function(value)
            else:
                self._named_function(value, lambda cell: _home(cell) == home)
        elif isinstance(value, type):
            self._type(value, home)
        elif _wrapped(value) is not None and getattr(value, "__module__", home) != home:
            self._part("name", _qualified(value))
        elif _home(value) == home or _is_library(_home(value)) or _array_bytes(value):
            self.value(value, home)
        else:  # another package's object, a model perhaps: its type's name
            self._part("foreign", _qualified(type(value)))

    def _type(self, kind: type, home: str) -> None:
        if kind.__module__ == home and not _is_library(home):
            self._node(kind, home)
        else:
            self._part("name", _qualified(kind))

    def _class(self, kind: type, home: str) -> None:
        self._part("class", _qualified(type(kind)))
        for base in kind.__bases__:
            self._type(base, home)
        for name in sorted(set(vars(kind)) - _DERIVED):
            self._part("entry", name)
            self.value(vars(kind)[name], home)

    def _instance(self, thing: Any, home: str) -> None:
        """The class and the state as pickle would take it, walked instead of pickled.

        Pickle's bytes depend on which equal strings are one object, which differs between source and cache files.
        """
        self._part("instance")
        self._type(type(thing), home)
        reducer = copyreg.dispatch_table.get(type(thing))
        try:
            state = reducer(thing) if reducer else thing.__reduce_ex__(4)
        except Exception:  # whatever a user's class raises: a lock, an open file, a model that cannot be pickled
            self._part("opaque")
            return
        if isinstance(state, str):
            self._part(state)
            return
        made, args, attributes, items, pairs = (*state[:5], None, None, None)[:5]
        for part in (
            made,
            args,
            attributes,
            None if items is None else list(items),
            None if pairs is None else dict(pairs),
        ):
            self.value(part, home)


def _cell_value(cell: types.CellType) -> Any:
    """The value of a closure variable; the cell's type where it is not bound yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return types.CellType
