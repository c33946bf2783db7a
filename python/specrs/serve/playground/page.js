
"use strict";
// Everything that a server says enters the page by textContent and by attributes of shapes: none of it can be markup.
(() => {
  const $ = (id) => document.getElementById(id);
  const SVG = "http://www.w3.org/2000/svg";
  const EXAMPLES = [
    ["unit test", $("prompt").value],
    ["quicksort", "def quicksort(items):\n"],
    ["stack", 'class Stack:\n    """A stack of items."""\n\n    def __init__(self):\n'],
  ];
  const CHATS = [["haiku", "Write a haiku about trees."], ["explain", "Explain speculative decoding to a child."]];
  const make = (name, props = {}, ...children) => {
    const made = Object.assign(document.createElement(name), props);
    made.append(...children);
    return made;
  };
  const shape = (name, attributes, ...children) => {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  };

  const state = { runs: [], at: 0, follow: true, stop: null, model: null };
  const shown = () => state.runs[0];
  const chosen = (name) => document.querySelector(`input[name="${name}"]:checked`).value;

  // -- asking ------------------------------------------------------------------------------------------------------

  const headers = () => {
    const key = $("key").value.trim();
    const json = { "Content-Type": "application/json" };
    return key ? { ...json, Authorization: `Bearer ${key}` } : json;
  };

  async function refusal(answer) {
    try {
      return (await answer.json()).error.message;
    } catch {
      return `the server answered ${answer.status}`;
    }
  }

  /** The data of server-sent events, as they come. */
  async function* events(answer) {
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        if (!block.startsWith("data: ")) continue;
        if (block === "data: [DONE]") return;
        yield JSON.parse(block.slice(6));
      }
    }
  }

  /** One request, into a run. */
  async function generate(run, asked, signal) {
    const chat = asked.mode === "chat";
    const body = {
      temperature: asked.temperature, seed: asked.seed, stream: true, speculative: run.speculative,
      return_spec_stats: "rounds", return_token_ids: true, stream_options: { include_usage: true },
    };
    if (state.model) body.model = state.model.id;
    const messages = [{ role: "user", content: asked.prompt }];
    if (chat) Object.assign(body, { messages, max_completion_tokens: asked.tokens });
    else Object.assign(body, { prompt: asked.prompt, max_tokens: asked.tokens });
    run.began = performance.now();
    const path = chat ? "v1/chat/completions" : "v1/completions";
    const answer = await fetch(path, { method: "POST", headers: headers(), body: JSON.stringify(body), signal });
    if (!answer.ok) throw Object.assign(new Error(await refusal(answer)), { status: answer.status });
    for await (const event of events(answer)) {
      if (event.error) throw new Error(event.error.message);
      run.take(event, chat);
      wish();
    }
    run.complete = run.finish !== null;
  }

  class Run {
    constructor(title, speculative, pane) {
      Object.assign(this, { title, speculative, pane, rounds: [], ids: [], spans: [], text: "" });
      Object.assign(this, { total: null, finish: null, began: 0, first: null, last: null, complete: false, fresh: 0 });
    }

    take(event, chat) {
      const now = performance.now();
      if (event.specrs) this.total = event.specrs;
      for (const choice of event.choices) {
        const told = choice.specrs;
        const text = chat ? choice.delta.content || "" : choice.text;
        const pieces = told ? told.pieces : text ? [[text, false, -1]] : [];
        const before = this.rounds.length;
        if (told) this.rounds.push(...told.rounds);
        for (const [piece, drafted, at] of pieces) this.piece(piece, drafted, before + (at < 0 ? -1 : at));
        if (choice.token_ids && choice.token_ids.length) {
          this.ids.push(...choice.token_ids);
          this.last = now;
          if (this.first === null) Object.assign(this, { first: now, fresh: this.ids.length });
        }
        if (choice.finish_reason) this.finish = choice.finish_reason;
      }
    }

    piece(text, drafted, round) {
      const span = make("span", { className: drafted ? "d" : "t", textContent: text });
      span.round = round;
      this.text += text;
      this.spans.push(span);
      this.pane.append(span);
    }

    /** Tokens a second behind the first ones; null before there are any. */
    get rate() {
      const more = this.ids.length - this.fresh;
      return more > 0 && this.last > this.first ? (more * 1000) / (this.last - this.first) : null;
    }

    get seconds() {
      return this.last === null ? 0 : (this.last - this.began) / 1000;
    }
  }

  // -- a run from beginning to end ---------------------------------------------------------------------------------

  function form() {
    const wrong = (name, why) => {
      $(name).focus();
      throw new Error(why);
    };
    const temperature = Number($("temperature").value || 0), tokens = Number($("tokens").value);
    if (!(temperature >= 0)) wrong("temperature", "Temperature: must be 0 or more.");
    if (!Number.isInteger(tokens) || tokens < 1) wrong("tokens", "Max tokens: must be a whole number of at least 1.");
    const given = $("seed").value.trim();
    if (!/^\d{0,15}$/.test(given)) wrong("seed", "Seed: must be a whole number of at most 15 digits.");
    const seed = given ? Number(given) : crypto.getRandomValues(new Uint32Array(1))[0];
    if (!$("prompt").value) wrong("prompt", "There is nothing to continue.");
    return { mode: chosen("mode"), way: chosen("way"), prompt: $("prompt").value, temperature, tokens, seed };
  }

  async function start() {
    if (state.stop) return;
    fail(null);
    let asked;
    try {
      asked = form();
    } catch (error) {
      fail(error.message);
      return;
    }
    const compare = asked.way === "compare", plans = [];
    if (asked.way !== "off") plans.push(["Speculative", true]);
    if (asked.way !== "on") plans.push(["Plain", false]);
    $("panes").replaceChildren();
    state.runs = plans.map(([title, speculative]) => new Run(title, speculative, pane(compare ? title : null, asked)));
    Object.assign(state, { at: 0, follow: true, stop: new AbortController() });
    lanes(compare);
    busy(true);
    draw();  // nothing of the run before stays, whatever becomes of this one
    if ($("output").getBoundingClientRect().top > window.innerHeight - 120) $("output").scrollIntoView();
    say(`Generating, seed ${asked.seed} …`);
    try {
      for (const run of state.runs) {
        run.pane.parentNode.classList.add("running");
        try {
          await generate(run, asked, state.stop.signal);
        } finally {
          run.pane.parentNode.classList.remove("running");
        }
      }
      say(`${state.runs.map(told).join("; ")}. Seed ${asked.seed}.`);
    } catch (error) {
      const count = state.runs.reduce((sum, run) => sum + run.ids.length, 0);
      if (error.name === "AbortError") say(`Stopped after ${count} tokens.`);
      else if (error.status === 401) locked();
      else fail(error.message);
      if (error.name !== "AbortError") say("");
    }
    state.stop = null;
    busy(false);
    draw();
    if (compare) judge();
  }

  const told = (run) => {
    const rounds = run.total && run.total.rounds ? ` in ${run.total.rounds} rounds` : "";
    return `${run.title}: ${run.ids.length} tokens${rounds}, ended by ${run.finish}`;
  };

  /** One of the two buttons works; the focus goes with it, since a disabled button cannot have it. */
  function busy(on) {
    const [works, rests] = on ? ["stop", "run"] : ["run", "stop"], focused = document.activeElement === $(rests);
    $(works).disabled = false;
    if (focused) $(works).focus();
    $(rests).disabled = true;
  }

  function say(text) {
    $("status").textContent = text;
  }

  function fail(text) {
    $("error").hidden = text === null;
    $("error").textContent = text || "";
    if (text) $("error").scrollIntoView({ block: "nearest" });
  }

  function locked() {
    fail("This server asks for an API key.");
    $("key").focus();
  }

  function pane(title, asked) {
    const text = make("pre", { className: "text" });
    text.tabIndex = 0;
    text.setAttribute("aria-label", title ? `Output, ${title}` : "Output");
    if (asked.mode === "prompt") text.append(make("span", { className: "asked", textContent: asked.prompt }));
    const output = make("span", { className: "output" });
    text.append(output);
    const box = make("div", { className: "pane" });
    if (title) box.append(make("h3", { textContent: title }));
    box.append(text);
    $("panes").append(box);
    output.addEventListener("click", (event) => {
      if (event.target.round >= 0 && shown() && output === shown().pane) pick(event.target.round);
    });
    return output;
  }

  // -- two runs ----------------------------------------------------------------------------------------------------

  function lanes(compare) {
    $("race").hidden = !compare;
    for (const lane of document.querySelectorAll(".lane")) lane.remove();
    $("verdict").textContent = "";
    $("verdict").className = "verdict";
    if (!compare) return;
    for (const run of state.runs) {
      run.bar = make("i");
      run.note = make("b", { textContent: "–" });
      const title = make("span", { textContent: run.title });
      const lane = make("div", { className: run.speculative ? "lane spec" : "lane" }, title, run.bar, run.note);
      $("race").insertBefore(lane, $("verdict"));
    }
  }

  function judge() {
    const [one, two] = state.runs, verdict = $("verdict");
    if (!one.complete || !two.complete) {
      verdict.textContent = "Not compared: one of the two did not end.";
      return;
    }
    const differ = one.ids.findIndex((id, i) => id !== two.ids[i]);
    const equal = differ < 0 && one.ids.length === two.ids.length && one.text === two.text;
    verdict.className = equal ? "verdict equal" : "verdict differs";
    if (!equal) {
      const from = differ < 0 ? Math.min(one.ids.length, two.ids.length) : differ;
      verdict.textContent = `Different from token ${from} on.`;
      return;
    }
    const gain = one.rate && two.rate ? one.rate / two.rate : null;
    verdict.textContent = `Equal: the same ${one.ids.length} tokens, twice.`;
    if (!one.rounds.some((round) => round.tokens.length > 1)) verdict.append(" Nothing was drafted.");
    else if (gain) verdict.append(` Speculative decoding ran at ${gain.toFixed(2)}× the speed.`);
  }

  // -- drawing -----------------------------------------------------------------------------------------------------

  let pending = false, drawn = 0;
  /** Draw soon, and not much oftener than eyes can follow. */
  function wish() {
    if (pending) return;
    pending = true;
    const wait = Math.max(0, drawn + 60 - performance.now());
    setTimeout(() => requestAnimationFrame(() => {
      pending = false;
      drawn = performance.now();
      draw();
    }), wait);
  }

  function draw() {
    const run = shown();
    if (!run) return;
    if (state.follow) state.at = Math.max(run.rounds.length - 1, 0);
    figures();
    replay();
    for (const one of state.runs) {
      if (one.note) note(one);
      if (state.stop && state.follow && !one.complete) one.pane.parentNode.scrollTop = 1e9;
    }
  }

  function note(run) {
    const most = Math.max(...state.runs.map((one) => one.seconds), 0.001);
    run.bar.style.width = `${(100 * run.seconds) / most}%`;
    run.note.textContent = run.rate ? `${run.seconds.toFixed(2)} s · ${Math.round(run.rate)} tokens/s` : "–";
  }

  function figure(id, value, unit = "") {
    $(id).replaceChildren(value, ...(unit ? [make("small", { textContent: unit })] : []));
  }

  function figures() {
    const run = state.runs.find((one) => !one.complete && one.first !== null) || shown(), count = run.rounds.length;
    const sum = (of) => run.rounds.reduce((n, round) => n + of(round), 0);
    const drafted = sum((round) => round.tokens.length - 1), accepted = sum((round) => round.accepted.length);
    figure("rate", run.rate ? (run.rate < 100 ? run.rate.toFixed(1) : String(Math.round(run.rate))) : "–");
    figure("mean", count ? (sum((round) => round.emitted) / count).toFixed(2) : "–");
    if (run.first === null) figure("first", "–");
    else figure("first", String(Math.round(run.first - run.began)), "ms");
    figure("share", drafted ? String(accepted) : "–", drafted ? `of ${drafted}` : "");
  }

  function replay() {
    const run = shown(), count = run.rounds.length, slider = $("round"), round = run.rounds[state.at];
    slider.max = String(Math.max(count - 1, 0));
    slider.value = String(state.at);
    slider.disabled = !count;
    $("back").disabled = !count || state.at === 0;
    $("next").disabled = !count || state.at >= count - 1;
    bars();
    for (const span of run.spans) {
      const later = span.round > state.at, now = span.round === state.at && !state.follow;
      const kind = span.className[0] + (later ? " later" : now ? " now" : "");
      if (span.className !== kind) span.className = kind;
    }
    if (!round) {
      $("caption").textContent = "";
      $("sources").textContent = "";
      slider.setAttribute("aria-valuetext", "no round yet");
      const why = state.stop ? "No round has run yet." : "No round ran.";
      $("tree").replaceChildren(make("p", { className: "empty", textContent: why }));
      return;
    }
    const gained = `${round.emitted} ${round.emitted === 1 ? "token" : "tokens"}`;
    const summary = `${round.tokens.length - 1} drafted, ${round.accepted.length} accepted, ${gained}`;
    const of = make("b", { textContent: `${state.at + 1} of ${count}` });
    $("caption").replaceChildren("round ", of, ` · ${summary} · ${(round.seconds * 1000).toFixed(1)} ms`);
    slider.setAttribute("aria-valuetext", `Round ${state.at + 1} of ${count}: ${summary}`);
    $("sources").textContent = round.sources.length ? `drafted by ${round.sources.join(" and ")}` : "decoded plainly";
    tree(round, `Round ${state.at + 1}: ${summary}`);
  }

  function pick(at) {
    const run = shown();
    if (!run || !run.rounds.length) return;
    state.at = Math.min(Math.max(at, 0), run.rounds.length - 1);
    state.follow = Boolean(state.stop) && state.at === run.rounds.length - 1;
    replay();
    const span = run.spans.find((one) => one.round === state.at), box = run.pane.parentNode;
    if (span) box.scrollTop = span.offsetTop - box.offsetTop - box.clientHeight / 2;
  }

  function palette() {
    const style = getComputedStyle(document.documentElement);
    return (name) => style.getPropertyValue(name).trim();
  }

  /** A bar for each round: what was drafted behind it, accepted drafts, and the target's own token above them. */
  function bars() {
    const canvas = $("bars"), rounds = shown() ? shown().rounds : [], scale = window.devicePixelRatio || 1;
    const width = canvas.clientWidth, height = canvas.clientHeight, pen = canvas.getContext("2d"), colour = palette();
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    pen.scale(scale, scale);
    const step = width / Math.max(rounds.length, 1), bar = Math.max(Math.min(step * 0.72, 30), Math.min(step, 1.5));
    const most = Math.max(4, ...rounds.map((round) => round.emitted)), unit = (height - 4) / most;
    rounds.forEach((round, i) => {
      const x = i * step + (step - bar) / 2, accepted = round.accepted.length * unit;
      const own = (round.emitted - round.accepted.length) * unit;
      if (i === state.at) {
        pen.fillStyle = colour("--line");
        pen.fillRect(i * step, 0, Math.max(step, 3), height);
      }
      pen.fillStyle = colour("--accept");
      pen.fillRect(x, height - accepted, bar, accepted);
      pen.fillStyle = colour("--own-line");
      pen.fillRect(x, height - accepted - own, bar, Math.max(own - (accepted ? 1 : 0), 0));
    });
  }

  const visible = (text) => {
    const lines = text.replace(/\r/g, "␍").replace(/\n/g, "⏎").replace(/\t/g, "⇥");
    const told = lines.replace(/ {4,}/g, (all) => `·×${all.length}`).replace(/ /g, "·");
    const letters = [...(told || "∅")];
    return letters.length > 14 ? `${letters.slice(0, 13).join("")}…` : letters.join("");
  };

  /** Leaves get a line each, from the top; parents stand in the middle of their children. */
  function layout(round, room) {
    const leaf = (token, text, parent, kind) => ({ token, text, parent, kind, children: [] });
    const nodes = round.tokens.map((token, i) => leaf(token, round.texts[i], round.parents[i], "r"));
    nodes[0].kind = "root";
    for (const i of round.accepted) nodes[i].kind = "a";
    if (round.own !== null) {
      const parent = round.accepted.length ? round.accepted[round.accepted.length - 1] : 0;
      nodes.push(leaf(round.own, round.own_text, parent, "o"));
    }
    nodes.forEach((node, i) => {
      node.depth = node.parent < 0 ? 0 : nodes[node.parent].depth + 1;
      node.label = visible(node.text);
      node.width = Math.max(30, 7.3 * [...node.label].length + 16);
      if (node.parent >= 0) nodes[node.parent].children.push(i);
      const who = round.proposed ? round.proposed[i] || 0 : 0;
      node.by = round.sources.filter((_, bit) => (who >> bit) & 1).join(" and ");
    });
    let lines = 0;
    for (const i of visit(nodes)) if (!nodes[i].children.length) nodes[i].line = lines++;
    for (const i of visit(nodes).reverse()) {
      const node = nodes[i], inner = node.children.map((child) => nodes[child].line);
      if (inner.length) node.line = (Math.min(...inner) + Math.max(...inner)) / 2;
    }
    const columns = [], height = 36 + lines * 32 - 6;
    for (const node of nodes) columns[node.depth] = Math.max(columns[node.depth] || 0, node.width);
    // As wide as the lines' height leaves room for, so that branches are told apart.
    const narrow = columns.reduce((sum, width) => sum + width, 28), scale = Math.min(1.25, room.height / height);
    const gap = Math.min(88, Math.max(34, (room.width / scale - narrow) / Math.max(columns.length - 1, 1)));
    const starts = [14];
    columns.forEach((width, i) => (starts[i + 1] = starts[i] + width + gap));
    for (const node of nodes) Object.assign(node, { x: starts[node.depth], y: 18 + node.line * 32 + 13 });
    return { nodes, width: starts[columns.length] - gap + 14, height };
  }

  /** Nodes in the order of a walk, children as they were drafted. */
  function visit(nodes) {
    const order = [], rest = [0];
    while (rest.length) {
      const i = rest.pop();
      order.push(i);
      rest.push(...[...nodes[i].children].reverse());
    }
    return order;
  }

  function tree(round, label) {
    const box = $("tree"), room = { width: box.clientWidth - 4, height: box.clientHeight - 4 };
    const { nodes, width, height } = layout(round, room);
    const scale = Math.min(1.25, Math.max(0.62, Math.min(room.width / width, room.height / height)));
    const size = { viewBox: `0 0 ${width} ${height}`, width: width * scale, height: height * scale };
    const svg = shape("svg", { ...size, role: "img", "aria-label": label });
    const rank = { r: 0, o: 1, a: 2 };
    const edges = nodes.filter((node) => node.parent >= 0).sort((one, two) => rank[one.kind] - rank[two.kind]);
    for (const node of edges) {
      const from = nodes[node.parent], x = from.x + from.width, bend = (node.x - x) / 2;
      const curve = `M${x} ${from.y}C${x + bend} ${from.y} ${node.x - bend} ${node.y} ${node.x} ${node.y}`;
      svg.append(shape("path", { class: `edge ${node.kind}`, d: curve }));
    }
    const names = { root: "last token", a: "accepted", o: "the target's own", r: "rejected" };
    for (const node of nodes) {
      const text = shape("text", { x: node.x + node.width / 2, y: node.y });
      text.textContent = node.label;
      const title = shape("title", {});
      const who = node.by ? `, drafted by ${node.by}` : "";
      title.textContent = `${JSON.stringify(node.text)} (${node.token}): ${names[node.kind]}${who}`;
      const frame = shape("rect", { x: node.x, y: node.y - 12, width: node.width, height: 24, rx: 7 });
      svg.append(shape("g", { class: `node ${node.kind}` }, title, frame, text));
    }
    box.replaceChildren(svg);
  }

  // -- controls ----------------------------------------------------------------------------------------------------

  function examples() {
    const list = chosen("mode") === "chat" ? CHATS : EXAMPLES;
    $("examples").replaceChildren(...list.map(([name, text]) => {
      const button = make("button", { type: "button", textContent: name });
      button.addEventListener("click", () => ($("prompt").value = text));
      return button;
    }));
    $("ask").textContent = chosen("mode") === "chat" ? "Message" : "Prompt";
  }

  async function meet() {
    try {
      const answer = await fetch("v1/models", { headers: headers() });
      if (answer.status === 401) {
        if ($("key").value) locked();
        else say("This server asks for an API key.");
        return;
      }
      if (!answer.ok) throw new Error(await refusal(answer));
      const model = (await answer.json()).data[0], own = model.specrs || { chat: false, speculative: true };
      state.model = model;
      fail(null);
      say("");
      $("model").hidden = false;
      $("model").textContent = `${model.id} · ${model.max_model_len} tokens of context`;
      $("tokens").max = String(model.max_model_len);
      const chat = document.querySelector('input[value="chat"]');
      chat.disabled = !own.chat;
      $("why").hidden = own.chat;
      for (const way of ["on", "compare"]) document.querySelector(`input[value="${way}"]`).disabled = !own.speculative;
      if (!own.speculative) document.querySelector('input[value="off"]').checked = true;
    } catch (error) {
      fail(error.message);
    }
  }

  async function build() {
    try {
      const told = await (await fetch("version")).json();
      $("build").textContent = `specrs ${told.version}`;
    } catch {
      $("build").textContent = "";
    }
  }

  const THEMES = ["auto", "light", "dark"];
  $("theme").addEventListener("click", () => {
    const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme || "auto") + 1) % 3];
    if (next === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = next;
    $("theme").textContent = next[0].toUpperCase() + next.slice(1);
    $("theme").setAttribute("aria-label", next === "auto" ? "Colours: as the system has them" : `Colours: ${next}`);
    bars();
  });
  $("run").addEventListener("click", start);
  $("stop").addEventListener("click", () => state.stop && state.stop.abort());
  $("key").addEventListener("change", meet);
  $("round").addEventListener("input", () => pick(Number($("round").value)));
  $("back").addEventListener("click", () => pick(state.at - 1));
  $("next").addEventListener("click", () => pick(state.at + 1));
  $("bars").addEventListener("click", (event) => {
    const count = shown() ? shown().rounds.length : 0;
    pick(Math.floor((event.offsetX / $("bars").clientWidth) * count));
  });
  for (const input of document.querySelectorAll('input[name="mode"]')) input.addEventListener("change", examples);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      start();
    } else if (event.key === "Escape" && state.stop) {
      state.stop.abort();
    }
  });
  window.addEventListener("resize", () => shown() ? replay() : bars());
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", bars);
  $("panes").append(make("p", { className: "text none", textContent: "What the model writes will stand here." }));
  examples();
  meet();
  build();
})();
