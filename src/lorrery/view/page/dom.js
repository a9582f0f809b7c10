// Elements. Whatever comes from a feed goes in as text: nothing here, or anywhere on the page, writes HTML.

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
