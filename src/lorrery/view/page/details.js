// What is known of one worker, adapter or tenant: figures, two minutes, where it is, and its last requests.

import { Rows, clock, count, make, mark, percent, plural, seconds, write, writeName } from './dom.js';
import { drawLines, niceTop } from './strips.js';
import { themeColours } from './colours.js';

const MAX_REQUESTS = 12;
const MAX_CHIPS = 24;
const PHASES = [['queue', 'queue'], ['load', 'adapter load'], ['prefill', 'prefill'], ['decode', 'decode']];
const STATES = ['unused', 'in use', 'loading'];
const KINDS = { worker: 'Worker', adapter: 'Adapter', tenant: 'Tenant' };

/** Figures of an entity: [name, text]. */
const FIGURES = {
  worker: (worker, model) => [
    ['state', worker.lostAt === null ? worker.state : `lost ${seconds(model.at - worker.lostAt)} ago`],
    ['GPU', worker.tp > 1 ? `${worker.tp} × ${worker.gpu}` : worker.gpu],
    ['running', count(worker.running)],
    ['waiting', worker.waiting ? `${count(worker.waiting)}, ${seconds(worker.oldest)}` : '0'],
    ['KV tokens', `${count(worker.kv)} of ${count(worker.pool)}`],
    ['last step', worker.step ? `${seconds(worker.step)} ${worker.stepKind}` : 'idle'],
    ['tokens/s', count(worker.tokensPerSecond)],
    ['busy, 5 s', percent(worker.busy)],
    ['preempted', count(worker.preempted)],
    ['on the GPU', plural(worker.resident.length, 'adapter')],
    ['in host RAM', plural(worker.host ?? 0, 'adapter')],
  ],
  adapter: (adapter) => [
    ['running', count(adapter.running)],
    ['waiting', count(adapter.waiting)],
    ['on GPUs', adapter.loading ? `${count(adapter.onGpus)}, ${count(adapter.loading)} loading` : count(adapter.onGpus)],
    ['loads', count(adapter.loads)],
    ['evictions', count(adapter.evictions)],
    ['thrash, last minute', count(adapter.recentThrash)],
    ['thrash, in all', count(adapter.thrash)],
  ],
  tenant: (tenant) => [
    ['running', count(tenant.running)],
    ['waiting', tenant.waiting ? `${count(tenant.waiting)}, ${seconds(tenant.oldest)}` : '0'],
    ['tokens, 30 s', percent(tenant.share)],
    ['requests, 30 s', percent(tenant.demand)],
    ['tokens/s', count(tenant.tokensPerSecond)],
    ['output tokens', count(tenant.tokens)],
    ['refused', count(tenant.refused)],
  ],
};

/** Entities beside it: [entity, what it is there], most telling first. */
function related(entity, model) {
  if (entity.kind === 'worker') {
    return entity.resident.map(([index, state, rank]) => [model.adapter(index), `${STATES[state] ?? ''}, rank ${rank}`, state])
      .sort((a, b) => (b[2] % 2) - (a[2] % 2) || b[2] - a[2]);
  }
  const found = new Map();
  for (const worker of model.workers) {
    if (entity.kind === 'adapter') {
      const resident = worker.resident.find(([index]) => model.adapter(index) === entity);
      if (resident) found.set(worker, STATES[resident[1]]);
    }
    for (const [, adapter, tenant] of worker.batch) {
      if (entity.kind === 'tenant' && model.tenant(tenant) === entity) {
        const other = model.adapter(adapter);
        found.set(other, (found.get(other) ?? 0) + 1);
      }
    }
  }
  return [...found].sort((a, b) => (b[1] > a[1] ? 1 : -1)).map(([other, what]) => [other, typeof what === 'number' ? `${what} running` : what]);
}

