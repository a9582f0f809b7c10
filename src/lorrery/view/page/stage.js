// The picture: two canvases, one above the other, and a button over each body, for the keyboard and for names.

import { Rows, count, make, mark, percent, plural, write } from './dom.js';
import { drawBodies, measures } from './bodies.js';
import { Moving } from './moving.js';
import { swatches, themeColours } from './colours.js';

const MARGIN = 8;
const USUAL_TYPE = 14; // the root's font size in CSS pixels, but on large screens
const MAX_DENSITY = 2; // device pixels a CSS pixel that are drawn
const SLOW_MS = 21; // between animation frames, on the mean of SLOW_FOR_MS: then what moves is drawn in fewer pixels
const SLOW_FOR_MS = 3000;
const LEAST_DENSITY = 0.6;
const MAX_CELL = 400; // room for one body beyond which more does not help, in CSS pixels
const MAX_RINGS = 6;
const SAMPLES = 256; // points of an ellipse, for its arc length
const byName = new Intl.Collator('en', { numeric: true });

export class Stage {
  /** `pick(entity)` is called when a body is chosen. */
  constructor(container, pick) {
    this.container = container;
    this.pick = pick;
    this.still = make('canvas', { 'aria-hidden': 'true' });
    this.moved = make('canvas', { 'aria-hidden': 'true' });
    this.buttons = make('ul', { class: 'bodies', 'aria-label': 'Workers' });
    container.prepend(this.still, this.moved, this.buttons);
    this.moving = new Moving();
    this.view = { bodies: [], speed: 1, orbits: true, severities: new Map(), hovered: null };
    this.byKey = new Map();
    this.reduced = window.matchMedia('(prefers-reduced-motion: reduce)');
    this.stale = true;
    this.drawnAt = 0;
    this.rows = new Rows(this.buttons, { key: (body) => body.worker.key, create: (body) => this.#button(body), update: updateButton });
    new ResizeObserver(() => this.#resize()).observe(container);
    this.recolour();
    this.#resize();
  }

  /** The theme has changed. */
  recolour() {
    this.view.colours = themeColours();
    this.view.swatches = swatches();
    this.moving.recolour();
    this.stale = true;
  }

  #button(body) {
    const set = (hovered) => {
      this.view.hovered = hovered;
      this.stale = true;
    };
    const button = make('button', {
      type: 'button', onclick: () => this.pick(button.worker), onpointerenter: () => set(button.worker), onpointerleave: () => set(null),
      onfocus: () => set(button.worker), onblur: () => set(null),
    });
    button.worker = body.worker;
    const item = make('li', {}, button);
    item.button = button;
    return item;
  }

  #resize() {
    const { width, height } = this.container.getBoundingClientRect();
    const density = Math.min(MAX_DENSITY, window.devicePixelRatio || 1);
    this.view.type = parseFloat(getComputedStyle(document.documentElement).fontSize) / USUAL_TYPE;
    this.numDrawn = this.drawnMs = 0;
    size(this.still, width, height, density);
    size(this.moved, width, height, density);
    this.still.getContext('2d').setTransform(density, 0, 0, density, 0, 0);
    Object.assign(this.view, { width, height, density });
    this.moving.recolour();
    this.numPlaced = -1;
    this.stale = true;
  }

  /** A frame has come, or what is looked for or selected has changed. `ui`: see main.js. */
  update(model, ui) {
    const { view } = this;
    const now = performance.now();
    const workers = [...model.workers, ...model.lost].sort((a, b) => a.shard - b.shard || byName.compare(a.name, b.name));
    this.#place(workers);
    Object.assign(view, {
      selected: ui.selected, severities: ui.severities, speed: ui.speed, animated: !this.reduced.matches,
      colourIndex: (adapter, tenant) => (ui.byTenant
        ? model.tenantColours.index(model.tenant(tenant).key) : model.adapterColours.index(model.adapter(adapter).key)),
      adapterColour: (adapter) => model.adapterColours.index(model.adapter(adapter).key),
      swatch: (adapter) => view.swatches[model.adapterColours.index(adapter.key)],
      dimAdapter: (adapter) => ui.focus !== null && !ui.focus(adapter),
      dimMoon: (adapter, tenant, worker) => ui.focus !== null && !ui.focus(model.adapter(adapter)) && !ui.focus(model.tenant(tenant)) && !ui.focus(worker),
      matches: ui.focus && ((worker) => ui.focus(worker) || worker.batch.some(([, adapter, tenant]) => !view.dimMoon(adapter, tenant, worker))
        || worker.resident.some(([adapter]) => ui.focus(model.adapter(adapter)))),
    });
    if (model.version !== this.version || ui.changed) {
      this.moving.place(model, view, (now - (this.frameAt ?? now)) / 1000 || 0.1);
      this.frameAt = now;
      this.version = model.version;
      this.rows.show(view.bodies);
    }
    this.model = model;
    this.stale = true;
  }

  #place(workers) {
    const { view } = this;
    const changed = workers.length !== this.numPlaced;
    if (changed) {
      view.place = layout(workers.length, Math.max(100, view.width - 2 * MARGIN), Math.max(100, view.height - 2 * MARGIN));
      view.measure = measures(view.place.cell, view.type);
      this.numPlaced = workers.length;
    }
    const gone = new Set(this.byKey.keys());
    view.bodies = workers.map((worker, index) => {
      let body = this.byKey.get(worker.key);
      if (!body || body.worker !== worker) {
        body = { phase: 0, omega: 0, owed: 0, due: 0, emission: 0, tilt: (index * 2.4) % 6.28, tokens: undefined, resident: null };
        this.byKey.set(worker.key, body);
      }
      gone.delete(worker.key);
      const { x, y } = view.place.places[index];
      Object.assign(body, { worker, x, y, outwards: Math.atan2(y, x), inwards: Math.atan2(-y, -x) });
      body.centre = { x: view.width / 2 + x, y: view.height / 2 + y, room: view.measure.outer * 2 };
      return body;
    });
    for (const key of gone) this.byKey.delete(key);
  }

