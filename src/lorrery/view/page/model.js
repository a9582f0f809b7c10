// What the page draws: the cluster as of the newest frame, its notices and figures as of the newest view, and both of
// the last two minutes.
//
// Notices and figures come with the frames (view/app.py): nothing is computed here that would say something of the
// cluster. Frames name adapters and tenants by number, in order of appearance; a new connection numbers anew. So
// everything here is kept by name, and numbers only lead to names. All times are device seconds.

import { Colours } from './colours.js';

export const KEPT_SECONDS = 120;
const NUM_BINS = 120;
const USUAL_FRAME_SECONDS = 0.5; // frames that are rarer have wider bins, so that as many points are kept
const MAX_ENDED = 3000; // requests that ended, for "last requests"
const MAX_EVENTS = 300;
const MAX_NEWCOMERS = 16;
const RANKING_SECONDS = 5; // how often colours follow traffic

export const DRAINING = 'draining';
export const LOST = 'lost worker'; // the rule whose notices can be dismissed

/** Notices with an id of their own each: there may be several of a rule. */
export function numbered(notices) {
  const seen = new Map();
  return notices.map((notice) => {
    const key = `${notice.rule} ${notice.subjects[0]?.[1] ?? ''} ${notice.subjects.length > 1}`;
    seen.set(key, (seen.get(key) ?? 0) + 1);
    return { ...notice, id: `${key} ${seen.get(key)}` };
  });
}

/** The past of one figure, in bins of device time; each bin keeps its last value, an empty one is NaN. */
export class Series {
  constructor(binSeconds, numBins) {
    this.binSeconds = binSeconds;
    this.span = binSeconds * numBins; // seconds that are kept
    this.values = new Float64Array(numBins + 1).fill(NaN);
    this.last = -1; // number of the newest bin since time 0
    this.first = -1; // and of the oldest that was ever written
  }

  /** Note a value; times never fall. */
  push(at, value) {
    const bin = Math.max(this.last, Math.floor(at / this.binSeconds));
    const kept = this.values.length;
    if (this.last < 0) this.first = bin;
    else if (bin - this.last >= kept) this.values.fill(NaN);
    else for (let between = this.last + 1; between < bin; between += 1) this.values[between % kept] = NaN;
    this.last = bin;
    this.values[bin % kept] = value;
  }

  /** Call with each value, oldest first, and its bin's time. */
  each(call) {
    if (this.last < 0) return;
    for (let bin = Math.max(this.first, this.last - this.values.length + 2); bin <= this.last; bin += 1) {
      const value = this.values[bin % this.values.length];
      if (!Number.isNaN(value)) call(value, bin * this.binSeconds);
    }
  }
}

class Named {
  constructor(kind, key, name, binSeconds) {
    Object.assign(this, { kind, key, name, running: 0, waiting: 0, oldest: 0 });
    this.runningSeries = new Series(binSeconds, NUM_BINS);
    this.waitingSeries = new Series(binSeconds, NUM_BINS);
    this.traffic = 0; // requests seen running, summed over frames and slowly forgotten: for colours only
  }
}

/** An adapter or the base model, whose key is null. */
export class Adapter extends Named {
  constructor(name, binSeconds) {
    super('adapter', name, name ?? 'base model', binSeconds);
    Object.assign(this, { loads: 0, evictions: 0, thrash: 0 }); // in all
    this.show();
  }

  /** Take over its figures of a view. */
  show(onGpus = 0, loading = 0, recentThrash = 0, isGone = false) {
    Object.assign(this, { onGpus, loading, recentThrash, isGone });
  }
}

export class Tenant extends Named {
  constructor(name, binSeconds) {
    super('tenant', name, name === '' ? '(no tenant)' : name, binSeconds);
    Object.assign(this, { tokens: 0, refused: 0 }); // in all
    this.show();
  }

  /** Take over its figures of a view. */
  show(share = 0, demand = 0, tokensPerSecond = 0) {
    Object.assign(this, { share, demand, tokensPerSecond });
  }
}

