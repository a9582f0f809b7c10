// Light or dark: the system's choice, until the button says otherwise; the choice is kept in the browser.

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