export class Details {
  /** `pick(entity or null)` chooses another, or none. */
  constructor(parent, pick) {
    this.colours = themeColours();
    this.kind = make('span', { class: 'kind' });
    this.name = make('span');
    this.swatch = make('i', { class: 'swatch' });
    this.heading = make('h2', { tabindex: '-1' }, this.kind, this.swatch, this.name);
    this.figures = make('dl');
    this.canvas = make('canvas', { 'aria-hidden': 'true' });
    this.scale = make('span', { class: 'scale' });
    this.chips = make('ul', { class: 'chips' });
    this.relatedTitle = make('h3');
    this.requests = make('ol', { class: 'requests' });
    this.none = make('p', { class: 'more' });
    parent.append(
      make('div', { class: 'heading' }, this.heading, make('button', { type: 'button', class: 'plain', onclick: () => pick(null), 'aria-label': 'Close', title: 'Close (Esc)', text: '✕' })),
      this.figures,
      make('div', { class: 'strip small', title: 'Last two minutes' },
        make('div', { class: 'keys' }, make('span', { class: 'line-0', text: 'running' }), make('span', { class: 'line-1', text: 'waiting' })),
        make('div', { class: 'spark' }, this.canvas, this.scale)),
      this.relatedTitle, this.chips,
      make('h3', { text: 'Last requests' }),
      make('ul', { class: 'phases', 'aria-label': 'Colours of the bars' }, ...PHASES.map(([phase, label]) => make('li', {}, make('i', { class: `phase ${phase}` }), label))),
      this.requests, this.none,
    );
    this.figureRows = new Rows(this.figures, {
      key: ([name]) => name,
      create: ([name]) => {
        const value = make('dd');
        return Object.assign(make('div', {}, make('dt', { text: name }), value), { value });
      },
      update: (row, [, text]) => write(row.value, text),
    });
    this.chipRows = new Rows(this.chips, {
      key: ([entity]) => entity,
      create: ([entity]) => {
        const swatch = make('i', { class: 'swatch' });
        const what = make('span', { class: 'soft' });
        const name = make('span');
        writeName(name, entity.name);
        const button = make('button', { type: 'button', class: 'chip', onclick: () => pick(entity) }, swatch, name, what);
        return Object.assign(make('li', {}, button), { button, swatch, what });
      },
      update: (row, [entity, what]) => {
        write(row.what, what);
        mark(row.button, 'aria-label', `${entity.name} ${what}`);
        row.swatch.style.setProperty('background', this.ui.colour(entity) ?? 'transparent');
      },
    });
    this.requestRows = new Rows(this.requests, { key: (request) => request, create: createRequest, update: (row, request) => this.#request(row, request) });
  }

  recolour() {
    this.colours = themeColours();
  }

  /** Show an entity. */
  draw(entity, model, ui) {
    this.ui = ui;
    write(this.kind, KINDS[entity.kind]);
    writeName(this.name, entity.name);
    this.swatch.style.setProperty('background', ui.colour(entity) ?? 'transparent');
    this.swatch.hidden = ui.colour(entity) === null;
    this.figureRows.show(FIGURES[entity.kind](entity, model));
    const series = [entity.runningSeries, entity.waitingSeries];
    const top = niceTop(series);
    write(this.scale, count(top));
    drawLines(this.canvas, series, model.at, top, [this.colours.brass, this.colours.faint], this.colours.line);

    const all = related(entity, model);
    this.chipRows.show(all.slice(0, MAX_CHIPS));
    const what = { worker: 'Adapters on the GPU', adapter: 'Where it is', tenant: 'Adapters that run for it' }[entity.kind];
    write(this.relatedTitle, all.length > MAX_CHIPS ? `${what} (${MAX_CHIPS} of ${all.length})` : all.length ? what : `${what}: none`);

    const last = [];
    for (let index = model.ended.length - 1; index >= 0 && last.length < MAX_REQUESTS; index -= 1) {
      const request = model.ended[index];
      if (request[entity.kind]?.key === entity.key) last.push(request);
    }
    this.longest = Math.max(1e-9, ...last.map(duration));
    this.requestRows.show(last);
    write(this.none, last.length ? '' : 'None has ended since this page was opened.');
  }

  #request(row, request) {
    const [a, b] = { worker: ['adapter', 'tenant'], adapter: ['worker', 'tenant'], tenant: ['adapter', 'worker'] }[this.ui.selected?.kind ?? 'worker'];
    writeName(row.one, request[a]?.name ?? 'no worker');
    writeName(row.other, request[b]?.name ?? 'no worker');
    write(row.what, `${count(request.prompt)} → ${count(request.output)} tokens`);
    write(row.time, seconds(duration(request)));
    write(row.outcome, PLAIN.has(request.outcome) ? '' : request.outcome);
    const parts = PHASES.map(([phase, label]) => `${label} ${seconds(request[phase])}`).join(', ');
    mark(row.bar, 'aria-label', parts);
    mark(row.bar, 'title', `${parts}; arrived at ${clock(request.arrived)}, ${request.outcome}`);
    for (const [phase] of PHASES) row.parts[phase].style.setProperty('width', `${(request[phase] / this.longest) * 100}%`);
  }
}

const PLAIN = new Set(['finished', 'length', 'stop', 'eos', 'stop_sequence', 'ok']); // endings that need no word

function duration(request) {
  return request.queue + request.load + request.prefill + request.decode;
}

function createRequest() {
  const parts = Object.fromEntries(PHASES.map(([phase]) => [phase, make('i', { class: `phase ${phase}` })]));
  const [one, other] = [make('span'), make('span')];
  const who = make('span', { class: 'who' }, one, make('span', { text: ' · ' }), other);
  const [what, time, outcome] = ['what', 'time', 'outcome'].map((name) => make('span', { class: name }));
  const bar = make('div', { class: 'stack', role: 'img' }, ...Object.values(parts));
  return Object.assign(make('li', {}, who, outcome, what, time, bar), { one, other, what, time, outcome, bar, parts });
}
