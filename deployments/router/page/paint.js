// Draws on canvases: lanes, charts, and the legend that says what their marks mean.
//
// Each state has a pattern and a place beside its colour, so it can be told without seeing colour.

import { quantile, seconds } from "./state.js";

/** What a lane can show, in the order of the legend. */
export const STATES = {
  prefill: { name: "prefill", about: "a prompt is computed; the letter is its engine's" },
  handoff: { name: "handoff", about: "KV that was prefilled elsewhere is loaded" },
  decode: { name: "decode", about: "the answer is generated" },
  tool: { name: "tool", about: "a tool runs, as the agent reports it" },
  waiting: { name: "waiting", about: "the turn waits for room" },
  paused: { name: "paused", about: "its room was needed; bound to no engine" },
  lost: { name: "engine lost", about: "its engine is gone; its next turn is placed anew" },
};
const PHASES = ["decode", "prefill", "tool", "waiting", "paused", "lost", "idle"];
const HATCH = 7;
// Of engines; none is that of an alarm.
const HUES = [205, 150, 275, 40, 310, 180, 95, 240];

/** Colours and patterns of the current theme. */
export class Paint {
  constructor() {
    const style = getComputedStyle(document.documentElement);
    this.color = {};
    for (const name of [
      "text", "muted", "line", "card", "ground", "alarm", "accent", ...Object.keys(STATES), "idle",
    ]) {
      this.color[name] = style.getPropertyValue(`--${name}`).trim();
    }
    this.dark = style.getPropertyValue("--dark").trim() === "1";
    this.font = style.getPropertyValue("--font").trim() || "sans-serif";
    this.scale = Math.min(3, devicePixelRatio || 1);
    this.patterns = {};
    for (const kind of Object.keys(STATES)) this.patterns[kind] = this.pattern(kind);
  }

  pattern(kind) {
    const size = Math.round(HATCH * this.scale);
    const canvas = new OffscreenCanvas(size, size);
    const draw = canvas.getContext("2d");
    const color = this.color[kind];
    draw.scale(size / HATCH, size / HATCH);
    draw.lineCap = "square";
    draw.strokeStyle = draw.fillStyle = color;
    const lines = (width, ...each) => {
      draw.lineWidth = width;
      for (const [x0, y0, x1, y1] of each) {
        draw.beginPath();
        draw.moveTo(x0, y0);
        draw.lineTo(x1, y1);
        draw.stroke();
      }
    };
    const wash = (alpha) => {
      draw.globalAlpha = alpha;
      draw.fillRect(0, 0, HATCH, HATCH);
      draw.globalAlpha = 1;
    };
    const h = HATCH;
    if (kind === "decode") draw.fillRect(0, 0, h, h);
    if (kind === "prefill") {
      wash(0.25);
      lines(1.8, [0, h, h, 0], [-1, 1, 1, -1], [h - 1, h + 1, h + 1, h - 1]);
    }
    if (kind === "handoff") {
      wash(0.2);
      lines(1.7, [1, -1, 4, h / 2], [4, h / 2, 1, h + 1]);
    }
    if (kind === "tool") {
      wash(0.14);
      draw.beginPath();
      draw.arc(h / 2, h / 2, 1.15, 0, 7);
      draw.fill();
    }
    if (kind === "waiting") {
      wash(0.16);
      lines(1.8, [h / 2, 0, h / 2, h]);
    }
    if (kind === "paused") lines(1.4, [0, h / 2, 3, h / 2]);
    if (kind === "lost") lines(1.1, [0, 0, h, h], [0, h, h, 0]);
    const pattern = draw.createPattern(canvas, "repeat");
    pattern.setTransform(new DOMMatrix().scale(1 / this.scale));
    return pattern;
  }

  /** The colour of an engine; beside it its letter is always shown. */
  engine(number) {
    const hue = HUES[number % HUES.length];
    return this.dark ? `hsl(${hue} 60% 66%)` : `hsl(${hue} 62% 38%)`;
  }

  /** The fill of a conversation's share of an engine. */
  conversation(hue, at) {
    const light = this.dark ? 38 + (at % 3) * 6 : 74 - (at % 3) * 6;
    return `hsl(${hue} 42% ${light}%)`;
  }

