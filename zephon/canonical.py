"""One byte string for one value: what hashes of content are taken over.

Equal content gives equal bytes in every process, on every machine and under every hash seed. The bytes are msgpack in
which whatever msgpack cannot tell apart by itself is an extension:

    None, bool, int, float, str, bytes     msgpack's own; True, 1 and 1.0 differ; so do 0.0 and -0.0
    list, tuple                            array: equal content is equal; so are bytes, bytearray and memoryview
    dict with str keys                     map, sorted by key
    set, frozenset                         extension: the sorted encodings of the members
    numpy arrays and scalars               extension: dtype, shape, C-order bytes, those between values as 0
    other dicts, big ints, lone surrogates extensions of their own
    any other object                       extension: what `__reduce_ex__` says, encoded by the same rules
    what none of this takes                extension: its pickle (cycles; stable only where pickle is)
"""

from __future__ import annotations

import math
import pickle
import sys
from functools import lru_cache
from types import BuiltinFunctionType, FunctionType, ModuleType, NoneType
from typing import Any, Final

import msgspec
import numpy as np
from msgspec.msgpack import Ext
from numpy.typing import NDArray

_SCALARS: Final = frozenset({str, int, float, bool, NoneType, bytes})
_ARRAY, _SET, _MAP, _INTEGER, _TEXT, _OBJECT, _GLOBAL, _PICKLE = range(1, 9)  # extension codes: part of the format
_X87_MANTISSA, _X87_BYTES = 63, 10  # a long double of x86, which takes 12 or 16 bytes
_encode: Final = msgspec.msgpack.Encoder(order="deterministic").encode


def canonical_bytes(value: Any) -> bytes:
    """The canonical encoding of `value`, by the table at the top of this file.

    Raises what pickle raises where the value can be encoded in no other way and cannot be pickled either.
    """
    if _is_plain(value):
        try:
            return _encode(value)
        except (OverflowError, UnicodeEncodeError):  # an int beyond 64 bits, a lone surrogate
            pass
    try:
        return _encode(_rewrite(value))
    except RecursionError:  # a value that holds itself; pickle knows cycles
        return _encode(_pickled(value))


def _is_plain(value: Any) -> bool:
    """Whether msgpack alone tells this value apart: no subclass, no set, no array anywhere in it."""
    kind = type(value)
    if kind in _SCALARS:
        return True
    if kind is list or kind is tuple:
        return _all_plain(value)
    if kind is dict:
        return all(type(key) is str for key in value) and _all_plain(value.values())
    return False


def _all_plain(values: Any) -> bool:
    # The first test runs at C speed: long lists of tokens are the common case.
    try:
        return _SCALARS.issuperset(map(type, values)) or all(map(_is_plain, values))
    except RecursionError:
        return False


def _rewrite(value: Any) -> Any:
    """The same value in terms of what msgpack tells apart. Plain values come back equal."""
    kind = type(value)
    if kind is str:
        return value if _is_unicode(value) else Ext(_TEXT, value.encode("utf-8", "surrogatepass"))
    if kind is int:
        return value if -(1 << 63) <= value < 1 << 64 else Ext(_INTEGER, _integer_bytes(value))
    if kind in _SCALARS:
        return value
    if kind is list or kind is tuple:
        return [_rewrite(item) for item in value]
    if kind is dict:
        return _rewrite_dict(value)
    if kind is bytearray or kind is memoryview:
        return bytes(value)
    if isinstance(value, (set, frozenset)):
        return Ext(_SET, _encode(sorted(_encode(_rewrite(item)) for item in value)))
    if kind is np.ndarray or kind is np.memmap or isinstance(value, np.generic):
        return Ext(_ARRAY, _array_bytes(np.asarray(value)))
    return _rewrite_object(value)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _integer_bytes(value: int) -> bytes:
    return value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True)


def _rewrite_dict(value: dict[Any, Any]) -> Any:
    if all(type(key) is str and _is_unicode(key) for key in value):
        return {key: _rewrite(item) for key, item in value.items()}
    pairs = sorted((_encode(_rewrite(key)), _encode(_rewrite(item))) for key, item in value.items())
    return Ext(_MAP, _encode(pairs))


def _array_bytes(array: NDArray[Any]) -> bytes:
    dtype = array.dtype
    kind = repr(fields_of(dtype)) if dtype.fields else f"{dtype.str} {dtype.name}"
    if dtype.hasobject or dtype.kind == "T":  # the memory holds addresses, not content
        content: Any = [_rewrite(item) for item in array.ravel().tolist()]
    else:
        content = array_bytes(array)
    return _encode([kind, array.shape, content])


