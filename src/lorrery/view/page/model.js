// What the page knows: the cluster as of the newest frame, and what the last two minutes of frames have said.
//
// Frames name adapters and tenants by number, in order of appearance; a new connection numbers anew. So everything here
// is kept by name, and numbers only lead to names. All times are device seconds. docs/orrery.md describes a frame.

import { Series, Counter } from './series.js';
import { Colours } from './palette.js';

const NUM_BINS = 120;
const USUAL_FRAME_SECONDS = 0.5; // frames that are rarer have wider bins, so that as many points are kept
const MAX_ENDED = 3000; // requests that ended, for "last requests"
const MAX_EVENTS = 300;
const MAX_NEWCOMERS = 16;
const LOST_SECONDS = 60; // how long a worker that is gone is still shown
const TTFT_SECONDS = 10; // over which TTFT's percentiles go
const RANKING_SECONDS = 5; // how often colours follow traffic

export const DRAINING = 'draining';

class Named {
  constructor(kind, key, name, binSeconds) {
    Object.assign(this, { kind, key, name, running: 0, waiting: 0, oldest: 0 });
    this.runningSeries = new Series(binSeconds, NUM_BINS);
    this.waitingSeries = new Series(binSeconds, NUM_BINS);
  }
}

/** An adapter or the base model, whose key is null. */
export class Adapter extends Named {
  constructor(name, binSeconds) {
    super('adapter', name, name ?? 'base model', binSeconds);
    this.loads = new Counter(binSeconds, NUM_BINS);
    this.thrash = new Counter(binSeconds, NUM_BINS);
    this.evictions = new Counter(binSeconds, NUM_BINS);
    this.traffic = 0; // requests seen running, summed over frames and slowly forgotten: for ranking only
    this.unloaded = false;
  }

  /** Whether it has been unloaded, and its last request has ended. */
  get isGone() {
    return Boolean(this.unloaded) && !this.running && !this.waiting;
  }
}

export class Tenant extends Named {
  constructor(name, binSeconds) {
    super('tenant', name, name === '' ? '(no tenant)' : name, binSeconds);
    this.tokens = new Counter(binSeconds, NUM_BINS);
    this.refused = new Counter(binSeconds, NUM_BINS);
    this.traffic = 0;
  }
}

export class Worker extends Named {
  constructor(shard, id, at, binSeconds) {
    super('worker', `${shard}/${id}`, id, binSeconds);
    this.shard = shard;
    this.tokens = new Counter(binSeconds, NUM_BINS);
    this.busy = new Counter(binSeconds, NUM_BINS);
    this.preempted = new Counter(binSeconds, NUM_BINS);
    this.slots = new Map(); // place of each running request among the moons
    this.free = []; // places that others left, lowest last
    this.newcomers = []; // requests that have joined; who draws them takes them out
    this.joinedAt = at; // when a request last joined its batch
    this.ranAt = at; // when it last had a batch
    this.lostAt = null;
  }

  /** Take over a worker's part of a frame. */
  update(at, shown) {
    Object.assign(this, {
      gpu: shown.gpu, tp: shown.tp, state: shown.state, batch: shown.running, waiting: shown.waiting, oldest: shown.oldest,
      kv: shown.kv, pool: shown.pool, resident: shown.adapters, host: shown.host, step: shown.step, stepKind: shown.kind,
    });
    this.running = shown.running.length;
    this.lostAt = null;
    this.#place(at);
    if (this.running) this.ranAt = at;
    this.tokens.push(at, shown.tokens);
    this.busy.push(at, shown.busy);
    this.preempted.push(at, shown.preempted);
    this.runningSeries.push(at, this.running);
    this.waitingSeries.push(at, this.waiting);
  }

  /** Requests have other numbers from now on. */
  renumber() {
    this.slots.clear();
    this.free = [];
  }

  get kvRatio() {
    return this.pool > 0 ? this.kv / this.pool : 0;
  }

  // A request keeps its place while it runs; a new one takes the lowest that is free.
  #place(at) {
    const left = new Set(this.slots.keys());
    const arrived = this.batch.filter(([request]) => !left.delete(request));
    for (const request of left) {
      this.free.push(this.slots.get(request));
      this.slots.delete(request);
    }
    if (left.size) this.free.sort((a, b) => b - a);
    for (const entry of arrived) {
      this.slots.set(entry[0], this.free.pop() ?? this.slots.size);
      if (this.newcomers.length < MAX_NEWCOMERS) this.newcomers.push(entry);
    }
    if (arrived.length) this.joinedAt = at;
  }
}

