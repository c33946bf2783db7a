"""The playground in a real browser: what a person sees is what the API says, and nothing that a model writes runs."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any

import httpx
import pytest

import browser as chromium
from browser import Browser, Page
from serve_world import Running, events, running
from specrs.engine import AsyncLLM
from specrs.serve import Keys, ServeConfig
from specrs.serve.playground import page

PROMPT = "class Stack:\n    def __init__(self):\n"
HOSTILE = "<script>document.title='x'</script><img src=x onerror=\"document.title='x'\">&amp;</pre>"
Open = Callable[..., Page]


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncLLM]:
    made = AsyncLLM(max_batch=4, max_context_len=512, tree=(3, 4, 12))
    yield made
    asyncio.run(made.aclose(drain=False))


@pytest.fixture(scope="module")
def web(engine: AsyncLLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(engine, tmp_path_factory.mktemp("web")) as made:
        yield made
        made.idle()


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    executable = chromium.found()
    if executable is None:
        pytest.skip(chromium.MISSING)
    made = Browser(executable, tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


@pytest.fixture
def show(window: Browser, web: Running) -> Iterator[Open]:
    """Opens a page, ready to generate; at the end none of them has complained."""
    opened: list[Page] = []

    def opening(web: Running = web, model: bool = True, **options: Any) -> Page:
        made = window.page(f"{web.address}/", **options)
        opened.append(made)
        if model:
            made.wait("!document.querySelector('#model').hidden")
        return made

    yield opening
    for one in opened:
        assert one.complaints() == []
        one.close()


def run(p: Page, way: str = "on", mode: str = "prompt", **fields: Any) -> None:
    """Fill in the form, generate, and wait for the end."""
    for name, value in {"prompt": PROMPT, "temperature": 0.7, "tokens": 60, "seed": 11, **fields}.items():
        p.type(f"#{name}", str(value))
    for name, value in (("mode", mode), ("way", way)):
        p.click(f"input[name={name}][value={value}]")
    p.click("#run")
    p.wait("document.querySelector('#stop').disabled")


def texts(p: Page) -> list[str]:
    found: list[str] = p("[...document.querySelectorAll('.output')].map(one => one.textContent)")
    return found


def streams(p: Page) -> list[list[dict[str, Any]]]:
    """Events of the page's generating requests, as they came over the wire."""
    asked = [e for e in p.events("Network.requestWillBeSent") if e["request"]["url"].endswith("completions")]
    ended = {e["requestId"] for e in p.events("Network.loadingFinished")}
    bodies = [p.send("Network.getResponseBody", requestId=e["requestId"]) for e in asked if e["requestId"] in ended]
    told = [base64.b64decode(b["body"]).decode() if b["base64Encoded"] else b["body"] for b in bodies]
    return [events(one) for one in told]


def rounds(stream: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one for event in stream for choice in event["choices"] if "specrs" in choice
            for one in choice["specrs"]["rounds"]]  # fmt: skip


def pick(p: Page, at: int) -> None:
    """Move the slider to a round."""
    p(f"""(() => {{ const slider = document.querySelector('#round');
        slider.value = '{at}'; slider.dispatchEvent(new Event('input')); }})()""")


# -- without a browser --------------------------------------------------------------------------------------------


def test_the_page_and_its_policy(web: Running) -> None:
    answer = web.client.get("/")
    assert answer.status_code == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.content == page()[0]
    policy = dict(one.partition(" ")[::2] for one in answer.headers["content-security-policy"].split("; "))
    for tag, name in (("script", "script-src"), ("style", "style-src")):
        [inside] = re.findall(f"<{tag}>(.*?)</{tag}>", answer.text, re.S)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert len(inside) > 1000 and policy[name] == f"'sha256-{digest}'"
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    assert "unsafe" not in answer.headers["content-security-policy"]
    head = web.client.head("/")
    assert head.status_code == 200 and head.content == b"" and head.headers["content-length"] == str(len(page()[0]))
    assert web.client.post("/", json={}).status_code == 405


def test_the_page_has_no_address_and_no_handler_in_its_markup() -> None:
    text = page()[0].decode()
    assert set(re.findall(r"\w+://[^\s\"'%]*", text)) == {"http://www.w3.org/2000/svg"}

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            for name, value in attrs:
                assert not name.startswith("on") and name != "style", (tag, name)
                assert name not in ("src", "srcset", "action", "ping"), (tag, name)
                assert name != "href" or (value or "").startswith(("#", "data:image/svg+xml,")), (tag, value)

    Reader().feed(text)
    script = resources.files("specrs.serve.playground").joinpath("page.js").read_text(encoding="utf-8")
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "Storage",
                 "cookie", "srcdoc", "DOMParser"):  # fmt: skip
        assert word not in script, word


