// The strips beneath the picture: one figure each, now and over the last two minutes.

import { count, make, percent, seconds, write } from './dom.js';
import { themeColours } from './colours.js';

const STRIPS = [
  { name: 'Tokens per second', unit: count, lines: [['tokensPerSecond', 'all']], title: 'Output tokens a device second, mean of 2 s' },
  { name: 'Time to first token', unit: seconds, lines: [['ttft50', 'p50'], ['ttft95', 'p95']], title: 'TTFT, from the arrival at the scheduler, of the requests that ended in the last 10 s: of half of them, and of 95 %, it is at most this' },
  { name: 'Queue', unit: count, lines: [['waiting', 'waiting'], ['running', 'running']], title: 'Requests that wait anywhere, and that run' },
  { name: 'KV in use', unit: percent, lines: [['kv', 'mean'], ['fullestKv', 'fullest']], top: 1, title: 'Part of the KV memory in use: mean of all pools, and the fullest' },
];

export class Strips {
  constructor(parent) {
    this.colours = themeColours();
    this.strips = STRIPS.map((strip) => {
      const figures = strip.lines.map(() => make('b', { text: '–' }));
      const canvas = make('canvas', { 'aria-hidden': 'true' });
      const scale = make('span', { class: 'scale' });
      parent.append(make('figure', { class: 'strip', title: strip.title },
        make('figcaption', {}, make('span', { text: strip.name }), make('span', { class: 'figures' }, ...strip.lines.map(([, label], line) => (
          make('span', { class: `line-${line}` }, figures[line], strip.lines.length > 1 ? ` ${label}` : '')
        )))),
        make('div', { class: 'spark' }, canvas, scale)));
      return { ...strip, figures, canvas, scale };
    });
  }

  recolour() {
    this.colours = themeColours();
  }

  /** Draw the model's last two minutes. */
  draw(model) {
    for (const strip of this.strips) {
      const series = strip.lines.map(([name]) => model.series[name]);
      strip.lines.forEach(([name], index) => write(strip.figures[index], strip.unit(model.figures[name])));
      const top = strip.top ?? niceTop(series);
      write(strip.scale, strip.unit(top));
      drawLines(strip.canvas, series, model.at, top, [this.colours.brass, this.colours.faint], this.colours.line);
    }
  }
}

/** Draw series over the last two minutes into a canvas; the first is filled. */
export function drawLines(canvas, series, at, top, strokes, ground) {
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  const density = Math.min(2, window.devicePixelRatio || 1);
  if (canvas.width !== Math.round(width * density) || canvas.height !== Math.round(height * density)) {
    canvas.width = Math.round(width * density);
    canvas.height = Math.round(height * density);
  }
  const context = canvas.getContext('2d');
  context.setTransform(density, 0, 0, density, 0, 0);
  context.clearRect(0, 0, width, height);
  context.strokeStyle = ground;
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(0, height - 0.5);
  context.lineTo(width, height - 0.5);
  context.moveTo(0, 0.5);
  context.lineTo(width, 0.5);
  context.stroke();
  for (let line = series.length - 1; line >= 0; line -= 1) {
    const { span, binSeconds } = series[line];
    const x = (time) => width * (1 - (at - time) / span);
    const y = (value) => height - 1 - (height - 3) * Math.min(1, value / (top || 1));
    context.beginPath();
    let [begun, last] = [null, 0];
    series[line].each((value, time) => {
      begun ??= x(time);
      last = Math.min(width, x(time + binSeconds));
      context.lineTo(Math.max(0, x(time)), y(value));
    });
    if (begun === null) continue;
    context.strokeStyle = strokes[line];
    context.lineWidth = line ? 1.2 : 1.6;
    context.lineJoin = 'round';
    context.stroke();
    if (line) continue;
    context.lineTo(last, height);
    context.lineTo(Math.max(0, begun), height);
    context.fillStyle = strokes[line];
    context.globalAlpha = 0.13;
    context.fill();
    context.globalAlpha = 1;
  }
}

/** 1, 2 or 5 times a power of ten that holds every value. */
export function niceTop(series) {
  let most = 0;
  for (const line of series) {
    line.each((value) => {
      most = Math.max(most, value);
    });
  }
  if (!(most > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(most));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= most * 0.999);
}
