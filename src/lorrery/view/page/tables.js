// The tables of tenants, adapters and workers, and what they have in common with the notices: a row leads to its entity.

import { Rows, make, mark, write } from './dom.js';
import { briefly, count, percent } from './format.js';
import { tenantShares, THRASH_SECONDS } from './rules.js';

const MAX_ROWS = 60; // more is a matter for the search field
const ORDER_SECONDS = 2; // wall seconds that an order stays, so that one can click

/** Columns: [heading, what it means, text of a row]. The first column is the name, with its colour. */
const TABLES = {
  tenants: {
    entities: (model) => model.tenants.values(),
    order: (tenant) => tenant.running + tenant.waiting + tenant.tokens.total * 1e-9,
    columns: [
      ['share', 'Part of the output tokens of the last 30 s; the mark is its part of the requests that run and wait'],
      ['running', 'Requests that run', (tenant) => count(tenant.running)],
      ['waiting', 'Requests that wait', (tenant) => count(tenant.waiting)],
      ['oldest', 'How long the oldest has waited', (tenant) => (tenant.waiting ? briefly(tenant.oldest) : '–')],
      ['refused', 'Requests refused, in all', (tenant) => count(tenant.refused.total)],
    ],
  },
  adapters: {
    entities: (model) => [...model.adapters.values()].filter((adapter) => !adapter.isGone),
    order: (adapter) => adapter.running + adapter.waiting + adapter.loads.total * 1e-6,
    columns: [
      ['running', 'Requests that run', (adapter) => count(adapter.running)],
      ['waiting', 'Requests that wait', (adapter) => count(adapter.waiting)],
      ['loads', 'Loads to a GPU, in all', (adapter) => count(adapter.loads.total)],
      ['evicted', 'Evictions from a GPU, in all', (adapter) => count(adapter.evictions.total)],
      ['thrash', 'Loads within a minute of the eviction, in the last minute', (adapter, model) => count(adapter.thrash.growth(THRASH_SECONDS, model.at))],
    ],
  },
  workers: {
    entities: (model) => [...model.workers, ...model.lost],
    order: () => 0,
    columns: [
      ['KV', 'Part of the KV memory in use', (worker) => percent(worker.kvRatio)],
      ['running', 'Requests that run', (worker) => count(worker.running)],
      ['waiting', 'Requests that wait', (worker) => count(worker.waiting)],
      ['oldest', 'How long its first has waited', (worker) => (worker.waiting ? briefly(worker.oldest) : '–')],
      ['tok/s', 'Output tokens a second, over 5 s', (worker, model) => count(worker.tokens.rate(5, model.at))],
    ],
  },
};

const byName = new Intl.Collator('en', { numeric: true });

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
    const { model, ui } = this;
    row.entity = entity;
    write(row.label, entity.name);
    mark(row.button, 'title', entity.name);
    row.swatch.style.setProperty('background', ui.colour(entity) ?? 'transparent');
    mark(row, 'class', [ui.severities.get(entity), ui.selected === entity ? 'selected' : null].filter(Boolean).join(' ') || null);
    mark(row.button, 'aria-pressed', ui.selected === entity ? 'true' : 'false');
    table.columns.forEach(([heading, , text], index) => {
      if (heading !== 'share') {
        write(row.values[index], text(entity, model));
        return;
      }
      const { share = 0, demand = 0 } = this.shares.get(entity) ?? {};
      row.bar.style.setProperty('width', `${(share * 100).toFixed(1)}%`);
      row.demand.style.setProperty('left', `${(demand * 100).toFixed(1)}%`);
      write(row.share, percent(share));
    });
  }

  /** Show the chosen table. */
  draw(model, ui) {
    Object.assign(this, { model, ui });
    const table = this.tables[this.chosen];
    if (this.chosen === 'tenants') this.shares = new Map(tenantShares(model).map((share) => [share.tenant, share]));
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