def test_it_can_be_left_out(engine: AsyncLLM, tmp_path: Path) -> None:
    with running(engine, tmp_path, playground=False) as web:
        assert web.client.get("/").status_code == 404
        assert web.client.get("/health").status_code == 200
    assert ServeConfig.from_env({"SPECRS_SERVE_PLAYGROUND": "false"}).playground is False


# -- in a browser -------------------------------------------------------------------------------------------------


def test_tokens_marks_and_trees_are_the_api_s(show: Open, web: Running) -> None:
    p = show()
    run(p)
    asked = {"prompt": PROMPT, "temperature": 0.7, "max_tokens": 60, "seed": 11, "return_spec_stats": True}
    want = web.complete(**asked)
    assert texts(p) == [want["choices"][0]["text"]]
    [stream] = streams(p)
    told, stats = rounds(stream), stream[-1]["specrs"]
    assert stats["draft_tokens_accepted"] > 20, "a run that shows something"
    assert p("document.querySelectorAll('.output .d').length") == stats["draft_tokens_accepted"]
    assert p("document.querySelectorAll('.output .t').length") == 60 - stats["draft_tokens_accepted"]
    assert int(p("document.querySelector('#round').max")) + 1 == len(told) == stats["rounds"]
    assert float(p("document.querySelector('#mean').textContent")) == round(stats["mean_accepted"], 2)
    share = p("document.querySelector('#share').textContent")
    assert share == f"{stats['draft_tokens_accepted']}of {stats['draft_tokens']}"
    assert int(p("document.querySelector('#first').textContent").removesuffix("ms")) > 0
    for i, one in enumerate(told):
        pick(p, i)
        nodes = p("""Object.fromEntries(['node', 'node.a', 'node.o', 'node.r', 'node.root', 'edge'].map(
            kind => [kind, document.querySelectorAll('#tree svg .' + kind).length]))""")
        own, accepted = int(one["own"] is not None), len(one["accepted"])
        assert nodes == {
            "node": len(one["tokens"]) + own, "node.a": accepted, "node.o": own, "node.root": 1,
            "node.r": len(one["tokens"]) - 1 - accepted, "edge": len(one["tokens"]) - 1 + own,
        }  # fmt: skip
        label = p("document.querySelector('#tree svg').getAttribute('aria-label')")
        drafted = len(one["tokens"]) - 1
        assert label.startswith(f"Round {i + 1}: {drafted} drafted, {accepted} accepted, {one['emitted']} token")
        seen = p("[...document.querySelectorAll('.output span:not(.later)')].map(one => one.textContent).join('')")
        read = [piece for event in stream for choice in event["choices"] for piece in choice["specrs"]["pieces"]]
        emitted = 1 + sum(one["emitted"] for one in told[: i + 1])
        assert seen == "".join(piece[0] for piece in read[:emitted]), "the text as it was then"


def test_the_accepted_path_is_drawn_as_a_path(show: Open) -> None:
    """From the root to the target's own token, each edge begins where the one before ends."""
    p = show()
    run(p)
    [stream] = streams(p)
    best = max(range(len(told := rounds(stream))), key=lambda i: len(told[i]["accepted"]))
    pick(p, best)
    edges = p("[...document.querySelectorAll('.edge.a, .edge.o')].map(one => one.getAttribute('d'))")
    ends = sorted((tuple(map(float, re.findall(r"[\d.]+", d)))) for d in edges)
    assert len(ends) == told[best]["emitted"] >= 3
    boxes = p("""[...document.querySelectorAll('.node.root rect, .node.a rect, .node.o rect')].map(
        one => ['x', 'y', 'width', 'height'].map(name => Number(one.getAttribute(name))))""")
    path = sorted(boxes)
    for edge, (x, y, width, height), (to, below, _, _) in zip(ends, path[:-1], path[1:], strict=True):
        assert edge[:2] == pytest.approx((x + width, y + height / 2))
        assert edge[-2:] == pytest.approx((to, below + height / 2))


