// Numbers as people read them. Fixed digits, so that a changing figure does not move what stands beside it.

/** 950, 1.2k, 34k, 1.2M: a count in at most four characters. */
export function count(value) {
  if (!Number.isFinite(value)) return '–';
  const size = Math.abs(value);
  if (size < 1000) return String(Math.round(value));
  for (const [unit, letter] of [[1e9, 'G'], [1e6, 'M'], [1e3, 'k']]) {
    if (size >= unit * 0.9995) {
      const scaled = value / unit;
      return scaled.toFixed(Math.abs(scaled) < 9.95 ? 1 : 0) + letter;
    }
  }
  return String(Math.round(value));
}

/** 0 ms, 45 ms, 1.23 s, 12.3 s, 2:05: a duration. */
export function seconds(value) {
  if (!Number.isFinite(value)) return '–';
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  if (value < 9.995) return `${value.toFixed(2)} s`;
  if (value < 99.95) return `${value.toFixed(1)} s`;
  return clock(value);
}

/** 0.4 s, 12 s, 2:05: a duration where there is little room. */
export function briefly(value) {
  if (!Number.isFinite(value)) return '–';
  return value < 9.95 ? `${value.toFixed(1)} s` : value < 99.5 ? `${Math.round(value)} s` : clock(value);
}

/** The first so many characters of a name. */
export function short(name, most = 32) {
  return name.length > most ? `${name.slice(0, most - 1)}…` : name;
}

/** 2:05 or 1:02:05: a point on the device clock. */
export function clock(value) {
  if (!Number.isFinite(value)) return '–';
  const whole = Math.max(0, Math.floor(value));
  const [h, m, s] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const two = (number) => String(number).padStart(2, '0');
  return h ? `${h}:${two(m)}:${two(s)}` : `${m}:${two(s)}`;
}

/** 0 %, 4 %, 100 %: a ratio. */
export function percent(ratio) {
  return Number.isFinite(ratio) ? `${Math.round(ratio * 100)} %` : '–';
}

/** 1 request, 2 requests. */
export function plural(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? '' : 's'}`;
}
