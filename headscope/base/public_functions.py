"""Decorators of public functions: checks of arguments by their annotations, and contexts that can be entered again."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ContextDecorator, contextmanager
from functools import partial, wraps
from inspect import Parameter, getattr_static, signature
from itertools import islice
from numbers import Real
from operator import index
from pathlib import Path
from types import FunctionType, NoneType, UnionType
from typing import Annotated, Any, Literal, ParamSpec, Protocol, TypeVar, Union, get_args, get_origin

from headscope.base.user_input import MAX_ITEMS, is_path, is_text, is_too_long, quote
from headscope.errors import BadInput

P = ParamSpec("P")
T = TypeVar("T")
Class = TypeVar("Class", bound=type)

MAX_INTEGER = 2**63 - 1
"""Largest integer, and its negative the smallest: what torch and numpy hold."""
NOUNS = {
    bool: "True or False",
    int: "an integer",
    float: "a number",
    str: "a text",
    Path: "a path",
    NoneType: "None",
}
CLASS_NOUNS = {"Callable": "a function", "Mapping": "a mapping"}
CLASS_NOUNS |= dict.fromkeys(("Model", "LoadedModel"), "a model that hs.load opened")
CLASS_NOUNS["Run"] = "a run that hs.Run.open opened"


def checked(function: Callable[P, T]) -> Callable[P, T]:
    """The function with checks of its arguments: raises BadInput for a value that the annotation excludes.

    True and False are no numbers. Integers of numpy become int, and iterables of numbers or texts become lists.
    """
    parameters = signature(function).parameters.values()
    names = [item.name for item in parameters if item.kind in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD)]
    rest = next((item.name for item in parameters if item.kind is item.VAR_POSITIONAL), "")
    annotations = {item.name: item.annotation for item in parameters if _is_checkable(item)}
    if not annotations:
        return function

    @wraps(function)
    def call(*args: Any, **keywords: Any) -> T:
        values = list(args)
        for number, value in enumerate(args):
            name = names[number] if number < len(names) else rest
            if name in annotations:
                values[number] = check_argument(annotations[name], value, name)
        for name in annotations.keys() & keywords.keys():
            keywords[name] = check_argument(annotations[name], keywords[name], name)
        return function(*values, **keywords)

    return call


def checked_methods(cls: Class) -> Class:
    """The class with checks of the arguments of its constructor and public methods, see `checked`."""
    for name, member in list(vars(cls).items()):
        if isinstance(member, classmethod) and not name.startswith("_"):
            setattr(cls, name, classmethod(checked(member.__func__)))
        elif isinstance(member, FunctionType) and (name == "__init__" or not name.startswith("_")):
            setattr(cls, name, checked(member))
    return cls


class ReusableContext(ContextDecorator, AbstractContextManager[T]):
    """A context that can be entered several times, one after the other or nested: each time anew."""

    def __init__(self, create: Callable[[], AbstractContextManager[T]]) -> None:
        self._create = create
        self._entered: list[AbstractContextManager[T]] = []

    def __enter__(self) -> T:
        context = self._create()
        value = context.__enter__()
        self._entered.append(context)
        return value

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


def public_context(function: Callable[P, Iterator[T]]) -> Callable[P, ReusableContext[T]]:
    """A function that makes a context, as `contextlib.contextmanager` does, with checked arguments."""
    create = contextmanager(function)

    @wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> ReusableContext[T]:
        create(*args, **keywords)  # raises for a missing argument
        return ReusableContext(partial(create, *args, **keywords))

    return checked(call)


def check_argument(annotation: Any, value: Any, name: str) -> Any:
    """The value, converted to the type. Raises BadInput, with this name of the argument, for another kind of value."""
    try:
        return _convert(annotation, value)
    except OverflowError as error:
        raise BadInput(f"{name}={quote(value)} has more than 64 bits. Use a smaller number") from error
    except TypeError as error:
        raise BadInput(f"{name}={quote(value)} is not valid. Use {_describe(annotation)}") from error


def _is_checkable(parameter: Parameter) -> bool:
    """Whether the annotation excludes values: not Any, a type variable or a name in quotes."""
    kind = get_origin(parameter.annotation) or parameter.annotation
    return kind in (Annotated, Union, Literal) or (isinstance(kind, type) and kind not in (Any, Parameter.empty))


def _convert(annotation: Any, value: Any) -> Any:
    """The value as this type. Raises TypeError for another kind of value, OverflowError for an integer that is too
    large."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _convert(arguments[0], value)
    if origin in (Union, UnionType):
        return _convert_to_one(arguments, value)
    if annotation in (bool, NoneType) or origin is Literal:
        is_valid = any(value is item or (isinstance(value, str) and value == item) for item in arguments)
        return _require(is_valid or (not arguments and type(value) is annotation), value)
    if annotation is int:
        return _in_range(index(_require(type(value) is not bool, value)))
    if annotation is float:
        return _in_range(_require(isinstance(value, Real) and not isinstance(value, bool), value))
    if annotation in (str, Path):
        return _require(is_path(value) if annotation is Path else is_text(value), value)
    kind = origin or annotation
    if not isinstance(kind, type) or kind is object:
        return value
    if Protocol in kind.__bases__ and not kind.__module__.startswith("collections"):
        return _require(_implements(value, kind), value)
    if _is_list(kind):
        _require(isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping), value)
        if not arguments or not _is_item_checked(arguments[0]):
            return value
        _require(not is_too_long(value), value)
        items = [_convert(arguments[0], item) for item in islice(value, MAX_ITEMS + 1)]
        return (tuple if kind is tuple else list)(_require(not is_too_long(items), items))
    return _require(isinstance(value, kind), value)