  /** Size a canvas to its place, and return its context in CSS pixels. */
  context(canvas) {
    const width = canvas.clientWidth;
    const height = canvas.clientHeight;
    const [w, h] = [Math.round(width * this.scale), Math.round(height * this.scale)];
    if (canvas.width !== w || canvas.height !== h) Object.assign(canvas, { width: w, height: h });
    const draw = canvas.getContext("2d");
    draw.setTransform(this.scale, 0, 0, this.scale, 0, 0);
    draw.clearRect(0, 0, width, height);
    draw.textBaseline = "middle";
    return { draw, width, height };
  }
}

/** Draw one state as lanes do. */
export function swatch(paint, canvas, kind) {
  const { draw, width, height } = paint.context(canvas);
  if (kind === "home") {
    draw.fillStyle = paint.engine(0);
    draw.fillRect(0, height / 2 - 1.5, width, 3);
    return;
  }
  block(paint, draw, kind, 0, 1, width, height - 2);
}

function block(paint, draw, kind, x, y, width, height) {
  if (kind === "paused") {
    draw.strokeStyle = paint.color.paused;
    draw.lineWidth = 1.5;
    draw.setLineDash([4, 3]);
    draw.beginPath();
    draw.moveTo(x, y + height / 2);
    draw.lineTo(x + width, y + height / 2);
    draw.stroke();
    draw.setLineDash([]);
    return;
  }
  draw.fillStyle = paint.patterns[kind];
  draw.fillRect(x, y, width, height);
  if (kind !== "decode" && width > 3) {
    draw.strokeStyle = paint.color[kind];
    draw.lineWidth = 1;
    draw.strokeRect(x + 0.5, y + 0.5, width - 1, height - 1);
  }
}

// --- lanes ---------------------------------------------------------------------------------------

export const ROW = 28;
const TOP = 4;
const BLOCK = 12;
const RAIL = 20;
/** Room for what is now, right of the last second. */
export const EDGE = 6;
// In front of others.
const ORDER = { tool: 0, paused: 0, lost: 0, waiting: 1, prefill: 2, handoff: 2, decode: 3 };

/** Draw rows of lanes; returns what can be pointed at: boxes with what they show. */
export function drawLanes(paint, canvas, { rows, state, now, span, selected, offset }) {
  const { draw, width, height } = paint.context(canvas);
  const x = (at) => width - EDGE - ((now - at) / span) * (width - EDGE);
  const from = now - span;
  const spots = [];
  gridLines(paint, draw, width, height, span);
  for (const gap of state.gaps) {
    if (gap.b < from) continue;
    const [a, b] = [Math.max(0, x(gap.a)), x(gap.b)];
    draw.fillStyle = paint.color.line;
    draw.fillRect(a, 0, Math.max(2, b - a), height);
    spots.push({ x: a, y: 0, w: Math.max(4, b - a), h: height, gap });
  }
  rows.forEach((row, index) => {
    const y = index * ROW - offset;
    if (row === selected) {
      draw.fillStyle = paint.color.accent;
      draw.globalAlpha = 0.1;
      draw.fillRect(0, y, width, ROW);
      draw.globalAlpha = 1;
    }
    draw.fillStyle = paint.color.line;
    draw.fillRect(0, y + ROW - 0.5, width, 0.5);
    lane(paint, draw, state, row, { x, y, from, now, width, spots });
  });
  draw.fillStyle = paint.color.muted;
  draw.globalAlpha = 0.5;
  draw.fillRect(width - EDGE, 0, 1, height);
  draw.globalAlpha = 1;
  return spots;
}

