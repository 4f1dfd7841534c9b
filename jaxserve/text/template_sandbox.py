"""The Jinja environment of chat templates: immutable sandbox, bounded steps and sizes.

A template is a program that came with a model. What it can spend is bounded by counting its loop
iterations, its calls and the size of the texts that it builds; this is no bound on seconds, so a
template sent by a client belongs into a worker with a clock.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.filters import do_indent
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

_FORBIDDEN_NODES = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)
_WIDENING_METHODS = frozenset({"ljust", "rjust", "center", "zfill", "expandtabs"})
_WIDE_FORMAT = re.compile(r"\d{4,}|\*")
_MAX_POWER = 64
_MAX_INDENT = 64


@dataclass(slots=True)
class Budget:
    """What one rendering may still spend.

    Attributes:
      steps: loop iterations and calls left.
      max_characters: of the output and of each text on the way.
    """

    steps: int
    max_characters: int

    def spend(self, steps: int) -> None:
        """Take steps away.

        Raises:
          SecurityError: there are not so many left.
        """
        self.steps -= steps
        if self.steps < 0:
            raise SecurityError("the template must end within its bounded number of steps")

    def check_size(self, value: object) -> Any:
        """Give the value back.

        Raises:
          SecurityError: it is a text or list longer than `max_characters`.
        """
        if isinstance(value, str | list | tuple) and len(value) > self.max_characters:
            raise SecurityError(
                f"a text of the template must have at most {self.max_characters} characters"
            )
        return value


BUDGET: ContextVar[Budget] = ContextVar("chat_template_budget")
"""Of the rendering that runs in this context."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the model wrote, for training; here only its body counts."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """ImmutableSandboxedEnvironment as chat templates expect it, spending a Budget."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        """Set what Hugging Face's templates rely on: trimming, filters and functions."""
        super().__init__(
            optimized=False,  # constants are not folded, so that every operation is counted
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
        )
        for name in ("attr", "batch", "center", "format", "slice", "wordwrap", "xmlattr"):
            del self.filters[name]
        self.filters |= {
            "tojson": _to_json,
            "indent": _bounded_indent,
            "join": _bounded_join,
            "replace": _bounded_replace,
            _ITERATE: _bounded_iterable,
            _CONCAT: _bounded_concat,
        }
        del self.globals["lipsum"]
        self.globals |= {
            "range": _bounded_range,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def call(*args: Any, **kwargs: Any) -> Any:
        """Call a function of the template; the arguments are Jinja's own."""
        self, _, function = args[:3]
        BUDGET.get().spend(1)
        method = getattr(function, "__wrapped__", function)
        if isinstance(getattr(method, "__self__", None), str):
            _check_method(method.__name__, method.__self__, args[3:])
        result = ImmutableSandboxedEnvironment.call(*args, **kwargs)
        return BUDGET.get().check_size(result)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator whose result can be far larger than its operands."""
        budget = BUDGET.get()
        if operator == "**" and not (_is_small(left) and _is_small(right)):
            raise SecurityError(f"operands of ** must be numbers up to {_MAX_POWER}")
        if operator == "%" and isinstance(left, str) and _WIDE_FORMAT.search(left):
            raise SecurityError("a format in a template must not ask for such a width")
        if operator == "*":
            for text, count in ((left, right), (right, left)):
                if isinstance(text, str | list | tuple) and isinstance(count, int):
                    _check_growth(count, text)
        return budget.check_size(super().call_binop(context, operator, left, right))


def parse_template(environment: TemplateEnvironment, source: str) -> nodes.Template:
    """Parse a template, refuse what it must not hold, and let its loops and joins be counted.

    Raises:
      SecurityError: it includes, imports or extends, or names something private.
      jinja2.TemplateSyntaxError: it is no template.
    """
    tree = environment.parse(source)
    for node in tree.find_all(nodes.Node):
        _check_node(node)
    return _CountingTransformer().visit(tree)


def _check_method(name: str, text: str, arguments: Sequence[Any]) -> None:
    """Refuse a call of a method of str that would build far more than it is given."""
    if name in _WIDENING_METHODS or (name == "format" and _WIDE_FORMAT.search(text)):
        raise SecurityError(f"a template must not call str.{name}")
    if name == "replace" and len(arguments) > 1:
        _check_growth(text.count(str(arguments[0])), str(arguments[1]))
    if name == "join" and arguments and isinstance(arguments[0], list | tuple | str):
        _check_growth(len(arguments[0]), text)


def _check_growth(count: int, text: Sequence[Any]) -> None:
    if count * len(text) > BUDGET.get().max_characters:
        raise SecurityError("a template must not repeat a text so often")


def _check_node(node: nodes.Node) -> None:
    if isinstance(node, _FORBIDDEN_NODES):
        raise SecurityError(
            f"a template must not include, import or extend; got one in line {node.lineno}"
        )
    names = {nodes.Getattr: "attr", nodes.NSRef: "attr", nodes.Keyword: "key"}
    name = getattr(node, names.get(type(node), ""), "")
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        name = node.arg.value if str(node.arg.value).startswith("__") else ""
    if str(name).startswith("_"):
        raise SecurityError(f"a template must not name private attributes; got {name!r}")


_ITERATE, _CONCAT = "__bounded_iterable", "__bounded_concat"


class _CountingTransformer(NodeTransformer):
    """Lets each loop and each `~` go through a filter that spends the budget."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, _ITERATE)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), _CONCAT)


def _filtered(node: Any, name: str) -> nodes.Filter:
    wrapped = nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
    wrapped.set_environment(node.environment or _ENVIRONMENT_OF_NODES)
    return wrapped


def _bounded_iterable(values: Iterable[Any]) -> Iterable[Any]:
    if isinstance(values, list | tuple | dict | str):
        BUDGET.get().spend(len(values))
        return values
    return _counted(values)


def _counted(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        BUDGET.get().spend(1)
        yield value


def _bounded_concat(values: list[Any]) -> str:
    texts = [str(value) for value in values]
    if sum(map(len, texts)) > BUDGET.get().max_characters:
        raise SecurityError("a template must not join texts to one so long")
    return "".join(texts)


def _bounded_join(values: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
    if attribute is not None:
        raise SecurityError(f"join must not be given an attribute; got {attribute!r}")
    texts = [str(value) for value in _bounded_iterable(values)]
    _check_growth(len(texts), d)
    return BUDGET.get().check_size(d.join(texts))


def _bounded_replace(s: Any, old: str, new: str, count: int | None = None) -> str:
    text = str(s)
    _check_growth(text.count(old), new)
    return text.replace(old, new, -1 if count is None else count)


def _bounded_indent(s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    num_spaces = len(width) if isinstance(width, str) else int(width)
    if num_spaces > _MAX_INDENT:
        raise SecurityError(f"indent must be at most {_MAX_INDENT}; got {num_spaces}")
    return BUDGET.get().check_size(do_indent(str(s), width, first, blank))


def _bounded_range(*bounds: int) -> range:
    numbers = range(*bounds)
    BUDGET.get().spend(len(numbers))
    return numbers


def _is_small(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) <= _MAX_POWER


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    if isinstance(indent, int) and indent > _MAX_INDENT:
        raise SecurityError(f"indent must be at most {_MAX_INDENT}; got {indent}")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


_ENVIRONMENT_OF_NODES = TemplateEnvironment()