def _is_list(kind: Any) -> bool:
    """Whether values of a type may be any iterable: lists, tuples and the abstract types of Python, but no mapping."""
    is_abstract = kind.__module__ == "collections.abc" and isinstance(kind, type)
    return kind in (list, tuple) or (is_abstract and issubclass(kind, Iterable) and kind is not Mapping)


def _is_item_checked(annotation: Any) -> bool:
    """Whether the items of a list of this type are checked: numbers, texts, mappings and headscope's own classes."""
    kind = get_origin(annotation) or annotation
    return kind in (int, float, str, Mapping) or getattr(kind, "__module__", "").startswith("headscope.")


def _convert_to_one(types: tuple[Any, ...], value: Any) -> Any:
    """The value as its own type, or as the first of these types that it fits; a text is a path if one of them is Path.

    So a tensor stays one: to read an integer from it would wait for its GPU.
    """
    if Path in types and isinstance(value, str | os.PathLike):
        types = (Path,)
    for item in sorted(types, key=lambda item: item not in type(value).__mro__):
        try:
            return _convert(item, value)
        except TypeError:
            continue
    raise TypeError


def _in_range(value: Any) -> Any:
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        raise OverflowError
    return value


def _require(is_valid: bool, value: Any) -> Any:
    if not is_valid:
        raise TypeError
    return value


def _implements(value: Any, protocol: type) -> bool:
    """Whether the value has the members of a protocol; properties are not computed."""
    absent = object()
    for name, member in vars(protocol).items():
        own = getattr_static(value, name, absent)
        if not name.startswith("_") and (own is absent or (isinstance(member, FunctionType) and not callable(own))):
            return False
    return not isinstance(value, type)


def _describe(annotation: Any) -> str:
    """The values of a type in words, such as "a text, a path or None"; an annotated type says it itself."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return str(arguments[1])
    if origin in (Union, UnionType):
        *first, last = dict.fromkeys(map(_describe, arguments))
        return f"{', '.join(first)} or {last}" if first else last
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    kind: Any = origin or annotation
    if kind in NOUNS:
        return NOUNS[kind]
    if _is_list(kind):
        nouns = {int: "integers", float: "numbers", str: "texts"}
        item = arguments[0] if arguments else None
        if item not in nouns and _is_item_checked(item):
            return f"a list, each {_describe(item)}"
        return f"a list of at most {MAX_ITEMS:,} {nouns[item]}" if item in nouns else "a list"
    class_name = getattr(kind, "__name__", "value")
    return CLASS_NOUNS.get(class_name, f"a {class_name}")
