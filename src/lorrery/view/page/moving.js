// The layer that changes with every animation frame: moons, sparks, adapters on their way.
//
// Numbers live in typed arrays that are filled when a frame comes, and dots are written into one image: an animation frame
// allocates nothing.

import { swatches } from './colours.js';
import { Dot, Pixels, Sparks, pixel } from './pixels.js';

const TURN = 2 * Math.PI;
const TOP = -Math.PI / 2;
const GOLDEN = 0.618034;
const MAX_MOONS = 16384;
const SPARKS_PER_SECOND = 400; // beyond which one spark stands for more tokens
const SPARK_SECONDS = 1.3;
const COURIER_SECONDS = 0.55;
const LEAVING_SECONDS = 0.9;
const SECONDS_PER_TURN = 9; // of the innermost moon, at 30 steps a second
const FULL = 0; // kinds of dots: requests in decode, in prefill, and those that wait
const HOLLOW = 1;
const WAITS = 2;
const QUEUE_ROWS = 3;
const LATE_SECONDS = [5, 10]; // how long a queue's first has waited when what waits is drawn in amber, in red
const DIM = 34; // of 256

export class Moving {
  constructor() {
    this.moons = {
      number: 0, body: new Uint16Array(MAX_MOONS), orbit: new Float32Array(MAX_MOONS), angle: new Float32Array(MAX_MOONS),
      turn: new Float32Array(MAX_MOONS), colour: new Uint8Array(MAX_MOONS), kind: new Uint8Array(MAX_MOONS), dim: new Uint8Array(MAX_MOONS),
    };
    this.sparks = new Sparks();
    this.loading = []; // {body, place, of, colour, left, total}
    this.leaving = []; // {x, y, dx, dy, colour, age}
    this.capacity = 8;
    this.tokensPerSpark = 1;
    this.dots = null;
    this.frameWall = 0.1; // mean wall seconds between frames
  }

  /** The theme has changed. */
  recolour() {
    this.dots = null;
  }

  /** Take over what a frame says of the moons; `wall` is the wall seconds since the last one. */
  place(model, view, wall) {
    this.frameWall += 0.2 * (Math.min(2, Math.max(0.02, wall)) - this.frameWall);
    this.#size(view);
    const { moons } = this;
    moons.number = 0;
    this.loading.length = 0;
    let emitted = 0;
    this.turning = false;
    view.bodies.forEach((body, index) => {
      const { worker } = body;
      body.firstMoon = moons.number;
      for (const [request, adapter, tenant, , output] of worker.batch) {
        if (moons.number === MAX_MOONS) break;
        const moon = moons.number++;
        const [orbit, place] = this.#orbit(worker.slots.get(request));
        moons.body[moon] = index;
        moons.orbit[moon] = orbit.radius;
        moons.turn[moon] = orbit.turn;
        moons.angle[moon] = body.tilt + (TURN * ((place * orbit.stride) % orbit.places)) / orbit.places;
        moons.kind[moon] = output > 0 ? FULL : HOLLOW;
        moons.colour[moon] = view.colourIndex(adapter, tenant);
        moons.dim[moon] = view.dimMoon(adapter, tenant, worker) ? 1 : 0;
      }
      body.numMoons = moons.number - body.firstMoon;
      this.#queue(body, index, view);
      const grown = body.tokens === undefined ? 0 : Math.max(0, worker.tokens - body.tokens);
      body.tokens = worker.tokens;
      emitted += grown;
      body.owed = Math.min(body.owed + grown / this.tokensPerSpark, 200);
      body.emission = body.owed / this.frameWall;
      body.omega = worker.step > 0 && worker.running ? (TURN / SECONDS_PER_TURN) * Math.min(4, (view.speed / worker.step) / 30) : 0;
      this.turning ||= body.omega > 0 || body.owed > 0;
      this.#adapters(body, index, model, view);
      if (view.animated) for (const [, adapter, tenant] of worker.newcomers) this.#courier(body, view.colourIndex(adapter, tenant));
      worker.newcomers.length = 0;
    });
    this.#scale(emitted / this.frameWall);
  }

