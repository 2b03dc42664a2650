// The page: what is drawn when, what is chosen, and what is asked.
//
// Ids, tenants and tools' names come from clients: they get in as text nodes only.

import { Feed, get, key } from "./feed.js";
import {
  EDGE, Paint, ROW, STATES, drawAxis, drawLanes, drawPhases, drawShares, drawTimes, swatch,
} from "./paint.js";
import {
  KINDS, WAITS, apply, byFamily, countPhases, keyOf, leading, missed, newState, occupancy, phaseOf,
  quantile, seconds, setConversations, setEngines, source, tokens, trim,
} from "./state.js";

// What costs the table something is asked for this seldom.
const ENGINES_MS = 10000;
const LISTED = 1000;
const TEXT_MS = 500;
const RECENT_S = 60;
// Engines that are gone are listed for so long.
const GONE_S = 120;
// Rows beyond those seen, so that scrolling finds some.
const SPARE = 4;
const MOST_ITEMS = 50;
const MOST_CHILDREN = 8;

const $ = (id) => document.getElementById(id);
const still = matchMedia("(prefers-reduced-motion: reduce)");
const dark = matchMedia("(prefers-color-scheme: dark)");

const state = newState();
let paint = new Paint();
const view = {
  span: 300,
  filter: "",
  order: "newest",
  heldAt: null,
  // How far this machine's clock is ahead of the table's; null: not known.
  ahead: null,
  chosen: null,
  rows: [],
  opened: null,
  phases: [],
  spots: [],
  drawnAt: 0,
  connected: false,
};

/** The table's time now, or the time at which the picture is held. */
function now() {
  if (view.heldAt !== null) return view.heldAt;
  return view.ahead === null ? state.now : Date.now() / 1000 - view.ahead;
}

/** Make an element of text and others; attributes by name. */
function make(tag, attributes = {}, ...content) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...content);
  return element;
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// --- what comes ----------------------------------------------------------------------------------

function heard(events) {
  const local = Date.now() / 1000;
  for (const event of events) {
    apply(state, event);
    // The least delayed event tells most of the other clock.
    if (view.ahead === null || local - event.at < view.ahead) view.ahead = local - event.at;
  }
  if (view.opened && events.some((one) => one.conversation === view.opened.conversation.id)) {
    view.stale = true;
  }
}

async function askEngines() {
  const { body, at } = await get("v1/engines");
  clock(at);
  const rank = (one) => ["decoder", "prefiller", "encoder"].indexOf(one.role);
  setEngines(state, body.data.sort((one, other) => rank(one) - rank(other)), now());
}

async function askCache() {
  showCache((await get("v1/cache")).body);
}

async function askConversations() {
  const { body, at } = await get(`v1/conversations?limit=${LISTED}`);
  clock(at);
  setConversations(state, body, now());
}

async function askModel() {
  setText($("model"), (await get("version")).body.model);
}

function clock(at) {
  // Of the answer's header, which has whole seconds.
  if (at !== null && view.ahead === null) view.ahead = Date.now() / 1000 - at - 0.5;
}

async function quietly(asked) {
  try {
    await asked();
  } catch {
    // The stream's own troubles are told already.
  }
}

function status(to, text) {
  $("status").dataset.state = to;
  setText($("status-text"), text);
}

const feed = new Feed(KINDS, {
  events: heard,
  missed(count) {
    missed(state, count, now());
    quietly(askConversations);
  },
  status,
  connected() {
    view.connected = true;
    quietly(askModel);
    quietly(askEngines);
    quietly(askCache);
    quietly(askConversations);
  },
  denied(error) {
    $("login-why").textContent = error.message;
    $("login").showModal();
    $("key").focus();
    return new Promise((resolve) => {
      $("login-form").onsubmit = () => {
        key.set($("key").value.trim());
        $("key").value = "";
        resolve();
      };
    });
  },
});

// --- rows ----------------------------------------------------------------------------------------

function matches(conversation, words) {
  if (!words) return true;
  if (conversation.id.toLowerCase().includes(words)) return true;
  if (conversation.tenant?.toLowerCase().includes(words)) return true;
  for (const history of conversation.histories.values()) {
    const engine = state.engines.get(history.engine);
    if (engine && (engine.letter.toLowerCase() === words || engine.id.toLowerCase().includes(words))) {
      return true;
    }
    if (phaseOf(history) === words) return true;
  }
  return false;
}

