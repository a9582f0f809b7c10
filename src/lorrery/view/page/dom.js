// Elements, and numbers as people read them. Whatever comes from a feed goes in as text: nothing here, or anywhere on the
// page, writes HTML.

/** The element with this id. */
export const byId = (id) => document.getElementById(id);

/**
 * A new element. `attributes`: `class`, `text` (textContent), `on…` (a listener), anything else is an attribute; null
 * and false leave one out.
 */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === false || value === undefined) continue;
    if (name === 'text') element.textContent = value;
    else if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? '' : value);
  }
  element.append(...children);
  return element;
}

/** Set an element's text where it differs: an equal text costs no layout. */
export function write(element, text) {
  if (element.shown !== text) {
    element.shown = text;
    element.textContent = text;
  }
}

const TAIL = 7; // characters at the end of a name that stay when it is cut

/** Write a name that is cut in its middle where there is no room, and is whole where the pointer rests on it. */
export function writeName(element, name) {
  mark(element, 'title', name);
  if (element.shown === name) return;
  element.shown = name;
  const characters = [...name];
  const at = characters.length > 2 * TAIL ? characters.length - TAIL : characters.length;
  mark(element, 'class', 'cut');
  element.replaceChildren(make('span', { text: characters.slice(0, at).join('') }), make('span', { text: characters.slice(at).join('') }));
}

/** Set an attribute where it differs; null removes it. */
export function mark(element, name, value) {
  if (value === null || value === false) {
    if (element.hasAttribute(name)) element.removeAttribute(name);
  } else if (element.getAttribute(name) !== String(value)) {
    element.setAttribute(name, value);
  }
}

/**
 * Rows that keep their elements: `show(items)` makes one for a new key, updates it, puts it in its place, and drops
 * those that are gone. A row that has the keyboard's focus keeps it.
 */
export class Rows {
  constructor(parent, { key, create, update }) {
    Object.assign(this, { parent, key, create, update });
    this.made = new Map();
  }

  show(items) {
    const gone = new Set(this.made.keys());
    let before = this.parent.firstElementChild;
    for (const item of items) {
      const key = this.key(item);
      gone.delete(key);
      let row = this.made.get(key);
      if (!row) {
        row = this.create(item);
        this.made.set(key, row);
      }
      this.update(row, item);
      if (row === before) before = row.nextElementSibling;
      else this.parent.insertBefore(row, before);
    }
    for (const key of gone) {
      this.made.get(key).remove();
      this.made.delete(key);
    }
  }
}

// Fixed digits, so that a changing figure does not move what stands beside it.

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

/** 0 ms, 45 ms, 1.23 s, 12.3 s, 2 min 5 s: a duration. */
export function seconds(value) {
  if (!Number.isFinite(value)) return '–';
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  if (value < 9.995) return `${value.toFixed(2)} s`;
  if (value < 99.95) return `${value.toFixed(1)} s`;
  const whole = Math.floor(value);
  return whole < 3600 ? `${Math.floor(whole / 60)} min ${whole % 60} s` : `${Math.floor(whole / 3600)} h ${Math.floor(whole / 60) % 60} min`;
}

/** 0.4 s, 12 s, 2 min: a duration where there is little room. */
export function briefly(value) {
  if (!Number.isFinite(value)) return '–';
  return value < 9.95 ? `${value.toFixed(1)} s` : value < 99.5 ? `${Math.round(value)} s` : `${Math.floor(value / 60)} min`;
}

/** 2:05 or 1:02:05: a point on the device clock. */
export function clock(value) {
  if (!Number.isFinite(value)) return '–';
  const whole = Math.max(0, Math.floor(value));
  const [h, m, s] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const two = (number) => String(number).padStart(2, '0');
  return h ? `${h}:${two(m)}:${two(s)}` : `${m}:${two(s)}`;
}

/** 0%, 4%, 100%: a ratio. */
export function percent(ratio) {
  return Number.isFinite(ratio) ? `${Math.round(ratio * 100)}%` : '–';
}

/** 1 request, 2 requests. */
export function plural(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? '' : 's'}`;
}
