// Colours: light or dark, and which colour stands for which adapter or tenant.
//
// Light or dark is the system's choice, until the button says otherwise; the choice is kept in the browser.
//
// Eight colours can be told apart as small dots, also with red-green or blue-yellow blindness (tests/view holds the
// least difference). They go to the names with the most traffic; all others get one of four greys, and the base model
// the ink's colour. A name's hash says which it prefers, and where two prefer the same, the one first in the alphabet has
// it: the same names have the same colours on every page, and tomorrow. A name keeps its colour until a busier one needs
// it after it has fallen far behind, and gets it again if it is free. No colour is an alarm's.

const KEY = 'lorrery-theme';
const dark = window.matchMedia('(prefers-color-scheme: dark)');

/** 'light' or 'dark', as shown now. */
export function theme() {
  return document.documentElement.dataset.theme ?? (dark.matches ? 'dark' : 'light');
}

/** Let the button change between both; `changed` is called after each change, the system's included. */
export function startTheme(button, changed) {
  const kept = stored();
  if (kept === 'light' || kept === 'dark') document.documentElement.dataset.theme = kept;
  const label = () => {
    button.setAttribute('aria-label', `Theme: ${theme()}. Change to ${theme() === 'dark' ? 'light' : 'dark'}`);
    changed();
  };
  button.addEventListener('click', () => {
    document.documentElement.dataset.theme = theme() === 'dark' ? 'light' : 'dark';
    try {
      localStorage.setItem(KEY, theme());
    } catch {
      // a browser that keeps nothing still shows it
    }
    label();
  });
  dark.addEventListener('change', label);
  label();
}

function stored() {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null;
  }
}

/** The page's colours by the names that style.css gives them (without the dashes), as CSS text. */
export function themeColours() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  return Object.fromEntries(
    ['ground', 'raised', 'ink', 'soft', 'faint', 'line', 'brass', 'warn', 'bad', 'calm'].map((name) => [name, colour(name)]),
  );
}

const COLOURS = {
  dark: ['#5b8cff', '#a8ecdf', '#2fb37c', '#c6e34f', '#e0a03c', '#f2b8f5', '#c955c0', '#a9683a'],
  light: ['#2f2a8c', '#4f9de8', '#2fa36b', '#134a2c', '#b8860b', '#a5512f', '#c2479f', '#7d5cf0'],
};
const GREYS = {
  dark: ['#76808d', '#8a929c', '#646f7d', '#9aa0a8'],
  light: ['#8f8a80', '#a39e93', '#7c776e', '#b3aea4'],
};
const BASE = { dark: '#d9d6cc', light: '#4a4740' };

export const NUM_DISTINCT = COLOURS.dark.length;
const NUM_GREYS = GREYS.dark.length;
const BASE_INDEX = NUM_DISTINCT + NUM_GREYS;

/** All colours in the theme that is shown, by the indices that Colours gives. */
export function swatches(shown = theme()) {
  return [...COLOURS[shown], ...GREYS[shown], BASE[shown]];
}

/** FNV-1a, 32 bits. */
export function hash(name) {
  let value = 0x811c9dc5;
  for (let index = 0; index < name.length; index += 1) {
    value = Math.imul(value ^ name.charCodeAt(index), 0x01000193);
  }
  return value >>> 0;
}

/** The colours of one kind of name. */
export class Colours {
  constructor() {
    this.slots = new Array(NUM_DISTINCT).fill(null); // whose colour each is
    this.byName = new Map();
    this.had = new Map(); // the last colour of each name that had one
  }

  /** Let the names have colours; `ranked` is by traffic, most first. */
  assign(ranked) {
    const near = new Set(ranked.slice(0, 2 * NUM_DISTINCT));
    const coming = ranked.slice(0, NUM_DISTINCT).filter((name) => !this.byName.has(name)).sort();
    let free = this.slots.filter((name) => name === null).length;
    this.slots.forEach((name, slot) => {
      if (free < coming.length && name !== null && !near.has(name)) {
        this.#give(slot, null);
        free += 1;
      }
    });
    const preferredBy = (name) => this.had.get(name) ?? hash(name) % NUM_DISTINCT;
    // First all that can have their own, so that one that cannot takes no other's.
    for (const name of coming) if (this.slots[preferredBy(name)] === null) this.#give(preferredBy(name), name);
    for (const name of coming) {
      if (this.byName.has(name)) continue;
      const preferred = preferredBy(name);
      let slot = -1;
      for (let step = 0; step < NUM_DISTINCT && slot < 0; step += 1) {
        const tried = (preferred + step) % NUM_DISTINCT;
        if (this.slots[tried] === null) slot = tried;
      }
      if (slot >= 0) this.#give(slot, name);
    }
  }

  /** The index among swatches() of a name; null is the base model. */
  index(name) {
    if (name === null) return BASE_INDEX;
    return this.byName.get(name) ?? NUM_DISTINCT + (hash(name) % NUM_GREYS);
  }

  /** Whether a name has a colour of its own now. */
  isDistinct(name) {
    return this.byName.has(name);
  }

  #give(slot, name) {
    if (this.slots[slot] !== null) this.byName.delete(this.slots[slot]);
    this.slots[slot] = name;
    if (name === null) return;
    this.byName.set(name, slot);
    this.had.set(name, slot);
  }
}
