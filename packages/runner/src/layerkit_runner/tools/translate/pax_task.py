"""What the methods that make a Pax task set, as paths from the task.

    lp = task_p.train.learner
    lp.optimizer.epsilon = 1e-8        task.train.learner.optimizer.epsilon

The methods are followed as far as the source tells: through other names of a part of the task, and
through functions of the files that are called with it. Whatever else may set something is a
`Setting` too, without a path, so that nothing is passed over.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Mapping
from typing import Any

from layerkit_runner.errors import UsageError
from layerkit_runner.tools.translate.pax_source import (
    CannotTellError,
    PaxFunction,
    PaxSource,
    Symbol,
    told,
)

# Nodes of the syntax trees that are followed in one method; functions that call one another twice
# each would take time that doubles with every function.
_MAX_NODES = 500_000

# Steps of a path that depend on how layers are arranged, and not on what they compute.
_ARRANGEMENT = ("block", "pipeline_stage")
# Functions that set nothing of what they are called with.
_HARMLESS = (
    *("get_callable", "isinstance", "issubclass", "hasattr", "getattr", "len", "type", "print"),
    *("clone", "copy", "deepcopy", "info", "warning"),
)


@dataclasses.dataclass(frozen=True)
class TaskPath:
    """A part of the task: the names that lead to it."""

    parts: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ".".join(("task", *self.parts))

    def child(self, name: str) -> TaskPath:
        """A part of this part."""
        return self if name in _ARRANGEMENT else TaskPath((*self.parts, name))


@dataclasses.dataclass(frozen=True)
class Gaussian:
    """Normal weights of this deviation."""

    std: Any


@dataclasses.dataclass(frozen=True)
class Setting:
    """Something that a method sets, or may set.

    Attributes:
      path: From the task; None where the source does not tell, or it is no assignment.
      name: As it is written.
      text: The value as it is written.
      value: `CannotTellError` where the source alone does not tell.
      is_certain: Not within a condition of which the source does not tell whether it holds.
    """

    path: str | None
    name: str
    text: str
    value: Any
    is_certain: bool


def settings_of(method: PaxFunction, source: PaxSource, fields: Mapping[str, Any]) -> list[Setting]:
    """What a method sets, in its order.

    Args:
      method: A `task()`.
      source: Its files, for the functions that it calls.
      fields: The class's, with inherited ones.

    Raises:
      UsageError: Its calls lead to more code than is followed.
    """
    settings: list[Setting] = []
    _Frame(method, {}, source, fields, settings, budget=_Budget()).run(method.node.body)
    return settings


def goes_on_from_base(method: PaxFunction) -> bool:
    """Whether a `task()` begins with that of a base."""
    calls = (part.func for part in ast.walk(method.node) if isinstance(part, ast.Call))
    return any(isinstance(called, ast.Attribute) and called.attr == "task" for called in calls)


class _Budget:
    """Count of the nodes that the frames of one method may still follow."""

    def __init__(self) -> None:
        self._num_nodes = _MAX_NODES

    def spend(self, node: ast.AST) -> None:
        """Count a statement, and raise an error if it is one too many."""
        self._num_nodes -= sum(1 for _ in ast.walk(node))
        if self._num_nodes < 0:
            raise UsageError(
                "task() calls functions of the files too often to be followed:"
                f" expected at most {_MAX_NODES:,} nodes of code in all."
            )


class _Frame:
    """The call of one function: the values of its names, and whether it certainly gets there."""

    def __init__(
        self,
        function: PaxFunction,
        arguments: Mapping[str, Any],
        source: PaxSource,
        fields: Mapping[str, Any],
        settings: list[Setting],
        *,
        budget: _Budget,
        callers: tuple[ast.FunctionDef, ...] = (),
        is_certain: bool = True,
    ) -> None:
        self._names: dict[str, Any] = {**function.constants, **arguments}
        self._own = set(arguments)
        self._source = source
        self._fields = fields
        self._settings = settings
        self._budget = budget
        self._callers = (*callers, function.node)
        self._is_certain = is_certain
        self._may_have_ended = False
        self.returned: Any = CannotTellError(function.node.name)

    def run(self, body: list[ast.stmt]) -> bool:
        """Follows statements; True if they certainly end the call."""
        return any(self._statement(statement) for statement in body)

    def _statement(self, node: ast.stmt) -> bool:
        self._budget.spend(node)
        for part in _considered(node):
            self._tell_calls(part)
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            self._assignment(node)
        elif isinstance(node, ast.AugAssign):
            self._augmented_assignment(node)
        elif isinstance(node, ast.Expr):
            self._expression(node)
        elif isinstance(node, ast.Return):
            return self._return(node)
        elif isinstance(node, ast.If):
            return self._branch(node)
        elif isinstance(node, ast.With):
            return self.run(node.body)
        elif isinstance(node, (ast.For, ast.While)):
            self._loop(node)
        elif isinstance(node, ast.Try):
            return self._try(node)
        elif not isinstance(node, _SETS_NOTHING):
            text = ast.unparse(node).partition("\n")[0].rstrip(":")
            self._tell(None, text, "…", CannotTellError(text))
        return False

    def _assignment(self, node: ast.Assign | ast.AnnAssign) -> None:
        if node.value is None:
            return
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        value = self._value(node.value, tells=not _is_place(targets[0]))
        for target in targets:
            self._bind(target, node.value, value)

    def _augmented_assignment(self, node: ast.AugAssign) -> None:
        unknown = ast.BinOp(ast.Name("_"), node.op, node.value)
        text = f"{ast.unparse(node.target)}{ast.unparse(unknown)[1:]}"
        if _is_place(node.target):
            self._tell(None, ast.unparse(node.target), text, CannotTellError(text))
        else:
            self._bind(node.target, node.value, CannotTellError(text))

    def _expression(self, node: ast.Expr) -> None:
        self._value(node.value)
        if not isinstance(node.value, ast.Call) and self._reaches(node.value):
            self._tell(None, ast.unparse(node), "…", CannotTellError(ast.unparse(node)))

    def _return(self, node: ast.Return) -> bool:
        value = None if node.value is None else self._value(node.value)
        if not self._may_have_ended:
            self.returned = value
        elif self.returned != value:
            self.returned = CannotTellError(ast.unparse(node))
        self._may_have_ended = True
        return self._is_certain

    def _loop(self, node: ast.For | ast.While) -> None:
        if isinstance(node, ast.For):
            self._bind(node.target, node.iter, CannotTellError(ast.unparse(node.iter)))
        self._run_perhaps(node.body)
        self._run_perhaps(node.orelse)

    def _try(self, node: ast.Try) -> bool:
        caught = [statement for handler in node.handlers for statement in handler.body]
        self._run_perhaps([*node.body, *caught, *node.orelse])
        return self.run(node.finalbody)

    def _branch(self, node: ast.If) -> bool:
        condition = told(node.test, self._names, self._fields)
        if not isinstance(condition, (CannotTellError, Symbol, TaskPath)):
            return self.run(node.body if condition else node.orelse)
        self._run_perhaps(node.body)
        self._run_perhaps(node.orelse)
        return False

    def _run_perhaps(self, body: list[ast.stmt]) -> None:
        before = self._is_certain
        self._is_certain = False
        self.run(body)
        self._is_certain = before and not self._may_have_ended

    def _bind(self, target: ast.expr, node: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self._bind_name(target.id, value)
        elif isinstance(target, ast.Attribute):
            part = self._value(target.value)
            path = part.child(target.attr) if isinstance(part, TaskPath) else None
            if path is None or path != value:  # a part may be put back to its place
                name = ast.unparse(target)
                self._tell(None if path is None else str(path), name, ast.unparse(node), value)
        elif isinstance(target, (ast.Tuple, ast.List)):
            nodes = node.elts if isinstance(node, (ast.Tuple, ast.List)) else []
            if len(nodes) == len(target.elts):
                pairs = [(part, self._value(part)) for part in nodes]
            else:
                pairs = [(node, CannotTellError(ast.unparse(node)))] * len(target.elts)
            for item, (part, found) in zip(target.elts, pairs, strict=True):
                self._bind(item, part, found)
        else:
            self._tell(None, ast.unparse(target), ast.unparse(node), CannotTellError(""))

    def _bind_name(self, name: str, value: Any) -> None:
        if not self._is_certain:
            known = self._names.get(name, value)
            is_same_part = isinstance(value, TaskPath) and known == value
            value = value if is_same_part else CannotTellError(name)
        self._names[name] = value
        self._own.add(name)

    def _tell(self, path: str | None, name: str, text: str, value: Any) -> None:
        self._settings.append(Setting(path, name, text, value, self._is_certain))

    def _value(self, node: ast.expr, *, tells: bool = True) -> Any:
        """A value, a part of the task, or `CannotTellError`; a call that may set is told."""
        if isinstance(node, ast.Call):
            return self._call(node, tells=tells)
        if isinstance(node, ast.Attribute):
            part = self._value(node.value)
            if isinstance(part, TaskPath):
                return part.child(node.attr)
        return told(node, self._names, self._fields)

    def _tell_calls(self, node: ast.expr) -> None:
        """Of calls within a larger expression, those that may set something."""
        for part in ast.walk(node):
            if isinstance(part, ast.Call) and not _is_harmless(part) and self._reaches(part):
                self._tell(None, ast.unparse(part), "…", CannotTellError(ast.unparse(part)))

    def _call(self, node: ast.Call, *, tells: bool) -> Any:
        function = ast.unparse(node.func)
        name = function.rpartition(".")[2]
        if function.endswith(".task") and (
            function == "super().task" or not self._reaches(node.func)
        ):
            return TaskPath()
        if isinstance(node.func, ast.Name) and name in self._source.functions:
            found = self._source.functions[name]
            arguments = self._arguments(node, found.node)
            if arguments is not None and found.node not in self._callers:
                return self._follow(found, arguments)
        if name == "cast" and len(node.args) == 2:
            return self._value(node.args[1])
        if name == "Gaussian":
            scale = [*node.args, *(word.value for word in node.keywords if word.arg == "scale")]
            return Gaussian(self._value(scale[0]) if scale else 1.0)
        unknown = CannotTellError(ast.unparse(node))
        has_words_only = not node.args and all(word.arg for word in node.keywords)
        if isinstance(node.func, ast.Attribute) and name == "set" and has_words_only:
            receiver = self._value(node.func.value)
            if isinstance(receiver, TaskPath):
                return self._set(receiver, ast.unparse(node.func.value), node.keywords)
        if tells and not _is_harmless(node) and self._reaches(node):
            self._tell(None, ast.unparse(node), "…", unknown)
        return unknown

    def _set(self, receiver: TaskPath, written: str, words: list[ast.keyword]) -> TaskPath:
        for word in words:
            path = receiver.child(str(word.arg))
            value = self._value(word.value)
            self._tell(str(path), f"{written}.{word.arg}", ast.unparse(word.value), value)
        return receiver

    def _arguments(self, node: ast.Call, function: ast.FunctionDef) -> dict[str, Any] | None:
        """Those of a call by the names of parameters; None where they cannot be told."""
        names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
        words = [word.arg for word in node.keywords]
        is_starred = any(isinstance(argument, ast.Starred) for argument in node.args)
        if is_starred or None in words or len(node.args) > len(names):
            return None
        given = dict(zip(names, node.args, strict=False))
        given |= {str(word.arg): word.value for word in node.keywords}
        values = {name: self._value(value) for name, value in given.items()}
        others = [values[name] for name in ("self", "cls") if name in values]
        return values if all(value in ("self", "cls") for value in others) else None

    def _follow(self, function: PaxFunction, arguments: Mapping[str, Any]) -> Any:
        frame = _Frame(
            function,
            arguments,
            self._source,
            self._fields,
            self._settings,
            budget=self._budget,
            callers=self._callers,
            is_certain=self._is_certain,
        )
        frame.run(function.node.body)
        return frame.returned

    def _reaches(self, node: ast.AST) -> bool:
        """Whether it names a part of the task, or what may be one."""
        names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        values = [self._names[name] for name in names if name in self._own]
        return any(isinstance(value, (TaskPath, CannotTellError)) for value in values)


_SETS_NOTHING = (
    *(ast.Pass, ast.Assert, ast.Raise, ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal),
    *(ast.Break, ast.Continue),
)


def _is_place(target: ast.expr) -> bool:
    return isinstance(target, (ast.Attribute, ast.Subscript))


def _is_harmless(node: ast.Call) -> bool:
    return ast.unparse(node.func).rpartition(".")[2] in _HARMLESS


def _considered(node: ast.stmt) -> list[ast.expr]:
    """Expressions of a statement that are evaluated, and not followed as calls are."""
    if isinstance(node, (ast.If, ast.While, ast.Assert)):
        return [node.test]
    if isinstance(node, ast.For):
        return [node.iter]
    if isinstance(node, ast.With):
        return [item.context_expr for item in node.items]
    if isinstance(node, (ast.Assign, ast.AnnAssign, ast.Return)) and node.value is not None:
        is_followed = isinstance(node.value, (ast.Call, ast.List, ast.Tuple))
        is_told = isinstance(node, ast.Assign) and _is_place(node.targets[0])
        return [] if is_followed or is_told else [node.value]
    return []