def test_keyboard_alone(show: Open) -> None:
    p = show()
    p("document.querySelector('#prompt').focus()")
    p.type("#prompt", PROMPT)
    p.type("#seed", "5")
    p.key("Enter", 13, modifiers=2)
    p.wait("!document.querySelector('#stop').disabled || document.querySelector('.output').textContent")
    p.wait("document.querySelector('#stop').disabled")
    assert len(texts(p)[0]) > 20
    last = int(p("document.querySelector('#round').value"))
    assert last == int(p("document.querySelector('#round').max")) > 2, "the newest round is shown"
    reached = set()
    p("document.body.tabIndex = -1, document.body.focus()")
    for _ in range(40):
        p.key("Tab", 9)
        reached.add(p("document.activeElement.id || document.activeElement.name || document.activeElement.className"))
    assert {"prompt", "temperature", "tokens", "seed", "key", "run", "round", "back", "tree", "theme", "mode", "way",
            "text"} <= reached  # fmt: skip
    p("document.querySelector('#round').focus()")
    p.key("ArrowLeft", 37)
    p.wait(f"document.querySelector('#caption').textContent.startsWith('round {last} of')")
    p("document.querySelector('#back').focus()")
    p.key("Enter", 13, text="\r")
    p.wait(f"document.querySelector('#caption').textContent.startsWith('round {last - 1} of')")


def test_everything_that_takes_input_has_a_name(show: Open) -> None:
    p = show()
    run(p, way="compare", tokens=20)
    takes = {"button", "textbox", "slider", "radio", "spinbutton", "region", "img", "searchbox"}
    named = []
    for node in p.send("Accessibility.getFullAXTree")["nodes"]:
        role = node.get("role", {}).get("value")
        if not node["ignored"] and role in takes:
            assert node.get("name", {}).get("value"), node
            named.append(role)
    assert len(named) > 15


@pytest.mark.parametrize("how", ["Escape", "button"])
def test_stop_aborts(show: Open, web: Running, how: str) -> None:
    p = show()
    for name, value in (("prompt", PROMPT), ("tokens", 460), ("temperature", 1), ("seed", 3)):
        p.type(f"#{name}", str(value))
    p.click("input[name=way][value=off]")
    p.click("#run")
    p.wait("document.querySelector('.output') && document.querySelector('.output').textContent.length > 10")
    if how == "Escape":
        p.key("Escape", 27)
    else:
        p.click("#stop")
        p.wait("document.activeElement.id === 'run'")
    p.wait("document.querySelector('#status').textContent.startsWith('Stopped after')")
    web.idle()
    count = int(re.findall(r"\d+", p("document.querySelector('#status').textContent"))[0])
    assert 0 < count < 460
    assert p("document.querySelector('#run').disabled") is False
    run(p, tokens=8)
    assert texts(p)[0], "and one can go on"


@pytest.mark.parametrize("mode", ["prompt", "chat"])
def test_compare_says_equal(show: Open, mode: str) -> None:
    p = show()
    run(p, way="compare", mode=mode)
    one, two = texts(p)
    assert one == two and len(one) > 20
    verdict = p("document.querySelector('#verdict').textContent")
    assert verdict.startswith("Equal: the same 60 tokens, twice."), verdict
    assert p("document.querySelectorAll('.lane').length") == 2
    fast, slow = streams(p)
    assert fast[-1]["specrs"]["draft_tokens_accepted"] > 0 == slow[-1]["specrs"]["draft_tokens_accepted"]
    marked = p("[...document.querySelectorAll('.output')].map(one => one.querySelectorAll('.d').length)")
    assert marked == [fast[-1]["specrs"]["draft_tokens_accepted"], 0]


def test_compare_says_different_where_it_is(show: Open) -> None:
    """A server that answers the second request with another seed."""
    p = show()
    p("""(() => { const real = fetch; window.fetch = (url, o) => real(url, o.body && !JSON.parse(o.body).speculative
        ? {...o, body: JSON.stringify({...JSON.parse(o.body), seed: 12345})} : o); })()""")
    run(p, way="compare", temperature=1.2)
    assert p("document.querySelector('#verdict').textContent").startswith("Different from token")


def test_a_chat_is_the_api_s(show: Open, web: Running) -> None:
    p = show()
    run(p, mode="chat", prompt="def f(x):", tokens=30)
    want = web.chat("def f(x):", temperature=0.7, max_tokens=30, seed=11)
    assert texts(p) == [want["choices"][0]["message"]["content"]]


def test_what_a_model_writes_stays_text(show: Open) -> None:
    """The model is made to write markup; the server says what was drafted of it."""
    p = show()
    told = json.dumps({"choice": [HOSTILE]})
    p(f"""(() => {{ const real = fetch; window.fetch = (url, o) => real(url, o.body
        ? {{...o, body: JSON.stringify({{...JSON.parse(o.body), structured_outputs: {told}}})}} : o); }})()""")
    run(p, tokens=200)
    assert texts(p) == [HOSTILE]
    assert p("document.querySelectorAll('script, .output img, .output script, #tree img').length") == 1, (
        "its own script"
    )
    assert p("document.title") == "specrs playground"