const ORDERS = {
  newest: (one, other) => other.first - one.first,
  tokens: (one, other) => held(other) - held(one),
  engine(one, other) {
    const [a, b] = [one, other].map((each) => state.engines.get(leading(each)?.engine)?.number ?? 1e9);
    return a - b || other.first - one.first;
  },
};

function held(conversation) {
  let sum = 0;
  for (const history of conversation.histories.values()) sum += history.held;
  return sum;
}

function findRows() {
  const words = view.filter.trim().toLowerCase();
  const from = now() - view.span;
  const found = [];
  for (const one of state.conversations.values()) {
    if ((one.ended === null || one.ended > from) && matches(one, words)) found.push(one);
  }
  found.sort((one, other) => ORDERS[view.order](one, other) || (one.key < other.key ? -1 : 1));
  view.shown = found.length;
  view.rows = byFamily(found).flatMap((conversation) =>
    [...conversation.histories.values()].sort((one, other) => one.place - other.place),
  );
}

/** A phase in a few words. */
function phaseText(history) {
  const { conversation } = history;
  if (conversation.ended !== null || history.ended !== null) return "ended";
  const phase = phaseOf(history);
  if (phase === "tool") return [...history.tools.values()].at(-1).label || "tool";
  return STATES[phase]?.name ?? phase;
}

function phaseData(history) {
  const ended = history.conversation.ended !== null || history.ended !== null;
  return ended ? "ended" : phaseOf(history);
}

const rowElements = [];

function showNames() {
  const box = $("names");
  const scroll = $("scroll");
  $("sheet").style.height = `${Math.max(view.rows.length * ROW, scroll.clientHeight)}px`;
  const first = Math.max(0, Math.floor(scroll.scrollTop / ROW) - SPARE);
  const count = Math.min(view.rows.length - first, Math.ceil(scroll.clientHeight / ROW) + 2 * SPARE);
  while (rowElements.length < count) {
    const element = make(
      "div", { class: "lane", role: "option" },
      make("span", { class: "letter" }), make("span", { class: "id" }), make("span", { class: "phase" }),
    );
    element.addEventListener("click", () => {
      view.chosen = element.history;
      open(element.history);
    });
    rowElements.push(element);
    box.append(element);
  }
  rowElements.forEach((element, index) => {
    const history = view.rows[first + index];
    element.hidden = index >= count || !history;
    if (element.hidden) return;
    fillName(element, history, first + index);
  });
  const at = view.rows.indexOf(view.chosen);
  if (at >= first && at < first + count) box.setAttribute("aria-activedescendant", `lane-${at}`);
  else box.removeAttribute("aria-activedescendant");
}

/** Shorten the id of an agent of `parent`, which begins with the parent's id. */
const shortId = (id, parent) => (id.startsWith(`${parent}/`) ? id.slice(parent.length) : id);

function fillName(element, history, at) {
  const { conversation } = history;
  const engine = state.engines.get(history.engine);
  const [letter, id, phase] = element.children;
  element.history = history;
  element.style.top = `${at * ROW}px`;
  element.id = `lane-${at}`;
  element.setAttribute("aria-selected", history === view.chosen);
  element.setAttribute("aria-setsize", view.rows.length);
  element.setAttribute("aria-posinset", at + 1);
  const data = {
    conversation: conversation.id, tenant: conversation.tenant ?? "", history: String(history.place),
    engine: engine?.id ?? "", letter: engine?.letter ?? "", phase: phaseData(history),
    moves: String(conversation.moves), parent: conversation.depth ? conversation.parent : "",
  };
  for (const [name, value] of Object.entries(data)) {
    if (element.dataset[name] !== value) element.dataset[name] = value;
  }
  letterOf(letter, engine);
  const isFurther = view.rows[at - 1]?.conversation === conversation;
  const text = isFurther ? `└ history ${history.place}` : shortId(conversation.id, data.parent);
  const tenant = conversation.tenant && !isFurther && !conversation.depth ? `${conversation.tenant} / ` : "";
  id.title = [conversation.tenant, conversation.id].filter(Boolean).join(" / ");
  id.style.setProperty("--depth", conversation.depth);
  if (id.textContent !== tenant + text) {
    id.replaceChildren(...(tenant ? [make("i", {}, tenant)] : []), text);
    id.classList.toggle("more", isFurther);
  }
  setText(phase, phaseText(history));
}

