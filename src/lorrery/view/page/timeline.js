// The controls of a record: play, step, speed, and a slider with what was wrong when marked beneath it.

import { clock, make, mark, write } from './dom.js';
import { themeColours } from './colours.js';

const SPEEDS = [0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 120];
const JUMP_SECONDS = 10;

export class Timeline {
  constructor(parent, record) {
    this.record = record;
    this.drawn = '';
    const button = (text, label, onclick) => make('button', { type: 'button', class: 'plain', text, 'aria-label': label, title: label, onclick });
    this.play = button('▶', 'Play (space)', () => this.toggle());
    this.speed = make('select', { 'aria-label': 'Speed', title: 'Speed: device seconds a second (+ and -)', onchange: () => {
      record.speed = Number(this.speed.value);
    } }, ...SPEEDS.map((speed) => make('option', { value: speed, text: `${speed}×` })));
    this.speed.value = '1';
    this.slider = make('input', { type: 'range', min: 0, max: 1, step: 'any', value: 0, 'aria-label': 'Time', oninput: () => record.seek(Number(this.slider.value)) });
    this.canvas = make('canvas', { 'aria-hidden': 'true' });
    this.now = make('output', { class: 'now' });
    this.end = make('span', { class: 'soft' });
    const previous = button('⟨!', 'Back to where something went wrong (p)', () => this.notice(-1));
    const next = button('!⟩', 'On to where something goes wrong (n)', () => this.notice(1));
    parent.append(
      make('div', { class: 'buttons' }, this.play, button('⟨', 'Back by a frame (←)', () => record.step(-1)), button('⟩', 'On by a frame (→)', () => record.step(1)), this.speed, previous, next),
      make('div', { class: 'track' }, this.canvas, this.slider),
      make('div', { class: 'times' }, this.now, this.end),
    );
    parent.hidden = false;
    document.addEventListener('keydown', (event) => this.#key(event));
  }

  toggle() {
    const { record } = this;
    if (!record.playing && record.time >= record.last) record.seek(record.first);
    record.playing = !record.playing;
  }

  /** Go to the next beginning of a notice, or the one before. */
  notice(direction) {
    const { record } = this;
    const starts = record.marks.map((each) => each.from).sort((a, b) => a - b);
    const found = direction > 0 ? starts.find((at) => at > record.time + 0.01) : starts.reverse().find((at) => at < record.time - 0.01);
    if (found !== undefined) {
      record.playing = false;
      record.seek(found);
    }
  }

  #faster(direction) {
    const place = SPEEDS.indexOf(this.record.speed) + direction;
    if (place < 0 || place >= SPEEDS.length) return;
    this.record.speed = SPEEDS[place];
    this.speed.value = String(SPEEDS[place]);
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { target, key } = event;
    const typed = target.closest?.('input:not([type=range]), select, textarea');
    if (typed || (key === ' ' && target.closest?.('button'))) return;
    const { record } = this;
    const keys = {
      ' ': () => this.toggle(),
      ArrowLeft: () => (event.shiftKey ? record.seek(record.time - JUMP_SECONDS) : record.step(-1)),
      ArrowRight: () => (event.shiftKey ? record.seek(record.time + JUMP_SECONDS) : record.step(1)),
      Home: () => record.seek(record.first),
      End: () => record.seek(record.last),
      '+': () => this.#faster(1),
      '-': () => this.#faster(-1),
      n: () => this.notice(1),
      p: () => this.notice(-1),
    };
    if (target.closest?.('[role=tablist]') && key.startsWith('Arrow')) return;
    if (keys[key]) {
      event.preventDefault();
      keys[key]();
    }
  }

  /** Show where the record stands. */
  draw() {
    const { record } = this;
    write(this.play, record.playing ? '❚❚' : '▶');
    mark(this.play, 'aria-label', record.playing ? 'Pause (space)' : 'Play (space)');
    this.slider.min = record.first;
    this.slider.max = record.last;
    this.slider.value = record.time;
    mark(this.slider, 'aria-valuetext', `${clock(record.time)} of ${clock(record.last)}`);
    write(this.now, clock(record.time) + (record.time % 1).toFixed(1).slice(1));
    const loading = record.complete ? '' : ' loading …';
    write(this.end, `${clock(record.last)}${loading}`);
    const key = `${record.lines.length} ${record.complete} ${this.canvas.clientWidth} ${document.documentElement.dataset.theme}`;
    if (key !== this.drawn) {
      this.drawn = key;
      this.#overview();
    }
  }

  // Tokens a second as an area, notices as bars beneath: lower the graver.
  #overview() {
    const { record, canvas } = this;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    const density = Math.min(2, window.devicePixelRatio || 1);
    Object.assign(canvas, { width: Math.round(width * density), height: Math.round(height * density) });
    const context = canvas.getContext('2d');
    context.setTransform(density, 0, 0, density, 0, 0);
    const colours = themeColours();
    const span = Math.max(1e-9, record.last - record.first);
    const columns = Math.max(1, Math.floor(width / 2));
    const rates = [];
    for (let column = 0; column < columns; column += 1) {
      const [a, b] = [0, 1].map((add) => Math.max(0, record.indexAt(record.first + (span * (column + add)) / columns)));
      rates.push(b > a ? (record.tokens[b] - record.tokens[a]) / (record.times[b] - record.times[a]) : rates[column - 1] ?? 0);
    }
    const most = Math.max(1e-9, ...rates);
    const bottom = height - 9;
    context.fillStyle = colours.brass;
    context.globalAlpha = 0.3;
    rates.forEach((rate, column) => context.fillRect(column * 2, bottom - (bottom * rate) / most, 2, (bottom * rate) / most));
    context.globalAlpha = 1;
    for (const each of [...record.marks, ...record.open.values()]) {
      const x = ((each.from - record.first) / span) * width;
      context.fillStyle = colours[each.severity];
      context.fillRect(x, height - (each.severity === 'bad' ? 3 : 7), Math.max(2, ((each.to - each.from) / span) * width), 3);
    }
  }
}
