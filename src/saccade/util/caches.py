"""Caches: attributes that are computed once, the one bounded cache of this package, and constants of torch.compile."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, overload

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from saccade.util.kept_memory import capturing, keep

# Attributes that are computed once, when they are first asked for.

T = TypeVar("T")


class cached_attribute(Generic[T]):
    """`functools.cached_property` without the lock that it has before Python 3.12: all objects share that lock, and a
    child that is forked while it is held waits for ever. Two threads may compute an attribute; both get the same value.

    >>> class Circle:
    ...     r = 2.0
    ...     @cached_attribute
    ...     def area(self) -> float:
    ...         return 3.14 * self.r**2
    >>> circle = Circle()
    >>> circle.area, circle.area is circle.area
    (12.56, True)
    """

    def __init__(self, function: Callable[[Any], T]) -> None:
        self.function, self.name, self.__doc__ = function, function.__name__, function.__doc__

    @overload
    def __get__(self, owner: None, kind: Any = None) -> cached_attribute[T]: ...

    @overload
    def __get__(self, owner: object, kind: Any = None) -> T: ...

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        if owner is None:
            return self
        return owner.__dict__.setdefault(self.name, self.function(owner))


# The one cache of this package: bounded, safe for threads and forks.


Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class CacheInfo(NamedTuple):
    """Counts of a cache, as in `functools.lru_cache`."""

    hits: int
    misses: int
    maxsize: int
    currsize: int


class _Entry:
    __slots__ = ("asked", "owners", "size", "value")

    def __init__(self, value: Any, owners: list[Any], size: int) -> None:
        self.value, self.owners, self.size, self.asked = value, owners, size, False


class BoundedCache(Generic[Key, Value]):
    """A mapping whose sizes add up to at most `maxsize`; the oldest entry that was not used since goes first.

    An entry has size 1 unless `put` says otherwise. It goes with its `owners`: when the memory of a tensor is freed, or
    any other object dies. **A key never holds the id or address of a thing that is neither part of the value nor an
    owner**: another thing may have it later. A look-up hashes the key once and takes no lock. Values are made outside
    of the lock, so that two threads may make the same one.
    """

    _caches: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()

    def __init__(self, maxsize: int) -> None:
        self.maxsize = maxsize
        self._entries: dict[Key, _Entry] = {}
        self._orphans: deque[Key] = deque()
        self._lock = threading.RLock()
        self._size = self._hits = self._misses = 0
        self._caches.add(self)

    def get(self, key: Key, default: Any = None) -> Value | Any:
        if self._orphans:
            with self._lock:
                self._drop_orphans()
        entry = self._entries.get(key)
        if entry is None:
            self._misses += 1
            return default
        self._hits += 1
        entry.asked = True
        return entry.value

    def put(self, key: Key, value: Value, owners: Sequence[Any] = (), size: int = 1) -> Value:
        """Returns the value. A TypeError says that an owner has no weak references."""
        references = [self._reference(key, owner) for owner in owners]
        with self._lock:
            self._drop_orphans()
            if any(isinstance(x, StorageWeakRef) for x in references):
                self._drop_freed()
            self._drop(key)
            # First, so that the new entry, for which nobody can have asked yet, is not the one that goes.
            while self._entries and self._size + size > self.maxsize:
                self._drop_oldest()
            self._entries[key] = _Entry(value, references, size)
            self._size += size
        return value

    def get_or_make(self, key: Key, make: Callable[[], Value], owners: Sequence[Any] = ()) -> Value:
        value = self.get(key, _MISSING)
        return self.put(key, make(), owners) if value is _MISSING else value

    def discard(self, key: Key) -> None:
        with self._lock:
            self._drop(key)

    def clear(self) -> None:
        """Drops all entries and resets the counts."""
        with self._lock:
            self._entries.clear()
            self._orphans.clear()
            self._size = self._hits = self._misses = 0

    def info(self) -> CacheInfo:
        return CacheInfo(self._hits, self._misses, self.maxsize, self._size)

    def __len__(self) -> int:
        return len(self._entries)

    def _reference(self, key: Key, owner: Any) -> Any:
        if isinstance(owner, Tensor):
            return StorageWeakRef(owner.untyped_storage())
        # The garbage collector may call this in the middle of anything: only the next look-up drops the entry.
        orphans = self._orphans
        return weakref.ref(owner, lambda _: orphans.append(key))

    def _drop(self, key: Key) -> None:
        if (entry := self._entries.pop(key, None)) is not None:
            self._size -= entry.size

    def _drop_oldest(self) -> None:
        """One that was asked for becomes the newest instead, once."""
        key, entry = next(iter(self._entries.items()))
        if entry.asked:
            entry.asked = False
            self._entries[key] = self._entries.pop(key)
        else:
            self._drop(key)

    def _drop_orphans(self) -> None:
        while self._orphans:
            self._drop(self._orphans.popleft())

    def _drop_freed(self) -> None:
        for key, entry in list(self._entries.items()):
            if any(isinstance(x, StorageWeakRef) and x.expired() for x in entry.owners):
                self._drop(key)

    @classmethod
    def _renew_locks(cls) -> None:
        """Replaces locks in a forked process, whose holders do not exist there."""
        for cache in cls._caches:
            cache._lock = threading.RLock()


_MISSING: Any = object()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=BoundedCache._renew_locks)

_derived: BoundedCache[Any, Any] = BoundedCache(64)
_compared: BoundedCache[Any, tuple[list[Tensor], Any]] = BoundedCache(1 << 28)


def derived(key: Hashable, tensors: Sequence[Tensor], make: Callable[[], Any]) -> Any:
    """The result of `make`, cached while the tensors live and are not written to.

    A CUDA graph computes it in every replay from the tensors' values then, as it outlives the cache. A result belongs
    to the stream that computed it.
    """
    if capturing() or (written := versions(tensors)) is None:
        return make()
    stream = torch.cuda.current_stream().cuda_stream if torch.cuda.is_initialized() else 0
    return _derived.get_or_make((key, stream, written), lambda: keep(make), tensors)


def derived_from_values(key: Hashable, tensors: Sequence[Tensor], make: Callable[[], Any]) -> Any:
    """The result of `make`, cached as long as the tensors hold what they held.

    Not all writes are counted: those of compiled code, of a CUDA graph's replay and of numpy are not. So a CPU compares
    the values with copies, and what depends on tensors of a GPU, or of a class of its own, is made in each call.
    """
    if not tensors:
        return derived(key, (), make)
    if not all(x.is_cpu and type(x) in (Tensor, torch.nn.Parameter) for x in tensors):
        return make()
    key = key, *((x.data_ptr(), x.shape, x.dtype) for x in tensors)
    copies, value = _compared.get(key, (None, None))
    if copies is None or not all(map(torch.equal, copies, tensors)):
        copies, value = keep(lambda: ([x.detach().clone() for x in tensors], make()))
        _compared.put(key, (copies, value), size=1 + sum(x.nbytes for x in copies))
    return value


def versions(tensors: Iterable[Tensor]) -> Hashable | None:
    """Where the elements of tensors are and how often they were written; None if torch does not count that of one.

    It says nothing once the memory of one is freed. So an entry that has it, in its key or its value, has the tensors
    for owners: while it refers to their storages, nothing else has their addresses.
    """
    found = []
    for x in tensors:
        if x.is_inference():
            return None
        form = x.untyped_storage()._cdata, x.storage_offset(), tuple(x.shape), x.stride()
        found.append((*form, x.dtype, x._version))
    return tuple(found)


# Functions that `torch.compile` runs while it compiles, and whose results are constants.


F = TypeVar("F", bound=Callable[..., Any])


def compile_constant(fn: F) -> F:
    """`torch.compiler.assume_constant_result` by the mark that it sets: the decorator itself would import the compiler,
    which takes as long as torch, for people who compile nothing."""
    fn._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return fn


@compile_constant
def exports() -> bool:
    """Whether torch.export traces. Of torch 2.11 Dynamo says that it always does."""
    return torch.compiler.is_exporting()


def standing_for(fn: Any) -> Any:
    """A constant that stands for a callable that exists outside of the compiled region. Functions are constants; of
    other objects torch 2.11 knows none, but their addresses, and compiles anew for others.

    >>> callable_of(standing_for(standing_for)) is standing_for, callable_of(standing_for(len)) is len
    (True, True)
    """
    if fn is None or isinstance(fn, (types.FunctionType, functools.partial)):
        return fn
    if isinstance(fn, types.MethodType):
        return fn.__func__, id(fn.__self__)
    return id(fn)


def callable_of(standing: Any) -> Any:
    """What `standing_for` was given, which has to be alive."""
    if isinstance(standing, int):
        return ctypes.cast(standing, ctypes.py_object).value
    if isinstance(standing, tuple):
        return types.MethodType(standing[0], ctypes.cast(standing[1], ctypes.py_object).value)
    return standing


@compile_constant
def word_of(function: Any) -> str:
    """The name of one of torch's functions, or of an operator, as torch.export has them."""
    name: str = function.__name__
    return {"and_": "__and__", "or_": "__or__"}.get(name, name)