  // One size for all moons, so that the fullest batch fits; it shrinks again only when that is far smaller.
  #size(view) {
    let most = 1;
    for (const { worker } of view.bodies) most = Math.max(most, worker.slots.size + worker.free.length);
    while (this.capacity < most) this.capacity *= 2;
    while (this.capacity > 8 && most < this.capacity / 4) this.capacity /= 2;
    this.firstState = view.swatches.length;
    this.queueSize = Math.max(1.2, Math.min(3, view.measure.cell * 0.014));
    const key = `${this.capacity} ${view.measure.cell} ${view.measure.innerMoon}`;
    if (key === this.sizedFor) return;
    this.sizedFor = key;
    const { innerMoon, outer, cell } = view.measure;
    const queue = Math.max(4, cell * 0.07); // room for what waits, outside
    const last = Math.max(innerMoon + 1, outer - queue);
    for (let size = Math.min(6.5, Math.max(1.6, cell * 0.03)); ; size *= 0.94) {
      const gap = size * 2.7;
      this.orbits = [];
      let places = 0;
      for (let radius = innerMoon + size; places < this.capacity && (radius <= last || !this.orbits.length); radius += gap) {
        const here = Math.max(3, Math.floor((TURN * radius) / gap));
        let stride = Math.max(1, Math.round(here * GOLDEN));
        while (common(stride, here) > 1) stride += 1;
        this.orbits.push({ radius, from: places, places: here, stride, turn: (innerMoon / radius) ** 1.5 });
        places += here;
      }
      this.moonSize = size;
      this.dots = null;
      this.moonRadius = this.orbits[this.orbits.length - 1].radius;
      if (places >= this.capacity || size < 0.7) break;
    }
  }

  #orbit(slot) {
    let index = 0;
    while (index < this.orbits.length - 1 && slot >= this.orbits[index].from + this.orbits[index].places) index += 1;
    return [this.orbits[index], slot - this.orbits[index].from];
  }

  // What waits stands on the side of the scheduler, in rows; amber and red by how long the first has waited.
  #queue(body, index, { measure }) {
    const { moons } = this;
    const { waiting, oldest } = body.worker;
    const size = this.queueSize;
    const colour = this.firstState + (oldest >= LATE_SECONDS[1] ? 2 : oldest >= LATE_SECONDS[0] ? 1 : 0);
    let left = waiting;
    let radius = this.moonRadius + this.moonSize + size * 2;
    for (let row = 0; row < QUEUE_ROWS && left > 0 && (!row || radius <= measure.outer); row += 1, radius += size * 2.8) {
      const shown = Math.min(left, Math.max(3, Math.floor((1.9 * radius) / (size * 3))));
      for (let place = 0; place < shown && moons.number < MAX_MOONS; place += 1) {
        const moon = moons.number++;
        moons.body[moon] = index;
        moons.orbit[moon] = radius;
        moons.turn[moon] = 0;
        moons.angle[moon] = body.inwards + ((place - (shown - 1) / 2) * size * 3) / radius;
        moons.kind[moon] = WAITS;
        moons.colour[moon] = colour;
        moons.dim[moon] = 0;
      }
      left -= shown;
    }
    body.queueMore = left;
    body.queueRadius = radius;
  }

  // Adapters that load get a place on the ring that fills; those that left fly off.
  #adapters(body, index, model, view) {
    const { worker } = body;
    const before = body.resident ?? new Map();
    const now = new Map();
    worker.resident.forEach(([adapter, state, , left], place) => {
      const known = before.get(adapter);
      const total = state === 2 ? Math.max(known?.total ?? 0, left ?? 0) : 0;
      const colour = view.adapterColour(adapter);
      now.set(adapter, { total, colour });
      if (state === 2) this.loading.push({ body: index, place, of: worker.resident.length, colour, left: left ?? 0, total });
    });
    if (view.animated && body.resident) {
      for (const [adapter, { colour }] of before) {
        if (now.has(adapter) || this.leaving.length >= 64) continue;
        const angle = body.outwards + (Math.random() - 0.5);
        this.leaving.push({ x: body.x, y: body.y, dx: Math.cos(angle), dy: Math.sin(angle), colour, age: 0 });
      }
    }
    body.resident = now;
  }

  // So many tokens a spark that there is an even stream, in steps that a person can read.
  #scale(perSecond) {
    this.rate = this.rate === undefined ? perSecond : this.rate + 0.05 * (perSecond - this.rate);
    const wanted = this.rate / SPARKS_PER_SECOND;
    const allowed = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000].find((step) => step >= wanted) ?? 10000;
    if (allowed > this.tokensPerSpark || wanted < this.tokensPerSpark / 4) this.tokensPerSpark = allowed;
  }

  // A request that has joined flies from the scheduler to its worker.
  #courier(body, colour) {
    const begun = Math.random() * 0.4; // those of one frame would fly as a lump
    this.sparks.add(body.x * begun, body.y * begun, body.x / COURIER_SECONDS, body.y / COURIER_SECONDS, COURIER_SECONDS * (1 - begun), colour, 0);
  }

  /** Whether another animation frame would look the same. */
  get rests() {
    return !this.turning && !this.sparks.number && !this.loading.length && !this.leaving.length;
  }

  /** Let wall seconds pass, and draw. */
  draw(context, view, elapsed) {
    const [wide, high] = [context.canvas.width, context.canvas.height];
    if (this.pixels?.width !== wide || this.pixels?.height !== high) this.pixels = new Pixels(wide, high);
    if (!this.dots) this.#prepare(view);
    const { pixels, dots } = this;
    pixels.clear();
    if (view.animated) this.#move(view, elapsed);
    this.#drawAdapters(view, elapsed, wide / 2, high / 2);
    this.#drawMoons(view, wide / 2, high / 2);
    if (view.animated) this.sparks.draw(pixels, dots, this.colours, view.density, wide / 2, high / 2);
    pixels.show(context);
  }

  #prepare({ density, colours: { soft, warn, bad } }) {
    const radius = (this.moonSize ?? 3) * density;
    this.kinds = [new Dot(radius), new Dot(radius, Math.max(1, radius * 0.36)), new Dot((this.queueSize ?? 2) * density)];
    this.dots = new Dot(Math.max(0.8, Math.min(1.8, radius * 0.42)));
    this.colours = [...swatches(), soft, warn, bad].map(pixel);
  }

  #move(view, elapsed) {
    const { moons } = this;
    for (let index = 0; index < view.bodies.length; index += 1) {
      const body = view.bodies[index];
      body.phase = (body.phase + body.omega * elapsed) % (TURN * 1000);
      body.due += Math.min(body.owed, body.emission * elapsed);
      body.owed = Math.max(0, body.owed - body.emission * elapsed);
      while (body.due >= 1) {
        body.due -= 1;
        if (!body.numMoons) continue;
        const moon = body.firstMoon + Math.floor(Math.random() * body.numMoons);
        if (moons.dim[moon]) continue;
        const angle = moons.angle[moon] + body.phase * moons.turn[moon];
        const fly = angle + (Math.random() - 0.5) * 0.6;
        const speed = view.measure.cell * (0.2 + 0.2 * Math.random()) + 10;
        this.sparks.add(
          body.x + moons.orbit[moon] * Math.cos(angle), body.y + moons.orbit[moon] * Math.sin(angle),
          speed * Math.cos(fly), speed * Math.sin(fly), SPARK_SECONDS * (0.7 + 0.6 * Math.random()),
          moons.colour[moon], 1,
        );
      }
    }
    this.sparks.move(elapsed);
  }

  #drawMoons({ bodies, density }, middleX, middleY) {
    const { moons, pixels, kinds, colours } = this;
    for (let moon = 0; moon < moons.number; moon += 1) {
      const body = bodies[moons.body[moon]];
      const angle = moons.angle[moon] + body.phase * moons.turn[moon];
      const orbit = moons.orbit[moon];
      pixels.dot(
        kinds[moons.kind[moon]], middleX + (body.x + orbit * Math.cos(angle)) * density,
        middleY + (body.y + orbit * Math.sin(angle)) * density, colours[moons.colour[moon]], moons.dim[moon] ? DIM : 256,
      );
    }
  }

  // Adapters come from the outside to their place on the ring, and leave the same way, as squares.
  #drawAdapters(view, elapsed, middleX, middleY) {
    const { measure, density, bodies } = view;
    const half = Math.max(2, this.moonSize * 0.95) * density;
    for (const load of this.loading) {
      const body = bodies[load.body];
      if (!body) continue;
      if (view.animated) load.left = Math.max(0, load.left - elapsed * view.speed);
      const distance = measure.outer + (measure.resident - measure.outer) * (load.total > 0 ? 1 - load.left / load.total : 0);
      const angle = TOP + (TURN * (load.place + 0.5)) / load.of;
      this.pixels.square(
        middleX + (body.x + distance * Math.cos(angle)) * density, middleY + (body.y + distance * Math.sin(angle)) * density, half,
        this.colours[load.colour], 255, true,
      );
    }
    for (let index = this.leaving.length - 1; index >= 0 && view.animated; index -= 1) {
      const square = this.leaving[index];
      square.age += elapsed;
      const part = square.age / LEAVING_SECONDS;
      if (part >= 1) {
        this.leaving.splice(index, 1);
        continue;
      }
      const distance = measure.resident + (measure.outer - measure.resident) * part;
      this.pixels.square(
        middleX + (square.x + square.dx * distance) * density, middleY + (square.y + square.dy * distance) * density, half,
        this.colours[square.colour], Math.round(150 * (1 - part)), false,
      );
    }
  }
}

function common(a, b) {
  return b ? common(b, a % b) : a;
}