function lane(paint, draw, state, history, { x, y, from, now, width, spots }) {
  let said = null;
  for (const home of history.homes) {
    if (home.b !== null && home.b < from) continue;
    const a = Math.max(0, x(home.a));
    const b = Math.min(x(Math.min(now, home.b ?? now)), width - EDGE);
    const engine = state.engines.get(home.engine);
    draw.fillStyle = engine ? paint.engine(engine.number) : paint.color.muted;
    draw.fillRect(a, y + RAIL, Math.max(1, b - a), 3);
    // Where it lives is said again in letters.
    if (engine && engine !== said) {
      draw.font = `700 8.5px ${paint.font}`;
      const wide = draw.measureText(engine.letter).width + 6;
      if (b - a > wide + 4) {
        draw.fillRect(a, y + RAIL - 2.5, wide, 8.5);
        draw.fillStyle = paint.color.card;
        draw.fillText(engine.letter, a + 3, y + RAIL + 2);
        said = engine;
      }
    }
    spots.push({ x: a, y: y + RAIL - 2, w: b - a, h: 7, history, home });
  }
  const shown = history.segments.filter((one) => (one.b ?? now) >= from && one.a <= now);
  shown.sort((one, other) => ORDER[one.kind] - ORDER[other.kind]);
  for (const one of shown) {
    const a = Math.max(0, x(one.a));
    const b = Math.min(x(Math.min(now, one.b ?? now)), width - EDGE);
    const wide = Math.max(1.5, b - a);
    block(paint, draw, one.kind, a, y + TOP, wide, BLOCK);
    label(paint, draw, state, one, a, y + TOP, wide);
    spots.push({ x: a - 1, y: y + TOP - 1, w: Math.max(5, wide + 2), h: BLOCK + 2, history, segment: one });
  }
  let free = -Infinity;
  for (const one of history.marks) {
    if (one.at < from || one.at > now) continue;
    const at = x(one.at);
    const spot = drawMark(paint, draw, state, one, at, y, free);
    if (!spot) continue;
    if (one.kind === "moved") free = spot.x + spot.w + 2;
    spots.push({ ...spot, history, mark: one });
  }
}

function label(paint, draw, state, segment, x, y, width) {
  let text = "";
  if (segment.kind === "tool") text = segment.label ?? "";
  if (segment.kind === "prefill") text = state.engines.get(segment.engine)?.letter ?? "";
  if (segment.kind === "waiting") text = "waits";
  if (segment.kind === "paused") text = "paused";
  if (segment.kind === "lost") text = "engine lost";
  if (!text || width < 14) return;
  draw.font = `600 9.5px ${paint.font}`;
  const wide = draw.measureText(text).width;
  if (wide + 8 > width) return;
  draw.fillStyle = paint.color.card;
  draw.globalAlpha = 0.88;
  draw.fillRect(x + 2, y + 1.5, wide + 6, BLOCK - 3);
  draw.globalAlpha = 1;
  draw.fillStyle = paint.color.text;
  draw.fillText(text, x + 5, y + BLOCK / 2 + 0.5);
}

function drawMark(paint, draw, state, mark, x, y, free) {
  const middle = y + TOP + BLOCK / 2;
  if (mark.kind === "moved") {
    const name = (id) => state.engines.get(id)?.letter ?? "?";
    const text = mark.from ? `${name(mark.from)} → ${name(mark.to)}` : `→ ${name(mark.to)}`;
    draw.font = `700 10px ${paint.font}`;
    const wide = draw.measureText(text).width + 10;
    const left = Math.max(free, x - wide);
    draw.fillStyle = paint.color.text;
    draw.beginPath();
    draw.roundRect(left, y + TOP - 1.5, wide, BLOCK + 3, 3);
    draw.fill();
    draw.fillStyle = paint.color.card;
    draw.fillText(text, left + 5, middle + 0.5);
    return { x: left, y: y + 2, w: wide, h: BLOCK + 4 };
  }
  if (mark.kind === "slow" || mark.kind === "noted") {
    Object.assign(draw, { fillStyle: paint.color.alarm, strokeStyle: paint.color.text, lineWidth: 1 });
    const triangle = new Path2D(`M${x - 4} ${y + 0.5} h8 l-4 6.5 z`);
    draw[mark.kind === "slow" ? "fill" : "stroke"](triangle);
    return { x: x - 5, y: y - 1, w: 10, h: 9 };
  }
  if (["cut", "lost", "refused", "failed"].includes(mark.kind)) {
    draw.strokeStyle = paint.color.alarm;
    draw.lineWidth = 2;
    draw.stroke(new Path2D(`M${x - 4} ${middle - 4} l8 8 m0 -8 l-8 8`));
    return { x: x - 5, y: middle - 5, w: 10, h: 10 };
  }
  if (mark.kind === "ended") {
    draw.fillStyle = paint.color.muted;
    draw.fillRect(x - 1, y + TOP, 2, ROW - TOP - 4);
    return { x: x - 4, y: y + TOP, w: 8, h: ROW - 8 };
  }
  return null;
}