def fields_of(dtype: np.dtype[Any]) -> Any:
    """What a structured dtype is made of; its text where fields overlap or are not in the order of memory."""
    try:
        return dtype.descr
    except ValueError:
        return str(dtype)


def array_bytes(array: NDArray[Any]) -> bytes:
    """The values of an array that holds no addresses, in C order. Bytes that belong to no value are 0."""
    if array.dtype.char not in "gGV":
        return array.tobytes()
    return _without_padding(array).tobytes()


def _without_padding(array: NDArray[Any]) -> NDArray[Any]:
    """A copy, of the same class, whose padding is 0: what stood there is chance."""
    copied = array.copy(order="C")
    padding = _padding(array.dtype)
    if len(padding):
        copied.view(np.ndarray).reshape(-1).view(np.uint8).reshape(-1, array.dtype.itemsize)[:, padding] = 0
    return copied


@lru_cache(maxsize=256)
def _padding(dtype: np.dtype[Any]) -> NDArray[np.intp]:
    """Which bytes of an item belong to no value."""
    return np.flatnonzero(~_used(dtype))


def _used(dtype: np.dtype[Any]) -> NDArray[np.bool_]:
    """For every byte of an item, whether it belongs to a value."""
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return np.tile(_used(base), math.prod(shape))
    used = np.full(dtype.itemsize, dtype.names is None)
    for field, offset, *_ in (dtype.fields or {}).values():
        used[offset : offset + field.itemsize] |= _used(field)
    if dtype.char in "gG" and np.finfo(dtype).nmant == _X87_MANTISSA:
        part = np.arange(np.dtype(np.longdouble).itemsize) < _X87_BYTES
        used = np.tile(part if dtype.isnative else part[::-1], dtype.itemsize // len(part))
    return used


def _rewrite_object(value: Any) -> Ext:
    if isinstance(value, (type, FunctionType)) or _is_builtin_function(value):
        return _named(value, value.__qualname__)
    array = _as_array(value)
    if array is not None:
        return Ext(_OBJECT, _encode([_named(type(value), type(value).__qualname__), Ext(_ARRAY, _array_bytes(array))]))
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        value = _without_padding(value)  # of a subclass, which pickles its memory
    try:
        parts = value.__reduce_ex__(4)
    except Exception:
        return _pickled(value)
    if isinstance(parts, str):
        return _named(value, parts)
    made, args, state, items, pairs = [*parts, None, None, None][:5]
    content = [made, args, state, None if items is None else list(items), None if pairs is None else list(pairs)]
    return Ext(_OBJECT, _encode(_rewrite(content)))


def _as_array(value: Any) -> NDArray[Any] | None:
    """The content of a foreign tensor. Its pickle may hold more than the content."""
    if isinstance(value, np.ndarray) or not callable(getattr(type(value), "__array__", None)):
        return None
    try:
        array = np.asarray(value)
    except Exception:
        return _torch_bytes(value)
    return None if array.dtype.hasobject else array


def _torch_bytes(value: Any) -> NDArray[Any] | None:
    """A torch tensor that numpy does not take (it wants a gradient, or is a bfloat16), by its bytes and dtype."""
    if type(value).__module__.partition(".")[0] != "torch" or not hasattr(value, "detach"):
        return None
    tensor = value.detach().cpu().contiguous()
    raw = tensor.reshape(-1).view(dtype=sys.modules["torch"].uint8).numpy()
    return np.array([str(tensor.dtype), str(tuple(tensor.shape)), raw.tobytes().hex()])


def _is_builtin_function(value: Any) -> bool:
    """True for `len`, false for `[].append`, whose name does not say what it is bound to."""
    return isinstance(value, BuiltinFunctionType) and isinstance(value.__self__, (ModuleType, type, NoneType))


def _named(value: Any, name: str) -> Ext:
    """Something found by its name; what has no name of its own (a lambda, a local class) is left to pickle."""
    if "<" in name:
        return _pickled(value)
    return Ext(_GLOBAL, f"{getattr(value, '__module__', None) or type(value).__module__}:{name}".encode())


def _pickled(value: Any) -> Ext:
    return Ext(_PICKLE, pickle.dumps(value, protocol=4))
