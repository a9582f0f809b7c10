// The layer that changes with every animation frame: moons, sparks, adapters on their way.
//
// Numbers live in typed arrays that are filled when a frame comes, and dots are copies of prepared sprites: an animation
// frame allocates nothing.

import { swatches } from './palette.js';

const TURN = 2 * Math.PI;
const TOP = -Math.PI / 2;
const GOLDEN = 0.618034;
const MAX_MOONS = 16384;
const MAX_SPARKS = 4096;
const SPARKS_PER_SECOND = 400; // beyond which one spark stands for more tokens
const SPARK_SECONDS = 1.3;
const COURIER_SECONDS = 0.55;
const LEAVING_SECONDS = 0.9;
const SECONDS_PER_TURN = 9; // of the innermost moon, at 30 steps a second
const DIM = 0.13;

/** Dots of every swatch, so many device pixels wide: full in the first row, hollow in the second. */
class Sprites {
  constructor(radius, density) {
    const colours = swatches();
    const dot = radius * density;
    this.wide = Math.ceil(2 * dot) + 2; // a pixel of rim on each side
    this.shown = this.wide / density;
    this.canvas = document.createElement('canvas');
    this.canvas.width = this.wide * colours.length;
    this.canvas.height = this.wide * 2;
    const context = this.canvas.getContext('2d');
    colours.forEach((colour, index) => {
      context.fillStyle = context.strokeStyle = colour;
      context.lineWidth = Math.max(1, dot * 0.36);
      for (const [row, draw] of [[0, 'fill'], [1, 'stroke']]) {
        context.beginPath();
        context.arc((index + 0.5) * this.wide, (row + 0.5) * this.wide, row ? dot - context.lineWidth / 2 : dot, 0, TURN);
        context[draw]();
      }
    });
  }

  /** Draw a dot; x and y are its middle. */
  draw(context, colour, row, x, y) {
    const { wide, shown } = this;
    context.drawImage(this.canvas, colour * wide, row * wide, wide, wide, x - shown / 2, y - shown / 2, shown, shown);
  }
}

export class Moving {
  constructor() {
    this.moons = {
      number: 0, body: new Uint16Array(MAX_MOONS), orbit: new Float32Array(MAX_MOONS), angle: new Float32Array(MAX_MOONS),
      turn: new Float32Array(MAX_MOONS), colour: new Uint8Array(MAX_MOONS), hollow: new Uint8Array(MAX_MOONS), dim: new Uint8Array(MAX_MOONS),
    };
    const floats = () => new Float32Array(MAX_SPARKS);
    this.sparks = {
      number: 0, x: floats(), y: floats(), vx: floats(), vy: floats(), age: floats(), life: floats(),
      colour: new Uint8Array(MAX_SPARKS), fades: new Uint8Array(MAX_SPARKS),
    };
    this.loading = []; // {body, place, of, colour, left, total}
    this.leaving = []; // {x, y, dx, dy, colour, age}
    this.capacity = 8;
    this.tokensPerSpark = 1;
    this.sprites = null;
    this.frameWall = 0.1; // mean wall seconds between frames
  }

  /** The theme has changed. */
  recolour() {
    this.sprites = null;
  }

