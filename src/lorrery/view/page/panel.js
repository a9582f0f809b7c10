// The lists beside the picture: what is wrong, the tables of tenants, adapters and workers, and what has happened. A notice
// or a row leads to its entity.

import { Rows, briefly, clock, count, make, mark, percent, write, writeName } from './dom.js';
import { LOST } from './model.js';

const MAX_SHOWN_EVENTS = 80;
const WORDS = {
  load: 'loaded', evict: 'evicted', load_failed: 'load failed', preempt: 'preempted', worker_lost: 'worker lost', worker_joined: 'worker joined',
  worker_draining: 'draining', moved: 'moved', refused: 'refused', fault: 'fault', more: '…',
};
const MAX_ROWS = 60; // more is a matter for the search field
const ORDER_SECONDS = 2; // wall seconds that an order stays, so that one can click

/** Columns: [heading, what it means, text of a row]. The first column is the name, with its colour. */
const TABLES = {
  tenants: {
    entities: (model) => model.tenants.values(),
    order: (tenant) => tenant.running + tenant.waiting + tenant.tokens * 1e-9,
    columns: [
      ['share', 'Part of the output tokens of the last 30 s; the mark is its part of the requests that run and wait'],
      ['run', 'Requests that run', (tenant) => count(tenant.running)],
      ['wait', 'Requests that wait', (tenant) => count(tenant.waiting)],
      ['oldest', 'How long the oldest has waited', (tenant) => (tenant.waiting ? briefly(tenant.oldest) : '–')],
      ['refused', 'Requests refused, in all', (tenant) => count(tenant.refused)],
    ],
  },
  adapters: {
    entities: (model) => [...model.adapters.values()].filter((adapter) => !adapter.isGone),
    order: (adapter) => adapter.running + adapter.waiting + adapter.loads * 1e-6,
    columns: [
      ['run', 'Requests that run', (adapter) => count(adapter.running)],
      ['wait', 'Requests that wait', (adapter) => count(adapter.waiting)],
      ['loads', 'Loads to a GPU, in all', (adapter) => count(adapter.loads)],
      ['evicted', 'Evictions from a GPU, in all', (adapter) => count(adapter.evictions)],
      ['thrash', 'Loads within a minute of the eviction, in the last minute', (adapter) => count(adapter.recentThrash)],
    ],
  },
  workers: {
    entities: (model) => [...model.workers, ...model.lost],
    order: () => 0,
    columns: [
      ['KV', 'Part of the KV memory in use', (worker) => percent(worker.kvRatio)],
      ['run', 'Requests that run', (worker) => count(worker.running)],
      ['wait', 'Requests that wait', (worker) => count(worker.waiting)],
      ['oldest', 'How long its first has waited', (worker) => (worker.waiting ? briefly(worker.oldest) : '–')],
      ['tok/s', 'Output tokens a second, over 5 s', (worker) => count(worker.tokensPerSecond)],
    ],
  },
};

const byName = new Intl.Collator('en', { numeric: true });

export class Notices {
  /** `pick(entity)` chooses one; `dismiss(keys)` drops lost workers from the picture and the lists. */
  constructor(list, summary, pick, dismiss) {
    this.summary = summary;
    this.rows = new Rows(list, {
      key: (notice) => notice.id,
      create: () => {
        const title = make('span', { class: 'title' });
        const why = make('span', { class: 'why' });
        const rule = make('span', { class: 'rule' });
        const button = make('button', { type: 'button', onclick: () => button.subject && pick(button.subject) }, rule, title, why);
        const row = make('li', {}, button);
        const drop = make('button', { type: 'button', class: 'plain drop', text: '✕', title: 'Dismiss: it will not come back', 'aria-label': 'Dismiss', onclick: () => dismiss(row.keys) });
        row.append(drop);
        return Object.assign(row, { button, titleText: title, why, rule, drop });
      },
      update: (row, notice) => {
        mark(row, 'class', notice.severity);
        const [kind, key] = notice.subjects[0] ?? ['scheduler'];
        row.keys = notice.subjects.map(([, each]) => each);
        row.drop.hidden = notice.rule !== LOST;
        row.button.subject = kind === 'scheduler' ? null : { kind, key };
        write(row.rule, notice.rule);
        write(row.titleText, notice.title);
        write(row.why, notice.why);
      },
    });
  }

  draw(notices, running) {
    this.rows.show(notices);
    const bad = notices.filter((notice) => notice.severity === 'bad').length;
    write(this.summary, !running ? '' : !notices.length ? 'Nothing is wrong' : `${notices.length} ${notices.length === 1 ? 'thing is' : 'things are'} wrong`);
    mark(this.summary, 'class', bad ? 'bad' : notices.length ? 'warn' : 'calm');
  }
}

