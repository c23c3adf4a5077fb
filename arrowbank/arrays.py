"""Conversions into the NumPy arrays that rollouts hold, and equality down to the bit.

Invariant: a conversion either keeps every value or raises ``UnrepresentableError``. The one visible exception is
that Python floats and float64 arrays become float32 where float32 is the declared type; a finite number that
would become infinite on the way is refused.
"""

from __future__ import annotations

import array
import struct
import sys
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from arrowbank.errors import UnrepresentableError

__all__ = [
    "BoolArray",
    "Float32Array",
    "TokenArray",
    "bools",
    "dtype_name",
    "exact_turns",
    "float32s",
    "named_dtype",
    "ndarray",
    "same_bits",
    "tokens",
]

TokenArray: TypeAlias = NDArray[np.int32]
Float32Array: TypeAlias = NDArray[np.float32]
BoolArray: TypeAlias = NDArray[np.bool_]

MAX_TOKEN_ID = 2**31 - 1
_EXACT = 2.0**53
"""Larger integers are refused where floats are expected, exact or not."""


def tokens(value: Any) -> TokenArray:
    """Convert one turn's token ids to int32. Shapes: (T,). Raises UnrepresentableError outside 0 … 2^31−1."""
    if type(value) is np.ndarray and value.dtype == np.int32:
        found = value
    elif isinstance(value, list | tuple):
        found = _int32_of_list(value)
    else:
        wide = _one_dimensional(_as_array(value))
        if wide.size and wide.dtype.kind not in "iu":
            raise UnrepresentableError("", f"token ids must be integers, found an array of {wide.dtype}")
        if wide.size and (wide.min() < 0 or wide.max() > MAX_TOKEN_ID):
            raise UnrepresentableError("", _out_of_range(int(wide.min()), int(wide.max())))
        found = wide.astype(np.int32, copy=False)
    if found.ndim != 1:
        raise UnrepresentableError("", f"expected one dimension, found shape {found.shape}")
    if found.size and found.min() < 0:
        raise UnrepresentableError("", _out_of_range(int(found.min()), int(found.max())))
    return found


def float32s(value: Any) -> Float32Array:
    """Convert one turn's logprobs to float32. Shapes: (T,) or (generated,)."""
    if type(value) is np.ndarray and value.dtype == np.float32:
        return _one_dimensional(value)
    if isinstance(value, list | tuple):
        try:
            wide: NDArray[Any] = np.frombuffer(array.array("d", value), np.float64)
        except (TypeError, OverflowError) as error:
            raise UnrepresentableError("", f"expected numbers: {error}") from None
    else:
        wide = _one_dimensional(_as_array(value))
        if wide.size and wide.dtype.kind not in "fiu" and dtype_name(wide.dtype) != "bfloat16":
            raise UnrepresentableError("", f"expected floats, found an array of {wide.dtype}")
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = wide.astype(np.float32)
    if wide.dtype.kind in "iu":
        if wide.size and (np.abs(narrow).max() > _EXACT or not np.array_equal(narrow.astype(np.int64), wide)):
            raise UnrepresentableError("", "an integer here has no exact float32")
    elif wide.dtype.itemsize > 4 and np.any(np.isinf(narrow) & ~np.isinf(wide)):
        raise UnrepresentableError("", "a finite number here is beyond float32 and would become infinite")
    return narrow


def bools(value: Any) -> BoolArray:
    """Convert one turn's mask to bool; integers 0 and 1 are taken, others refused. Shapes: (T,)."""
    if type(value) is np.ndarray and value.dtype == np.bool_:
        return _one_dimensional(value)
    if isinstance(value, list | tuple):
        try:
            wide: NDArray[Any] = np.frombuffer(bytes(value), np.uint8)
        except (TypeError, ValueError):
            if not all(isinstance(entry, np.bool_ | bool) for entry in value):  # NumPy's bool is no index
                raise UnrepresentableError("", "a mask holds True and False (or 1 and 0) only") from None
            wide = np.array(value, np.bool_)
    else:
        wide = _one_dimensional(_as_array(value))
    if wide.size and (wide.dtype.kind not in "biu" or wide.min() < 0 or wide.max() > 1):
        raise UnrepresentableError("", "a mask holds True and False (or 1 and 0) only")
    return wide.astype(np.bool_)


def exact_turns(name: str, given: Any, dtype: Any) -> list[NDArray[Any]]:
    """Return turns that are arrays of ``dtype`` already: a list may have been changed since it was converted.

    Raises UnrepresentableError, naming the turn.
    """
    if type(given) is not list:
        raise UnrepresentableError(name, f"expected a list with one array a turn, found {type(given).__name__}")
    for index, turn in enumerate(given):
        if type(turn) is not np.ndarray or turn.dtype != dtype or turn.ndim != 1:
            found = f"shape {turn.shape} of {turn.dtype}" if isinstance(turn, np.ndarray) else type(turn).__name__
            expected = f"expected one dimension of {np.dtype(dtype)}, found {found}"
            raise UnrepresentableError(f"{name}[{index}]", f"{expected}; assign the whole list to convert it")
        if dtype is np.int32 and turn.size and turn.min() < 0:
            raise UnrepresentableError(f"{name}[{index}]", _out_of_range(int(turn.min()), 0))
    return given


