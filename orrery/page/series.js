// The last two minutes of one figure, in bins of device time.

export const KEPT_SECONDS = 120;

/** Values by time; each bin keeps its last value, an empty one is NaN. */
export class Series {
  constructor(binSeconds = 1, keptSeconds = KEPT_SECONDS) {
    this.binSeconds = binSeconds;
    this.values = new Float64Array(Math.ceil(keptSeconds / binSeconds) + 1).fill(NaN);
    this.last = -1; // number of the newest bin since time 0
    this.first = -1; // and of the oldest that was ever written
  }

  /** Note a value; times never fall. */
  push(at, value) {
    const bin = Math.floor(at / this.binSeconds);
    if (this.last < 0) this.first = bin;
    else if (bin - this.last >= this.values.length) this.values.fill(NaN);
    else for (let between = this.last + 1; between < bin; between += 1) this.values[between % this.values.length] = NaN;
    this.last = Math.max(bin, this.last);
    this.values[this.last % this.values.length] = value;
  }

  /** The newest value at or before a time; NaN where there is none. */
  before(at) {
    let bin = Math.min(Math.floor(at / this.binSeconds), this.last);
    const oldest = Math.max(this.first, this.last - this.values.length + 1, 0);
    for (; bin >= oldest; bin -= 1) {
      const value = this.values[bin % this.values.length];
      if (!Number.isNaN(value)) return value;
    }
    return NaN;
  }

  /** The time from which there are values. */
  get since() {
    return Math.max(this.first, this.last - this.values.length + 1) * this.binSeconds;
  }

  /** The mean of what was noted in the last so many seconds; NaN where nothing was. */
  mean(keptSeconds) {
    let sum = 0;
    let number = 0;
    this.each(keptSeconds, (value) => {
      sum += value;
      number += 1;
    });
    return number ? sum / number : NaN;
  }

  /** Call with each value of the last so many seconds, oldest first, with its bin's time. */
  each(keptSeconds, call) {
    if (this.last < 0) return;
    const bins = Math.min(Math.ceil(keptSeconds / this.binSeconds), this.values.length);
    for (let bin = Math.max(this.first, this.last - bins + 1); bin <= this.last; bin += 1) {
      const value = this.values[bin % this.values.length];
      if (!Number.isNaN(value)) call(value, bin * this.binSeconds);
    }
  }
}

/** A figure that only grows: how much it grew, and how fast. */
export class Counter extends Series {
  constructor(binSeconds = 1) {
    super(binSeconds);
    this.total = 0;
    this.at = 0;
  }

  push(at, total) {
    if (total < this.total) this.values.fill(NaN); // whoever counts began anew
    this.total = total;
    this.at = at;
    super.push(at, total);
  }

  /** The growth within the last so many seconds, or since the first value if that is later. */
  growth(keptSeconds, at = this.at) {
    let before = this.before(at - keptSeconds);
    if (Number.isNaN(before)) before = this.before(this.since);
    return Number.isNaN(before) ? 0 : this.total - before;
  }

  /** The growth a second, over as much of the last so many seconds as is known. */
  rate(keptSeconds, at = this.at) {
    const span = Math.min(keptSeconds, at - this.since);
    return span > 0 ? this.growth(keptSeconds, at) / span : 0;
  }
}