/** Seconds between the lines of a window. */
const stepOf = (span) => (span <= 60 ? 10 : span <= 300 ? 60 : 180);

function gridLines(paint, draw, width, height, span) {
  draw.fillStyle = paint.color.line;
  for (let s = stepOf(span); s < span; s += stepOf(span)) {
    draw.fillRect(width - EDGE - (s / span) * (width - EDGE), 0, 1, height);
  }
}

/** Draw the axis above the lanes. */
export function drawAxis(paint, canvas, span) {
  const { draw, width, height } = paint.context(canvas);
  draw.font = `11px ${paint.font}`;
  draw.fillStyle = paint.color.muted;
  draw.textAlign = "center";
  for (let s = stepOf(span); s < span; s += stepOf(span)) {
    const text = s < 60 ? `−${s} s` : `−${s / 60} min`;
    draw.fillText(text, width - EDGE - (s / span) * (width - EDGE), height / 2);
  }
  draw.textAlign = "right";
  draw.fillText("now", width - 1, height / 2);
  draw.textAlign = "left";
}

// --- charts --------------------------------------------------------------------------------------

const BUCKETS = 48;
const MOST_DOTS = 1500;

/** Draw times as dots on a logarithmic scale, with their median and 95th percentile as lines. */
export function drawTimes(paint, canvas, samples, now, span, lines = true) {
  const { draw, width, height } = paint.context(canvas);
  const left = 42;
  const seen = samples.filter((one) => one.at >= now - span && one.at <= now && one.s > 0);
  const [low, high] = seen.reduce(
    ([a, b], { s }) => [Math.min(a, s), Math.max(b, s)], [0.1, 1],
  );
  const [bottom, top] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  const y = (s) => height - 5 - ((Math.log10(s) - bottom) / (top - bottom)) * (height - 10);
  const x = (at) => left + (1 - (now - at) / span) * (width - left);
  draw.font = `10px ${paint.font}`;
  for (let power = bottom; power <= top; power++) {
    draw.fillStyle = paint.color.line;
    draw.fillRect(left, y(10 ** power), width - left, 1);
    draw.fillStyle = paint.color.muted;
    if (top - bottom < 4 || (power - bottom) % 2 === 0) {
      draw.fillText(seconds(10 ** power), 0, y(10 ** power));
    }
  }
  draw.fillStyle = paint.color.decode;
  draw.globalAlpha = lines ? 0.45 : 0.9;
  const every = Math.ceil(seen.length / MOST_DOTS);
  for (let i = 0; i < seen.length; i += every || 1) {
    draw.fillRect(x(seen[i].at) - 1.25, y(seen[i].s) - 1.25, 2.5, 2.5);
  }
  draw.globalAlpha = 1;
  if (!lines) return;
  const byBucket = Array.from({ length: BUCKETS }, () => []);
  for (const one of seen) {
    byBucket[Math.min(BUCKETS - 1, Math.floor((1 - (now - one.at) / span) * BUCKETS))].push(one.s);
  }
  for (const [q, dash, color] of [[0.5, [], "text"], [0.95, [3, 2], "alarm"]]) {
    draw.strokeStyle = paint.color[color];
    draw.lineWidth = 1.5;
    draw.setLineDash(dash);
    draw.beginPath();
    let on = false;
    byBucket.forEach((values, bucket) => {
      // A few neighbours steady what is rare.
      const near = values.concat(byBucket[bucket - 1] ?? [], byBucket[bucket - 2] ?? []);
      if (!near.length) {
        on = false;
        return;
      }
      const at = [left + ((bucket + 0.5) / BUCKETS) * (width - left), y(quantile(near, q))];
      draw[on ? "lineTo" : "moveTo"](...at);
      on = true;
    });
    draw.stroke();
  }
  draw.setLineDash([]);
}