function letterOf(element, engine) {
  setText(element, engine?.letter ?? "–");
  element.classList.toggle("none", !engine);
  element.style.backgroundColor = engine ? paint.engine(engine.number) : "";
  element.title = engine ? `engine ${engine.letter}: ${engine.id}` : "bound to no engine";
}

// --- panels --------------------------------------------------------------------------------------

function showTiles() {
  const at = now();
  const counts = countPhases(state);
  const live = Object.values(counts).reduce((sum, one) => sum + one, 0);
  setText($("v-live"), live.toLocaleString("en"));
  const said = [
    [counts.decode + counts.prefill, "run"], [counts.tool, "in tools"], [counts.idle, "idle"],
    [counts.waiting, "wait"], [counts.paused, "paused"], [counts.lost, "to be placed"],
  ];
  setText($("s-live"), said.filter(([n]) => n).map(([n, what]) => `${n.toLocaleString("en")} ${what}`).join(" · "));
  for (const name of ["ttft", "ttfet"]) {
    const values = state[name].filter((one) => one.at > at - RECENT_S && one.at <= at).map((one) => one.s);
    const half = quantile(values, 0.5);
    setText($(`v-${name}`), half === null ? "–" : seconds(half));
    setText(
      $(`s-${name}`),
      half === null ? "none in the last minute"
        : `median · p95 ${seconds(quantile(values, 0.95))} · ${values.length.toLocaleString("en")} in 1 min`,
    );
  }
  const turns = state.turns.filter((one) => one.at > at - RECENT_S && one.at <= at);
  const sum = (part) => turns.reduce((total, one) => total + one[part], 0);
  const [own, host, prompt] = ["own", "host", "prompt"].map(sum);
  const share = (part) => `${Math.round((part / prompt) * 100)} %`;
  setText($("v-cache"), prompt ? share(own + host) : "–");
  setText(
    $("s-cache"),
    prompt ? `own cache ${share(own)} · host memory ${share(host)}`
      : "none in the last minute",
  );
}

/** Show shares of the prompt tokens that engines computed in the last hour, by cause. */
function showCache({ tokens: all, again_tokens: again, causes }) {
  const percent = (share) => `${Math.round(share * 100)} %`;
  setText($("v-again"), all ? percent(again / all) : "–");
  setText($("s-again"), all ? `${tokens(again)} of ${tokens(all)} tokens` : "none in the last hour");
  const part = (tag, one, ...content) =>
    make(tag, { "data-cause": one.cause, title: `${one.name}: ${tokens(one.tokens)} tokens. ${one.advice}` }, ...content);
  const [bar, list] = $("c-again").children;
  bar.replaceChildren(...causes.map((one) => part("span", one)));
  causes.forEach((one, index) => (bar.children[index].style.width = `${one.share * 100}%`));
  list.replaceChildren(...causes.map((one) => part("li", one, make("i"), `${one.name} ${percent(one.share)}`)));
}

function showEngines() {
  const box = $("engines");
  const by = occupancy(state);
  const shown = [...state.engines.values()].filter((one) => !one.gone || one.at > now() - GONE_S);
  const engines = shown.sort((one, other) => one.number - other.number);
  const old = new Map([...box.children].filter((one) => one.dataset.engine).map((one) => [one.dataset.engine, one]));
  const elements = engines.map((engine) => {
    const element = old.get(engine.id) ?? engineCard(engine);
    fillEngine(element, engine, by.get(engine.id));
    return element;
  });
  if (!elements.length) elements.push(make("p", { class: "none-yet" }, "No engine is ready yet."));
  if (elements.length !== box.children.length || elements.some((one, i) => box.children[i] !== one)) {
    box.replaceChildren(...elements);
  }
}

function engineCard(engine) {
  return make(
    "div", { class: "engine", "data-engine": engine.id },
    make("div", { class: "top" }, make("span", { class: "letter" }), make("span", { class: "name" }), make("span", { class: "now" })),
    make("div", { class: "bar" }),
    make("div", { class: "foot" }, make("span"), make("span")),
  );
}