  // A machine that cannot keep up, most often one without a GPU, gets a coarser picture rather than a slower one.
  #adapt(ms) {
    const { view } = this;
    if (ms > 250 || !view.animated || view.density <= LEAST_DENSITY) return; // a hidden page, a pause
    this.numDrawn += 1;
    this.drawnMs += ms;
    if (this.drawnMs < SLOW_FOR_MS) return;
    const mean = this.drawnMs / this.numDrawn;
    this.numDrawn = this.drawnMs = 0;
    if (mean < SLOW_MS) return;
    view.density = Math.max(LEAST_DENSITY, view.density * 0.75);
    size(this.moved, view.width, view.height, view.density);
    this.moving.recolour();
  }

  /** Draw what has changed; called once an animation frame. */
  draw(now) {
    const elapsed = Math.min(0.1, (now - this.drawnAt) / 1000);
    this.#adapt(now - this.drawnAt);
    this.drawnAt = now;
    const { view } = this;
    if (!this.model || !view.measure) return;
    if (this.numPlaced < 0) {
      this.#place(view.bodies.map((body) => body.worker));
      this.moving.place(this.model, view, 1);
      this.rows.show(view.bodies);
    }
    if (this.stale) {
      for (const body of view.bodies) Object.assign(body, { moonRadius: this.moving.moonRadius ?? 0, orbitGap: Math.max(2, (this.moving.moonSize ?? 2) * 2.7) });
      view.orbits = view.measure.cell > 110;
      drawBodies(this.still.getContext('2d'), this.model, view);
    }
    if (this.stale || (view.animated && !this.moving.rests)) this.moving.draw(this.moved.getContext('2d', { willReadFrequently: true }), view, elapsed);
    this.stale = false;
  }
}

function size(canvas, width, height, density) {
  Object.assign(canvas, { width: Math.round(width * density), height: Math.round(height * density) });
}

function updateButton(item, { worker, centre }) {
  const { button } = item;
  button.worker = worker;
  const key = `${Math.round(centre.x)} ${Math.round(centre.y)} ${Math.round(centre.room)}`;
  if (item.placed !== key) {
    item.placed = key;
    button.style.setProperty('width', `${centre.room}px`);
    button.style.setProperty('height', `${centre.room}px`);
    button.style.setProperty('transform', `translate(${centre.x - centre.room / 2}px, ${centre.y - centre.room / 2}px)`);
  }
  const named = `${Math.floor(performance.now() / 1000)} ${worker.lostAt}`;
  if (item.named === named) return; // a name that changes ten times a second helps no one
  item.named = named;
  const label = worker.lostAt !== null ? `${worker.name}: lost`
    : `${worker.name}: ${worker.gpu}, ${worker.state}, ${plural(worker.running, 'request')} running, ${count(worker.waiting)} waiting, `
      + `KV ${percent(worker.kvRatio)}`;
  mark(button, 'aria-label', label);
  mark(button, 'title', label);
  write(button, '');
}

