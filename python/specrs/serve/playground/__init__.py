"""``GET /``: one page on which a person watches tokens come and trees being verified.

The page asks for nothing but this server's own endpoints. Its policy (CSP) lets the one script and the one style run
that stand in it, by their hashes; by trusted types it lets no text become markup. The page holds no secret: every
client that can reach the server may have it. Where there are API keys, its calls need one.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib import resources

Headers = tuple[tuple[bytes, bytes], ...]


@cache
def page() -> tuple[bytes, Headers]:
    """The page in UTF-8, and the headers that it is served with beside type and length."""
    files = resources.files(__name__)
    html, style, script = (files.joinpath(f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js"))
    # The files' last line ends before the element does, and the hash is of what stands between its tags.
    for tag, text in (("style", style), ("script", script)):
        if html.count(f"<{tag}></{tag}>") != 1 or f"</{tag}" in text.lower() or "<!--" in text:
            raise ValueError(f"page.html: has one empty <{tag}>, and nothing in its text ends it")
        html = html.replace(f"<{tag}></{tag}>", f"<{tag}>{text}</{tag}>")
    policy = "; ".join((
        "default-src 'none'", f"script-src '{_hash(script)}'", f"style-src '{_hash(style)}'", "connect-src 'self'",
        "img-src data:", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'",
        "require-trusted-types-for 'script'", "trusted-types 'none'",
    ))  # fmt: skip
    headers = (
        (b"content-security-policy", policy.encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"x-frame-options", b"DENY"),
        (b"referrer-policy", b"no-referrer"),
        (b"cache-control", b"no-cache"),
    )
    return html.encode(), headers


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
