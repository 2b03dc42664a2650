// What the page knows, and how each event of `/v1/events` changes it.
//
// Nothing here reads a clock, the network or the document: times are those of the events (Unix
// seconds, by the conversation table's clock), so a recording gives the same picture each time.

// Asked for; `environment` is not shown.
export const KINDS = [
  "wait", "refuse", "place", "start", "prefilled", "end", "cut", "answered", "park", "pause",
  "restore", "ended", "tool_start", "tool_end", "engine_ready", "engine_lost", "engine_left",
  "window",
];
// The longest window that can be shown.
export const LONGEST_S = 900;
const MOST_TURNS = 100;
const MOST_SLOW = 200;
const MOST_SAMPLES = 20000;
const MOST_SEGMENTS = 150000;
const MOST_CONVERSATIONS = 20000;
// Shorter ones are not drawn apart from what follows.
const LEAST_S = 0.005;

/** Return the state before any event. */
export function newState() {
  return {
    now: 0,
    conversations: new Map(),
    engines: new Map(),
    // By key, the histories that wait for room.
    waiting: new Map(),
    // Of completed turns: time, tokens by source, reason; of answers: time, seconds.
    turns: [],
    ttft: [],
    ttfet: [],
    slow: [],
    // Spans of time of which events were missed.
    gaps: [],
    moves: 0,
    window: null,
    keep: LONGEST_S,
    segments: 0,
    letters: 0,
  };
}

/** Return the key of a conversation; ids of tenants are their own. */
export const keyOf = (id, tenant) => `${tenant ?? ""}\n${id}`;

// --- engines -------------------------------------------------------------------------------------

/** Return the letter or letters of the n-th engine: A, ..., Z, AA, ... */
export function letters(n) {
  return (n >= 26 ? letters(Math.floor(n / 26) - 1) : "") + String.fromCharCode(65 + (n % 26));
}

function engineOf(state, id, more = {}) {
  let engine = state.engines.get(id);
  if (!engine) {
    const number = state.letters++;
    engine = {
      id, number, letter: letters(number), role: "", capacity: 0, held: null, conversations: null,
      load: null, queued: null, leaving: false, gone: null, why: null, at: 0,
    };
    state.engines.set(id, engine);
  }
  return Object.assign(engine, more);
}

/** Take the answer of `/v1/engines`. */
export function setEngines(state, listed, at) {
  const there = new Set();
  for (const one of listed) {
    there.add(one.id);
    const known = state.engines.get(one.id);
    if (known?.gone && known.at > at - 3) continue;
    engineOf(state, one.id, {
      role: one.role, model: one.model, hosts: one.hosts, capacity: one.capacity_tokens, held: one.held_tokens,
      conversations: one.conversations, load: one.load, queued: one.queued_tokens,
      leaving: one.leaving, tier: one.tier, gone: null,
    });
  }
  for (const engine of state.engines.values()) {
    // An event may say why, soon.
    if (!there.has(engine.id) && !engine.gone && engine.at < at - 3) {
      Object.assign(engine, { gone: "gone", at });
    }
  }
}

// --- conversations -------------------------------------------------------------------------------

function conversationOf(state, id, tenant, at) {
  const key = keyOf(id, tenant);
  let found = state.conversations.get(key);
  if (!found) {
    found = {
      key, id, tenant: tenant ?? null, histories: new Map(), first: at, last: at, ended: null,
      ttfet: null, moves: 0, count: 0, hue: hueOf(key), parent: null, depth: 0,
    };
    state.conversations.set(key, found);
  }
  // An id may be used again. Its new life keeps the lane.
  if (at > found.ended) found.ended = null;
  return found;
}

function hueOf(key) {
  let hash = 2166136261;
  for (let i = 0; i < key.length; i++) hash = Math.imul(hash ^ key.charCodeAt(i), 16777619);
  return ((hash >>> 0) * 137.508) % 360;
}

function historyOf(state, conversation, number) {
  let found = conversation.histories.get(number);
  if (!found) {
    found = {
      // `number` is unique and long; `place` is its place among those of its conversation.
      conversation, number, place: conversation.histories.size + 1, segments: [], homes: [],
      marks: [], turns: [], running: new Map(), tools: new Map(), engine: null, before: null, held: 0, parked: 0, since: 0, placed: null,
      restored: null, open: null, waited: 0, lost: null, ended: null,
    };
    conversation.histories.set(number, found);
  }
  return found;
}