export class Model {
  /** `names`: the adapters' and tenants' names where all are known beforehand, as of a record. */
  constructor(names = null) {
    this.known = names;
    this.hello = null;
    this.version = 0; // grows with every frame
    this.binSeconds = 1;
    this.#forget();
  }

  /** A connection begins: it numbers names and requests anew, and counts anew. The last two minutes stay. */
  begin(hello) {
    this.hello = hello;
    this.adapterNames = this.known?.adapters ?? [];
    this.tenantNames = this.known?.tenants ?? [];
    for (const worker of this.workersByKey.values()) worker.renumber();
    const binSeconds = Math.max(1, (hello.frame_seconds ?? 0) / USUAL_FRAME_SECONDS);
    if (binSeconds !== this.binSeconds) {
      this.binSeconds = binSeconds;
      this.#forget();
    }
  }

  #forget() {
    Object.assign(this, {
      at: 0, adapters: new Map(), tenants: new Map(), workersByKey: new Map(), workers: [], lost: [], shards: [], frame: null,
      ended: [], events: [], totals: {}, rankedAt: -Infinity, unplaced: 0, held: 0, unplacedSince: null,
      startedAt: null,
    });
    this.adapterColours = new Colours();
    this.tenantColours = new Colours();
    const counter = () => new Counter(this.binSeconds / 2, 2 * NUM_BINS);
    const gauge = () => new Series(this.binSeconds / 2, 2 * NUM_BINS);
    this.series = {
      tokens: counter(), finished: counter(), requests: counter(), ttft50: gauge(), ttft95: gauge(), queue: gauge(), running: gauge(),
      kvMean: gauge(), kvMax: gauge(), tokenRate: gauge(),
    };
  }

  /** The adapter of a frame's number. */
  adapter(index) {
    return this.#named(this.adapters, Adapter, index < 0 ? null : this.adapterNames[index] ?? `adapter ${index}`);
  }

  tenant(index) {
    return this.#named(this.tenants, Tenant, this.tenantNames[index] ?? `tenant ${index}`);
  }

  #named(map, Kind, name) {
    let entity = map.get(name);
    if (!entity) {
      entity = new Kind(name, this.binSeconds);
      map.set(name, entity);
    }
    return entity;
  }

  /** The entity that a selection means, or undefined. */
  find(kind, key) {
    return { worker: this.workersByKey, adapter: this.adapters, tenant: this.tenants }[kind]?.get(key);
  }

  /** Take over a frame. */
  apply(frame) {
    if (frame.at < this.at - 1) this.#forget(); // the scheduler, and with it the device clock, began anew
    if (!this.known) {
      this.adapterNames.push(...(frame.adapters_new ?? []));
      this.tenantNames.push(...(frame.tenants_new ?? []));
    }
    this.startedAt ??= frame.at;
    this.at = Math.max(this.at, frame.at);
    this.frame = frame;
    this.version += 1;
    this.shards = frame.shards ?? [];
    this.unplaced = frame.unplaced;
    this.held = frame.held;
    if (!this.unplaced) this.unplacedSince = null;
    else this.unplacedSince ??= this.at;
    this.#workers(frame);
    this.#names(frame);
    this.#history(frame);
    this.#rank();
  }

  #workers(frame) {
    const before = this.workers;
    const present = new Set();
    this.workers = frame.workers.map((shown) => {
      const key = `${shown.shard}/${shown.id}`;
      present.add(key);
      let worker = this.workersByKey.get(key);
      if (!worker) {
        worker = new Worker(shown.shard, shown.id, this.at, this.binSeconds);
        this.workersByKey.set(key, worker);
      }
      worker.update(this.at, shown);
      return worker;
    });
    for (const worker of before) {
      if (present.has(worker.key)) continue;
      if (worker.state === DRAINING && !worker.running) this.workersByKey.delete(worker.key); // it left as it should
      else {
        Object.assign(worker, { lostAt: this.at, batch: [], running: 0, waiting: 0, oldest: 0, kv: 0, resident: [] });
        worker.renumber();
        this.lost.push(worker);
      }
    }
    this.lost = this.lost.filter((worker) => {
      const kept = worker.lostAt !== null && this.at - worker.lostAt < LOST_SECONDS;
      if (worker.lostAt !== null && !kept) this.workersByKey.delete(worker.key);
      return kept;
    });
  }

  #names(frame) {
    const { at } = this;
    for (const entity of this.adapters.values()) Object.assign(entity, { running: 0, waiting: 0, oldest: 0, unloaded: false });
    for (const entity of this.tenants.values()) entity.running = entity.waiting = entity.oldest = 0;
    for (const [index, running, waiting, loads, evictions, thrash, unloaded] of frame.adapters) {
      const adapter = this.adapter(index);
      Object.assign(adapter, { running, waiting, unloaded });
      adapter.loads.push(at, loads);
      adapter.evictions.push(at, evictions);
      adapter.thrash.push(at, thrash);
    }
    for (const [index, running, waiting, oldest, tokens, refused] of frame.tenants) {
      const tenant = this.tenant(index);
      Object.assign(tenant, { running, waiting, oldest });
      tenant.tokens.push(at, tokens);
      tenant.refused.push(at, refused);
    }
    for (const map of [this.adapters, this.tenants]) {
      for (const entity of map.values()) {
        entity.runningSeries.push(at, entity.running);
        entity.waitingSeries.push(at, entity.waiting);
        entity.traffic = entity.traffic * 0.998 + entity.running + entity.waiting;
      }
    }
  }

  #history(frame) {
    const { at, series } = this;
    for (const [request, worker, adapter, tenant, prompt, output, arrived, queue, load, prefill, decode, outcome] of frame.ended) {
      const ran = worker < 0 ? undefined : this.workers[worker];
      if (ran) ran.joinedAt = Math.max(ran.joinedAt, Math.min(at, arrived + queue + load)); // though no frame may have shown it
      this.ended.push({
        request, worker: ran, adapter: this.adapter(adapter), tenant: this.tenant(tenant),
        prompt, output, arrived, queue, load, prefill, decode, outcome, at,
      });
    }
    if (this.ended.length > MAX_ENDED) this.ended.splice(0, this.ended.length - MAX_ENDED);
    for (const [when, kind, text] of frame.events) this.events.push({ at: when, kind, text });
    if (frame.events_more) this.events.push({ at, kind: 'more', text: `and ${frame.events_more} more` });
    if (this.events.length > MAX_EVENTS) this.events.splice(0, this.events.length - MAX_EVENTS);

    this.totals = frame.totals;
    series.tokens.push(at, frame.totals.output_tokens);
    series.tokenRate.push(at, series.tokens.rate(2, at));
    for (const name of ['finished', 'requests']) series[name].push(at, frame.totals[name]);
    let [waiting, running, kv, kvMax] = [this.unplaced + this.held, 0, 0, 0];
    for (const worker of this.workers) {
      waiting += worker.waiting;
      running += worker.running;
      kv += worker.kvRatio;
      kvMax = Math.max(kvMax, worker.kvRatio);
    }
    this.waiting = waiting;
    this.running = running;
    series.queue.push(at, waiting);
    series.running.push(at, running);
    series.kvMean.push(at, this.workers.length ? kv / this.workers.length : 0);
    series.kvMax.push(at, kvMax);
    this.#ttft();
  }

  #ttft() {
    const times = [];
    for (let index = this.ended.length - 1; index >= 0 && this.ended[index].at > this.at - TTFT_SECONDS; index -= 1) {
      const request = this.ended[index];
      if (request.output > 0) times.push(request.queue + request.load + request.prefill);
    }
    if (!times.length) return;
    times.sort((a, b) => a - b);
    this.series.ttft50.push(this.at, times[Math.floor(times.length * 0.5)]);
    this.series.ttft95.push(this.at, times[Math.floor(times.length * 0.95)]);
  }

  #rank() {
    if (this.at - this.rankedAt < RANKING_SECONDS) return;
    this.rankedAt = this.at;
    const ranked = (map) => [...map.values()].filter((entity) => entity.key !== null && entity.traffic > 0)
      .sort((a, b) => b.traffic - a.traffic).map((entity) => entity.key);
    this.adapterColours.assign(ranked(this.adapters));
    this.tenantColours.assign(ranked(this.tenants));
  }
}