function fillEngine(element, engine, holds) {
  const [top, bar, foot] = element.children;
  letterOf(top.children[0], engine);
  element.dataset.letter = engine.letter;
  if (engine.gone) element.dataset.gone = engine.gone;
  else delete element.dataset.gone;
  setText(top.children[1], `${engine.model ? `${engine.model}: ` : ""}${engine.role || "engine"} ${engine.id}`);
  setText(top.children[2], engineNow(engine));
  const hosts = engine.hosts ?? engine.role === "decoder";
  bar.hidden = foot.hidden = Boolean(engine.gone) || !hosts || !engine.capacity;
  if (bar.hidden) {
    bar.replaceChildren();
    return;
  }
  // Histories may share a beginning, which the engine counts once.
  const total = holds?.total ?? 0;
  const scale = engine.held !== null && engine.held < total ? engine.held / total : 1;
  const parts = (holds?.top ?? []).map(({ conversation, history, held: of }, at) => ({
    key: `${conversation.key}\n${history.number}`, conversation, history, at,
    share: (of * scale) / engine.capacity, of,
  }));
  while (bar.children.length > parts.length) bar.lastChild.remove();
  parts.forEach((part, at) => {
    let piece = bar.children[at];
    if (!piece) {
      piece = make("span");
      piece.addEventListener("click", () => open(piece.history));
      bar.append(piece);
    }
    piece.history = part.history;
    piece.className = "";
    piece.style.width = `${(part.share * 100).toFixed(2)}%`;
    piece.style.backgroundColor = paint.conversation(part.conversation.hue, at);
    setText(piece, part.share > 0.06 ? part.conversation.id : "");
    piece.title = `${part.conversation.id}: ${tokens(part.of)} tokens`;
  });
  if (holds?.rest) {
    const piece = make("span", { class: "rest", title: `${holds.count - parts.length} more: ${tokens(holds.rest)} tokens` });
    piece.style.width = `${((holds.rest * scale) / engine.capacity) * 100}%`;
    bar.append(piece);
  }
  const amount = total * scale;
  setText(foot.children[0], `${tokens(amount)} of ${tokens(engine.capacity)} tokens · ${Math.round((amount / engine.capacity) * 100)} %`);
  const count = holds?.count ?? 0;
  setText(foot.children[1], `${count.toLocaleString("en")} ${count === 1 ? "history" : "histories"}`);
}

function engineNow(engine) {
  if (engine.gone) {
    const ago = seconds(Math.max(0, now() - engine.at));
    return `${engine.gone === "left" ? "left" : "lost"} ${ago} ago`;
  }
  const said = [];
  if (engine.leaving) said.push("drains");
  let running = 0;
  let prefills = 0;
  for (const conversation of state.conversations.values()) {
    if (conversation.ended !== null) continue;
    for (const history of conversation.histories.values()) {
      for (const turn of history.running.values()) {
        if (turn.prefilling && (turn.prefiller ?? turn.decoder) === engine.id) prefills++;
        else if (turn.decoder === engine.id && !turn.prefilling) running++;
      }
    }
  }
  if (running) said.push(`${running} decode`);
  if (prefills) said.push(`${prefills} prefill`);
  if (engine.queued) said.push(`${tokens(engine.queued)} tokens queued`);
  return said.join(" · ") || "idle";
}

function showWaiting() {
  const all = [...state.waiting.values()];
  setText($("waiting-count"), all.length ? all.length.toLocaleString("en") : "");
  const items = all.slice(0, MOST_ITEMS).map(({ history, at, why, tokens: asked, missing, ahead }) => ({
    history,
    time: seconds(Math.max(0, now() - at)),
    text: [
      WAITS[why] ?? why,
      missing ? `${tokens(missing)} of its ${tokens(asked)} tokens do not fit` : `${tokens(asked)} tokens`,
      ahead ? `${ahead} ahead` : "next",
    ].join(" · "),
  }));
  const limit = state.window ? `At most ${state.window.limit} may be active.` : "";
  showItems($("waiting"), items, `Nothing waits for room. ${limit}`);
}

function showSlow() {
  const items = state.slow.slice(-MOST_ITEMS).reverse().map(({ history, at, why }) => ({
    history, time: `${seconds(Math.max(0, now() - at))} ago`, text: why,
  }));
  showItems($("slow"), items, "No turn was slow for a known reason.");
}