// At a history's lane, from `a` to `b`; while it is open `b` is null.
function begin(state, history, kind, at, engine = null, more = {}) {
  const segment = { kind, a: at, b: null, engine, ...more };
  history.segments.push(segment);
  state.segments++;
  return segment;
}

function close(segment, at) {
  if (segment && segment.b === null) segment.b = Math.max(segment.a, at);
}

function mark(history, kind, at, text, more = {}) {
  history.marks.push({ kind, at, text, ...more });
  if (history.marks.length > 200) history.marks.shift();
}

function bind(history, engine, at) {
  const last = history.homes.at(-1);
  if (last && last.b === null) {
    if (last.engine === engine) return;
    last.b = at;
  }
  if (engine !== null) {
    history.homes.push({ engine, a: at, b: null });
    history.before = engine;
  }
  history.engine = engine;
}

/** What a history does: `prefill`, `decode`, `tool`, `waiting`, `paused`, `lost`, `idle`. */
export function phaseOf(history) {
  if (history.running.size) {
    for (const turn of history.running.values()) if (turn.prefilling) return "prefill";
    return "decode";
  }
  if (history.open) return history.open.kind;
  return history.tools.size ? "tool" : "idle";
}

/** Put each conversation directly below its parent, if that is among them, and note its depth. */
export function byFamily(conversations) {
  const children = new Map(conversations.map((one) => [one.key, []]));
  const top = [];
  for (const one of conversations) {
    (children.get(one.parent && keyOf(one.parent, one.tenant)) ?? top).push(one);
  }
  const placed = new Set();
  // Those that are left after the top ones began each other in a circle.
  const stack = [...top, ...conversations].reverse().map((one) => [one, 0]);
  while (stack.length) {
    const [one, depth] = stack.pop();
    if (placed.has(one)) continue;
    placed.add(Object.assign(one, { depth }));
    for (const child of children.get(one.key).reverse()) stack.push([child, depth + 1]);
  }
  return [...placed];
}

/** The most telling of a conversation's histories: one that runs, or the one used last. */
export function leading(conversation) {
  let best = null;
  for (const history of conversation.histories.values()) {
    if (history.running.size) return history;
    if (best === null || history.since >= best.since) best = history;
  }
  return best;
}

// --- events --------------------------------------------------------------------------------------

/** Apply one event, as `/v1/events` has it. */
export function apply(state, event) {
  state.now = Math.max(state.now, event.at);
  const handle = HANDLERS[event.kind];
  if (!handle) return;
  if (event.conversation === undefined) {
    handle(state, event);
    return;
  }
  const conversation = conversationOf(state, event.conversation, event.tenant, event.at);
  const history = historyOf(state, conversation, event.history ?? event.model ?? null);
  if (event.at >= conversation.last) conversation.last = event.at;
  history.since = event.at;
  handle(state, event, history, conversation);
}