def ndarray(value: Any) -> NDArray[Any]:
    """Convert an array field's value, of any plain dtype and shape, bfloat16 included."""
    found = value if type(value) is np.ndarray else _as_array(value)
    dtype_name(found.dtype)
    return found


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return a name from which ``named_dtype`` makes the same dtype again, or raise UnrepresentableError."""
    name = dtype.name if dtype.isnative else dtype.str
    try:
        if not _is_plain(dtype) or named_dtype(name) != dtype:
            raise TypeError
    except (TypeError, UnrepresentableError):
        if _is_plain(dtype) and named_plain(dtype.str) == dtype:
            return dtype.str
        raise UnrepresentableError("", f"arrays of dtype {dtype} cannot be kept; use a plain number dtype") from None
    return name


def named_plain(name: str) -> np.dtype[Any] | None:
    """Return NumPy's own dtype of that name unless it holds objects or fields; None if there is none."""
    try:
        dtype = np.dtype(name)
    except (TypeError, ValueError, SyntaxError):
        return None
    return dtype if _is_plain(dtype) and dtype.kind != "V" else None


def _is_plain(dtype: np.dtype[Any]) -> bool:
    """Whether bytes alone make elements of this dtype."""
    return not dtype.hasobject and dtype.fields is None and dtype.subdtype is None and dtype.itemsize > 0


def named_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype that ``dtype_name`` named; the small floats (bfloat16, float8…) come from ml_dtypes."""
    plain = named_plain(name)
    if plain is not None:
        return plain
    try:
        import ml_dtypes  # optional: only arrays of these dtypes need it
    except ImportError:
        raise UnrepresentableError("", f"dtype {name} needs the package ml_dtypes: install ml-dtypes") from None
    scalar = getattr(ml_dtypes, name, None)
    if not isinstance(scalar, type) or not issubclass(scalar, np.generic):
        raise UnrepresentableError("", f"no dtype is called {name!r}")
    return np.dtype(scalar)


def same_bits(left: Any, right: Any) -> bool:
    """Compare by value, bit for bit: NaN equals the same NaN, −0.0 differs from 0.0, 1 differs from 1.0 and True."""
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return (
            isinstance(left, np.ndarray)
            and isinstance(right, np.ndarray)
            and left.dtype == right.dtype
            and left.shape == right.shape
            and left.tobytes() == right.tobytes()
        )
    if isinstance(left, np.generic) or isinstance(right, np.generic):
        return type(left) is type(right) and left.tobytes() == right.tobytes()
    if isinstance(left, float) and isinstance(right, float):
        return struct.pack("<d", left) == struct.pack("<d", right)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(same_bits, left, right))
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(same_bits(left[key], right[key]) for key in left)
    if isinstance(left, bool | int) and isinstance(right, bool | int) and type(left) is not type(right):
        return False
    return bool(left == right) and not (isinstance(left, float) ^ isinstance(right, float))


def _int32_of_list(value: list[Any] | tuple[Any, ...]) -> TokenArray:
    """Token ids of a Python sequence; array.array is the fastest converter that refuses floats and overflow."""
    try:
        return np.frombuffer(array.array("i", value), np.int32)
    except TypeError as error:
        raise UnrepresentableError("", f"token ids must be integers: {error}") from None
    except OverflowError:
        raise UnrepresentableError("", _out_of_range(min(value), max(value))) from None


def _out_of_range(low: int, high: int) -> str:
    worst = low if low < 0 else high
    return f"token id {worst} is outside 0 … {MAX_TOKEN_ID}"


def _as_array(value: Any) -> NDArray[Any]:
    """Make an array of whatever has ``__array__`` or nested lists; a torch bfloat16 tensor goes by its bits."""
    if type(value).__module__.split(".")[0] == "torch" and str(getattr(value, "dtype", "")) == "torch.bfloat16":
        torch = sys.modules["torch"]
        return np.asarray(value.detach().cpu().view(torch.int16)).view(named_dtype("bfloat16"))
    if isinstance(value, str | bytes | Mapping) or value is None:
        raise UnrepresentableError("", f"expected an array, found {type(value).__name__}")
    if isinstance(value, np.ma.MaskedArray):
        raise UnrepresentableError("", "the mask of a masked array cannot be kept")
    try:
        found = np.asarray(value)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:  # RuntimeError: torch, requires_grad
        raise UnrepresentableError("", f"expected an array: {error}") from None
    if found.dtype.hasobject:
        raise UnrepresentableError("", f"expected an array of numbers, found {type(value).__name__} of objects")
    return found


def _one_dimensional(found: NDArray[Any]) -> NDArray[Any]:
    if found.ndim != 1:
        raise UnrepresentableError("", f"expected one dimension, found shape {found.shape}")
    return found