// Where the bodies stand: on ellipses around the scheduler, as many as leave each body the most room.

/**
 * Places for so many bodies: {cell, sun, rings: [{rx, ry}], places: [{x, y}]}, x and y from the stage's middle. `cell` is
 * the diameter of the room of each body.
 */
export function layout(number, width, height) {
  let best = null;
  for (let rings = 1; rings <= Math.min(MAX_RINGS, Math.max(1, number)); rings += 1) {
    const tried = withRings(number, rings, width, height);
    if (!best || tried.cell > best.cell * 1.001) best = tried;
  }
  return best;
}

function withRings(number, rings, width, height) {
  const sun = Math.max(26, Math.min(width, height) * (rings > 2 ? 0.07 : 0.09));
  let cell = MAX_CELL;
  let [shapes, counts] = [[], []];
  for (let pass = 0; pass < 12; pass += 1) {
    const [rx, ry] = [Math.max(10, (width - cell) / 2), Math.max(10, (height - cell) / 2)];
    const inner = rings === 1 ? 1 : Math.min(0.75, (sun + cell * 0.5) / Math.min(rx, ry));
    shapes = Array.from({ length: rings }, (_, ring) => {
      const share = rings === 1 ? 1 : inner + ((1 - inner) * ring) / (rings - 1);
      return { rx: rx * share, ry: ry * share };
    });
    const lengths = shapes.map(({ rx: a, ry: b }) => perimeter(a, b));
    counts = spread(number, lengths);
    let room = MAX_CELL;
    shapes.forEach(({ rx: a, ry: b }, ring) => {
      if (!counts[ring]) return;
      // Neighbours on one ring: the chord, a little shorter than the arc.
      if (counts[ring] > 1) room = Math.min(room, (lengths[ring] / counts[ring]) * (counts[ring] < 5 ? 0.8 : 0.96));
      room = Math.min(room, ring ? Math.min(a - shapes[ring - 1].rx, b - shapes[ring - 1].ry) : (Math.min(a, b) - sun) * 2);
    });
    const next = Math.min(room, Math.max(Math.min(width, height) * 0.46, number <= 2 ? Math.max(width, height) * 0.36 : 0), Math.min(width, height));
    if (Math.abs(next - cell) < 0.5) break;
    cell = (cell + next) / 2;
  }
  cell = Math.max(16, cell);
  const places = [];
  shapes.forEach((shape, ring) => places.push(...around(counts[ring], shape, ring)));
  return { cell, sun, rings: shapes, places };
}

// Shares out bodies by the rings' lengths, the inner rings first in order.
function spread(number, lengths) {
  const total = lengths.reduce((sum, length) => sum + length, 0);
  const counts = lengths.map((length) => Math.floor((number * length) / total));
  let left = number - counts.reduce((sum, count) => sum + count, 0);
  for (let ring = lengths.length - 1; left > 0; ring = ring ? ring - 1 : lengths.length - 1, left -= 1) counts[ring] += 1;
  return counts;
}

// Places at equal arc lengths from the top on; two bodies stand left and right where that is the longer way.
function around(number, { rx, ry }, ring) {
  const angles = new Float64Array(SAMPLES + 1);
  const lengths = new Float64Array(SAMPLES + 1);
  const begin = number <= 2 && rx >= ry ? Math.PI : -Math.PI / 2;
  for (let sample = 0; sample <= SAMPLES; sample += 1) {
    angles[sample] = begin + (2 * Math.PI * sample) / SAMPLES;
    if (sample) {
      const dx = rx * (Math.cos(angles[sample]) - Math.cos(angles[sample - 1]));
      const dy = ry * (Math.sin(angles[sample]) - Math.sin(angles[sample - 1]));
      lengths[sample] = lengths[sample - 1] + Math.hypot(dx, dy);
    }
  }
  const places = [];
  let sample = 0;
  for (let index = 0; index < number; index += 1) {
    const wanted = (lengths[SAMPLES] * (index + (ring % 2 && number > 2 ? 0.5 : 0))) / number;
    while (lengths[sample + 1] < wanted) sample += 1;
    const part = (wanted - lengths[sample]) / (lengths[sample + 1] - lengths[sample] || 1);
    const angle = angles[sample] + part * (angles[sample + 1] - angles[sample]);
    places.push({ x: rx * Math.cos(angle), y: ry * Math.sin(angle) });
  }
  return places;
}

// Ramanujan's approximation.
function perimeter(a, b) {
  return Math.PI * (3 * (a + b) - Math.sqrt((3 * a + b) * (a + 3 * b)));
}