const HANDLERS = {
  wait(state, event, history) {
    close(history.open, event.at);
    history.open = begin(state, history, "waiting", event.at, null, { why: event.why });
    state.waiting.set(`${history.conversation.key}\n${history.number}`, {
      history, at: event.at, why: event.why, tokens: event.tokens, ahead: event.ahead,
      missing: event.missing_tokens, decoders: event.decoders,
    });
  },

  refuse(state, event, history) {
    stopWaiting(state, history, event.at);
    mark(history, "refused", event.at, `refused: ${REFUSALS[event.code] ?? event.code}`);
    if (history.before !== null) {
      history.open = begin(state, history, "paused", event.at);
    } else if (history.turns.length === 0) {
      history.ended = history.conversation.ended = event.at;
    }
  },

  place(state, event, history, conversation) {
    const { before } = history;
    conversation.parent = event.parent ?? null;
    history.ended = null;
    history.waited = stopWaiting(state, history, event.at);
    bind(history, event.decoder, event.at);
    engineOf(state, event.decoder);
    if (event.prefiller) engineOf(state, event.prefiller);
    const from = before !== null && before !== event.decoder ? before : null;
    if (from !== null || event.moved) {
      conversation.moves++;
      state.moves++;
      mark(history, "moved", event.at, movedText(state, from, event.decoder, history.lost), {
        from, to: event.decoder,
      });
    }
    history.placed = { isNew: event.new, from, tokens: event.tokens, lost: history.lost };
    history.lost = null;
    history.held = Math.max(history.held, event.tokens ?? 0);
  },

  start(state, event, history, conversation) {
    const waited = stopWaiting(state, history, event.at) || history.waited;
    endTools(history, event.at);
    close(history.open, event.at);
    history.open = null;
    const again = history.running.get(event.turn);
    if (again) endSegments(again, event.at);
    else conversation.count++;
    bind(history, event.decoder, event.at);
    const remote = event.prefiller ?? null;
    // When its own engine's prefill is over is known once the turn has ended.
    const prefilling = remote !== null;
    const turn = again ?? {
      id: event.turn, number: conversation.count, at: event.at, history: history.number,
      prefilledAt: null, end: null, outcome: null, prompt: null, cached: null, loaded: null,
      output: null, ttft: null, why: null, decodeS: null,
    };
    Object.assign(turn, {
      decoder: event.decoder, prefiller: remote, later: Boolean(event.later), prefilling, waited,
      continued: Boolean(again), placed: history.placed, restored: history.restored,
    });
    turn.begun = event.at;
    turn.segments = [
      begin(state, history, prefilling ? "prefill" : "decode", event.at, remote ?? event.decoder),
    ];
    history.placed = history.restored = null;
    history.waited = 0;
    history.running.set(turn.id, turn);
    if (!again) {
      history.turns.push(turn);
      if (history.turns.length > MOST_TURNS) history.turns.shift();
    }
  },

  prefilled(state, event, history) {
    const turn = history.running.get(event.turn);
    if (!turn) return;
    turn.prefilling = false;
    turn.prefilledAt = event.at;
    turn.prefillFailed = Boolean(event.failed);
    turn.prefilledTokens = event.tokens ?? null;
    turn.prefillerLoaded = event.loaded_tokens ?? 0;
    endSegments(turn, event.at);
    turn.segments.push(begin(state, history, "decode", event.at, turn.decoder));
    if (event.failed) mark(history, "failed", event.at, "the prefill failed");
  },

  end(state, event, history, conversation) {
    const turn = history.running.get(event.turn) ?? known(history, event.turn);
    history.held = (event.prompt_tokens ?? 0) + (event.output_tokens ?? 0);
    if (history.engine === null && event.decoder) bind(history, event.decoder, event.at);
    const prefilled = turn?.prefiller && !turn.prefillFailed;
    push(state.turns, {
      at: event.at,
      prompt: event.prompt_tokens,
      own: event.cached_tokens,
      // After a remote prefill, what was loaded is what the prefiller had computed or found.
      host: prefilled ? Math.min(turn.prefillerLoaded, event.loaded_tokens) : event.loaded_tokens,
    });
    if (event.why) {
      push(state.slow, { at: event.at, conversation, history, why: event.why });
      if (state.slow.length > MOST_SLOW) state.slow.shift();
    }
    const said = [event.why, event.note].filter(Boolean).join("; ");
    if (said) mark(history, event.why ? "slow" : "noted", turn?.at ?? event.at, said);
    if (!turn) return;
    Object.assign(turn, {
      end: event.at, outcome: "completed", decoder: event.decoder, prompt: event.prompt_tokens,
      cached: event.cached_tokens, loaded: event.loaded_tokens, output: event.output_tokens,
      why: event.why ?? null, decodeS: event.decode_s ?? null,
      note: [turn.note, event.note].filter(Boolean).join("; "),
      engineWaitS: event.engine_wait_s ?? null, prefilling: false,
    });
    history.running.delete(event.turn);
    endSegments(turn, event.at);
    refine(state, history, turn);
  },

  cut(state, event, history) {
    const turn = history.running.get(event.turn);
    if (!turn) return;
    history.running.delete(event.turn);
    Object.assign(turn, {
      end: event.at, outcome: turn.outcome ?? "cut", prefilling: false,
      output: event.output_tokens ?? null,
    });
    endSegments(turn, event.at);
    mark(history, "cut", event.at, "the turn was cut");
  },

  answered(state, event, history, conversation) {
    if (event.ttft_s !== undefined) push(state.ttft, { at: event.at, s: event.ttft_s });
    if (event.ttfet_s !== undefined) {
      push(state.ttfet, { at: event.at, s: event.ttfet_s });
      conversation.ttfet = event.ttfet_s;
    }
    const turn = known(history, event.turn);
    if (!turn) return;
    turn.ttft = event.ttft_s ?? null;
    turn.latency = event.latency_s;
    if (event.outcome !== "completed") turn.outcome = event.outcome;
    if (turn.ttft !== null) turn.firstAt = event.at - event.latency_s + event.ttft_s;
    refine(state, history, turn);
  },

  park(state, event, history) {
    history.parked = event.tokens;
  },

  pause(state, event, history) {
    endTools(history, event.at);
    bind(history, null, event.at);
    close(history.open, event.at);
    history.open = begin(state, history, "paused", event.at, null, { why: event.reason });
    history.pausedFrom = event.decoder;
    mark(history, "paused", event.at, `paused: ${PAUSES[event.reason] ?? event.reason}`);
  },

  restore(state, event, history) {
    history.restored = event.where;
  },

  ended(state, event, history, conversation) {
    stopWaiting(state, history, event.at);
    for (const turn of history.running.values()) endSegments(turn, event.at);
    history.running.clear();
    endTools(history, event.at);
    close(history.open, event.at);
    history.open = null;
    bind(history, null, event.at);
    history.held = 0;
    history.ended = event.at;
    // Its client may be served by another attempt at once.
    if (event.reason === "first_turn_failed") return;
    history.before = history.lost = null;
    mark(history, "ended", event.at, `ended: ${event.reason}`);
    if ([...conversation.histories.values()].every((one) => one.ended !== null)) {
      conversation.ended = event.at;
    }
  },

  tool_start(state, event, history) {
    const key = event.call_id ?? event.tool;
    close(history.tools.get(key), event.at);
    history.tools.set(key, begin(state, history, "tool", event.at, null, { label: event.tool }));
  },

  tool_end(state, event, history) {
    const key = event.call_id ?? event.tool;
    close(history.tools.get(key), event.at);
    history.tools.delete(key);
  },

  engine_ready(state, event) {
    engineOf(state, event.engine, {
      role: event.role, model: event.model, capacity: event.capacity_tokens, gone: null, why: null, at: event.at,
    });
  },

  engine_lost(state, event) {
    leave(state, event, "lost");
  },

  engine_left(state, event) {
    leave(state, event, "left");
  },

  window(state, event) {
    state.window = event.limit === undefined ? null : event;
  },
};

