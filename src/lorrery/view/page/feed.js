// Where frames come from, each with its view: server-sent events while something runs, again and again until they come;
// after a simulation its record, whole, and a time to look at.

import { KEPT_SECONDS, Model, numbered } from './model.js';

const STALE_SECONDS = 5; // without a frame for so long, a connection is dead though it is open
const RETRY_SECONDS = [1, 1, 2, 3, 5];
const REPLAYED_FRAMES = 100; // a step ahead of more frames than this is a jump
const GLANCED_FRAMES = 150; // of which a jump shows so many at first, and all of them when the slider rests
const REST_MS = 250;
const SLICE_MS = 12; // how long loading holds the page at a time

/** What the server serves; throws what fetch throws, or an Error with the status. */
export async function fetchHello() {
  const answer = await fetch('hello', { cache: 'no-store' });
  if (!answer.ok) throw new Error(await reason(answer));
  return answer.json();
}

/** What an answer that is none says: the routes give {"error"}. */
export async function reason(answer) {
  try {
    return (await answer.json()).error;
  } catch {
    return `the server answers ${answer.status}`;
  }
}

/**
 * Frames as they come. Calls `hello(hello)`, `frame(frame)`, and of the connection `live()`, `lost(seconds)` until it is
 * tried again, and `problem(message)` where the page's server is there and the cluster is not.
 */
export class LiveFeed {
  constructor({ hello, frame, live, lost, problem }) {
    Object.assign(this, { onHello: hello, onFrame: frame, onLive: live, onLost: lost, onProblem: problem, failures: 0, source: null });
  }

  /** Connect, and stay so. */
  start() {
    this.source = new EventSource('events?view=true');
    this.heard = performance.now();
    this.source.addEventListener('hello', (event) => {
      this.#hear();
      this.onHello(JSON.parse(event.data));
    });
    this.source.addEventListener('frame', (event) => {
      this.#hear();
      this.onFrame(JSON.parse(event.data));
    });
    this.source.addEventListener('problem', (event) => {
      this.heard = performance.now();
      this.onProblem(JSON.parse(event.data).message);
    });
    // EventSource tries again by itself, but gives up at some answers, and never notices silence.
    this.source.addEventListener('error', () => this.#lose());
    this.watch = setInterval(() => {
      if (performance.now() - this.heard > STALE_SECONDS * 1000) this.#lose();
    }, 1000);
  }

  #hear() {
    this.heard = performance.now();
    this.failures = 0;
    this.onLive();
  }

  #lose() {
    if (!this.source) return;
    this.source.close();
    this.source = null;
    clearInterval(this.watch);
    const wait = RETRY_SECONDS[Math.min(this.failures, RETRY_SECONDS.length - 1)];
    this.failures += 1;
    this.onLost(wait);
    setTimeout(() => this.start(), wait * 1000);
  }
}

/**
 * A record. Lines are kept as text and parsed when they are needed, since a long run's frames as objects would not fit.
 * While they load, the marks beneath the slider are noted: what was wrong when.
 */
export class Record {
  constructor() {
    Object.assign(this, {
      hello: null, lines: [], times: [], tokens: [], names: { adapters: [], tenants: [] }, marks: [], complete: false, time: 0,
      speed: 1, playing: false, shown: -1, refineAt: Infinity,
    });
    this.open = new Map();
  }

  /** Load all of it; `progress` is called now and then, and at the end. */
  async load(progress) {
    const answer = await fetch('record?view=true');
    if (!answer.ok) throw new Error(`The record cannot be read: ${await reason(answer)}`);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = '';
    let begun = performance.now();
    for (;;) {
      const { done, value } = await reader.read();
      const lines = (rest + (value ?? '')).split('\n');
      rest = done ? '' : lines.pop();
      for (const line of lines) {
        if (line.trim()) this.#take(line);
        if (performance.now() - begun > SLICE_MS) {
          progress();
          await new Promise((resume) => setTimeout(resume));
          begun = performance.now();
        }
      }
      if (done) break;
    }
    for (const mark of this.open.values()) this.marks.push(mark);
    this.open.clear();
    this.complete = true;
    progress();
  }

  #take(line) {
    const content = JSON.parse(line);
    if (!this.hello) {
      this.hello = content;
      this.time = content.first ?? 0;
      return;
    }
    this.names.adapters.push(...content.adapters_new);
    this.names.tenants.push(...content.tenants_new);
    this.lines.push(line);
    this.times.push(content.at);
    this.tokens.push(content.totals.output_tokens);
    this.#mark(content.at, content.view.notices);
  }

  // Note from when to when each notice holds.
  #mark(at, notices) {
    const now = new Set();
    for (const notice of numbered(notices)) {
      const key = notice.id;
      now.add(key);
      const open = this.open.get(key);
      if (open) open.to = at;
      else this.open.set(key, { from: at, to: at, rule: notice.rule, severity: notice.severity, title: notice.title });
    }
    for (const [key, mark] of this.open) {
      if (!now.has(key)) {
        this.open.delete(key);
        this.marks.push(mark);
      }
    }
  }

  /** The device time of the first and of the last frame there is. */
  get first() {
    return this.times[0] ?? 0;
  }

  get last() {
    return this.times[this.times.length - 1] ?? 0;
  }

  /** The number of the newest frame at or before a time; -1 where there is none. */
  indexAt(time) {
    let [low, high] = [0, this.times.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.times[middle] <= time) low = middle + 1;
      else high = middle;
    }
    return low - 1;
  }

  /** Let wall seconds pass. */
  advance(elapsed) {
    if (!this.playing) return;
    this.time = Math.min(this.last, this.time + elapsed * this.speed);
    if (this.time >= this.last && this.complete) this.playing = false;
  }

  /** Go to a time. */
  seek(time) {
    this.time = Math.max(this.first, Math.min(this.last, time));
  }

  /** Go on or back by a frame, and stop there. */
  step(frames) {
    this.playing = false;
    const index = Math.max(0, Math.min(this.times.length - 1, this.indexAt(this.time) + frames));
    this.time = this.times[index] ?? this.time;
  }

  /** Bring a model to the time; returns it, or the new one that a jump takes. */
  show(model) {
    const now = performance.now();
    const wanted = Math.max(0, this.indexAt(this.time));
    const refined = now >= this.refineAt;
    if (!this.times.length || (wanted === this.shown && !refined)) return model;
    let [shown, from, stride] = [model, this.shown + 1, 1];
    if (this.shown < 0 || wanted < this.shown || wanted - this.shown > REPLAYED_FRAMES || refined) {
      shown = new Model(this.names);
      shown.begin(this.hello);
      shown.version = model.version;
      for (const name of ['dismissed', 'adapterColours', 'tenantColours']) shown[name] = model[name];
      from = Math.max(0, this.indexAt(this.times[wanted] - KEPT_SECONDS * shown.binSeconds));
      if (!refined) stride = Math.ceil((wanted - from + 1) / GLANCED_FRAMES);
      this.refineAt = stride > 1 ? now + REST_MS : Infinity;
    }
    for (let index = wanted - Math.floor((wanted - from) / stride) * stride; index <= wanted; index += stride) {
      shown.apply(JSON.parse(this.lines[index]));
    }
    this.shown = wanted;
    return shown;
  }
}
