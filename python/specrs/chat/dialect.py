"""The Jinja of chat templates: a sandbox, in the dialect that transformers gives it, with a clock in every loop."""

from __future__ import annotations

import contextvars
import functools
import json
import time
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from specrs.chat.errors import ChatLimitError, ChatTemplateError, RenderLimits

if TYPE_CHECKING:
    import jinja2

_MOST_SOURCE = 1 << 20  # characters of a template


def rendered(source: str, variables: Mapping[str, Any], limits: RenderLimits) -> str:
    if len(source) > _MOST_SOURCE:
        raise ChatLimitError(f"chat template of {len(source)} characters: at most {_MOST_SOURCE}")
    parts, size = [], 0
    token = _deadline.set(time.monotonic() + limits.seconds)
    try:
        for part in _compiled(source).generate(variables):
            size += len(part)
            if size > limits.characters:
                raise ChatLimitError(f"chat template: wrote {size} characters; at most {limits.characters}")
            _tick()
            parts.append(part)
    except ChatLimitError:
        raise
    except _Late:
        raise ChatLimitError(f"chat template: not done after {limits.seconds} seconds") from None
    except Exception as e:  # the template may raise anything that the sandbox allows
        line = getattr(e, "lineno", None)
        said = str(e) or type(e).__name__
        raise ChatTemplateError(f"chat template{'' if line is None else f', line {line}'}: {said}") from e
    finally:
        _deadline.reset(token)
    return "".join(parts)


class _Late(Exception):
    """The time is over."""


_deadline: contextvars.ContextVar[float] = contextvars.ContextVar("specrs.chat.deadline")


def _tick() -> bool:
    if time.monotonic() > _deadline.get():
        raise _Late
    return True


@functools.cache
def environment() -> jinja2.Environment:
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Dialect(Extension):
        """The tag that marks the model's own words, which prints them; and the clock."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            # A call, as in transformers: `varargs` and `caller` are its own, and no `break` leads out of it.
            return nodes.CallBlock(self.call_method("spoken"), [], [], body, lineno=line)

        def spoken(self, caller: Any) -> Any:
            return caller()

        def tick(self) -> bool:
            return _tick()

        def clocked(self, tree: nodes.Template) -> nodes.Template:
            """Make every turn of a loop and every macro look at the clock: so does a template that prints nothing."""
            for node in list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock))):
                assert isinstance(node, (nodes.For, nodes.Macro, nodes.CallBlock))
                node.body.insert(0, nodes.ExprStmt(self.call_method("tick"), lineno=node.lineno))
                if isinstance(node, nodes.For) and node.test is not None:
                    node.test = nodes.And(self.call_method("tick"), node.test, lineno=node.lineno)
            return tree

    class Dict:
        """The `dict` of templates: it makes a dict, and has no attributes of a type."""

        def __call__(self, *args: Any, **named: Any) -> dict[Any, Any]:
            return dict(*args, **named)

        def fromkeys(self, *args: Any) -> dict[Any, Any]:
            return dict.fromkeys(*args)

    class Namespace(jinja2.utils.Namespace):
        """Without names that begin with an underscore, which are Python's own."""

        def __init__(*args: Any, **named: Any) -> None:  # `namespace(self=1)` is one
            attributes = dict(*args[1:], **named)
            for name in attributes:
                _public(name)
            jinja2.utils.Namespace.__init__(args[0], attributes)

        def __setitem__(self, name: str, value: Any) -> None:
            _public(name)
            super().__setitem__(name, value)

    def _public(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"namespace: {name!r} begins with an underscore")

    def raise_exception(message: Any) -> None:
        raise jinja2.exceptions.TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )  # fmt: skip

    found = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Dialect, "jinja2.ext.loopcontrols"]
    )
    found.extend(clocked=Dialect(found).clocked)
    found.filters["tojson"] = tojson
    found.globals |= {
        "raise_exception": raise_exception, "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": Dict(), "namespace": Namespace,
    }  # fmt: skip
    return found


@functools.lru_cache(maxsize=64)
def _compiled(source: str) -> jinja2.Template:
    jinja = environment()
    tree = jinja.clocked(jinja.parse(source))  # type: ignore[attr-defined]
    return jinja.template_class.from_code(jinja, jinja.compile(tree), jinja.make_globals(None))
