"""Parts that the clients' programs share: the server's address, and the answers that it must give."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

BASE_URL = os.environ["BASE_URL"]  # with /v1
MODEL = "tiny"
EXPECT: dict[str, Any] = json.loads(Path(os.environ["EXPECT"]).read_text())


def same(got: Any, want: Any, what: str) -> None:
    """Raise where they differ."""
    if got != want:
        raise SystemExit(f"{what}: got {got!r}, want {want!r}")


def raised(kind: type[BaseException], call: Any, *args: Any, **kwargs: Any) -> Any:
    """The error of a kind that a call raises."""
    try:
        answer = call(*args, **kwargs)
    except kind as error:
        return error
    raise SystemExit(f"no {kind.__name__}: {args} {kwargs} gave {answer!r}")
