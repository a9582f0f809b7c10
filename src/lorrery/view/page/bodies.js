// The layer that changes with a frame: orbits, the scheduler, the workers' bodies, what is resident and what waits.
//
// Everything here is drawn ten times a second at most. What moves between frames is in moving.js.

import { count } from './dom.js';
import { DRAINING } from './model.js';

const TURN = 2 * Math.PI;
const TOP = -Math.PI / 2;
const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';

/** How large a worker's parts are, for the room that it has; `type`: how many times as large as usual text is. */
export function measures(cell, type) {
  const [labelled, detailed] = [cell >= 76 * type, cell >= 170 * type];
  const body = Math.max(4, Math.min(44 * type, cell * 0.125));
  const kv = body + Math.max(2, body * 0.22);
  const kvWidth = Math.max(1.5, body * 0.17);
  const resident = kv + kvWidth + Math.max(1.5, body * 0.14);
  const residentWidth = Math.max(1.5, body * 0.2);
  return {
    cell, body, kv, kvWidth, resident, residentWidth, labelled, detailed, innerMoon: resident + residentWidth + Math.max(2.5, body * 0.25),
    outer: cell / 2 - (detailed ? 34 * type : labelled ? 15 * type : 2),
  };
}

/** Draw the layer; `view` holds size, layout, measures, colours and what is selected. */
export function drawBodies(context, model, view) {
  const { width, height, place, colours } = view;
  context.clearRect(0, 0, width, height);
  context.save();
  context.translate(width / 2, height / 2);
  context.lineWidth = 1;
  context.strokeStyle = colours.line;
  for (const { rx, ry } of place.rings) {
    context.beginPath();
    context.ellipse(0, 0, rx, ry, 0, 0, TURN);
    context.stroke();
  }
  drawSun(context, model, view);
  for (const body of view.bodies) drawWorker(context, body, model, view);
  context.restore();
}

function drawSun(context, model, { place, colours, type }) {
  const radius = place.sun * 0.62;
  const waiting = model.unplaced + model.held;
  context.fillStyle = colours.ground;
  disc(context, 0, 0, place.sun + 2);
  context.strokeStyle = colours.brass;
  context.lineWidth = 1.5;
  circle(context, 0, 0, radius);
  context.lineWidth = 0.75;
  circle(context, 0, 0, radius + 4);
  // One mark a shard on the outer circle; one without a connection is a cross.
  const number = Math.max(model.shards.length, 1);
  model.shards.forEach((shard, index) => {
    const angle = TOP + (TURN * index) / number;
    const [x, y] = [(radius + 4) * Math.cos(angle), (radius + 4) * Math.sin(angle)];
    if (shard.connected) {
      context.fillStyle = colours.brass;
      disc(context, x, y, 3);
    } else cross(context, x, y, 5, colours.bad);
  });
  context.textAlign = 'center';
  context.textBaseline = 'middle';
  context.fillStyle = waiting ? colours.ink : colours.brass;
  context.font = `600 ${Math.round(Math.max(13, radius * 0.62))}px ${FONT}`;
  context.fillText(count(waiting), 0, 1);
  if (radius > 18) {
    context.fillStyle = colours.soft;
    context.font = `${11 * type}px ${FONT}`;
    context.fillText(model.unplaced ? 'unplaced' : model.held ? 'held' : 'scheduler', 0, radius + 8 + 9 * type);
  }
}

function drawWorker(context, body, model, view) {
  const { worker, x, y } = body;
  const { colours, measure, swatch } = view;
  const lost = worker.lostAt !== null;
  const dimmed = view.matches && !view.matches(worker);
  context.globalAlpha = dimmed ? 0.25 : 1;
  context.fillStyle = colours.raised;
  disc(context, x, y, measure.resident + measure.residentWidth);
  for (let radius = measure.innerMoon; view.orbits && radius <= body.moonRadius; radius += body.orbitGap) {
    context.strokeStyle = colours.line;
    context.lineWidth = 0.5;
    circle(context, x, y, radius);
  }
  drawKv(context, body, view);
  if (!lost) drawResident(context, body, model, view, swatch);
  context.textAlign = 'center';
  context.textBaseline = 'middle';
  if (lost) cross(context, x, y, measure.body * 0.6, colours.bad);
  else {
    context.fillStyle = worker.running ? colours.ink : colours.faint;
    if (measure.body >= 6) {
      context.font = `600 ${Math.round(Math.max(8, measure.body * 0.8))}px ${FONT}`;
      context.fillText(count(worker.running), x, y + 0.5);
    }
    drawQueue(context, body, view);
  }
  const severity = view.severities.get(worker);
  if (severity) drawAlarm(context, body, colours[severity], measure);
  if (view.selected === worker || view.hovered === worker) {
    context.strokeStyle = colours.brass;
    context.lineWidth = 1.5;
    circle(context, x, y, measure.outer + 3);
  }
  drawLabel(context, body, view, lost);
  context.globalAlpha = 1;
}

