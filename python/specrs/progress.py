"""Progress bars on stderr: of many prompts, of weights that load, of measurements, of a training.

``progress=None`` shows them where stderr is a terminal and the work is long; ``True`` always, ``False`` never. tqdm
draws them, and is imported with the first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from specrs._specrs import ConfigError

_read: ContextVar[Callable[[int], None] | None] = ContextVar("specrs.progress.read", default=None)


def wanted(progress: bool | None) -> bool:
    """Return whether to show a bar.

    Raises:
        ConfigError: the value is neither a bool nor None.
    """
    if progress is not None and not isinstance(progress, bool):
        raise ConfigError(f"progress = {progress!r}: must be True, False, or None for a bar on a terminal alone")
    if progress is not None:
        return progress and sys.stderr is not None  # a process without one has nowhere to draw
    try:
        return sys.stderr is not None and bool(sys.stderr.isatty())
    except (AttributeError, ValueError, OSError):  # a stream that somebody put in its place; a closed file
        return False


@contextmanager
def loading(total: int, progress: bool | None) -> Iterator[None]:
    """Show how many of ``total`` bytes `read` was told of within the context."""
    if not wanted(progress):
        yield
        return
    from tqdm import tqdm

    with tqdm(total=total, desc="weights", unit="B", unit_scale=True, unit_divisor=1024, file=sys.stderr) as bar:
        token = _read.set(lambda count: bar.update(min(count, total - bar.n)))  # tensors may share what a file has once
        try:
            yield
            bar.update(total - bar.n)  # headers, and what a model leaves in its files
        finally:
            _read.reset(token)


def read(count: int) -> None:
    """Tell the bar that so many bytes of weights have been read."""
    update = _read.get()
    if update is not None:
        update(count)


@contextmanager
def requests(total: int, progress: bool | None) -> Iterator[Callable[[int, int], None]]:
    """Show how many of ``total`` requests have ended; tell it the tokens that came, and the requests that ended.

    One request alone has no bar unless it is asked for.
    """
    if not wanted(progress) or (progress is None and total < 2):
        yield lambda tokens, ended: None
        return
    from tqdm import tqdm

    count = 0
    with tqdm(total=total, desc="prompts", unit="prompt", file=sys.stderr) as bar:

        def tell(tokens: int, ended: int) -> None:
            nonlocal count
            count += tokens
            if ended:
                elapsed = bar.format_dict["elapsed"]
                bar.set_postfix_str(f"{count / elapsed:.0f} tokens/s" if elapsed > 0 else "", refresh=False)
                bar.update(ended)

        yield tell


@contextmanager
def measurements(total: int, progress: bool | None) -> Iterator[Callable[[str], None]]:
    """Show how many of ``total`` measurements are over; tell it the name of each as it begins."""
    if not wanted(progress):
        yield lambda name: None
        return
    from tqdm import tqdm

    begun = 0
    with tqdm(total=total, desc="measuring", unit="case", file=sys.stderr) as bar:

        def tell(name: str) -> None:
            nonlocal begun
            bar.set_postfix_str(name, refresh=False)
            bar.update(begun - bar.n)
            bar.refresh()
            begun += 1

        yield tell
        bar.update(total - bar.n)


@contextmanager
def shares(name: str, progress: bool | None) -> Iterator[Callable[[float, str], None]]:
    """Show how much of a long piece of work is over; tell it the share, from 0 to 1, and what else is to be seen."""
    if not wanted(progress):
        yield lambda share, text: None
        return
    from tqdm import tqdm

    form = "{l_bar}{bar}| {elapsed}<{remaining}{postfix}"
    with tqdm(total=1.0, desc=name, file=sys.stderr, bar_format=form) as bar:

        def tell(share: float, text: str) -> None:
            bar.set_postfix_str(text, refresh=False)
            bar.update(share - bar.n)

        yield tell
