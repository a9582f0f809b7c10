// What flies: tokens away from the moons that made them, and requests from the scheduler to their worker.

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
