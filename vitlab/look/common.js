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
  if (drawing) drawingButtons(parent, name, drawing);
}
function drawingButtons(parent, name, drawing) { // a PDF is what the browser prints, on a page of the figure's size
  const button = (what, use) => el("button", parent, { type: "button", className: "save", textContent: what, title: "save " + name + " as " + what, onclick: async () => use(await drawing()) });
  button("svg", (svg) => save(name + ".svg", svg, "image/svg+xml"));
  button("pdf", (svg) => printSheet(name, svg));
}
function sheet(name, svg) { // a document of one page that is as large as the figure
  const [width, height] = ["width", "height"].map((side) => svg.match(new RegExp("<svg[^>]*? " + side + '="([0-9.]+)(pt|px)?"')));
  const [w, h] = [width, height].map((side) => (side ? side[1] + (side[2] ?? "px") : "6.9in"));
  const style = "@page{size:" + w + " " + h + ";margin:0}body{margin:0;background:#fff}svg{display:block}";
  return '<!doctype html><html><head><meta charset="utf-8"><title>' + escaped(name) + "</title><style>" + style + "<\/style><\/head><body>" + svg.slice(svg.indexOf("<svg")) + "<\/body><\/html>";
}
function printSheet(name, svg) {
  const frame = el("iframe", document.body, { srcdoc: sheet(name, svg), title: name, className: "sheet" }), title = document.title;
  frame.onload = () => {
    document.title = name; // browsers propose it as the file's name
    frame.contentWindow.onafterprint = () => { document.title = title; setTimeout(() => frame.remove(), 0); };
    frame.contentWindow.print();
  };
}
const shown = Object.fromEntries(new URLSearchParams(location.hash.slice(1))); // what the link asks for
function remember(values) { // null takes a word out of the link
  for (const [key, value] of Object.entries(values)) { if (value === null) delete shown[key]; else shown[key] = value; }
  try { history.replaceState(null, "", "#" + new URLSearchParams(shown)); } catch { /* a page within another has no address */ }
}