export class Worker extends Named {
  constructor(shard, id, binSeconds) {
    super('worker', `${shard}/${id}`, id, binSeconds);
    this.shard = shard;
    this.slots = new Map(); // place of each running request among the moons
    this.free = []; // places that others left, lowest last
    this.newcomers = []; // requests that have joined; who draws them takes them out
    this.lostAt = null;
    this.show();
  }

  /** Take over its part of a frame. */
  update(at, shown) {
    Object.assign(this, {
      gpu: shown.gpu, tp: shown.tp, state: shown.state, batch: shown.running, waiting: shown.waiting, oldest: shown.oldest,
      kv: shown.kv, pool: shown.pool, resident: shown.adapters, host: shown.host, step: shown.step, stepKind: shown.kind,
      tokens: shown.tokens, preempted: shown.preempted,
    });
    this.running = shown.running.length;
    this.lostAt = null;
    this.#place();
    this.runningSeries.push(at, this.running);
    this.waitingSeries.push(at, this.waiting);
  }

  /** Take over its figures of a view. */
  show(tokensPerSecond = 0, busy = 0) {
    Object.assign(this, { tokensPerSecond, busy });
  }

  /** It is lost, since then. */
  lose(lostAt, gpu, tp) {
    if (this.lostAt === null) this.renumber();
    Object.assign(this, {
      gpu, tp, state: 'lost', step: 0,
      lostAt, batch: [], running: 0, waiting: 0, oldest: 0, kv: 0, resident: [],
    });
    this.show();
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
  #place() {
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
  }
}

export class Model {
  /** `names`: the adapters' and tenants' names where all are known beforehand, as of a record. */
  constructor(names = null) {
    this.known = names;
    this.hello = null;
    this.version = 0; // grows with every frame
    this.binSeconds = 1;
    this.adapterColours = new Colours();
    this.tenantColours = new Colours();
    this.dismissed = new Set(); // lost workers that are to be shown no longer: key, and when they were lost
    this.knownUntil = -Infinity;
    this.#forget();
  }

  /** Show these lost workers no longer; one that is lost later is shown again. */
  dismiss(keys) {
    for (const worker of this.lost) if (keys.includes(worker.key)) this.dismissed.add(`${worker.key} ${worker.lostAt}`);
    this.#showLost();
    this.version += 1;
  }

