// The page: asks the server whether it shows a live cluster or a record, and keeps the picture and the panel up to date.

import { byId, clock, count, make, mark, write, writeName } from './dom.js';
import { fetchHello, LiveFeed, Record } from './feed.js';
import { Model } from './model.js';
import { startTheme, swatches } from './colours.js';
import { Stage } from './stage.js';
import { Strips } from './strips.js';
import { Details } from './details.js';
import { EventLog, Notices, Tables } from './panel.js';
import { Timeline } from './timeline.js';

const PANEL_MS = 400; // how often figures change: more often cannot be read
const HELLO_RETRY_MS = 2000;

class Page {
  constructor() {
    this.model = new Model();
    this.source = null; // 'live' or 'record' once known
    this.panelAt = -Infinity;
    this.chosen = null; // {kind, key}
    this.ui = { selected: null, severities: new Map(), byTenant: false, speed: 1, query: '', filter: null, focus: null, changed: true, colour: (entity) => this.#colour(entity) };
    const pick = (entity) => this.choose(entity);
    this.stage = new Stage(byId('stage'), pick);
    this.strips = new Strips(byId('strips'));
    this.tables = new Tables(byId('tables'), pick);
    this.details = new Details(byId('details'), pick);
    this.noticeList = new Notices(byId('notices'), byId('summary'), pick, (keys) => {
      this.model.dismiss(keys);
      this.refresh();
    });
    this.events = new EventLog(byId('events'), byId('no-events'));
    this.title = make('span');
    byId('model').append(this.title);
    this.#controls();
    startTheme(byId('theme'), () => {
      for (const part of [this.stage, this.strips, this.details]) part.recolour();
      this.palette = swatches();
      this.refresh();
    });
  }

  #controls() {
    const tabs = [...byId('tabs').querySelectorAll('[role=tab]')];
    const show = (tab) => {
      for (const other of tabs) {
        mark(other, 'aria-selected', String(other === tab));
        other.tabIndex = other === tab ? 0 : -1;
      }
      this.tables.choose(tab.dataset.table);
      this.refresh();
    };
    tabs.forEach((tab, index) => {
      tab.addEventListener('click', () => show(tab));
      tab.addEventListener('keydown', (event) => {
        const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (!step) return;
        const next = tabs[(index + step + tabs.length) % tabs.length];
        next.focus();
        show(next);
      });
    });
    show(tabs[0]);
    const search = byId('search');
    search.addEventListener('input', () => {
      const query = search.value.trim().toLowerCase();
      Object.assign(this.ui, { query, filter: query ? (name) => name.toLowerCase().includes(query) : null });
      this.refresh();
    });
    for (const radio of document.querySelectorAll('input[name=colour]')) {
      radio.addEventListener('change', () => {
        this.ui.byTenant = radio.value === 'tenant';
        this.refresh();
      });
    }
    document.addEventListener('keydown', (event) => {
      if (event.key === '/' && !event.target.closest('input:not([type=range]):not([type=radio]), select')) {
        event.preventDefault();
        search.focus();
      } else if (event.key === 'Escape') {
        if (event.target === search && search.value) {
          search.value = '';
          search.dispatchEvent(new Event('input'));
        } else this.choose(null);
      }
    });
  }

  /** Find out what is served, however long that takes, and show it. */
  async start() {
    requestAnimationFrame((now) => this.#tick(now));
    for (;;) {
      try {
        const hello = await fetchHello();
        if (hello.source === 'record') this.#showRecord();
        else this.#showLive();
        return;
      } catch (error) {
        this.#state('lost', 'no cluster', error instanceof TypeError
          ? 'The server of this page does not answer. Start it again with `lorrery up` or `lorrery web`; the page tries again by itself.'
          : `${error.message}. The page tries again by itself; \`lorrery up\` starts a cluster.`);
        await new Promise((resume) => setTimeout(resume, HELLO_RETRY_MS));
      }
    }
  }