function leave(state, event, how) {
  const engine = engineOf(state, event.engine, {
    role: event.role, gone: how, why: event.why ?? null, at: event.at, held: 0, conversations: 0,
    load: null, unbound: event.unbound,
  });
  for (const conversation of state.conversations.values()) {
    for (const history of conversation.histories.values()) {
      if (history.engine !== engine.id) continue;
      bind(history, null, event.at);
      history.lost = { engine: engine.id, how, at: event.at };
      for (const turn of history.running.values()) endSegments(turn, event.at);
      close(history.open, event.at);
      history.open = begin(state, history, "lost", event.at, engine.id);
      const text = `engine ${engine.letter} ${how === "lost" ? "was lost" : "has left"}`;
      const last = history.marks.at(-1);
      // Its turn was cut by this.
      if (last?.kind === "cut" && last.at > event.at - 1) {
        last.text = `${text} in mid-turn`;
        history.turns.at(-1).note = last.text;
      } else mark(history, "lost", event.at, text);
    }
  }
}

function movedText(state, from, to, lost) {
  const name = (id) => state.engines.get(id)?.letter ?? "?";
  const why = lost ? `, because ${name(lost.engine)} ${lost.how === "lost" ? "was lost" : "has left"}` : "";
  return `moved${from ? ` from ${name(from)}` : ""} to ${name(to)}${why}`;
}

/** End the wait of a history; returns how many seconds it was. */
function stopWaiting(state, history, at) {
  const key = `${history.conversation.key}\n${history.number}`;
  const waited = state.waiting.get(key);
  state.waiting.delete(key);
  if (history.open?.kind === "waiting") {
    close(history.open, at);
    history.open = null;
  }
  return waited ? at - waited.at : 0;
}

function endTools(history, at) {
  for (const segment of history.tools.values()) close(segment, at);
  history.tools.clear();
}

function endSegments(turn, at) {
  for (const segment of turn.segments) close(segment, at);
}

const known = (history, id) => history.turns.findLast((turn) => turn.id === id);

function push(samples, one) {
  samples.push(one);
  if (samples.length > MOST_SAMPLES) samples.splice(0, MOST_SAMPLES / 4);
}

