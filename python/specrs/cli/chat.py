"""``specrs chat MODEL``: a conversation in the terminal, by the model's chat template.

A message is a line; a line that ends with a backslash goes on in the next one, and lines between two lines of three
double quotes are one message. /help lists commands. From a pipe each message is answered in turn, on stdout alone.

Exit status 1 where a message of a pipe could not be answered.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from specrs._specrs import ConfigError, SpecrsError
from specrs.cli import options, terminal

if TYPE_CHECKING:
    from specrs.engine import LLM, RequestOutput
    from specrs.sampling_params import SamplingParams

_FENCE = '"""'
_HELP = """\
/new            forget the conversation
/system TEXT    begin anew with another system message; without TEXT, with none
/retry          answer the last message once more, with the next seed
/help           this
/quit           leave, as Control-D does
A line that ends with \\ goes on; lines between two lines of \"\"\" are one message; //TEXT sends /TEXT.
Control-C ends an answer."""


def add_parser(commands: Any) -> None:
    """Declare the subcommand."""
    p = commands.add_parser("chat", help="talk to a chat model in the terminal", description=__doc__,
                            formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    options.add_models(p, positional=True)
    p.add_argument("--system", metavar="TEXT", help="the system message")
    p.add_argument("--chat-template", metavar="FILE", help="template of conversations (default: the model's own)")
    p.add_argument("--no-draft", action="store_true", help="decode plainly")
    options.add_threads(p)
    terminal.add_mark(p)
    options.add_sampling(p)
    options.add_engine(p)
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Talk.

    Raises:
        ConfigError: the same errors as of `specrs.LLM`; a template that cannot be read.
        ChatTemplateError: the model has no chat template, and none was given.
    """
    from specrs.engine import LLM

    options.set_threads(args)
    params, engine = options.sampling_of(args), options.engine_options(args)
    template = _template(args)
    engine.setdefault("max_batch", 1)
    with LLM(args.model, args.draft, speculative=not args.no_draft, **engine) as llm:
        chat = Chat(llm, params, template, terminal.marks_of(args.mark, sys.stdout))
        chat.begin(args.system)
        return _talk(chat, Lines(terminal.utf8_stdin()))


def _template(args: argparse.Namespace) -> str | None:
    """The template that was given; ``None`` where the model has one, which is looked for before weights are read."""
    from specrs import assets
    from specrs.chat import ChatTemplateError, ChatTemplates
    from specrs.models import locate

    if args.chat_template is not None:
        try:
            return Path(args.chat_template).read_text(encoding="utf-8")
        except UnicodeDecodeError as e:
            raise ConfigError(f"--chat-template {args.chat_template}: not UTF-8: {e}") from None
    directory = assets.model_dir() if args.model is None else locate(args.model, "model")
    try:
        ChatTemplates.of(directory).source()
    except ChatTemplateError as e:
        e.args = (f"{e}; here: --chat-template FILE",)
        raise
    return None


# -- the conversation -------------------------------------------------------------------------------------------------


@dataclass
class Chat:
    """One conversation.

    Attributes:
        llm: the engine that answers.
        params: sampling parameters of each answer.
        template: template of the conversation; ``None``: the model's.
        marks: around accepted drafts.
        messages: said so far, answers included.
    """

    llm: LLM
    params: SamplingParams
    template: str | None
    marks: terminal.Marks
    messages: list[dict[str, str]] = field(default_factory=list)

    def begin(self, system: str | None) -> None:
        """Forget everything; begin with a system message where there is one."""
        self.messages = [{"role": "system", "content": system}] if system else []

    def new(self) -> None:
        """Forget everything but the system message."""
        self.messages = [one for one in self.messages[:1] if one["role"] == "system"]

    def say(self, text: str) -> None:
        """Answer a message. Where that fails, the conversation is as it was before.

        Raises:
            ConfigError: the template refuses the conversation, or it fills the context.
            NonFiniteError, GrammarFailedError: the error of the output, as its ``error`` has it.
        """
        before = list(self.messages)
        self.messages.append({"role": "user", "content": text})
        try:
            answer = self._answer()
        except BaseException:
            self.messages = before
            raise
        self.messages.append({"role": "assistant", "content": answer})

    def retry(self) -> None:
        """Answer the last message once more, with the next seed.

        Raises as `say`; ConfigError where nothing was said.
        """
        said = [i for i, one in enumerate(self.messages) if one["role"] == "user"]
        if not said:
            raise ConfigError("/retry: nothing was said yet")
        before, text = self.messages, self.messages[said[-1]]["content"]
        self.messages = self.messages[: said[-1]]
        if self.params.seed is not None:
            self.params = replace(self.params, seed=self.params.seed + 1)
        try:
            self.say(text)
        except BaseException:
            self.messages = before
            raise

    def _answer(self) -> str:
        """Stream an answer to stdout, and a line about it to stderr. Control-C ends the answer; its text so far
        stays."""
        prompt = self.llm.chat_prompt(self.messages, chat_template=self.template)
        context = self.llm.config.max_context_len or 0
        params = self.params
        if params.max_tokens is None and self.llm.stated_sampling.max_tokens is None:
            params = replace(params, max_tokens=max(context - len(prompt.token_ids), 1))
        events = self.llm.stream([prompt], params)
        began = time.perf_counter()
        parts: list[str] = []
        output: RequestOutput | None = None
        try:
            for event in events:
                parts.append(event.text)
                print(terminal.marked(event.pieces, self.marks), end="", flush=True)
                output = event.output or output
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
        finally:
            events.close()
            print(flush=True)
        if output is None:
            print("[stopped]", file=sys.stderr)
        elif output.error is not None:
            raise output.error
        else:
            print(f"[{terminal.summary(self.llm, output, time.perf_counter() - began)}]", file=sys.stderr)
        return "".join(parts)


# -- the terminal -----------------------------------------------------------------------------------------------------


class Lines:
    """Messages, from a terminal with a prompt and a history of lines, or from a pipe."""

    def __init__(self, source: TextIO) -> None:
        self._source = source
        self.interactive = source.isatty()
        if self.interactive:
            with suppress(ImportError):
                import readline  # noqa: F401  (`input` edits lines by it)

    def message(self) -> str | None:
        """The next message, of one line or several; ``None`` at the end.

        Raises:
            ConfigError: the input is not UTF-8.
        """
        try:
            line = self._line("> ")
            if line is None:
                return None
            if line.strip() == _FENCE:
                return self._until_fence()
            lines = [line]
            while lines[-1].endswith("\\"):
                lines[-1] = lines[-1][:-1]
                more = self._line(". ")
                lines.append("" if more is None else more)
            return "\n".join(lines)
        except UnicodeDecodeError as e:
            raise ConfigError(f"stdin: not UTF-8: {e}") from None

    def _until_fence(self) -> str:
        lines = []
        while (line := self._line(". ")) is not None and line.strip() != _FENCE:
            lines.append(line)
        return "\n".join(lines)

    def _line(self, prompt: str) -> str | None:
        if not self.interactive:
            line = self._source.readline()
            return line.removesuffix("\n").removesuffix("\r") if line else None
        try:
            return input(prompt)
        except EOFError:
            print()
            return None


def _talk(chat: Chat, lines: Lines) -> int:
    if lines.interactive:
        print(f"[on {chat.llm.device}; /help lists commands]", file=sys.stderr)
    failed = False
    while True:
        try:
            message = lines.message()
        except KeyboardInterrupt:
            if not lines.interactive:
                raise
            print()
            continue
        if message is None:
            return 1 if failed else 0
        try:
            if not _done(chat, message):
                return 1 if failed else 0
        except SpecrsError as e:
            print(f"specrs: {e}", file=sys.stderr)
            failed = not lines.interactive


def _done(chat: Chat, message: str) -> bool:
    """Do what a message or a command asks for; whether to go on.

    Raises:
        ConfigError: no such command; and the errors of `Chat.say`.
    """
    if not message.strip():
        return True
    if not message.startswith("/") or message.startswith("//"):
        chat.say(message[1:] if message.startswith("//") else message)
        return True
    name, _, rest = message.partition(" ")
    commands: dict[str, Callable[[], None]] = {
        "/new": chat.new,
        "/system": lambda: chat.begin(rest.strip() or None),
        "/retry": chat.retry,
        "/help": lambda: print(_HELP, file=sys.stderr),
    }
    if name in ("/quit", "/exit"):
        return False
    if name not in commands:
        raise ConfigError(f"{name}: no command; /help lists them, and //TEXT sends a message that begins with /")
    commands[name]()
    return True
