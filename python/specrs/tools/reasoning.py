"""From an answer's text, in any pieces, to what the model thought and what it says."""

from __future__ import annotations

_SPACES = " \t\n\r"


class ReasoningParser:
    """Parser of one message: reasoning between two marks, at the beginning, and content behind it.

    White space beside a mark belongs to the mark. Without the first mark all is content; without the second, all is
    reasoning.

    Args:
        start, end: the marks.
        inside: the prompt has the first mark already, so the text begins with reasoning.
    """

    def __init__(self, start: str, end: str, *, inside: bool = False) -> None:
        if not start or not end:
            raise ValueError(f"ReasoningParser: marks {start!r} and {end!r}: neither may be empty")
        self._start, self._end = start, end
        self._inside = inside
        self._content = False  # all that comes is content
        self._fresh = True  # only white space since a mark
        self._held = ""

    @property
    def at(self) -> str | None:
        """Part of the message that the last character belongs to: ``"reasoning"``, ``"content"`` (also the second
        mark), ``None`` while only more text can tell."""
        if self._content:
            return "content"
        return "reasoning" if self._inside else None

    def feed(self, text: str) -> tuple[str, str]:
        """Return the reasoning and the content that the next piece adds; content comes behind reasoning."""
        if self._content and not self._fresh:
            return "", text
        self._held += text
        reasoning = ""
        if not self._content and not self._inside:
            bare = self._held.lstrip(_SPACES)
            if bare.startswith(self._start):
                self._inside, self._held = True, bare[len(self._start) :]
            elif self._start.startswith(bare):
                return "", ""
            else:
                self._content, self._fresh = True, False
        if self._inside:
            reasoning = self._reasoned()
        if not self._content:
            return reasoning, ""
        if self._fresh:
            self._held = self._held.lstrip(_SPACES)
            self._fresh = not self._held
        content, self._held = self._held, ""
        return reasoning, content

    def finish(self) -> tuple[str, str]:
        """Return the reasoning and the content that were held back."""
        rest, self._held = self._held, ""
        if self._content:
            return "", ""
        return (rest, "") if self._inside else ("", rest)

    def _reasoned(self) -> str:
        """Reasoning that is certain; what is not, the beginning of the mark and white space before it, stays held."""
        if self._fresh:
            self._held = self._held.lstrip(_SPACES)
            self._fresh = not self._held
        at = self._held.find(self._end)
        if at >= 0:
            found, self._held = self._held[:at].rstrip(_SPACES), self._held[at + len(self._end) :]
            self._inside, self._content, self._fresh = False, True, True
            return found
        keep = next(
            (
                n
                for n in range(min(len(self._end) - 1, len(self._held)), 0, -1)
                if self._end.startswith(self._held[-n:])
            ),
            0,
        )
        cut = len(self._held[: len(self._held) - keep].rstrip(_SPACES))
        found, self._held = self._held[:cut], self._held[cut:]
        return found
