"""Pickles as data: what a file of torch describes, without calling anything that the file names.

torch's own `weights_only=True` cannot read the files of DeepSpeed, of Megatron and of torch.distributed.checkpoint,
which name classes of their own. Here every class and function that a pickle names is replaced by a `Record`, which
keeps what it was given and does nothing. What is not known to be data is refused by name.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass
from typing import Any

from traindiff.core.untrusted.demands import quoted
from traindiff.errors import CheckpointError
from traindiff.state.stored import unreadable

MOST_PICKLE_BYTES = 1 << 28
"""Limit for the size of a pickle: it has about 300 bytes per tensor, and no elements."""

MOST_CLASSES = 1 << 12
"""Limit for the classes and functions that a pickle names, of which those of a checkpoint are some dozens."""

MOST_NESTED = 500
"""Limit for values inside each other: tuples are hashed, and records searched, by functions that call themselves."""


MOST_DIMS = 64
"""Limit for the dims of a shape, as in torch."""

_MOST_BITS = 1 << 10
"""Limit for an integer; a text of one with more than 4300 digits is an error of Python."""

_SPARE = 1 << 16
"""What small pickles may copy, and have in tuples, beyond what their own length allows."""

_PER_BYTE = 16
"""Limit for the values in tuples per byte of a pickle, each counted wherever it is."""


def _bytearray(content: Any = b"", encoding: str = "latin-1") -> bytearray:
    """A copy of bytes: given a number, `bytearray` would allocate as many."""
    if isinstance(content, Record) and content.name == "_codecs.encode" and content.arguments:
        content = content.arguments[0]  # bytes before protocol 3
    if isinstance(content, str) and encoding == "latin-1":
        return bytearray(content, encoding)
    if isinstance(content, bytes):
        return bytearray(content)
    raise pickle.UnpicklingError("it has a bytearray of what is no bytes")


def _shape(lengths: Any = ()) -> tuple[int, ...]:
    """A shape: a tuple without others inside, whose hash would be computed by a function that calls itself."""
    found = tuple(lengths) if isinstance(lengths, list | tuple) else None
    if found is None or not is_shape(found):
        raise pickle.UnpicklingError("it has a shape of what is no lengths")
    return found


def is_shape(value: Any) -> bool:
    """True for a tuple of lengths that a tensor may have."""
    fits = isinstance(value, tuple) and len(value) <= MOST_DIMS
    return fits and all(type(one) is int and 0 <= one < 1 << 63 for one in value)


class _OrderedDict(OrderedDict[Any, Any]):
    """An OrderedDict without attributes, which unpickling would copy."""

    def __setstate__(self, state: Any) -> None:
        del state


_REAL: Mapping[str, Callable[..., Any]] = {
    "collections.OrderedDict": _OrderedDict, "builtins.dict": dict, "builtins.list": list, "builtins.set": set,
    "builtins.complex": complex, "builtins.bytearray": _bytearray, "torch.Size": _shape,
}  # fmt: skip
"""Containers and numbers, which are made as they are."""

_DATA = re.compile(
    r"""torch\.(\w+Storage|per_\w+_affine|\w*float\w*|\w*int\w*|bool|half|double|bfloat16|complex\w+|strided|device|Tensor|preserve_format
        |contiguous_format|channels_last(_3d)?|storage\.\w+Storage|serialization\._get_layout
        |_utils\._rebuild_(tensor|tensor_v2|tensor_v3|parameter|parameter_with_state|sparse_tensor|sparse_csr_tensor
            |qtensor|nested_tensor|meta_tensor_no_storage)
        |_tensor\._rebuild_from_type_v2|nn\.parameter\.(Parameter|Buffer)|_C\.\w+
        |distributed\.(checkpoint\.\w+\.\w+|tensor\.[\w.]+|_tensor\.[\w.]+|device_mesh\.\w+|_shard\.[\w.]+))
    |(deepspeed|megatron|transformers|accelerate|lightning|pytorch_lightning|omegaconf|transformer_engine)\.[\w.]+
    |argparse\.Namespace|types\.SimpleNamespace|pathlib\.\w+|datetime\.\w+|enum\.\w+|collections\.(defaultdict|Counter|deque)
    |numpy(\.\w+)*\.(dtype|ndarray|scalar|_reconstruct|_frombuffer|generic|\w*int\d*|float\d+|bool_?)|_codecs\.encode
    |signal\.Signals|uuid\.UUID|builtins\.(int|float|bool|str|bytes|object|slice|range|tuple|frozenset)|typing\.\w+""",
    re.VERBOSE,
)
"""Classes and functions by full name that describe data; each becomes a `Record`."""


class Record:
    """What a pickle says of an object: the name of its class or function, its arguments and its state. It does nothing.

    Attributes:
        name: Full name of the class or function.
        arguments: What it was to be called with.
        state: What was to be set on the object afterwards; None if nothing was.
        items: What was to be put into it as into a list or a dict.
    """

    __slots__ = ("arguments", "items", "name", "state")

    def __init__(self, name: str, arguments: tuple[Any, ...] = ()) -> None:
        self.name = name
        self.arguments = arguments
        self.state: Any = None
        self.items: list[Any] = []

    def __setstate__(self, state: Any) -> None:
        """Keep the state as it is."""
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """Keep an item of a subclass of dict."""
        self.items.append((key, value))

    def append(self, value: Any) -> None:
        """Keep an item of a subclass of list."""
        self.items.append(value)

    def extend(self, values: Any) -> None:
        """Keep items of a subclass of list."""
        self.items += values

    def attribute(self, name: str) -> Any:
        """An attribute from the state; None if it has none of this name."""
        return self.state.get(name) if isinstance(self.state, dict) else None


class _Unpickler(pickle.Unpickler):
    """An unpickler that imports nothing."""

    def __init__(self, data: bytes, where: str, stored: Callable[[Any], Any]) -> None:
        super().__init__(io.BytesIO(data), encoding="latin1")
        self._where = where
        self._stored = stored
        self._classes: dict[str, Any] = {}
        self._room = len(data) + _SPARE

    def find_class(self, module: str, name: str) -> Any:
        """A class that makes a container, or what stands for an object.

        Raises:
            CheckpointError: It is not known to be data.
            UnpicklingError: There are too many.
        """
        full = f"{module.replace('__builtin__', 'builtins')}.{name}"
        if full in self._classes:
            return self._classes[full]
        if full in _REAL or _DATA.fullmatch(full):
            if len(self._classes) >= MOST_CLASSES:
                raise pickle.UnpicklingError(f"it names more than {MOST_CLASSES} classes")
            return self._classes.setdefault(full, self._class_of(full))
        raise CheckpointError(
            f"{self._where} would call {quoted(full)} when it is loaded, which is code and not data; traindiff never "
            "runs it. If you trust the file, load it and save its tensors with safetensors."
        )

    def _class_of(self, name: str) -> Any:
        """A class that stands for another: pickles make objects by calling it, or by its `__new__`."""
        copy = self._copy

        class Named(Record):
            __slots__ = ()
            full_name = name

            def __new__(cls, *arguments: Any, **named: Any) -> Any:
                copy(len(arguments) + len(named))
                if name not in _REAL:
                    return Record(name, arguments)
                copy(sum(len(one) for one in arguments if isinstance(one, Sized)))
                return _REAL[name](*arguments)

        return Named

    def _copy(self, count: int) -> None:
        """Count values that are copied: each is written once, and what lies in the memo can be copied many times.

        Raises:
            UnpicklingError: There are more than the pickle has bytes.
        """
        self._room -= count
        if self._room < 0:
            raise pickle.UnpicklingError("it copies more values than it has")

    def persistent_load(self, key: Any) -> Any:
        """What the file keeps beside the pickle: elements of tensors."""
        return self._stored(key)


def name_of(value: Any) -> str:
    """The full name of a class or function that a pickle holds; empty for anything else."""
    return str(getattr(value, "full_name", "")) if isinstance(value, type) else ""


def check_length(count: int, where: str) -> None:
    """Refuse a pickle with more bytes than it may have.

    Raises:
        CheckpointError: It has.
    """
    if count > MOST_PICKLE_BYTES:
        raise unreadable(where, f"its pickle has {count} bytes, and may have {MOST_PICKLE_BYTES}")


def loaded(data: bytes, *, where: str, stored: Callable[[Any], Any]) -> Any:
    """The object that a pickle describes: containers, numbers and texts as they are, anything else as a `Record`.

    Args:
        data: The pickle.
        where: The file, for messages.
        stored: Makes what stands for a persistent identifier.

    Raises:
        CheckpointError: It is damaged, too large, or names something that is not known to be data.
    """
    check_length(len(data), where)
    try:
        _check(data)
        return _Unpickler(data, where, stored).load()
    except CheckpointError:
        raise
    except RecursionError:
        raise unreadable(where, "its pickle is nested too deep") from None
    except Exception as error:  # noqa: BLE001  a damaged pickle raises anything
        raise unreadable(where, f"its pickle is damaged ({str(error)[:80] or type(error).__name__})") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Effect:
    """What an opcode does to the stack.

    Attributes:
        takes: How many values it takes away from below those that it takes up to the last mark.
        to_mark: Whether it takes all values up to the last mark.
        gives: How many values it puts there.
    """

    takes: int
    to_mark: bool
    gives: int


def _effect(opcode: Any) -> _Effect:
    before, after = opcode.stack_before, opcode.stack_after
    to_mark = pickletools.markobject in before
    takes = before.index(pickletools.markobject) if to_mark else len(before)
    return _Effect(takes=takes, to_mark=to_mark, gives=len(after))


_EFFECTS: Mapping[str, _Effect] = {opcode.name: _effect(opcode) for opcode in pickletools.opcodes}

_VALUES = frozenset(name for name, one in _EFFECTS.items() if (one.takes, one.to_mark, one.gives) == (0, False, 1))
"""Opcodes of values without others in them."""

_PUTS = ("BINPUT", "LONG_BINPUT", "PUT")
_GETS = ("BINGET", "LONG_BINGET", "GET")
_REFUSED = ("EXT1", "EXT2", "EXT4", "NEXT_BUFFER")
_CHANGES = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD")
"""Opcodes that put something into a value, which may be in the memo."""

_IMMUTABLE = ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "FROZENSET")
"""Opcodes of values that are hashed with all that is in them."""


class _Value:
    """A value on the stack or in the memo, or in both.

    Attributes:
        depth: How deep values are inside each other in it.
        size: Number of values of a tuple or a frozenset, each counted wherever it is; 1 for anything else.
    """

    __slots__ = ("depth", "size")

    def __init__(self, depth: int = 0, size: int = 1) -> None:
        self.depth = depth
        self.size = size


def _check(data: bytes) -> None:
    """Refuse what an unpickler would do without limits.

    That are places of the memo that are far apart, deep nesting, long integers, and tuples of tuples of the memo:
    hashing them takes a time that doubles with each.

    Raises:
        UnpicklingError: It has such opcodes, or is cut off.
        RecursionError: It is nested too deep.
    """
    stack: list[_Value] = []
    marks: list[int] = []
    memo: dict[int, _Value] = {}
    room = _PER_BYTE * len(data) + _SPARE
    for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        name = opcode.name
        if name in _PUTS or name == "MEMOIZE":
            place = len(memo) if name == "MEMOIZE" else int(argument or 0)
            if place > count:
                raise pickle.UnpicklingError("its memo has holes")
            memo[place] = stack[-1]
        elif name in _GETS or name == "DUP":
            stack.append(stack[-1] if name == "DUP" else memo[int(argument or 0)])
        elif name == "MARK":
            marks.append(len(stack))
        elif name == "POP" and marks and marks[-1] == len(stack):
            marks.pop()
        elif name in _REFUSED or (isinstance(argument, int) and argument.bit_length() > _MOST_BITS):
            raise pickle.UnpicklingError(f"it has the opcode {name}, or an integer that is too long")
        elif name in _VALUES:
            stack.append(_Value())
        else:
            room -= _apply(name, stack, marks)
            if room < 0:
                raise pickle.UnpicklingError("it repeats tuples too often")


def _apply(name: str, stack: list[_Value], marks: list[int]) -> int:
    """Do to the stack what an opcode does, and return the size of what it takes.

    Raises:
        RecursionError: A value is too deep.
    """
    effect = _EFFECTS[name]
    if not effect.takes and not effect.to_mark:
        return 0  # PROTO and FRAME
    first = (marks.pop() if effect.to_mark else len(stack)) - effect.takes
    if first < 0:
        raise pickle.UnpicklingError("it takes more than it has")
    taken = stack[first:]
    del stack[first:]
    size = sum(one.size for one in taken)
    if not effect.gives:
        return size
    changes = name in _CHANGES
    depth = 1 + max((one.depth for one in (taken[1:] if changes else taken)), default=0)
    if depth > MOST_NESTED:
        raise RecursionError
    if changes:
        taken[0].depth = max(taken[0].depth, depth)
        stack.append(taken[0])
    else:
        stack.append(_Value(depth, 1 + size if name in _IMMUTABLE else 1))
    return size