function drawKv(context, { worker, x, y }, { colours, measure }) {
  context.lineWidth = measure.kvWidth;
  context.strokeStyle = colours.line;
  if (worker.state === DRAINING || worker.lostAt !== null) context.setLineDash([3, 3]);
  circle(context, x, y, measure.kv);
  context.setLineDash([]);
  const ratio = Math.min(1, worker.kvRatio);
  if (ratio <= 0) return;
  context.strokeStyle = ratio > 0.97 ? colours.bad : ratio > 0.9 ? colours.warn : colours.brass;
  context.beginPath();
  context.arc(x, y, measure.kv, TOP, TOP + TURN * ratio);
  context.stroke();
}

// Adapters on the GPU, a segment each: in use full, unused pale, still loading paler.
function drawResident(context, { worker, x, y }, model, { measure, dimAdapter }, swatch) {
  const number = worker.resident.length;
  if (!number) return;
  const gap = Math.min(0.06, TURN / number / 4);
  const alpha = context.globalAlpha;
  context.lineWidth = measure.residentWidth;
  worker.resident.forEach(([index, state], place) => {
    const adapter = model.adapter(index);
    context.globalAlpha = alpha * (dimAdapter(adapter) ? 0.12 : state === 1 ? 1 : state === 2 ? 0.15 : 0.35);
    context.strokeStyle = swatch(adapter);
    context.beginPath();
    context.arc(x, y, measure.resident, TOP + (TURN * place) / number + gap, TOP + (TURN * (place + 1)) / number - gap);
    context.stroke();
  });
  context.globalAlpha = alpha;
}

// What waits is drawn dot by dot in moving.js; what does not fit is a number here.
function drawQueue(context, { x, y, inwards, queueMore, queueRadius }, { colours, measure, type }) {
  if (!queueMore || !measure.labelled) return;
  context.font = `600 ${11 * type}px ${FONT}`;
  context.fillStyle = colours.soft;
  const text = `+${count(queueMore)}`;
  const beside = queueRadius + 4 * type + Math.abs(Math.cos(inwards)) * context.measureText(text).width / 2;
  context.fillText(text, x + beside * Math.cos(inwards), y + beside * Math.sin(inwards));
}

// A second circle and a badge: to be seen without colour too.
function drawAlarm(context, { x, y }, colour, measure) {
  context.strokeStyle = colour;
  context.lineWidth = measure.labelled ? 2 : 1.5;
  context.setLineDash([measure.outer * 0.22, measure.outer * 0.1]);
  circle(context, x, y, measure.outer);
  context.setLineDash([]);
  const size = Math.max(5, Math.min(9, measure.cell * 0.06));
  const [bx, by] = [x + measure.outer * 0.72, y - measure.outer * 0.72];
  context.fillStyle = colour;
  disc(context, bx, by, size);
  context.fillStyle = '#fff';
  context.font = `800 ${Math.round(size * 1.5)}px ${FONT}`;
  context.fillText('!', bx, by + 0.5);
}

function drawLabel(context, { worker, x, y }, { colours, measure, width, type }, lost) {
  if (!measure.labelled) return;
  // On the side away from the scheduler, where nothing waits.
  const above = y < -1;
  const beside = above ? y - measure.outer - (measure.detailed && !lost ? 24 : 8) * type : y + measure.outer + 9 * type;
  context.font = `${(measure.detailed ? 12.5 : 11) * type}px ${FONT}`;
  context.fillStyle = lost ? colours.bad : colours.ink;
  const room = Math.min(measure.cell * 1.05, width);
  const state = lost ? ' lost' : worker.state === DRAINING ? ' draining' : '';
  context.fillText(fitted(context, worker.name, room, state), x, beside);
  if (!measure.detailed || lost) return;
  context.font = `${11 * type}px ${FONT}`;
  context.fillStyle = colours.soft;
  context.fillText(fitted(context, worker.tp > 1 ? `${worker.tp} × ${worker.gpu}` : worker.gpu, room), x, beside + 15 * type);
}

const cut = new Map(); // texts that were too long, by font and text

// A name, and what follows it, that fit into some pixels: cut in its middle, with an ellipsis, where it is too long.
function fitted(context, name, room, after = '') {
  const key = `${context.font} ${Math.round(room)} ${name}${after}`;
  let shown = cut.get(key);
  if (shown === undefined) {
    const characters = [...name].slice(0, 80);
    shown = name + after;
    for (let length = characters.length - 1; length > 0 && context.measureText(shown).width > room; length -= 1) {
      const head = Math.ceil(length / 2);
      shown = `${characters.slice(0, head).join('')}…${characters.slice(characters.length - (length - head)).join('')}${after}`;
    }
    if (cut.size > 2000) cut.clear();
    cut.set(key, shown);
  }
  return shown;
}

function disc(context, x, y, radius) {
  context.beginPath();
  context.arc(x, y, radius, 0, TURN);
  context.fill();
}

function circle(context, x, y, radius) {
  context.beginPath();
  context.arc(x, y, radius, 0, TURN);
  context.stroke();
}

function cross(context, x, y, size, colour) {
  context.strokeStyle = colour;
  context.lineWidth = 2.5;
  context.beginPath();
  context.moveTo(x - size, y - size);
  context.lineTo(x + size, y + size);
  context.moveTo(x + size, y - size);
  context.lineTo(x - size, y + size);
  context.stroke();
}