function showItems(box, items, none) {
  if (!items.length) {
    if (box.children.length !== 1 || box.firstChild.textContent !== none) {
      box.replaceChildren(make("p", { class: "none-yet" }, none));
    }
    return;
  }
  if (box.firstChild?.tagName === "P") box.replaceChildren();
  while (box.children.length > items.length) box.lastChild.remove();
  items.forEach(({ history, time, text }, at) => {
    let item = box.children[at];
    if (!item) {
      item = make("button", { class: "item", type: "button" }, make("time"), make("b"), make("span"));
      item.addEventListener("click", () => open(item.history));
      box.append(item);
    }
    item.history = history;
    item.dataset.conversation = history.conversation.id;
    setText(item.children[0], time);
    setText(item.children[1], history.conversation.id);
    setText(item.children[2], text);
  });
}

// --- one conversation ----------------------------------------------------------------------------

function open(history) {
  if (!history) return;
  view.chosen = history;
  view.opened = { conversation: history.conversation, answer: null, from: view.opened?.from ?? document.activeElement };
  $("details").hidden = false;
  showDetails();
  $("details-close").focus();
  askDetails();
}

function shut() {
  if (!view.opened) return;
  const { from } = view.opened;
  view.opened = null;
  $("details").hidden = true;
  (from?.isConnected && from !== document.body ? from : $("names")).focus();
}

async function askDetails() {
  const opened = view.opened;
  const { id, tenant } = opened.conversation;
  const of = tenant === null ? "" : `?tenant=${encodeURIComponent(tenant)}`;
  try {
    opened.answer = (await get(`v1/conversations/${encodeURIComponent(id)}${of}`)).body;
  } catch {
    opened.answer = null;
  }
  if (view.opened === opened) showDetails();
}