  /** A connection begins: it numbers names and requests anew, and counts anew. The last two minutes stay. */
  begin(hello) {
    this.hello = hello;
    this.adapterNames = this.known?.adapters ?? [];
    this.tenantNames = this.known?.tenants ?? [];
    this.knownUntil = this.frame ? this.at : -Infinity; // events until then have been told by an earlier connection
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
      view: null, notices: [], ended: [], events: [], totals: {}, figures: {}, rankedAt: -Infinity, unplaced: 0, held: 0,
    });
    const series = () => new Series(this.binSeconds / 2, 2 * NUM_BINS);
    this.series = {
      tokensPerSecond: series(), ttft50: series(), ttft95: series(), waiting: series(), running: series(), kv: series(), fullestKv: series(),
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

  /** The entity that a selection or a notice means, or undefined. */
  find(kind, key) {
    return { worker: this.workersByKey, adapter: this.adapters, tenant: this.tenants }[kind]?.get(key);
  }

  /** Take over a frame. */
  apply(frame) {
    if (frame.at < this.at - 1) this.#forget(); // the scheduler, and with it the device clock, began anew
    if (!this.known) {
      this.adapterNames.push(...frame.adapters_new);
      this.tenantNames.push(...frame.tenants_new);
    }
    this.at = Math.max(this.at, frame.at);
    this.version += 1;
    for (const name of ['shards', 'unplaced', 'held', 'totals']) this[name] = frame[name];
    this.frame = frame;
    this.#workers(frame);
    this.#names(frame);
    if (frame.view) this.#show(frame.view);
    this.#history(frame);
    this.#rank();
  }

  #workers(frame) {
    this.workers = frame.workers.map((shown) => {
      const key = `${shown.shard}/${shown.id}`;
      let worker = this.workersByKey.get(key);
      if (!worker) {
        worker = new Worker(shown.shard, shown.id, this.binSeconds);
        this.workersByKey.set(key, worker);
      }
      worker.update(this.at, shown);
      return worker;
    });
  }

  #names(frame) {
    for (const map of [this.adapters, this.tenants]) {
      for (const entity of map.values()) entity.running = entity.waiting = entity.oldest = 0;
    }
    for (const [index, running, waiting, loads, evictions, thrash] of frame.adapters) {
      Object.assign(this.adapter(index), { running, waiting, loads, evictions, thrash });
    }
    for (const [index, running, waiting, oldest, tokens, refused] of frame.tenants) {
      Object.assign(this.tenant(index), { running, waiting, oldest, tokens, refused });
    }
    for (const map of [this.adapters, this.tenants]) {
      for (const entity of map.values()) {
        entity.runningSeries.push(this.at, entity.running);
        entity.waitingSeries.push(this.at, entity.waiting);
        entity.traffic = entity.traffic * 0.998 + entity.running + entity.waiting;
      }
    }
  }

  #show(view) {
    this.view = view;
    view.workers.forEach((figures, index) => this.workers[index].show(...figures));
    this.#showLost();
    for (const map of [this.adapters, this.tenants]) {
      for (const entity of map.values()) entity.show();
    }
    for (const [name, ...figures] of view.adapters) this.#named(this.adapters, Adapter, name).show(...figures);
    for (const [name, ...figures] of view.tenants) this.#named(this.tenants, Tenant, name).show(...figures);
    const [ttft50, ttft95] = view.ttft ?? [NaN, NaN];
    this.figures = {
      tokensPerSecond: view.tokens_per_second, ttft50, ttft95, waiting: view.waiting, running: view.running, kv: view.kv_ratio,
      fullestKv: view.fullest_kv_ratio,
    };
    for (const [name, value] of Object.entries(this.figures)) this.series[name].push(this.at, value);
  }

  // The lost workers, and all notices, but for what was dismissed.
  #showLost() {
    const lost = this.view.lost.filter(([shard, id, lostAt]) => !this.dismissed.has(`${shard}/${id} ${lostAt}`));
    this.lost = lost.map(([shard, id, lostAt, gpu, tp]) => {
      const worker = this.workersByKey.get(`${shard}/${id}`) ?? new Worker(shard, id, this.binSeconds); // lost before the page was opened
      worker.lose(lostAt, gpu, tp);
      return worker;
    });
    const shown = new Set(this.lost.map((worker) => worker.key));
    this.notices = numbered(this.view.notices.filter(({ rule, subjects }) => rule !== LOST || subjects.some(([, key]) => shown.has(key))));
    this.workersByKey = new Map([...this.workers, ...this.lost].map((worker) => [worker.key, worker]));
  }

  #history(frame) {
    const { at } = this;
    for (const [request, worker, adapter, tenant, prompt, output, arrived, queue, load, prefill, decode, outcome] of frame.ended) {
      this.ended.push({
        request, worker: this.workers[worker], adapter: this.adapter(adapter), tenant: this.tenant(tenant),
        prompt, output, arrived, queue, load, prefill, decode, outcome,
      });
    }
    if (this.ended.length > MAX_ENDED) this.ended.splice(0, this.ended.length - MAX_ENDED);
    for (const [when, kind, text] of frame.events) if (when > this.knownUntil) this.events.push({ at: when, kind, text });
    this.knownUntil = -Infinity;
    if (frame.events_more) this.events.push({ at, kind: 'more', text: `and ${frame.events_more} more` });
    if (this.events.length > MAX_EVENTS) this.events.splice(0, this.events.length - MAX_EVENTS);
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