/** Draw where prompt tokens came from, as shares of each while: own cache, host memory, computed. */
export function drawShares(paint, canvas, turns, now, span) {
  const { draw, width, height } = paint.context(canvas);
  const left = 42;
  const sums = Array.from({ length: BUCKETS }, () => ({ own: 0, host: 0, prompt: 0 }));
  for (const turn of turns) {
    if (turn.at < now - span || turn.at > now) continue;
    const sum = sums[Math.min(BUCKETS - 1, Math.floor((1 - (now - turn.at) / span) * BUCKETS))];
    for (const part of ["own", "host", "prompt"]) sum[part] += turn[part];
  }
  draw.font = `10px ${paint.font}`;
  const whole = height - 10;
  for (const share of [0, 0.5, 1]) {
    draw.fillStyle = paint.color.line;
    draw.fillRect(left, height - 5 - share * whole, width - left, 1);
    draw.fillStyle = paint.color.muted;
    draw.fillText(`${share * 100} %`, 0, height - 5 - share * whole);
  }
  const step = (width - left) / BUCKETS;
  sums.forEach((sum, bucket) => {
    if (!sum.prompt) return;
    let bottom = height - 5;
    const x = left + bucket * step;
    for (const [part, kind] of [["own", "decode"], ["host", "handoff"]]) {
      const tall = (sum[part] / sum.prompt) * whole;
      draw.fillStyle = paint.patterns[kind];
      draw.fillRect(x + 0.5, bottom - tall, step - 1, tall);
      bottom -= tall;
    }
    draw.strokeStyle = paint.color.muted;
    draw.globalAlpha = 0.55;
    draw.strokeRect(x + 1, height - 5 - whole, step - 2, Math.max(0, bottom - (height - 5 - whole)));
    draw.globalAlpha = 1;
  });
}

/** Draw how many conversations did what, one on the other. */
export function drawPhases(paint, canvas, samples, now, span) {
  const { draw, width, height } = paint.context(canvas);
  const left = 42;
  const seen = samples.filter((one) => one.at >= now - span - 2);
  const total = (one) => PHASES.reduce((sum, phase) => sum + one.counts[phase], 0);
  const most = niceTop(seen.reduce((top, one) => Math.max(top, total(one)), 1));
  const y = (count) => height - 5 - (count / most) * (height - 10);
  const x = (at) => Math.max(left, left + (1 - (now - at) / span) * (width - left));
  draw.font = `10px ${paint.font}`;
  for (const share of [0, 0.5, 1]) {
    if (most * share !== Math.round(most * share)) continue;
    draw.fillStyle = paint.color.line;
    draw.fillRect(left, y(most * share), width - left, 1);
    draw.fillStyle = paint.color.muted;
    draw.fillText((most * share).toLocaleString("en"), 0, y(most * share));
  }
  if (!seen.length) return;
  const base = seen.map(() => 0);
  for (const phase of PHASES) {
    if (!seen.some((one) => one.counts[phase])) continue;
    draw.beginPath();
    seen.forEach((one, i) => {
      const next = seen[i + 1];
      const top = y(base[i] + one.counts[phase]);
      draw.lineTo(x(one.at), top);
      draw.lineTo(x(next ? next.at : now), top);
    });
    for (let i = seen.length - 1; i >= 0; i--) {
      draw.lineTo(x(seen[i + 1] ? seen[i + 1].at : now), y(base[i]));
      draw.lineTo(x(seen[i].at), y(base[i]));
    }
    draw.closePath();
    draw.fillStyle = phase === "idle" ? paint.color.idle : paint.patterns[phase];
    draw.fill();
    seen.forEach((one, i) => (base[i] += one.counts[phase]));
  }
}

function niceTop(count) {
  const power = 10 ** Math.floor(Math.log10(count));
  return [1, 2, 4, 6, 10].map((one) => one * power).find((one) => one >= count);
}
