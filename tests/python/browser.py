"""A headless Chromium, driven over its debugging pipe: nothing but the standard library, and no port."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
MISSING = "no Chromium: apt-get install -y --no-install-recommends chromium, or name one by SPECRS_TEST_BROWSER"
_FLAGS = (
    "--headless=new", "--no-sandbox", "--remote-debugging-pipe", "--disable-gpu", "--disable-dev-shm-usage",
    "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-default-apps",
    "--disable-sync", "--disable-extensions",
    "--hide-scrollbars", "--mute-audio", "--force-color-profile=srgb",
)  # fmt: skip
_PLACE = """import os, sys
for fd, place in zip(sys.argv[1:3], (3, 4)):
    os.dup2(int(fd), place)
    os.close(int(fd))
os.execv(sys.argv[3], sys.argv[3:])"""


def found() -> str | None:
    """The browser's executable."""
    named = os.environ.get("SPECRS_TEST_BROWSER")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A process; `page` opens pages of it."""

    def __init__(self, executable: str, profile: Path) -> None:
        (theirs_in, self._out), (self._in, theirs_out) = os.pipe(), os.pipe()
        # The browser reads 3 and writes 4, where a program in between puts them; they are others before.
        high = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, 20) for one in (theirs_in, theirs_out)]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PLACE, *map(str, high), executable, *_FLAGS, f"--user-data-dir={profile}",
             "about:blank"],
            pass_fds=high, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for one in (theirs_in, theirs_out, *high):
            os.close(one)
        self._rest, self._number = b"", 0
        self.events: list[dict[str, Any]] = []  # events of all pages

    def send(self, method: str, session: str | None = None, seconds: float = 60.0, **params: Any) -> dict[str, Any]:
        """A command's result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        end = time.monotonic() + seconds
        while True:
            answer = self._read(end)
            assert answer is not None, f"{method}: no answer in {seconds} s"
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result

    def _read(self, end: float) -> dict[str, Any] | None:
        """The next message, kept where it is an event; ``None`` where none comes in time."""
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(end - time.monotonic(), 0.0))
            if not ready:
                return None
            data = os.read(self._in, 1 << 16)
            assert data, "the browser ended"
            self._rest += data
        block, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(block)
        if "method" in message:
            self.events.append(message)
        return message

    def page(self, url: str, width: int = 1360, height: int = 900, dark: bool = False) -> Page:
        """A page, loaded."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        made = Page(self, session, target)
        for domain in ("Page", "Runtime", "Network", "Log"):
            made.send(f"{domain}.enable")
        made.resize(width, height)
        made.send("Emulation.setEmulatedMedia", features=[
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ])  # fmt: skip
        made.send("Page.navigate", url=url)
        made.wait("document.readyState === 'complete'")
        return made

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(AssertionError, OSError):
            self.send("Browser.close", seconds=10)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)


class Page:
    """One page, in its own target."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self._browser, self._session, self._target = browser, session, target

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """A command's result."""
        return self._browser.send(method, self._session, **params)

    def __call__(self, script: str) -> Any:
        """The value of an expression, as JSON has it; promises are waited for."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, (script, answer["exceptionDetails"])
        return answer["result"].get("value")

    def wait(self, script: str, seconds: float = 60.0) -> Any:
        """Wait until an expression is true, and return its value."""
        end = time.monotonic() + seconds
        while not (value := self(script)):
            assert time.monotonic() < end, f"waited too long for {script}: {self('document.body.innerText')}"
            time.sleep(0.02)
        return value

    def resize(self, width: int, height: int, scale: float = 1.0) -> None:
        """The viewport, in CSS pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
        self.send("Emulation.setDeviceMetricsOverride", **size)

    def type(self, selector: str, text: str) -> None:
        """Type text into a field, in place of its content, as a person does."""
        found = f"document.querySelector({json.dumps(selector)})"
        self(f"(() => {{ const field = {found}; field.focus(); field.select(); }})()")
        self.send("Input.insertText", text=text)

    def key(self, key: str, code: int, modifiers: int = 0, text: str = "") -> None:
        """Press a key. modifiers: 2 is Control, 8 is Shift."""
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.send("Input.dispatchKeyEvent", type="keyUp", **common)

    def click(self, selector: str) -> None:
        """Click into the middle of an element, which must be where a person can."""
        spot = self(f"""(() => {{
            const found = document.querySelector({json.dumps(selector)}); found.scrollIntoView({{block: "center"}});
            const box = found.getBoundingClientRect(), x = box.x + box.width / 2, y = box.y + box.height / 2;
            return {{x, y, hit: found.contains(document.elementFromPoint(x, y))}}; }})()""")
        assert spot["hit"], f"{selector} is covered"
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=spot["x"], y=spot["y"], button="left", clickCount=1)

    def events(self, method: str) -> Iterator[dict[str, Any]]:
        """Parameters of the page's events of a kind so far."""
        self("0")  # everything before this has come
        for event in list(self._browser.events):
            if event.get("sessionId") == self._session and event["method"] == method:
                yield event["params"]

    def complaints(self) -> list[Any]:
        """Return all faults of the page so far: errors, warnings, exceptions, refusals of its policy."""
        logged = [e["entry"] for e in self.events("Log.entryAdded") if e["entry"]["level"] in ("error", "warning")]
        said = [e for e in self.events("Runtime.consoleAPICalled") if e["type"] in ("error", "warning", "assert")]
        return [*logged, *said, *self.events("Runtime.exceptionThrown")]

    def picture(self) -> bytes:
        """Return a picture of the viewport, as a PNG."""
        return base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"])

    def close(self) -> None:
        """End the browser, and remove its storage."""
        self._browser.send("Target.closeTarget", targetId=self._target)
