// Where the bodies stand: on ellipses around the scheduler, as many as leave each body the most room.

const MAX_CELL = 400; // room for one body beyond which more does not help, in CSS pixels
const MAX_RINGS = 6;
const SAMPLES = 256; // points of an ellipse, for its arc length

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