  #showLive() {
    this.source = 'live';
    new LiveFeed({
      hello: (hello) => {
        this.model.begin(hello);
        this.#title(hello);
      },
      frame: (frame) => this.model.apply(frame),
      live: () => this.#state('live', 'live', ''),
      lost: (wait) => this.#state('lost', `reconnecting in ${wait} s`, 'The connection is lost; the page tries again by itself. If the cluster was stopped, start it again: `lorrery up`.'),
      problem: (message) => this.#state('lost', 'no cluster', `${message}. The page tries again by itself; \`lorrery up\` starts a cluster.`),
    }).start();
  }

  async #showRecord() {
    this.source = 'record';
    this.record = new Record();
    this.timeline = new Timeline(byId('timeline'), this.record);
    this.#state('record', 'record, loading', '');
    try {
      await this.record.load(() => this.record.hello && this.model.hello !== this.record.hello && this.#title(this.record.hello));
      this.#title(this.record.hello);
      this.#state('record', 'record', '');
    } catch (error) {
      this.#state('lost', 'no record', error.message);
    }
  }

  #title(hello) {
    this.model.hello ??= hello;
    writeName(this.title, hello.title.includes(hello.model) ? hello.title : [hello.model, hello.title].filter(Boolean).join(' · '));
    mark(byId('model'), 'title', `lorrery ${hello.version}`);
    document.title = [hello.title || hello.model, 'Lorrery'].filter(Boolean).join(' · ');
    this.ui.speed = this.source === 'live' ? 1 / (hello.time_scale || 1) : 1;
  }

  #state(kind, text, advice) {
    mark(byId('connection'), 'class', kind);
    write(byId('connection'), text);
    mark(byId('stage'), 'class', kind === 'lost' ? 'lost' : null);
    this.advice = advice;
  }

  /** Select an entity, or nothing. */
  choose(entity) {
    this.chosen = entity && { kind: entity.kind, key: entity.key };
    this.refresh();
    if (entity) this.details.heading.focus({ preventScroll: false });
  }

  /** Something other than the model has changed. */
  refresh() {
    this.ui.changed = true;
    this.panelAt = -Infinity;
  }

  #colour(entity) {
    if (entity.kind === 'worker') return null;
    const colours = entity.kind === 'adapter' ? this.model.adapterColours : this.model.tenantColours;
    return this.palette[colours.index(entity.key)];
  }

  #tick(now) {
    requestAnimationFrame((later) => this.#tick(later));
    if (this.record) {
      this.record.advance(Math.min(0.25, (now - (this.tickedAt ?? now)) / 1000));
      this.model = this.record.show(this.model);
      const speed = this.record.playing ? this.record.speed : 0;
      this.ui.changed ||= speed !== this.ui.speed;
      this.ui.speed = speed;
    }
    this.tickedAt = now;
    const { model, ui } = this;
    if (model.version !== this.shown || ui.changed) {
      this.shown = model.version;
      ui.severities = this.#severities();
      ui.selected = this.chosen ? model.find(this.chosen.kind, this.chosen.key) ?? null : null;
      ui.focus = this.#focus();
      this.stage.update(model, ui);
      ui.changed = false;
    }
    this.stage.draw(now);
    if (now - this.panelAt >= PANEL_MS) {
      this.panelAt = now;
      this.#panel();
    }
  }

  // The gravest notice of each entity; notices come gravest first.
  #severities() {
    const severities = new Map();
    for (const { severity, subjects } of this.model.notices) {
      for (const [kind, key] of subjects) {
        const entity = this.model.find(kind, key);
        if (entity && !severities.has(entity)) severities.set(entity, severity);
      }
    }
    return severities;
  }

  // What is to stand out from the rest: what is looked for, or else the adapter or tenant that is selected.
  #focus() {
    const { filter, selected } = this.ui;
    if (filter) return (entity) => filter(entity.name);
    if (selected && selected.kind !== 'worker') return (entity) => entity === selected;
    return null;
  }

  #panel() {
    const { model, ui } = this;
    mark(document.body, 'class', ui.selected ? 'selected' : null);
    byId('details').hidden = !ui.selected;
    this.strips.draw(model);
    this.tables.draw(model, ui);
    if (ui.selected) this.details.draw(ui.selected, model, ui);
    this.noticeList.draw(model.notices, model.view !== null);
    this.events.draw(model.events, ui.filter);
    this.timeline?.draw();
    write(byId('clock'), model.frame ? clock(model.at) : '–');
    write(byId('numbers'), model.view ? `${count(model.workers.length)} workers · ${count(model.figures.running)} running · ${count(model.figures.waiting)} waiting` : '');
    write(byId('scale'), `one spark = ${count(this.stage.moving.tokensPerSpark)} token${this.stage.moving.tokensPerSpark === 1 ? '' : 's'}`);
    this.#legend();
    this.#advise();
  }

  #legend() {
    const { model, ui } = this;
    const [map, colours] = ui.byTenant ? [model.tenants, model.tenantColours] : [model.adapters, model.adapterColours];
    const distinct = [...map.values()].filter((entity) => entity.key !== null && colours.isDistinct(entity.key));
    const others = [...map.values()].filter((entity) => entity.key !== null && !colours.isDistinct(entity.key)).length;
    const base = ui.byTenant ? undefined : map.get(null);
    const key = [ui.byTenant, others, base, this.palette[0], ...distinct.map((entity) => `${entity.key} ${colours.index(entity.key)}`)].join('|');
    if (key === this.legendKey) return;
    this.legendKey = key;
    byId('legend').replaceChildren(...[...distinct, ...(base ? [base] : [])].map((entity) => {
      const [swatch, name] = [make('i', { class: 'swatch' }), make('span')];
      swatch.style.setProperty('background', this.#colour(entity));
      writeName(name, entity.name);
      return make('li', {}, make('button', { type: 'button', class: 'chip', 'aria-label': entity.name, onclick: () => this.choose(entity) }, swatch, name));
    }), ...(others ? [make('li', { class: 'soft', text: `${count(others)} more in grey` })] : []));
  }

  // What to do when there is nothing to see.
  #advise() {
    const { model } = this;
    let text = this.advice ?? '';
    if (!text && !model.frame) text = this.source === 'record' ? 'Reading the record …' : 'Waiting for the first frame …';
    else if (!text && this.source === 'live' && !model.workers.length && !model.lost.length) {
      text = 'No worker is attached yet. `lorrery up` starts some with the cluster; one more: `lorrery worker`.';
    } else if (!text && this.source === 'live' && !model.totals.requests) {
      text = `No request has come yet. Send some: \`${this.#loadCommand()}\``;
    }
    const advice = byId('advice');
    advice.hidden = !text;
    if (advice.shown === text) return;
    advice.shown = text;
    advice.replaceChildren(...text.split('`').map((part, index) => (index % 2 ? make('code', { text: part }) : part)));
  }

  #loadCommand() {
    const target = / at (\S+:\d+)$/.exec(this.model.hello?.title ?? '')?.[1]; // a live feed's title ends with the router
    return `lorrery load${target ? ` --target ${target}` : ''} --rate 20 -n 400 --adapters all`;
  }
}

const page = new Page();
page.start();