/** Divide a turn that has ended at its first token, now that this is known. */
function refine(state, history, turn) {
  if (turn.end === null || turn.outcome !== "completed") return;
  const last = turn.segments.at(-1);
  const from = turn.prefilledAt ?? turn.begun;
  const first = turn.decodeS ? turn.end - turn.decodeS : turn.firstAt;
  if (first === undefined || turn.refined || turn.continued) return;
  turn.refined = true;
  const at = Math.min(turn.end, Math.max(from, first));
  if (at - from > LEAST_S) {
    // Its own prefill, or the load of what was prefilled elsewhere.
    last.kind = turn.prefiller ? "handoff" : "prefill";
    last.b = at;
    turn.segments.push(begin(state, history, "decode", at, turn.decoder));
    close(turn.segments.at(-1), turn.end);
  } else {
    last.kind = "decode";
  }
}

// --- snapshots, gaps, bounds ---------------------------------------------------------------------

// Events come within so long.
const UNTOLD_S = 2;

function stopRunning(conversation, before, at) {
  for (const history of conversation.histories.values()) {
    for (const turn of history.running.values()) {
      if (turn.begun > before) continue;
      endSegments(turn, at);
      Object.assign(turn, { end: at, outcome: "end unknown", prefilling: false });
      history.running.delete(turn.id);
    }
  }
}

/** Take the answer of `/v1/conversations`, for what events have not told. */
export function setConversations(state, answer, at) {
  const listed = new Set();
  for (const one of answer.data) {
    listed.add(keyOf(one.id, one.tenant));
    const existed = state.conversations.has(keyOf(one.id, one.tenant));
    const conversation = conversationOf(state, one.id, one.tenant, one.created);
    if (!existed) conversation.last = one.last_used;
    conversation.first = Math.min(conversation.first, one.created);
    conversation.ttfet ??= one.ttfet_s;
    conversation.parent = one.parent;
    conversation.moves = Math.max(conversation.moves, one.moves);
    conversation.count = Math.max(conversation.count, one.turns);
    // Of a table that died, ends may never be told.
    if (existed && one.phase !== "reasoning") stopRunning(conversation, at - UNTOLD_S, at);
    if (conversation.histories.size > 1) continue;
    const [history] = conversation.histories.values();
    const only = history ?? historyOf(state, conversation, null);
    if (only.homes.length === 0 && one.decoder !== null) {
      engineOf(state, one.decoder);
      only.homes.push({ engine: one.decoder, a: one.created, b: null });
      only.engine = one.decoder;
    }
    only.held ||= one.held_tokens;
    if (!history) {
      only.since = one.last_used;
      if (one.phase === "paused") only.open = begin(state, only, "paused", one.last_used);
    }
  }
  // All are listed, so the others have ended.
  if (answer.total <= answer.data.length) {
    for (const conversation of state.conversations.values()) {
      if (!listed.has(conversation.key) && conversation.ended === null && conversation.last < at - 5) {
        for (const history of conversation.histories.values()) {
          HANDLERS.ended(state, { at, reason: "unseen" }, history, conversation);
        }
        conversation.ended = at;
      }
    }
  }
}

/** Note that events were missed until a time: what was open then is not known to go on. */
export function missed(state, count, at) {
  const from = state.now || at;
  state.gaps.push({ a: from, b: at, count });
  if (state.gaps.length > 20) state.gaps.shift();
  state.waiting.clear();
  for (const conversation of state.conversations.values()) {
    for (const history of conversation.histories.values()) {
      for (const segment of history.segments) close(segment, from);
      history.running.clear();
      history.tools.clear();
      history.open = null;
    }
  }
}

/** Forget what is older than the longest window, or more than is kept. */
export function trim(state, now) {
  if (state.segments > MOST_SEGMENTS) state.keep = Math.max(30, state.keep * 0.8);
  const horizon = now - state.keep;
  const old = (one) => one.at < horizon;
  for (const name of ["turns", "ttft", "ttfet", "slow"]) dropWhile(state[name], old);
  dropWhile(state.gaps, (one) => one.b < horizon);
  let segments = 0;
  for (const conversation of state.conversations.values()) {
    if (conversation.ended !== null && conversation.ended < horizon) {
      state.conversations.delete(conversation.key);
      continue;
    }
    for (const history of conversation.histories.values()) {
      dropWhile(history.segments, (one) => one.b !== null && one.b < horizon);
      dropWhile(history.homes, (one) => one.b !== null && one.b < horizon);
      dropWhile(history.marks, old);
      segments += history.segments.length;
    }
  }
  state.segments = segments;
  if (state.conversations.size > MOST_CONVERSATIONS) {
    const all = [...state.conversations.values()].sort((one, other) => one.last - other.last);
    for (const one of all.slice(0, all.length - MOST_CONVERSATIONS)) state.conversations.delete(one.key);
  }
  for (const engine of state.engines.values()) {
    if (engine.gone && engine.at < now - LONGEST_S) state.engines.delete(engine.id);
  }
}

