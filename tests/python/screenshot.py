"""Makes the picture of the playground: ``python tests/python/screenshot.py docs/playground.png`` (`make screenshot`).

A real server, the model in the package, a real generation in a headless Chromium; the round with the longest accepted
path is shown.
"""

from __future__ import annotations

import asyncio
import io
import sys
import tempfile
from pathlib import Path

from PIL import Image

import browser as chromium
from serve_world import running
from specrs.engine import AsyncLLM

WIDTH, HEIGHT, SCALE = 1360, 1000, 1.5
COLOURS = 256
MOST_BYTES = 200_000
SEED, TOKENS, TEMPERATURE = 1, 104, 0.4
_BEST = """(() => {
  const slider = document.querySelector('#round'), show = (at) => {
    slider.value = String(at);
    slider.dispatchEvent(new Event('input'));
  };
  let best = 0, most = -1;
  for (let at = 0; at <= Number(slider.max); at++) {
    show(at);
    const [accepted, rejected] = ['a', 'r'].map((kind) => document.querySelectorAll(`#tree .node.${kind}`).length);
    const worth = accepted * (rejected > 8) + at / 1000;
    if (worth > most) [best, most] = [at, worth];
  }
  show(best);
  document.activeElement.blur();
  scrollTo(0, 0);
})()"""


def main(argv: list[str]) -> int:
    """Exit status 1 without a browser, or where the picture is too large."""
    [path] = argv
    executable = chromium.found()
    if executable is None:
        print(f"specrs: {chromium.MISSING}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        engine = AsyncLLM(max_batch=2, max_context_len=1024, tree=(4, 5, 20))
        window = chromium.Browser(executable, Path(place) / "profile")
        try:
            with running(engine, Path(place), chat_template=None) as web:
                page = window.page(f"{web.address}/", WIDTH, HEIGHT)
                page.resize(WIDTH, HEIGHT, SCALE)
                page.wait("!document.querySelector('#model').hidden")
                for _ in range(2):  # the first one warms the engine
                    page.type("#seed", str(SEED))
                    page.type("#tokens", str(TOKENS))
                    page.type("#temperature", str(TEMPERATURE))
                    page.click("#run")
                    page.wait("document.querySelector('#stop').disabled")
                page(_BEST)
                assert page("document.querySelector('#error').hidden"), page("document.body.innerText")
                picture = Image.open(io.BytesIO(page.picture()))
        finally:
            window.close()
            asyncio.run(engine.aclose(drain=False))
    _of_few_colours(picture.convert("RGB")).save(path, optimize=True)
    size = Path(path).stat().st_size
    print(f"{path}: {picture.width} x {picture.height}, {size} bytes")
    return int(size > MOST_BYTES)


def _of_few_colours(picture: Image.Image) -> Image.Image:
    """The picture in its own most frequent colours, those of its areas unchanged; between them lie edges of letters."""
    counted = sorted(picture.getcolors(1 << 24), reverse=True)
    palette = Image.new("P", (1, 1))
    palette.putpalette([part for _, colour in counted[:COLOURS] for part in colour])
    return picture.quantize(palette=palette, dither=Image.Dither.NONE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
