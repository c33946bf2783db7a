"""The output items of a response, as the deltas of an answer make them, and the events that tell of them.

A whole response and a stream are made by the same machine, so they have the same items, whatever the pieces in which
the text comes: an item ends where a delta of another kind, or of another call, begins.
"""

from __future__ import annotations

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any

from specrs.serve.writing import dumps

Event = dict[str, Any]


class Events:
    """Numbers a stream's events, and writes them."""

    def __init__(self) -> None:
        self._numbers = count()

    def write(self, events: Iterable[Event]) -> bytes:
        """Return events as they go over the wire."""
        return b"".join(map(self._written, events))

    def _written(self, event: Event) -> bytes:
        data = dumps({**event, "sequence_number": next(self._numbers)})
        return b"event: %b\ndata: %b\n\n" % (str(event["type"]).encode(), data)


class Output:
    """The items of one response.

    Attributes:
        items: items that are complete.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open: _Item | None = None
        self._scores: list[dict[str, Any]] = []  # scores of tokens whose text a later delta brings

    def take(self, deltas: Sequence[Mapping[str, Any]], scores: Sequence[dict[str, Any]] = ()) -> list[Event]:
        """The events that the next deltas of a chat make. scores: of the tokens of content that came with them."""
        self._scores += scores
        events: list[Event] = []
        for delta in deltas:
            for part in delta.get("tool_calls", ()):
                if "id" in part:
                    events += self._begin(_Call(self._next, part["id"], part["function"]["name"]))
                events += self._grow(part["function"]["arguments"])
            for key, kind in (("reasoning_content", _Reasoning), ("content", _Message)):
                if delta.get(key):
                    if not isinstance(self._open, kind):
                        events += self._begin(kind(self._next))
                    events += self._grow(delta[key])
        return events

    def end(self, cut: bool) -> list[Event]:
        """Return the last events: no more text comes. cut: the last item would have gone on. An empty answer is a
        message without text."""
        events = [] if self.items or self._open else self._begin(_Message(0))
        return events + self._close("incomplete" if cut else "completed")

    def broken(self) -> list[Event]:
        """Return the last events of an answer that broke off."""
        return self._close("incomplete")

    @property
    def _next(self) -> int:
        """The place of an item that begins now."""
        return len(self.items) + (self._open is not None)

    def _begin(self, item: _Item) -> list[Event]:
        events = self._close("completed")
        self._open = item
        return events + item.opened()

    def _grow(self, text: str) -> list[Event]:
        assert self._open is not None
        if isinstance(self._open, _Message):
            scores, self._scores = self._scores, []
            return [self._open.scored(text, scores)]
        return [self._open.grown(text)] if text else []

    def _close(self, status: str) -> list[Event]:
        if self._open is None:
            return []
        item, self._open = self._open, None
        if isinstance(item, _Message):
            item.scores += self._scores
            self._scores = []
        events = item.closed(status)
        self.items.append(events[-1]["item"])
        return events


class _Item(ABC):
    """An item that grows. index: its place in the output."""

    prefix = ""
    changed = ""  # events that tell of its text: this and `.delta`, this and `.done`

    def __init__(self, index: int) -> None:
        self.index, self.id = index, f"{self.prefix}_{uuid.uuid4().hex}"
        self._texts: list[str] = []

    @abstractmethod
    def item(self, status: str, text: str | None) -> dict[str, Any]:
        """Return the item as it stands. text: ``None``: the item has only begun."""

    def opened(self) -> list[Event]:
        """The events of its beginning."""
        item = self.item("in_progress", None)
        return [{"type": "response.output_item.added", "output_index": self.index, "item": item}]

    def grown(self, text: str) -> Event:
        """The event of a piece of text."""
        self._texts.append(text)
        return self._event(f"{self.changed}.delta", delta=text)

    def closed(self, status: str) -> list[Event]:
        """The events of its end; the last has the item whole."""
        text = "".join(self._texts)
        item = self.item(status, text)
        return [*self._told(text), {"type": "response.output_item.done", "output_index": self.index, "item": item}]

    @abstractmethod
    def _told(self, text: str) -> list[Event]:
        """The events that tell of its whole text."""

    def _event(self, type: str, **more: Any) -> Event:
        return {"type": type, "item_id": self.id, "output_index": self.index, **more}


class _Parted(_Item):
    """Text in a part of an item's content."""

    @abstractmethod
    def part(self, text: str) -> dict[str, Any]:
        """Return a part with so much text."""

    def opened(self) -> list[Event]:
        return [*super().opened(), self._event("response.content_part.added", part=self.part(""))]

    def _told(self, text: str) -> list[Event]:
        done = self._event(f"{self.changed}.done", text=text)
        return [done, self._event("response.content_part.done", part=self.part(text))]

    def _event(self, type: str, **more: Any) -> Event:
        return super()._event(type, content_index=0, **more)


class _Reasoning(_Parted):
    prefix, changed = "rs", "response.reasoning_text"

    def part(self, text: str) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": text}

    def item(self, status: str, text: str | None) -> dict[str, Any]:
        content = [] if text is None else [self.part(text)]
        return {"id": self.id, "type": "reasoning", "status": status, "summary": [], "content": content}


class _Message(_Parted):
    prefix, changed = "msg", "response.output_text"

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.scores: list[dict[str, Any]] = []

    def scored(self, text: str, scores: list[dict[str, Any]]) -> Event:
        """Return the event of `grown`, with the scores of the text's tokens."""
        self.scores += scores
        return {**self.grown(text), "logprobs": scores}

    def part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self.scores}

    def item(self, status: str, text: str | None) -> dict[str, Any]:
        content = [] if text is None else [self.part(text)]
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}

    def _told(self, text: str) -> list[Event]:
        done, part = super()._told(text)
        return [{**done, "logprobs": self.scores}, part]


class _Call(_Item):
    prefix, changed = "fc", "response.function_call_arguments"

    def __init__(self, index: int, call_id: str, name: str) -> None:
        super().__init__(index)
        self._call_id, self._name = call_id, name

    def item(self, status: str, text: str | None) -> dict[str, Any]:
        if status == "incomplete" and _whole(text):
            status = "completed"  # the output was cut behind it
        return {
            "id": self.id, "type": "function_call", "status": status, "call_id": self._call_id, "name": self._name,
            "arguments": text or "",
        }  # fmt: skip

    def _told(self, text: str) -> list[Event]:
        return [self._event(f"{self.changed}.done", name=self._name, arguments=text)]


def _whole(arguments: str | None) -> bool:
    try:
        return isinstance(json.loads(arguments or ""), dict)
    except ValueError:
        return False