function dropWhile(list, test) {
  let count = 0;
  while (count < list.length && test(list[count])) count++;
  if (count) list.splice(0, count);
}

// --- what is said of it --------------------------------------------------------------------------

const REFUSALS = { queue_full: "the queue was full", timeout: "it waited too long for room" };
const PAUSES = {
  room: "a new prompt needed its room",
  mark: "running turns needed its room",
};
export const WAITS = {
  room: "no decoder has room",
  order: "others go first",
  window: "as many are active as the admission window admits",
};
const RESTORED = {
  kept: "it was paused, and its decoder still had it",
  reloaded: "it was paused, and reloaded from host memory",
  moved: "it was paused, and placed on another decoder",
  again: "it was paused, and its decoder had not kept it",
  unbound: "its engine was lost, or had left",
};

/** Format a number of tokens. */
export const tokens = (count) => Math.round(count).toLocaleString("en");

/** Format seconds, in at most four characters and a unit. */
export function seconds(s) {
  if (s < 0.9995) return `${Math.round(s * 1000)} ms`;
  if (s < 9.95) return `${s.toFixed(1)} s`;
  if (s < 119.5) return `${Math.round(s)} s`;
  return s < 7170 ? `${Math.round(s / 60)} min` : `${Math.round(s / 3600)} h`;
}

/** Say where a turn's KV came from, and why there. */
export function source(state, turn) {
  const name = (id) => state.engines.get(id)?.letter ?? "?";
  const parts = [];
  if (turn.placed?.isNew) parts.push("first turn of its history");
  else if (turn.placed?.lost) {
    const { engine, how } = turn.placed.lost;
    const again = turn.restored === "reloaded" ? ", so it was reloaded from host memory" : "";
    parts.push(`engine ${name(engine)} ${how === "lost" ? "was lost" : "has left"}${again}`);
  } else if (turn.restored) parts.push(RESTORED[turn.restored] ?? turn.restored);
  if (turn.prefiller) {
    parts.push(
      turn.prefillFailed
        ? `its prefill on ${name(turn.prefiller)} failed, so ${name(turn.decoder)} computed it`
        : `prefilled on ${name(turn.prefiller)}, handed off to ${name(turn.decoder)}`,
    );
  }
  if (turn.note) parts.push(turn.note);
  if (turn.prompt !== null) {
    const found = [];
    if (turn.cached) found.push(`${tokens(turn.cached)} in ${name(turn.decoder)}'s own cache`);
    if (turn.loaded) found.push(`${tokens(turn.loaded)} from LMCache`);
    found.push(`${tokens(Math.max(0, turn.prompt - turn.cached - turn.loaded))} computed there`);
    parts.push(found.join(", "));
  }
  return parts.join("; ");
}

/** Return the q-th quantile by the nearest rank; null of none. */
export function quantile(values, q) {
  if (values.length === 0) return null;
  const sorted = Float64Array.from(values).sort();
  return sorted[Math.min(sorted.length - 1, Math.floor(q * sorted.length))];
}

/** Count live conversations by what they do. */
export function countPhases(state) {
  const counts = { prefill: 0, decode: 0, tool: 0, waiting: 0, paused: 0, lost: 0, idle: 0 };
  for (const conversation of state.conversations.values()) {
    if (conversation.ended === null) {
      const history = leading(conversation);
      if (history) counts[phaseOf(history)]++;
    }
  }
  return counts;
}

/** Return what an engine holds, the largest first: conversations and tokens, and how many more. */
export function occupancy(state, most = 24) {
  const by = new Map();
  for (const conversation of state.conversations.values()) {
    if (conversation.ended !== null) continue;
    for (const history of conversation.histories.values()) {
      if (history.engine === null || !history.held) continue;
      let list = by.get(history.engine);
      if (!list) by.set(history.engine, (list = []));
      list.push({ conversation, history, held: history.held });
    }
  }
  for (const [engine, list] of by) {
    list.sort((a, b) => b.held - a.held || (a.conversation.key < b.conversation.key ? -1 : 1));
    const rest = list.slice(most);
    by.set(engine, {
      top: list.slice(0, most),
      count: list.length,
      rest: rest.reduce((sum, one) => sum + one.held, 0),
      total: list.reduce((sum, one) => sum + one.held, 0),
    });
  }
  return by;
}