  /** Take over what a frame says of the moons; `wall` is the wall seconds since the last one. */
  place(model, view, wall) {
    this.frameWall += 0.2 * (Math.min(2, Math.max(0.02, wall)) - this.frameWall);
    this.#size(view);
    const { moons } = this;
    moons.number = 0;
    this.loading.length = 0;
    let emitted = 0;
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
        moons.hollow[moon] = output > 0 ? 0 : 1;
        moons.colour[moon] = view.colourIndex(adapter, tenant);
        moons.dim[moon] = view.dimMoon(adapter, tenant, worker) ? 1 : 0;
      }
      body.numMoons = moons.number - body.firstMoon;
      const grown = body.tokens === undefined ? 0 : Math.max(0, worker.tokens.total - body.tokens);
      body.tokens = worker.tokens.total;
      emitted += grown;
      body.owed = Math.min(body.owed + grown / this.tokensPerSpark, 200);
      body.emission = body.owed / this.frameWall;
      body.omega = worker.step > 0 && worker.running ? (TURN / SECONDS_PER_TURN) * Math.min(4, (view.speed / worker.step) / 30) : 0;
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
    const key = `${this.capacity} ${view.measure.cell}`;
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
      this.sprites = null;
      this.moonRadius = this.orbits[this.orbits.length - 1].radius;
      if (places >= this.capacity || size < 0.7) break;
    }
  }

  #orbit(slot) {
    let index = 0;
    while (index < this.orbits.length - 1 && slot >= this.orbits[index].from + this.orbits[index].places) index += 1;
    return [this.orbits[index], slot - this.orbits[index].from];
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

  #spark(x, y, vx, vy, life, colour, fades) {
    const { sparks } = this;
    if (sparks.number === MAX_SPARKS) return;
    const index = sparks.number++;
    sparks.x[index] = x;
    sparks.y[index] = y;
    sparks.vx[index] = vx;
    sparks.vy[index] = vy;
    sparks.age[index] = 0;
    sparks.life[index] = life;
    sparks.colour[index] = colour;
    sparks.fades[index] = fades;
  }

  // A request that has joined flies from the scheduler to its worker.
  #courier(body, colour) {
    const begun = Math.random() * 0.4; // those of one frame would fly as a lump
    this.#spark(body.x * begun, body.y * begun, body.x / COURIER_SECONDS, body.y / COURIER_SECONDS, COURIER_SECONDS * (1 - begun), colour, 0);
  }

  /** Let wall seconds pass, and draw. */
  draw(context, view, elapsed) {
    if (!this.sprites) {
      const density = view.density;
      this.sprites = new Sprites(this.moonSize ?? 3, density);
      this.dots = new Sprites(Math.max(0.9, Math.min(2, (this.moonSize ?? 3) * 0.45)), density);
    }
    context.clearRect(0, 0, view.width, view.height);
    context.save();
    context.translate(view.width / 2, view.height / 2);
    if (view.animated) this.#move(view, elapsed);
    this.#drawLoading(context, view, elapsed);
    this.#drawMoons(context, view);
    if (view.animated) this.#drawSparks(context);
    context.restore();
  }

  #move(view, elapsed) {
    const { sparks, moons } = this;
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
        const fly = body.outwards + (Math.random() - 0.5) * 0.7;
        const speed = view.measure.cell * (0.35 + 0.25 * Math.random()) + 12;
        this.#spark(
          body.x + moons.orbit[moon] * Math.cos(angle), body.y + moons.orbit[moon] * Math.sin(angle),
          speed * Math.cos(fly), speed * Math.sin(fly), SPARK_SECONDS * (0.7 + 0.6 * Math.random()),
          moons.colour[moon], 1,
        );
      }
    }
    for (let index = 0; index < sparks.number; index += 1) {
      sparks.age[index] += elapsed;
      if (sparks.age[index] < sparks.life[index]) {
        sparks.x[index] += sparks.vx[index] * elapsed;
        sparks.y[index] += sparks.vy[index] * elapsed;
      } else {
        const last = --sparks.number; // the last takes its place
        for (const name of SPARK_FIELDS) sparks[name][index] = sparks[name][last];
        index -= 1;
      }
    }
  }

  #drawMoons(context, { bodies }) {
    const { moons, sprites } = this;
    for (let pass = 1; pass >= 0; pass -= 1) {
      context.globalAlpha = pass ? DIM : 1;
      for (let moon = 0; moon < moons.number; moon += 1) {
        if (moons.dim[moon] !== pass) continue;
        const body = bodies[moons.body[moon]];
        const angle = moons.angle[moon] + body.phase * moons.turn[moon];
        const orbit = moons.orbit[moon];
        sprites.draw(context, moons.colour[moon], moons.hollow[moon], body.x + orbit * Math.cos(angle), body.y + orbit * Math.sin(angle));
      }
    }
    context.globalAlpha = 1;
  }

  #drawSparks(context) {
    const { sparks, dots } = this;
    for (let index = 0; index < sparks.number; index += 1) {
      context.globalAlpha = sparks.fades[index] ? 1 - sparks.age[index] / sparks.life[index] : 0.75;
      dots.draw(context, sparks.colour[index], 0, sparks.x[index], sparks.y[index]);
    }
    context.globalAlpha = 1;
  }

  #drawLoading(context, view, elapsed) {
    const { measure, swatches: colours } = view;
    context.lineWidth = measure.residentWidth;
    for (const load of this.loading) {
      const body = view.bodies[load.body];
      if (!body) continue;
      if (view.animated) load.left = Math.max(0, load.left - elapsed * view.speed);
      const part = load.total > 0 ? 1 - load.left / load.total : 0;
      const from = TOP + (TURN * load.place) / load.of;
      const to = TOP + (TURN * (load.place + 1)) / load.of;
      context.strokeStyle = context.fillStyle = colours[load.colour];
      context.globalAlpha = 0.25;
      arc(context, body, measure.resident, from, to);
      context.globalAlpha = 1;
      if (part > 0) arc(context, body, measure.resident, from, from + (to - from) * part);
      // It comes from the outside, as a square.
      const distance = measure.outer + (measure.resident - measure.outer) * part;
      const middle = (from + to) / 2;
      const size = Math.max(2.4, this.moonSize * 1.1);
      context.fillRect(body.x + distance * Math.cos(middle) - size, body.y + distance * Math.sin(middle) - size, 2 * size, 2 * size);
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
      context.globalAlpha = 0.6 * (1 - part);
      context.strokeStyle = colours[square.colour];
      context.lineWidth = 1.2;
      const size = Math.max(2.4, this.moonSize * 1.1);
      context.strokeRect(square.x + square.dx * distance - size, square.y + square.dy * distance - size, 2 * size, 2 * size);
    }
    context.globalAlpha = 1;
  }
}

const SPARK_FIELDS = ['x', 'y', 'vx', 'vy', 'age', 'life', 'colour', 'fades'];

function arc(context, body, radius, from, to) {
  context.beginPath();
  context.arc(body.x, body.y, radius, from, to);
  context.stroke();
}

function common(a, b) {
  return b ? common(b, a % b) : a;
}
