"use strict";
// Without this the page shows the same: tables as they are, charts without values under the pointer.
document.documentElement.classList.add("js");

// ---- tables, sorted by a click on a heading -------------------------------------------------------------------------

function valueOf(row, column) {
  const text = row.cells[column].textContent.trim();
  const number = parseFloat(text.replace(/,/g, ""));
  const unit = { us: 1e-6, ms: 1e-3, s: 1 }[text.split(" ")[1]] ?? 1;
  return { text, number: /^[-+]?[\d.]/.test(text) ? number * unit : NaN };
}

function sort(table, column) {
  const heading = table.tHead.rows[0].cells[column];
  const isText = heading.classList.contains("t");
  const before = heading.getAttribute("aria-sort");
  const up = before ? before === "descending" : isText;
  const rows = [...table.tBodies[0].rows].map((row) => ({ row, value: valueOf(row, column) }));
  rows.sort((a, b) => {
    const [x, y] = [a.value.number, b.value.number];
    if (isText || (isNaN(x) && isNaN(y))) {
      return a.value.text.localeCompare(b.value.text, undefined, { numeric: true }) * (up ? 1 : -1);
    }
    if (isNaN(x) || isNaN(y)) return isNaN(x) ? 1 : -1; // what has no value is last, either way
    return (x - y) * (up ? 1 : -1);
  });
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", up ? "ascending" : "descending");
  table.tBodies[0].append(...rows.map((one) => one.row));
}

for (const table of document.querySelectorAll("table.sortable")) {
  [...table.tHead.rows[0].cells].forEach((heading, column) => {
    heading.tabIndex = 0;
    heading.addEventListener("click", () => sort(table, column));
    heading.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") {
        event.preventDefault();
        sort(table, column);
      }
    });
  });
}

// ---- charts: values under the pointer, read back from the paths -----------------------------------------------------

const SIZE = 1000;
const tip = document.getElementById("tip");

function scale(text) {
  const [kind, low, high, unit = ""] = text.split(" ");
  const [from, to] = [Number(low), Number(high)];
  return { unit, value: (share) => (kind === "log" ? 10 ** (from + share * (to - from)) : from + share * (to - from)) };
}

function show(value, unit) {
  const size = Math.abs(value);
  const three = (number) => (Math.abs(number) >= 999.5 ? Math.round(number).toLocaleString("en") : String(Number(number.toPrecision(3))));
  if (unit === "s") return size < 1e-3 ? `${three(value * 1e6)} us` : size < 1 ? `${three(value * 1e3)} ms` : `${three(value)} s`;
  return unit ? `${three(value)} ${unit}` : three(value);
}

function pointsOf(path) {
  return path.getAttribute("d").split("M").filter(Boolean).map((part) => part.split("L").map((pair) => pair.split(" ").map(Number)));
}

function heightAt(pieces, x) {
  for (const points of pieces) {
    for (let at = 1; at < points.length; at++) {
      const [[x0, y0], [x1, y1]] = [points[at - 1], points[at]];
      if (x >= x0 && x <= x1) return x1 === x0 ? y1 : y0 + ((x - x0) / (x1 - x0)) * (y1 - y0);
    }
    if (points.length === 1 && Math.abs(points[0][0] - x) < 12) return points[0][1];
  }
  return NaN;
}

for (const chart of document.querySelectorAll(".chart")) {
  const plot = chart.querySelector(".plot");
  if (!plot) continue;
  const across = scale(chart.dataset.x);
  const up = scale(chart.dataset.y);
  let lines = null; // read at the first look
  const cross = document.createElementNS("http://www.w3.org/2000/svg", "line");
  cross.setAttribute("class", "cross");
  cross.setAttribute("y1", "0");
  cross.setAttribute("y2", "100%");

  chart.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    const share = (event.clientX - box.left) / box.width;
    if (share < -0.02 || share > 1.02 || event.clientY < box.top - 20 || event.clientY > box.bottom + 20) return hide();
    lines ??= [...plot.querySelectorAll("path.line")].map((path) => ({
      name: path.dataset.name, style: path.getAttribute("class"), pieces: pointsOf(path),
    }));
    const found = lines
      .map((line) => ({ ...line, y: heightAt(line.pieces, Math.min(Math.max(share, 0), 1) * SIZE) }))
      .filter((line) => !isNaN(line.y));
    if (!found.length) return hide();
    const ticks = plot.querySelectorAll("text.x");
    const named = chart.dataset.names !== undefined && ticks.length;
    tip.replaceChildren();
    const head = document.createElement("div");
    head.textContent = named ? "" : show(across.value(share), across.unit);
    tip.append(head);
    for (const line of found) {
      const row = document.createElement("div");
      row.innerHTML = '<svg class="key" viewBox="0 0 22 10"><path d="M0 5H22"/></svg><span></span><b></b>';
      row.querySelector("path").setAttribute("class", line.style);
      row.querySelector("span").textContent = line.name;
      row.querySelector("b").textContent = show(up.value(1 - line.y / SIZE), up.unit);
      tip.append(row);
    }
    tip.hidden = false;
    const wide = tip.offsetWidth;
    const left = event.clientX + 16 + wide > innerWidth ? event.clientX - wide - 16 : event.clientX + 16;
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${Math.max(4, Math.min(event.clientY + 12, innerHeight - tip.offsetHeight - 4))}px`;
    cross.setAttribute("x1", `${share * 100}%`);
    cross.setAttribute("x2", `${share * 100}%`);
    plot.append(cross);
  });
  const hide = () => {
    tip.hidden = true;
    cross.remove();
  };
  chart.addEventListener("pointerleave", hide);
}

// ---- print: everything that is folded --------------------------------------------------------------------------------

addEventListener("beforeprint", () => {
  for (const one of document.querySelectorAll("details")) one.open = true;
});
