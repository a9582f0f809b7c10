// Dots into an image, pixel by pixel, and sparks, which are dots that fly.
//
// Thousands of small drawImage calls an animation frame cost a browser without a GPU 14 us each; a dot here is some
// fifty array writes. A dot's coverage is computed once for each of SHIFTS x SHIFTS places within a pixel, so that slow
// dots move smoothly.

const SHIFTS = 4;

/** The coverage of a dot of some radius in device pixels; of a ring, if it has a width. */
export class Dot {
  constructor(radius, ring = 0) {
    this.wide = 2 * Math.ceil(radius) + 2;
    this.masks = [];
    const middle = this.wide / 2;
    for (let shift = 0; shift < SHIFTS * SHIFTS; shift += 1) {
      const mask = new Uint8Array(this.wide * this.wide);
      const [dx, dy] = [((shift % SHIFTS) + 0.5) / SHIFTS, (Math.floor(shift / SHIFTS) + 0.5) / SHIFTS];
      for (let y = 0; y < this.wide; y += 1) {
        for (let x = 0; x < this.wide; x += 1) {
          const distance = Math.hypot(x + 0.5 - middle - dx + 0.5, y + 0.5 - middle - dy + 0.5);
          const within = Math.min(1, Math.max(0, radius + 0.5 - distance));
          const hole = ring ? Math.min(1, Math.max(0, radius - ring + 0.5 - distance)) : 0;
          mask[y * this.wide + x] = Math.round(255 * (within - hole));
        }
      }
      this.masks.push(mask);
    }
  }
}

/** A CSS colour #rrggbb as a pixel without its alpha. */
export function pixel(colour) {
  const rgb = parseInt(colour.slice(1), 16);
  return ((rgb & 0xff) << 16) | (rgb & 0xff00) | (rgb >> 16); // little-endian RGBA
}

export class Pixels {
  /** An image of so many device pixels. */
  constructor(width, height) {
    this.width = Math.max(1, width);
    this.height = Math.max(1, height);
    this.image = new ImageData(this.width, this.height);
    this.words = new Uint32Array(this.image.data.buffer);
  }

  clear() {
    this.words.fill(0);
  }

  /** Put a dot with its middle at x, y (device pixels); where dots overlap, the denser one is seen. */
  dot({ wide, masks }, x, y, rgb, alpha) {
    const [left, top] = [Math.floor(x - 0.5), Math.floor(y - 0.5)];
    const mask = masks[Math.floor((y - 0.5 - top) * SHIFTS) * SHIFTS + Math.floor((x - 0.5 - left) * SHIFTS)];
    const [x0, y0] = [left + 1 - wide / 2, top + 1 - wide / 2];
    if (x0 < 0 || y0 < 0 || x0 + wide > this.width || y0 + wide > this.height) return;
    const { words, width } = this;
    let from = 0;
    for (let row = y0 * width + x0, end = row + wide * width; row < end; row += width) {
      for (let at = row, last = row + wide; at < last; at += 1, from += 1) {
        const covered = (mask[from] * alpha) >> 8;
        if (covered > words[at] >>> 24) words[at] = (covered << 24) | rgb;
      }
    }
  }

  /** Put a square, full or its rim. */
  square(x, y, half, rgb, alpha, full) {
    const [x0, y0, x1, y1] = [x - half, y - half, x + half, y + half].map(Math.round);
    if (x0 < 0 || y0 < 0 || x1 >= this.width || y1 >= this.height) return;
    for (let row = y0; row <= y1; row += 1) {
      for (let column = x0; column <= x1; column += 1) {
        if (full || row === y0 || row === y1 || column === x0 || column === x1) {
          this.words[row * this.width + column] = (alpha << 24) | rgb;
        }
      }
    }
  }

  /** Show the image on a canvas of its size. */
  show(context) {
    context.putImageData(this.image, 0, 0);
  }
}

// Sparks: tokens away from the moons that made them, and requests from the scheduler to their worker.

const MAX_SPARKS = 4096;
const FIELDS = ['x', 'y', 'vx', 'vy', 'age', 'life', 'colour', 'fades'];

/** Sparks as columns of numbers, in CSS pixels from the stage's middle; nothing is allocated while they fly. */
export class Sparks {
  constructor() {
    this.number = 0;
    for (const name of FIELDS) this[name] = name === 'colour' || name === 'fades' ? new Uint8Array(MAX_SPARKS) : new Float32Array(MAX_SPARKS);
  }

  /** Let one fly; where there are too many, none. */
  add(x, y, vx, vy, life, colour, fades) {
    if (this.number === MAX_SPARKS) return;
    const index = this.number;
    this.number += 1;
    this.x[index] = x;
    this.y[index] = y;
    this.vx[index] = vx;
    this.vy[index] = vy;
    this.age[index] = 0;
    this.life[index] = life;
    this.colour[index] = colour;
    this.fades[index] = fades;
  }

  /** Let wall seconds pass. */
  move(elapsed) {
    for (let index = 0; index < this.number; index += 1) {
      this.age[index] += elapsed;
      if (this.age[index] < this.life[index]) {
        this.x[index] += this.vx[index] * elapsed;
        this.y[index] += this.vy[index] * elapsed;
      } else {
        this.number -= 1; // the last takes its place
        for (const name of FIELDS) this[name][index] = this[name][this.number];
        index -= 1;
      }
    }
  }

  /** Draw them around a middle, by a dot in device pixels. */
  draw(pixels, dot, colours, density, middleX, middleY) {
    for (let index = 0; index < this.number; index += 1) {
      const alpha = this.fades[index] ? 256 * (1 - this.age[index] / this.life[index]) : 190;
      pixels.dot(dot, middleX + this.x[index] * density, middleY + this.y[index] * density, colours[this.colour[index]], alpha);
    }
  }
}
