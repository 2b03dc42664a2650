// The page's connection: events as they come, and answers that are asked for.
//
// `EventSource` cannot send a key, so the stream is read by `fetch`. Paths are relative: a proxy may
// serve all of this below a prefix.

const KEY = "conserve-key";
// The server is never silent for longer than ten seconds.
const SILENT_MS = 25000;
const RETRIES_MS = [500, 1000, 2000, 5000, 10000];
// A page that nobody sees keeps listening for so long.
const HIDDEN_MS = 60000;
const RESTARTING = "the conversation table is being restarted";

/** An answer that is an error; `status` is 0 where there was none. */
export class Refused extends Error {
  constructor(status, message, retryAfterS = 0) {
    super(message);
    this.status = status;
    this.retryAfterS = retryAfterS;
  }
}

/** The key of this tab, which goes with the tab. */
export const key = {
  get: () => sessionStorage.getItem(KEY),
  set: (text) => (text ? sessionStorage.setItem(KEY, text) : sessionStorage.removeItem(KEY)),
};

async function request(path, options = {}) {
  const headers = { ...options.headers };
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  let answer;
  try {
    answer = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    throw new Refused(0, error.name === "AbortError" ? "silent" : "no answer");
  }
  if (answer.ok) return answer;
  let message = `status ${answer.status}`;
  try {
    message = (await answer.json()).error.message;
  } catch {
    // Of a proxy, perhaps.
  }
  throw new Refused(answer.status, message, Number(answer.headers.get("retry-after")) || 0);
}

/** Return a path's JSON, and the server's time in Unix seconds. */
export async function get(path) {
  const answer = await request(path, { signal: AbortSignal.timeout(20000) });
  const at = Date.parse(answer.headers.get("date")) / 1000;
  return { body: await answer.json(), at: Number.isNaN(at) ? null : at };
}

/** Listens for as long as the page is there. */
export class Feed {
  /**
   * `on` has: `events(list)`, `missed(count)`, `status(state, text)`, `connected()`,
   * and `denied(error)`, which resolves once there may be another key.
   */
  constructor(kinds, on) {
    this.on = on;
    // From the first that is kept.
    this.last = "0";
    this.query = kinds.map((kind) => `kind=${kind}`).join("&");
    this.hiddenSince = null;
    document.addEventListener("visibilitychange", () => this.seen());
    this.seen();
  }

  seen() {
    clearTimeout(this.hiding);
    if (document.hidden) this.hiding = setTimeout(() => this.abort?.abort(), HIDDEN_MS);
    else this.wake?.();
  }

  async run() {
    for (let failures = 0; ; ) {
      try {
        await this.listen(() => (failures = 0));
        this.on.status("lost", "The stream ended; connecting again");
      } catch (error) {
        if (error.status === 401 || error.status === 403) {
          this.on.status("denied", "A key is needed");
          await this.on.denied(error);
          continue;
        }
        const why = error instanceof Refused ? error.message : "the connection broke";
        this.on.status("lost", `Connecting again: ${why}`);
        if (error.retryAfterS) await sleep(error.retryAfterS * 1000);
      }
      if (document.hidden) await new Promise((resolve) => (this.wake = resolve));
      await sleep(RETRIES_MS[Math.min(failures++, RETRIES_MS.length - 1)]);
    }
  }

  async listen(hears) {
    const abort = (this.abort = new AbortController());
    let silent;
    const alive = () => {
      clearTimeout(silent);
      silent = setTimeout(() => abort.abort(), SILENT_MS);
    };
    alive();
    try {
      const answer = await request(`v1/events?${this.query}`, {
        headers: { "Last-Event-ID": this.last },
        signal: abort.signal,
      });
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      let told = false;
      for (;;) {
        const { value, done } = await reader.read();
        if (done) return;
        alive();
        hears();
        text += value;
        const parts = text.split("\n\n");
        text = parts.pop();
        this.take(parts);
        if (!told) this.on.connected();
        told = true;
      }
    } finally {
      clearTimeout(silent);
      abort.abort();
    }
  }

  take(parts) {
    const events = [];
    for (const part of parts) {
      const message = { event: "message", data: "" };
      for (const line of part.split("\n")) {
        if (line.startsWith(":")) {
          const restarting = line.includes(RESTARTING);
          if (restarting) {
            this.restarting = true;
            this.on.status("lost", "The conversation table is being restarted");
          } else this.works();
          continue;
        }
        const colon = line.indexOf(": ");
        if (colon > 0) message[line.slice(0, colon)] = line.slice(colon + 2);
      }
      if (!message.data) continue;
      const data = JSON.parse(message.data);
      if (message.event === "missed") {
        // At first all that was before is missed.
        if (this.last !== "0") this.on.missed(data.events);
        continue;
      }
      this.last = message.id;
      events.push(data);
    }
    if (events.length) {
      this.works();
      this.on.events(events);
    }
  }

  works() {
    this.on.status("live", "Live");
    // What the table before it had not told any more is not known.
    if (this.restarting) this.on.connected();
    this.restarting = false;
  }
}

const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
