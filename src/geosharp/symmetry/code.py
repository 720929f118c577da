"""What a module's forward pass says about itself: the names it reaches, what is computed from what, under which conditions.

Read from its code without running it. Where there is no source (a compiled or generated forward pass) nothing is said, and
whoever asks takes the usual case; verification has the last word.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

from torch import nn

_SOFTMAX = (
    "softmax", "logsumexp", "attention_function", "attention_forward", "attention_interface", "scaled_dot_product", "flash", "sdpa",
    "efficient_attention",
)  # fmt: skip


def attends(module: nn.Module) -> bool:
    """Whether a soft-max is in reach of the forward pass: state-space models and linear attention have maps of the same names."""
    names = names_reached(module)
    return not names or any(part in name.lower() for name in names for part in _SOFTMAX)


def names_reached(module: nn.Module) -> set[str]:
    """Every name in the forward pass, in the methods and functions that it uses, and in its children without weights."""
    space = vars(sys.modules.get(type(module).__module__, object))
    seen, todo = set[str](), [(name, space) for name in names_used(module)]
    while todo:
        name, space = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        child = module._modules.get(name)
        if child is not None:
            seen.add(type(child).__name__)
            todo += [] if any(True for _ in child.parameters()) else [(other, space) for other in names_used(child)]
        for found in (vars(type(module)).get(name), space.get(name)):
            if callable(found):  # under whatever name it was imported
                seen.add(getattr(found, "__name__", name))
                todo += [(other, getattr(found, "__globals__", space)) for other in names_of(found)]
    return seen


def names_used(module: nn.Module) -> set[str]:
    """Every global and attribute name in a module's forward pass."""
    return names_of(type(module).forward)


def names_of(function: Any) -> set[str]:
    """Every global and attribute name in a function."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return set(_names(code)) if isinstance(code, CodeType) else set()


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


# By its source --------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=512)
def _tree(forward: Callable[..., Any]) -> ast.AST | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(forward))))
    except (OSError, TypeError, SyntaxError):
        return None


def happens(module: nn.Module, names: set[str]) -> bool:
    """Whether one of these functions or attributes is used outside of every condition that is false for this module."""
    tree = _tree(type(module).forward)
    return tree is None or any(_reached(module, tree, names))


def _reached(module: nn.Module, node: ast.AST, names: set[str]) -> Iterator[bool]:
    if isinstance(node, ast.If):
        chosen = _truth(module, node.test)
        branches = [*([] if chosen is False else node.body), *([] if chosen is True else node.orelse)]
        for branch in branches:
            yield from _reached(module, branch, names)
        return
    if (isinstance(node, ast.Name) and node.id in names) or (isinstance(node, ast.Attribute) and node.attr in names):
        yield True
    for child in ast.iter_child_nodes(node):
        yield from _reached(module, child, names)


def _truth(module: nn.Module, test: ast.expr) -> bool | None:
    """What a condition on the module's own attributes says; nothing where it is about anything else."""
    if any(isinstance(node, (ast.Call, ast.NamedExpr, ast.Await)) for node in ast.walk(test)):
        return None
    if any(node.id != "self" for node in ast.walk(test) if isinstance(node, ast.Name)):
        return None
    try:
        return bool(eval(compile(ast.Expression(test), "<condition>", "eval"), {"__builtins__": {}, "self": module}))
    except Exception:  # an attribute that is not there, a tensor without a truth value
        return None


def numbers_named(module: nn.Module, variable: str) -> list[int]:
    """The whole numbers that a forward pass gives to a local variable."""
    tree = _tree(type(module).forward)
    assignments = (node for node in _in_order(tree) if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant))
    named = (node for node in assignments if any(isinstance(one, ast.Name) and one.id == variable for one in node.targets))
    return [node.value.value for node in named if isinstance(node.value, ast.Constant) and type(node.value.value) is int]


def sources(module: nn.Module) -> dict[str, frozenset[str]]:
    """For each child that the forward pass calls, the children whose results it is called on."""
    return _sources(type(module).forward)


@functools.lru_cache(maxsize=512)
def _sources(forward: Callable[..., Any]) -> dict[str, frozenset[str]]:
    tree = _tree(forward)
    found: dict[str, frozenset[str]] = {}
    known: dict[str, frozenset[str]] = {}
    for node in _in_order(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            made = _history(node.value, known, found)
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            known.update({name.id: made for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)})
        elif isinstance(node, (ast.Expr, ast.Return)) and node.value is not None:
            _history(node.value, known, found)
    return found


def _in_order(tree: ast.AST | None) -> Iterator[ast.AST]:
    """All statements as they are written."""
    for node in ast.iter_child_nodes(tree) if tree is not None else ():
        if isinstance(node, ast.stmt):
            yield node
            yield from _in_order(node)
        elif isinstance(node, ast.ExceptHandler):
            yield from _in_order(node)


def _history(node: ast.AST, known: dict[str, frozenset[str]], found: dict[str, frozenset[str]]) -> frozenset[str]:
    """The children that an expression went through; what each of them was called on is noted on the way."""
    if isinstance(node, ast.Name):
        return known.get(node.id, frozenset())
    below = frozenset[str]().union(*(_history(child, known, found) for child in ast.iter_child_nodes(node)))
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return below
    owner, child = node.func.value, node.func.attr
    if not isinstance(owner, ast.Name) or owner.id != "self":
        return below
    found[child] = found.get(child, frozenset()) | below
    return below | {child}