def test_what_a_server_says_stays_text(show: Open) -> None:
    """Every text of an answer is markup: pieces, tokens, sources, reasons, errors."""
    p = show()
    told = {"tokens": [1, 2], "texts": [HOSTILE, HOSTILE], "parents": [-1, 0], "accepted": [1], "own": 3,
            "own_text": HOSTILE, "emitted": 2, "seconds": 0.1, "sources": [HOSTILE]}  # fmt: skip
    choice = {"index": 0, "text": HOSTILE, "token_ids": [1, 2, 3], "finish_reason": HOSTILE,
              "specrs": {"rounds": [told], "pieces": [[HOSTILE, True, 0]]}}  # fmt: skip
    lines = [f"data: {json.dumps({'choices': [choice]})}\n\n", 'data: {"choices": [], "specrs": {"rounds": 1}}\n\n']
    p(f"""window.fetch = async () => new Response({json.dumps("".join(lines))})""")
    run(p)
    assert texts(p) == [HOSTILE]
    error = json.dumps({"error": {"message": HOSTILE}})
    p(f"window.fetch = async () => new Response({json.dumps(error)}, {{status: 400}})")
    run(p)
    assert p("document.querySelector('#error').textContent") == HOSTILE
    assert p("document.title") == "specrs playground" and p("document.querySelectorAll('img').length") == 0


@pytest.mark.parametrize(("width", "height"), [(1360, 620), (390, 640)])
def test_an_error_is_seen_and_nothing_of_the_run_before_is(show: Open, width: int, height: int) -> None:
    p = show(width=width, height=height)
    run(p)
    assert p("document.querySelectorAll('#tree svg').length") == 1
    p("""window.fetch = async () => new Response('{"error": {"message": "no such thing"}}', {status: 400})""")
    run(p)
    assert p("document.querySelector('#error').textContent") == "no such thing"
    box = p("(({top, bottom}) => [top, bottom])(document.querySelector('#error').getBoundingClientRect())")
    assert 0 <= box[0] < box[1] <= height, box
    assert p("document.querySelectorAll('#tree svg').length") == 0
    assert p("document.querySelector('#tree').textContent") == "No round ran."
    told = [p(f"document.querySelector('#{name}').textContent") for name in ("caption", "sources", "rate", "share")]
    assert told == ["", "", "\u2013", "\u2013"]


def test_where_nothing_was_drafted_no_speed_is_told(show: Open) -> None:
    p = show()
    told = {"tokens": [1], "texts": ["a"], "parents": [-1], "accepted": [], "own": 3, "own_text": "b", "emitted": 1,
            "seconds": 0.1, "sources": []}  # fmt: skip
    choice = {"index": 0, "text": "ab", "token_ids": [1], "finish_reason": "length",
              "specrs": {"rounds": [told], "pieces": [["ab", False, 0]]}}  # fmt: skip
    more = {"index": 0, "text": "", "token_ids": [3], "finish_reason": "length"}
    lines = "".join(f"data: {json.dumps({'choices': [one]})}\n\n" for one in (choice, more))
    p(f"""window.fetch = async () => new Response({json.dumps(lines)})""")
    run(p, way="compare")
    assert (
        p("document.querySelector('#verdict').textContent") == "Equal: the same 2 tokens, twice. Nothing was drafted."
    )


def test_a_model_s_name_stays_text(show: Open, engine: AsyncLLM, tmp_path: Path) -> None:
    with running(engine, tmp_path, served_names=[HOSTILE]) as web:
        p = show(web)
        assert p("document.querySelector('#model').textContent").startswith(HOSTILE)
        run(p, tokens=8)
        assert texts(p)[0]


def test_it_asks_its_own_server_alone(show: Open, web: Running) -> None:
    p = show()
    run(p, way="compare", tokens=16)
    asked = [e["request"]["url"] for e in p.events("Network.requestWillBeSent")]
    assert len(asked) >= 5 and all(url.startswith((f"{web.address}/", "data:")) for url in asked), asked


def test_the_policy_holds(window: Browser, web: Running) -> None:
    """The page's policy refuses what a fault of the page could do."""
    p = window.page(f"{web.address}/")
    with pytest.raises(AssertionError, match="TrustedHTML"):
        p("document.body.innerHTML = '<b>x</b>'")
    other = web.address.replace("127.0.0.1", "localhost")
    with pytest.raises(AssertionError, match=r"Content Security Policy|Failed to fetch"):
        p(f"fetch('{other}/version').then(answer => answer.json())")
    assert any("connect-src" in json.dumps(one) for one in p.complaints())
    with pytest.raises(AssertionError, match="TrustedScript"):
        p("document.querySelector('#run').setAttribute('onclick', 'document.title = 1')")
    assert p("document.title") == "specrs playground"
    p.close()


