// The last two minutes of one figure, in bins of device time; of a record with few frames, longer.

export const KEPT_SECONDS = 120;

/** Values by time; each bin keeps its last value, an empty one is NaN. */
export class Series {
  constructor(binSeconds = 1, numBins = KEPT_SECONDS / binSeconds) {
    this.binSeconds = binSeconds;
    this.span = binSeconds * numBins; // seconds that are kept
    this.values = new Float64Array(numBins + 1).fill(NaN);
    this.times = new Float64Array(numBins + 1); // when each value was noted
    this.last = -1; // number of the newest bin since time 0
    this.first = -1; // and of the oldest that was ever written
  }

  /** Note a value; times never fall. */
  push(at, value) {
    const bin = Math.max(this.last, Math.floor(at / this.binSeconds));
    const kept = this.values.length;
    if (this.last < 0) this.first = bin;
    else if (bin - this.last >= kept) this.values.fill(NaN);
    else for (let between = this.last + 1; between < bin; between += 1) this.values[between % kept] = NaN;
    this.last = bin;
    this.values[bin % kept] = value;
    this.times[bin % kept] = at;
  }

  // The newest bin with a value at or before a time; -1 where there is none.
  #bin(at) {
    const oldest = this.#oldest;
    for (let bin = Math.min(Math.floor(at / this.binSeconds), this.last); bin >= oldest; bin -= 1) {
      if (!Number.isNaN(this.values[bin % this.values.length])) return bin;
    }
    return -1;
  }

  get #oldest() {
    return Math.max(this.first, this.last - this.values.length + 1, 0);
  }

  /** The newest value at or before a time; NaN where there is none. */
  before(at) {
    const bin = this.#bin(at);
    return bin < 0 ? NaN : this.values[bin % this.values.length];
  }

  /** [value, when] of a time, or else the oldest there is; null where there is none. */
  since(at) {
    let bin = this.#bin(at);
    for (let oldest = this.#oldest; bin < 0 && oldest <= this.last; oldest += 1) {
      if (!Number.isNaN(this.values[oldest % this.values.length])) bin = oldest;
    }
    return bin < 0 ? null : [this.values[bin % this.values.length], this.times[bin % this.times.length]];
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
    const bins = Math.ceil(keptSeconds / this.binSeconds);
    for (let bin = Math.max(this.#oldest, this.last - bins + 1); bin <= this.last; bin += 1) {
      const value = this.values[bin % this.values.length];
      if (!Number.isNaN(value)) call(value, bin * this.binSeconds);
    }
  }
}

/** A figure that only grows: how much it grew, and how fast. */
export class Counter extends Series {
  constructor(binSeconds, numBins) {
    super(binSeconds, numBins);
    this.total = 0;
  }

  push(at, total) {
    if (total < this.total) this.values.fill(NaN); // it is counted anew
    this.total = total;
    super.push(at, total);
  }

  /** The growth within the last so many seconds, or since the first value if that is later. */
  growth(keptSeconds, at) {
    const before = this.since(at - keptSeconds);
    return before === null ? 0 : this.total - before[0];
  }

  /** The growth a second, over the last so many seconds, or as much as is known. */
  rate(keptSeconds, at) {
    const before = this.since(at - keptSeconds);
    return before === null || at <= before[1] ? 0 : (this.total - before[0]) / (at - before[1]);
  }
}
