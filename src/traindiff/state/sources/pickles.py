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
from collections.abc import Callable, Mapping
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


def _bytearray(content: Any = b"", encoding: str = "latin-1") -> bytearray:
    """A copy of bytes: given a number, `bytearray` would allocate as many."""
    if isinstance(content, Record) and content.name == "_codecs.encode" and content.arguments:
        content = content.arguments[0]  # bytes before protocol 3
    if isinstance(content, str) and encoding == "latin-1":
        return bytearray(content, encoding)
    if isinstance(content, bytes):
        return bytearray(content)
    raise pickle.UnpicklingError("it has a bytearray of what is no bytes")


_REAL: Mapping[str, Any] = {
    "collections.OrderedDict": OrderedDict, "builtins.dict": dict, "builtins.list": list, "builtins.set": set,
    "builtins.tuple": tuple, "builtins.frozenset": frozenset, "builtins.complex": complex,
    "builtins.bytearray": _bytearray, "torch.Size": tuple,
}  # fmt: skip
"""Containers, which are made as they are."""

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
    |signal\.Signals|uuid\.UUID|builtins\.(int|float|bool|str|bytes|object|slice|range)|typing\.\w+""",
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

    def find_class(self, module: str, name: str) -> Any:
        """A container, or what stands for a class.

        Raises:
            CheckpointError: It is not known to be data.
            UnpicklingError: There are too many.
        """
        full = f"{module.replace('__builtin__', 'builtins')}.{name}"
        if full in _REAL:
            return _REAL[full]
        if full in self._classes:
            return self._classes[full]
        if _DATA.fullmatch(full):
            if len(self._classes) >= MOST_CLASSES:
                raise pickle.UnpicklingError(f"it names more than {MOST_CLASSES} classes")
            return self._classes.setdefault(full, _class_of(full))
        raise CheckpointError(
            f"{self._where} would call {quoted(full)} when it is loaded, which is code and not data; traindiff never "
            "runs it. If you trust the file, load it and save its tensors with safetensors."
        )

    def persistent_load(self, key: Any) -> Any:
        """What the file keeps beside the pickle: elements of tensors."""
        return self._stored(key)


def _class_of(name: str) -> Any:
    """A class that stands for another: pickles make objects by calling it, or by its `__new__`."""

    class Named(Record):
        __slots__ = ()
        full_name = name

        def __new__(cls, *arguments: Any, **_: Any) -> Any:
            return Record(name, arguments)

    return Named


def name_of(value: Any) -> str:
    """The full name of a class or function that a pickle holds; empty for anything else."""
    return str(getattr(value, "full_name", "")) if isinstance(value, type) else ""


def loaded(data: bytes, *, where: str, stored: Callable[[Any], Any]) -> Any:
    """The object that a pickle describes: containers, numbers and texts as they are, anything else as a `Record`.

    Args:
        data: The pickle.
        where: The file, for messages.
        stored: Makes what stands for a persistent identifier.

    Raises:
        CheckpointError: It is damaged, too large, or names something that is not known to be data.
    """
    if len(data) > MOST_PICKLE_BYTES:
        raise unreadable(where, f"its pickle has {len(data)} bytes, and may have {MOST_PICKLE_BYTES}")
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


_Depth = int | list[int]
"""How deep a value on the stack is; in a list for one that lies at several places, where it may be changed."""


def _check(data: bytes) -> None:
    """Refuse what an unpickler would do without limits: places of the memo that are far apart, and deep nesting.

    Raises:
        UnpicklingError: It has such opcodes, or is cut off.
        RecursionError: It is nested too deep.
    """
    stack: list[_Depth] = []
    marks: list[int] = []
    memo: dict[int, list[int]] = {}
    for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        name = opcode.name
        if name in _PUTS or name == "MEMOIZE":
            place = len(memo) if name == "MEMOIZE" else int(argument or 0)
            if place > count:
                raise pickle.UnpicklingError("its memo has holes")
            memo[place] = stack[-1] = _shared(stack[-1])
        elif name in _GETS:
            stack.append(memo[int(argument or 0)])
        elif name == "MARK":
            marks.append(len(stack))
        elif name == "POP" and marks and marks[-1] == len(stack):
            marks.pop()
        elif name == "DUP":
            stack[-1] = _shared(stack[-1])
            stack.append(stack[-1])
        elif name in _REFUSED:
            raise pickle.UnpicklingError(f"it has the opcode {name}")
        elif name in _VALUES:
            stack.append(0)
        else:
            _apply(_EFFECTS[name], stack, marks, changes=name in _CHANGES)


def _apply(effect: _Effect, stack: list[_Depth], marks: list[int], *, changes: bool) -> None:
    """Do to the stack what an opcode does.

    Raises:
        RecursionError: A value is too deep.
    """
    if not effect.takes and not effect.to_mark:
        return  # PROTO and FRAME
    first = (marks.pop() if effect.to_mark else len(stack)) - effect.takes
    if first < 0:
        raise pickle.UnpicklingError("it takes more than it has")
    taken = stack[first:]
    del stack[first:]
    if not effect.gives:
        return
    inside = taken[1:] if changes else taken
    depth = 1 + max((one if isinstance(one, int) else one[0] for one in inside), default=0)
    if depth > MOST_NESTED:
        raise RecursionError
    if not changes:
        stack.append(depth)
    elif isinstance(taken[0], int):
        stack.append(max(taken[0], depth))
    else:
        taken[0][0] = max(taken[0][0], depth)
        stack.append(taken[0])


def _shared(depth: _Depth) -> list[int]:
    return [depth] if isinstance(depth, int) else depth