export class EventLog {
  constructor(list, none) {
    this.none = none;
    this.rows = new Rows(list, {
      key: (event) => event,
      create: (event) => make('li', { class: event.kind }, make('time', { text: clock(event.at) }),
        make('b', { text: WORDS[event.kind] ?? event.kind }), make('span', { text: event.text })),
      update: () => {},
    });
  }

  draw(events, filter) {
    const shown = [];
    for (let index = events.length - 1; index >= 0 && shown.length < MAX_SHOWN_EVENTS; index -= 1) {
      if (!filter || filter(events[index].text)) shown.push(events[index]);
    }
    this.rows.show(shown);
    write(this.none, shown.length ? '' : 'No events yet: adapters loaded and evicted, workers joined and lost, requests preempted, moved, refused.');
  }
}

export class Tables {
  constructor(parent, pick) {
    this.pick = pick;
    this.tables = Object.fromEntries(Object.entries(TABLES).map(([name, table]) => {
      const body = make('tbody');
      const heads = table.columns.map(([heading, title]) => make('th', { scope: 'col', title, text: heading, class: heading === 'share' ? 'wide' : null }));
      const more = make('p', { class: 'more' });
      const element = make('div', { class: 'table', role: 'tabpanel', id: `table-${name}`, 'aria-labelledby': `tab-${name}` },
        make('table', {}, make('thead', {}, make('tr', {}, make('th', { scope: 'col', text: 'name' }), ...heads)), body), more);
      parent.append(element);
      const rows = new Rows(body, { key: (entity) => entity.key, create: (entity) => this.#row(table, entity), update: (row, entity) => this.#update(table, row, entity) });
      return [name, { ...table, element, rows, more, order: [], orderKey: table.order, orderedAt: -Infinity, query: '' }];
    }));
  }

  /** Show one of them. */
  choose(name) {
    for (const [other, table] of Object.entries(this.tables)) table.element.hidden = other !== name;
    this.chosen = name;
  }

  #row(table, entity) {
    const row = make('tr');
    row.swatch = make('i', { class: 'swatch' });
    row.label = make('span');
    row.button = make('button', { type: 'button', class: 'name', onclick: () => this.pick(row.entity) }, row.swatch, row.label);
    row.append(make('th', { scope: 'row' }, row.button));
    row.addEventListener('click', (event) => {
      if (!row.button.contains(event.target)) this.pick(row.entity);
    });
    row.values = table.columns.map(([heading]) => {
      const cell = make('td');
      if (heading === 'share') {
        row.bar = make('i', { class: 'bar' });
        row.demand = make('i', { class: 'demand' });
        row.share = make('span');
        cell.append(make('span', { class: 'track' }, row.bar, row.demand), row.share);
      }
      row.append(cell);
      return cell;
    });
    return row;
  }

  #update(table, row, entity) {
    const { ui } = this;
    row.entity = entity;
    writeName(row.label, entity.name);
    mark(row.button, 'aria-label', entity.name);
    row.swatch.style.setProperty('background', ui.colour(entity) ?? 'transparent');
    mark(row, 'class', [ui.severities.get(entity), ui.selected === entity ? 'selected' : null].filter(Boolean).join(' ') || null);
    mark(row.button, 'aria-pressed', ui.selected === entity ? 'true' : 'false');
    table.columns.forEach(([heading, , text], index) => {
      if (heading !== 'share') {
        write(row.values[index], text(entity));
        return;
      }
      const { share, demand } = entity;
      row.bar.style.setProperty('width', `${(share * 100).toFixed(1)}%`);
      row.demand.style.setProperty('left', `${(demand * 100).toFixed(1)}%`);
      write(row.share, percent(share));
    });
  }

  /** Show the chosen table. */
  draw(model, ui) {
    this.ui = ui;
    const table = this.tables[this.chosen];
    const entities = [...table.entities(model)].filter((entity) => !ui.filter || ui.filter(entity.name));
    const now = performance.now() / 1000;
    if (now - table.orderedAt > ORDER_SECONDS || ui.query !== table.query || entities.length < MAX_ROWS / 2) {
      table.orderedAt = now;
      table.query = ui.query;
      table.ranks = new Map(entities.sort((a, b) => table.orderKey(b) - table.orderKey(a) || byName.compare(a.name, b.name)).map((entity, rank) => [entity.key, rank]));
    }
    entities.sort((a, b) => (table.ranks.get(a.key) ?? Infinity) - (table.ranks.get(b.key) ?? Infinity));
    table.rows.show(entities.slice(0, MAX_ROWS));
    const none = ui.filter ? 'No name has this in it.' : 'None yet.';
    write(table.more, entities.length > MAX_ROWS ? `${count(entities.length - MAX_ROWS)} more: search by name.` : entities.length ? '' : none);
  }
}
