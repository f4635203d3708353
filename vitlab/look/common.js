"use strict";
// What the parts of the page share: elements, numbers, files to save, and the link that restores what is shown.
const el = (name, parent, props = {}) => parent.appendChild(Object.assign(document.createElement(name), props));
const content = (id) => { const there = document.getElementById(id); return there ? JSON.parse(there.textContent) : null; };
const OKABE = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"];
const SAFE = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
const escaped = (text) => String(text).replace(/[&<>"]/g, (c) => SAFE[c]);
function number(value) { return value === 0 ? "0" : Math.abs(value) >= 0.001 ? value.toPrecision(4) : value.toExponential(2); }
function csv(rows) { // of objects with the same keys
  const cell = (v) => { const text = String(v ?? ""); return /[",\n\r]/.test(text) ? '"' + text.replace(/"/g, '""') + '"' : text; };
  return [Object.keys(rows[0] ?? {}), ...rows.map(Object.values)].map((row) => row.map(cell).join(",")).join("\n") + "\n";
}
function save(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type })), link = el("a", document.body, { href: url, download: name });
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
function saveButtons(parent, name, table, drawing) { // table: rows or text, drawing: svg, each made when asked for
  const button = (what, make, type) => el("button", parent, { type: "button", className: "save", textContent: what, title: "save " + name + " as " + what, onclick: () => save(name + "." + what, make(), type) });
  if (table) button("csv", () => { const found = table(); return typeof found === "string" ? found : csv(found); }, "text/csv");
  if (drawing) button("svg", drawing, "image/svg+xml");
}
const shown = Object.fromEntries(new URLSearchParams(location.hash.slice(1))); // what the link asks for
function remember(values) { // null takes a word out of the link
  for (const [key, value] of Object.entries(values)) { if (value === null) delete shown[key]; else shown[key] = value; }
  try { history.replaceState(null, "", "#" + new URLSearchParams(shown)); } catch { /* a page within another has no address */ }
}
