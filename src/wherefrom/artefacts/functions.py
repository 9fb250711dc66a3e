"""What a function computes, as a digest: its source without comments and layout, and whatever it
has at hand: defaults, bound arguments, closure, and the plain globals and helpers of its module.

What it changes itself, a counter or a list that it appends to, is left out; an object that is
neither plain nor a tensor, module or function counts by its class alone.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from .architecture import CHANGING, is_plain, network_identity, plain_attributes
from .identity import fingerprint

_Node = ast.Lambda | ast.FunctionDef | ast.AsyncFunctionDef


def function_fingerprint(function: Callable[..., Any]) -> str:
    """A digest of what a callable computes, as far as that is visible."""
    return fingerprint(_described(function, frozenset()))


def _described(thing: Any, above: frozenset[int]) -> Any:
    """A function, or something that a function has at hand, as what `fingerprint` takes."""
    # a compiled function is the function that was compiled
    thing = getattr(thing, "_torchdynamo_orig_callable", thing)
    if id(thing) in above:  # a function that calls itself
        return "itself"
    above = above | {id(thing)}
    if isinstance(thing, functools.partial):
        bound = [_described(one, above) for one in thing.args]
        named = {name: _described(one, above) for name, one in sorted(thing.keywords.items())}
        return "partial", _described(thing.func, above), bound, named
    if isinstance(thing, MethodType):
        method = thing.__func__.__name__
        return "method", _described(thing.__func__, above), _object(thing.__self__, method)
    if isinstance(thing, FunctionType):
        return _function(thing, above)
    if isinstance(thing, Tensor) or is_plain(thing):
        return thing
    if isinstance(thing, dict):
        return {str(name): _described(one, above) for name, one in thing.items()}
    if isinstance(thing, list | tuple | set):
        found = [_described(one, above) for one in thing]
        return sorted(map(repr, found)) if isinstance(thing, set) else found
    if isinstance(thing, nn.Module):
        return network_identity(thing)
    called = inspect.getattr_static(type(thing), "__call__", None)
    how = _function(called, above) if isinstance(called, FunctionType) else None
    return _object(thing, "__call__"), how


def _object(thing: Any, method: str) -> Any:
    """An object whose method is called."""
    if isinstance(thing, nn.Module):
        return network_identity(thing)
    name = getattr(thing, "__qualname__", type(thing).__qualname__)  # of a class, its own
    return name, plain_attributes(thing, method)


def _function(function: FunctionType, above: frozenset[int]) -> Any:
    node, code = _node(function), function.__code__
    changed = _changed(node) if node is not None else set()
    written = _bytecode(code) if node is None else _normalised(node)
    defaults = [_described(one, above) for one in function.__defaults__ or ()]
    named = {
        name: _described(one, above)
        for name, one in sorted((function.__kwdefaults__ or {}).items())
    }
    at_hand = {
        name: _described(value, above)
        for name, value in sorted(_at_hand(function))
        if name not in changed
    }
    return "function", written, defaults, named, at_hand


def _at_hand(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function refers to outside itself: its closure, and of the globals those that are
    plain, tensors, or functions of its own module.
    """
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not set yet
            continue
    for name in _names(function.__code__) - set(function.__code__.co_freevars):
        value = function.__globals__.get(name)
        own = isinstance(value, FunctionType) and value.__module__ == function.__module__
        if value is not None and (own or isinstance(value, Tensor | dict) or is_plain(value)):
            yield name, value


def _names(code: CodeType) -> set[str]:
    """The global names of a function and of those inside it."""
    inner = [one for one in code.co_consts if isinstance(one, CodeType)]
    return set(code.co_names).union(*(_names(one) for one in inner))


def _bytecode(code: CodeType) -> Any:
    """A function without its source: what the interpreter runs."""
    consts = [_bytecode(one) if isinstance(one, CodeType) else repr(one) for one in code.co_consts]
    return code.co_code, consts, code.co_names, code.co_varnames


# --- source -----------------------------------------------------------------------------------


def _node(function: FunctionType) -> _Node | None:
    """The function in the text of its file; None where there is no text, or another one."""
    try:
        lines, _ = inspect.findsource(function)
        tree = ast.parse("".join(lines))
    except (OSError, TypeError, SyntaxError, ValueError, IndexError):
        return None
    code = function.__code__
    if code.co_name != "<lambda>":
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                if node.name == code.co_name and first == code.co_firstlineno:
                    return node
        return None
    places = [
        ((line, column), (last, end))
        for line, last, column, end in code.co_positions()
        if line is not None and last is not None and column is not None and end is not None
    ]
    places = [place for place in places if place[0] != place[1]]  # that is no expression
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Lambda) and places and all(_inside(node.body, p) for p in places)
    ]
    # of lambdas in lambdas the innermost: it begins last
    return max(around, key=lambda node: (node.lineno, node.col_offset), default=None)


def _inside(node: ast.expr, place: tuple[tuple[int, int], tuple[int, int]]) -> bool:
    begin = (node.lineno, node.col_offset)
    return begin <= place[0] and place[1] <= (node.end_lineno or 0, node.end_col_offset or 0)


def _normalised(node: _Node) -> str:
    """The function's own text without its name, comments, layout and docstring."""
    if isinstance(node, ast.Lambda):
        return ast.unparse(node)
    body = node.body
    first = body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        body = body[1:]
    words = [ast.unparse(one) for one in (*node.decorator_list, node.args, *body)]
    return "\n".join(words)


def _changed(node: _Node) -> set[str]:
    """The names of what a function changes: sets, writes into, or calls a changing method of."""
    found = set()
    for one in ast.walk(node):
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store | ast.Del):
            found.add(one.id)
        elif isinstance(one, ast.Attribute | ast.Subscript):
            changes = isinstance(one, ast.Attribute) and one.attr in CHANGING
            if isinstance(one.value, ast.Name) and (changes or not isinstance(one.ctx, ast.Load)):
                found.add(one.value.id)
    return found