def test_a_server_with_keys(show: Open, engine: AsyncLLM, tmp_path: Path) -> None:
    with running(engine, tmp_path, keys=Keys.of(["sesame"])) as web:
        assert httpx.get(f"{web.address}/").status_code == 200
        p = show(web, model=False)
        p.wait("document.querySelector('#status').textContent.includes('API key')")
        assert p("document.querySelector('#model').hidden") is True
        p.click("#run")
        p.wait("document.querySelector('#error').textContent.includes('API key')")
        assert p("document.activeElement.id") == "key"
        p.type("#key", "sesam")
        p.key("Tab", 9)
        p.wait("document.querySelector('#error').textContent.includes('API key')")
        p.type("#key", "sesame")
        p.key("Tab", 9)
        p.wait("!document.querySelector('#model').hidden && document.querySelector('#error').hidden")
        run(p, tokens=12)
        assert texts(p)[0]
        kept = p("[localStorage.length, sessionStorage.length, document.cookie, location.href].join(' ')")
        assert kept == f"0 0  {web.address}/"
        # A refusal is an error to the console, whatever the page makes of it.
        assert all("401" in json.dumps(one) for one in p.complaints())
        p.send("Log.clear")
        p._browser.events = [one for one in p._browser.events if one["method"] != "Log.entryAdded"]


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [320, 390, 768, 1360])
def test_it_fits_and_can_be_read(show: Open, width: int, dark: bool) -> None:
    p = show(width=width, height=800, dark=dark)
    for way in ("on", "compare"):
        run(p, way=way, tokens=40)
        assert p("document.documentElement.scrollWidth") <= width
        assert p("document.querySelector('#tree').getBoundingClientRect().right") <= width
    low = p(_CONTRAST)
    assert low == [], low


def test_colours_of_one_s_own(show: Open) -> None:
    p = show()
    seen = []
    for _ in range(3):
        p.click("#theme")
        seen.append(p("getComputedStyle(document.body).backgroundColor"))
    assert seen[0] == seen[2] != seen[1]


def test_wrong_numbers_are_said_before_anything_is_asked(show: Open) -> None:
    p = show()
    for name, value in (("seed", "x"), ("tokens", "0"), ("tokens", "1.5"), ("temperature", "-1"), ("prompt", "")):
        good = p(f"document.querySelector('#{name}').value")
        p(f"document.querySelector('#{name}').value = {json.dumps(value)}")
        p.click("#run")
        assert p("document.querySelector('#error').textContent"), name
        p(f"document.querySelector('#{name}').value = {json.dumps(good)}")
    p.type("#tokens", "100000")
    p.click("#run")
    p.wait("document.querySelector('#error').textContent.includes('context')")
    p._browser.events = [one for one in p._browser.events if one["method"] != "Log.entryAdded"]


#: Texts whose contrast with what lies behind them is below what WCAG 2.1 asks for at level AA.
_CONTRAST = """(() => {
  const parts = (colour) => { const [r, g, b, a = 1] = colour.match(/[\\d.]+/g).map(Number); return {r, g, b, a}; };
  const light = ({r, g, b}) => { const [x, y, z] = [r, g, b].map((v) => (v /= 255) <= 0.03928 ? v / 12.92
    : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * x + 0.7152 * y + 0.0722 * z; };
  const behind = (node) => { for (; node; node = node.parentElement) {
    const found = parts(getComputedStyle(node).backgroundColor); if (found.a === 1) return found; }
    return {r: 255, g: 255, b: 255}; };
  const low = [];
  for (const node of document.querySelectorAll('body *:not(script, style, option)')) {
    if (![...node.childNodes].some((one) => one.nodeType === 3 && one.textContent.trim())) continue;
    if (!node.checkVisibility() || node.closest('svg, .hidden, .skip, :disabled, .later, canvas, kbd')) continue;
    if (node.matches('input:disabled + span')) continue;
    const style = getComputedStyle(node), [one, two] = [light(parts(style.color)), light(behind(node))];
    const ratio = (Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05);
    if (ratio < 4.5) low.push([node.tagName, node.className, node.textContent.slice(0, 20), ratio.toFixed(2)]);
  }
  return low; })()"""