function showDetails() {
  const { conversation, answer } = view.opened;
  const lead = leading(conversation);
  setText($("details-title"), (conversation.tenant ? `${conversation.tenant} / ` : "") + conversation.id);
  const engine = state.engines.get(lead?.engine);
  const facts = [
    ["now", lead ? phaseText(lead) : "–"],
    ["engine", engine ? `${engine.letter} (${engine.id})` : "none"],
    ["KV held", `${tokens(held(conversation))} tokens`],
    ["turns", tokens(Math.max(conversation.count, answer?.turns ?? 0))],
    ["histories", String(answer?.histories_total ?? conversation.histories.size)],
    ["moves", String(conversation.moves)],
    ["TTFET", conversation.ttfet === null ? "–" : seconds(conversation.ttfet)],
    ["age", seconds(Math.max(0, (conversation.ended ?? now()) - conversation.first))],
    ...(answer?.histories.some((one) => one.hints.priority < 0) ? [["class", "background"]] : []),
  ];
  const list = make("dl", { class: "facts" }, ...facts.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
  const body = $("details-body");
  const top = body.scrollTop;
  const why = answer?.last_turn?.why;
  body.replaceChildren(list, mixKey(), ...[...conversation.histories.values()].map((history) => turnsTable(history, why)));
  body.scrollTop = top;
  view.stale = false;
  showFamily();
}

/** Name a conversation's parent and first children, as links to those that the page knows. */
function showFamily() {
  const { conversation: { id, tenant, parent }, answer } = view.opened;
  const link = (name) => make(state.conversations.has(keyOf(name, tenant)) ? "button" : "span", { "data-id": name }, shortId(name, id));
  const children = answer?.children.slice(0, MOST_CHILDREN).map(link) ?? [];
  if (answer?.children_total > MOST_CHILDREN) children.push(`and ${answer.children_total - MOST_CHILDREN} more`);
  const made = $("details-family").cloneNode();
  if (parent) made.append(make("p", { class: "key" }, "Parent", link(parent)));
  if (children.length) made.append(make("p", { class: "key" }, "Children", ...children));
  // A link that is focused or pressed stays.
  if (!made.isEqualNode($("details-family"))) $("details-family").replaceChildren(...made.children);
}

function mixKey() {
  const of = (name, text) => make("span", {}, make("i", { class: name }), text);
  return make("p", { class: "key" }, "Prompt tokens:", of("own", "own cache"), of("lm", "LMCache"), of("new", "computed"));
}

function turnsTable(history, lastWhy) {
  const caption = history.conversation.histories.size > 1 ? `History ${history.place}` : "Turns";
  const heads = ["turn", "ago", "ran on", "prompt", "", "output", "TTFT", "took"];
  const wide = new Set([1, 5]);
  const table = make(
    "table", { class: "turns", "data-history": history.place },
    make("caption", {}, caption),
    make("thead", {}, make("tr", {}, ...heads.map((head, i) => make("th", { scope: "col", class: wide.has(i) ? "wide" : null }, head)))),
  );
  const turns = [...history.turns].reverse();
  if (!turns.length) {
    table.append(make("tbody", {}, make("tr", { class: "said" }, make("td", { colspan: heads.length }, lastWhy ? `Last turn: ${lastWhy}` : "No turn of it since this page listens."))));
  }
  for (const turn of turns) table.append(turnRows(turn, heads.length));
  return table;
}

function turnRows(turn, columns) {
  const letter = (id) => state.engines.get(id)?.letter ?? "?";
  const where = turn.prefiller ? `${letter(turn.prefiller)} → ${letter(turn.decoder)}` : letter(turn.decoder);
  const took = turn.end === null ? null : turn.end - turn.at;
  const cell = (text, name = null) => make("td", { class: name }, text);
  const mix = make("div", { class: "mix" });
  if (turn.prompt) {
    const computed = turn.prompt - turn.cached - turn.loaded;
    for (const [name, part] of [["own", turn.cached], ["lm", turn.loaded], ["new", computed]]) {
      const piece = make("span", { class: name });
      piece.style.width = `${(part / turn.prompt) * 100}%`;
      mix.append(piece);
    }
    mix.setAttribute("role", "img");
    mix.setAttribute("aria-label", `${tokens(turn.cached)} own cache, ${tokens(turn.loaded)} LMCache, ${tokens(computed)} computed`);
  }
  const outcome = turn.end === null ? (turn.prefilling ? "prefill" : "runs") : turn.outcome === "completed" ? seconds(took) : turn.outcome;
  const said = [source(state, turn)];
  if (turn.waited >= 0.05) said.push(`waited ${seconds(turn.waited)} for room`);
  if (turn.continued) said.push("continued there when its engine was lost");
  return make(
    "tbody", { "data-turn": turn.number, "data-engine": turn.decoder, "data-prefiller": turn.prefiller },
    make(
      "tr", {},
      cell(String(turn.number)),
      cell(seconds(Math.max(0, now() - turn.at)), "wide"),
      cell(where),
      cell(turn.prompt === null ? "" : tokens(turn.prompt)),
      make("td", {}, mix),
      cell(turn.output === null ? "" : tokens(turn.output), "wide"),
      cell(turn.ttft === null ? "" : seconds(turn.ttft)),
      cell(outcome),
    ),
    make("tr", { class: "said" }, make("td", { colspan: columns },
      ...(turn.why ? [make("span", { class: "why" }, `▼ slow: ${turn.why}`)] : []), said.filter(Boolean).join("; "))),
  );
}

// --- drawing -------------------------------------------------------------------------------------

function draw() {
  const scroll = $("scroll");
  const picture = $("picture");
  const height = scroll.clientHeight;
  if (picture.style.height !== `${height}px`) picture.style.height = `${height}px`;
  const first = Math.max(0, Math.floor(scroll.scrollTop / ROW));
  const rows = view.rows.slice(first, first + Math.ceil(height / ROW) + 1);
  const at = now();
  view.spots = drawLanes(paint, picture, {
    rows, state, now: at, span: view.span, selected: view.chosen, offset: scroll.scrollTop - first * ROW,
  });
  drawPhases(paint, $("c-live"), view.phases, at, view.span);
  drawTimes(paint, $("c-ttft"), state.ttft, at, view.span);
  drawTimes(paint, $("c-ttfet"), state.ttfet, at, view.span, false);
  drawShares(paint, $("c-cache"), state.turns, at, view.span);
}

let wroteAt = 0;

function write() {
  wroteAt = performance.now();
  findRows();
  showNames();
  setText($("lanes-count"), laneCount());
  showTiles();
  showEngines();
  showWaiting();
  showSlow();
  if (view.opened && view.stale) showDetails();
  const none = view.connected && !view.rows.length;
  $("empty").hidden = !none;
  if (none) showEmpty();
}

function laneCount() {
  const [shown, all] = [view.shown, state.conversations.size];
  const of = shown === all ? shown.toLocaleString("en") : `${shown.toLocaleString("en")} of ${all.toLocaleString("en")}`;
  const kept = state.keep < view.span ? `, ${seconds(state.keep)} kept` : "";
  return `${of} ${all === 1 ? "conversation" : "conversations"}${kept}`;
}

function showEmpty() {
  setText($("empty-what"), state.conversations.size ? "No conversation matches." : "No conversations yet.");
  const filtered = state.conversations.size > 0;
  $("empty-how").hidden = $("empty-command").hidden = filtered;
  setText($("empty-command"), `curl ${new URL("v1/chat/completions", location.href)} \\\n  -H 'Content-Type: application/json' -H 'X-Conversation-Id: hello' \\\n  -d '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20}'`);
}

/** Milliseconds between pictures: as long as a pixel takes to pass. */
function frameMs() {
  if (still.matches) return 1000;
  const pixels = Math.max(100, $("picture").clientWidth - EDGE);
  return Math.min(500, Math.max(60, (view.span * 1000) / pixels));
}

function tick(at) {
  requestAnimationFrame(tick);
  if (view.heldAt === null && at - wroteAt >= TEXT_MS) write();
  if (at - view.drawnAt < frameMs() && !view.redraw) return;
  if (view.heldAt !== null && !view.redraw) return;
  view.drawnAt = at;
  view.redraw = false;
  draw();
}

function redraw() {
  view.redraw = true;
}

// --- what is chosen ------------------------------------------------------------------------------

function hold(on) {
  view.heldAt = on ? now() : null;
  $("pause").setAttribute("aria-pressed", String(on));
  setText($("pause"), on ? "Go on" : "Pause");
  if (!on) write();
  redraw();
}

function choose(step) {
  if (!view.rows.length) return;
  const at = view.rows.indexOf(view.chosen);
  const to = at < 0 ? 0 : Math.min(view.rows.length - 1, Math.max(0, at + step));
  view.chosen = view.rows[to];
  const scroll = $("scroll");
  if (to * ROW < scroll.scrollTop) scroll.scrollTop = to * ROW;
  if ((to + 1) * ROW > scroll.scrollTop + scroll.clientHeight) scroll.scrollTop = (to + 1) * ROW - scroll.clientHeight;
  showNames();
  redraw();
  if (view.opened) {
    view.opened = { ...view.opened, conversation: view.chosen.conversation, answer: null };
    showDetails();
    askDetails();
  }
}

function show(span) {
  view.span = span;
  document.querySelector(`#window input[value="${span}"]`).checked = true;
  drawAxis(paint, $("axis"), view.span);
  write();
  redraw();
}

const KEYS = {
  ArrowDown: () => choose(1),
  ArrowUp: () => choose(-1),
  j: () => choose(1),
  k: () => choose(-1),
  PageDown: () => choose(10),
  PageUp: () => choose(-10),
  Enter: () => open(view.chosen),
  " ": () => hold(view.heldAt === null),
  "/": () => $("filter").focus(),
  "?": () => $("help-open").click(),
  1: () => show(60),
  2: () => show(300),
  3: () => show(900),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const typing = event.target.closest("input[type=search], input[type=password], select");
  if (event.key === "Escape") {
    if (event.target.id === "filter") {
      $("filter").value = view.filter = "";
      $("names").focus();
      write();
    } else shut();
    return;
  }
  // Buttons and choices have these keys for themselves.
  const taken = event.target.closest("button, #window") && ["Enter", " ", "ArrowDown", "ArrowUp"].includes(event.key);
  if (typing || taken || !KEYS[event.key]) return;
  event.preventDefault();
  KEYS[event.key]();
});

$("filter").addEventListener("input", () => {
  view.filter = $("filter").value;
  $("scroll").scrollTop = 0;
  write();
  redraw();
});
$("order").addEventListener("change", () => {
  view.order = $("order").value;
  write();
  redraw();
});
$("window").addEventListener("change", (event) => show(Number(event.target.value)));
$("pause").addEventListener("click", () => hold(view.heldAt === null));
$("help-open").addEventListener("click", () => {
  $("help").showModal();
  legends();
});
$("details-close").addEventListener("click", shut);
$("details-family").addEventListener("click", ({ target }) => {
  if (target.matches("button")) open(leading(state.conversations.get(keyOf(target.dataset.id, view.opened.conversation.tenant))));
});
$("forget").addEventListener("click", () => {
  key.set("");
  location.reload();
});
$("scroll").addEventListener("scroll", () => {
  showNames();
  redraw();
});

// --- what is pointed at --------------------------------------------------------------------------

function spotAt(event) {
  const box = $("picture").getBoundingClientRect();
  const [x, y] = [event.clientX - box.left, event.clientY - box.top];
  return view.spots.findLast((one) => x >= one.x && x <= one.x + one.w && y >= one.y && y <= one.y + one.h);
}

function tipText(spot) {
  if (spot.gap) return `${tokens(spot.gap.count)} events were missed here`;
  const name = (id) => {
    const engine = state.engines.get(id);
    return engine ? `${engine.letter} (${engine.id})` : id;
  };
  const title = spot.history.conversation.id;
  if (spot.mark) return `${title}\n${spot.mark.text}`;
  if (spot.home) return `${title}\nits KV is on ${name(spot.home.engine)}`;
  const one = spot.segment;
  const what = one.kind === "tool" ? `tool ${one.label}` : STATES[one.kind].name;
  const why = one.why ? `: ${WAITS[one.why] ?? one.why}` : "";
  return `${title}\n${what}${one.engine ? ` on ${name(one.engine)}` : ""}, ${seconds((one.b ?? now()) - one.a)}${why}`;
}

$("picture").addEventListener("pointermove", (event) => {
  const spot = spotAt(event);
  const tip = $("tip");
  tip.hidden = !spot;
  if (!spot) return;
  setText(tip, tipText(spot));
  tip.style.left = `${Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
});
$("picture").addEventListener("pointerleave", () => ($("tip").hidden = true));
$("picture").addEventListener("click", (event) => {
  const box = $("picture").getBoundingClientRect();
  open(view.rows[Math.floor(($("scroll").scrollTop + event.clientY - box.top) / ROW)]);
});

// --- the beginning -------------------------------------------------------------------------------

function legends() {
  for (const list of [$("legend"), $("help-legend")]) {
    const long = list.id === "help-legend";
    if (!list.children.length) {
      const about = { ...STATES, home: { name: "home", about: "where its KV is: the letter and colour of its engine" } };
      for (const [kind, { name, about: text }] of Object.entries(about)) {
        const item = make("li", {}, make("canvas", { "data-kind": kind, "aria-hidden": "true" }), name);
        if (long) item.append(make("span", {}, text));
        list.append(item);
      }
      if (long) {
        for (const [sign, name, text] of [
          ["A → B", "moved", "its home is another engine from here on"],
          ["▼", "slow", "the turn that began here was slow for a known reason"],
          ["▽", "noted", "the turn that began here was brought back before, or rejoined, and no slower for it"],
          ["✕", "broken", "an engine was lost, or the turn cut or refused"],
          ["▏", "ended", "the conversation ended"],
        ]) list.append(make("li", {}, make("b", {}, sign), name, make("span", {}, text)));
      }
    }
    for (const canvas of list.querySelectorAll("canvas")) if (canvas.clientWidth) swatch(paint, canvas, canvas.dataset.kind);
  }
}

function dress() {
  paint = new Paint();
  legends();
  drawAxis(paint, $("axis"), view.span);
  write();
  redraw();
}

dark.addEventListener("change", dress);
new ResizeObserver(dress).observe(document.body);

// What is counted each second is drawn.
setInterval(() => {
  if (document.hidden || !view.connected) return;
  trim(state, Date.now() / 1000 - (view.ahead ?? 0));
  view.phases.push({ at: Date.now() / 1000 - (view.ahead ?? 0), counts: countPhases(state) });
  if (view.phases.length > 1000) view.phases.shift();
}, 1000);
setInterval(() => {
  if (!document.hidden && view.connected && view.heldAt === null) quietly(() => Promise.all([askEngines(), askCache(), view.opened && askDetails()]));
}, ENGINES_MS);

dress();
requestAnimationFrame(tick);
// First, so that engines have the same letters in each page.
quietly(askEngines).finally(() => feed.run());
