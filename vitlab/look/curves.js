// Curves, drawn by uPlot: hover, zoom, log axis, smoothing.
const plots = [];
const curve = { smooth: 0, log: false, names: [], hidden: new Set(), focus: null };
const LEGEND = 8; // lines of a chart; of more, or of many runs, one legend serves all charts
const DASHED = [[], [6, 3], [2, 2], [8, 2, 2, 2]];
function smoothed(values, weight) { // exponential mean without the bias of its start
  let mean = 0, total = 0;
  return values.map((v) => {
    if (v === null) return null;
    mean = weight * mean + (1 - weight) * v; total = weight * total + 1 - weight;
    return mean / total;
  });
}
function aligned(lines) { // all steps, and of each line its values there, or null
  const steps = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b), at = new Map(steps.map((x, i) => [x, i]));
  return [steps, ...lines.map((line) => {
    const row = new Array(steps.length).fill(null);
    line.x.forEach((x, i) => { row[at.get(x)] = line.y[i]; });
    return row;
  })];
}
function isCrowded() { return curve.names.length > 0; } // the names of all lines, where one legend serves all charts
function lineStyle(name, names) { const i = (isCrowded() ? curve.names : names).indexOf(name); return { stroke: OKABE[i % OKABE.length], dash: DASHED[Math.floor(i / OKABE.length) % DASHED.length] }; }
function plotted(data) { // what is drawn: points as they are and, if asked for, smoothed lines
  const values = data.slice(1).map((row) => (curve.log ? row.map((v) => (v > 0 ? v : null)) : row));
  return curve.smooth > 0 ? [data[0], ...values.map((row) => smoothed(row, curve.smooth)), ...values] : [data[0], ...values];
}
function ticks(low, high, log) { // round numbers between the ends, so far apart that two to six are there
  if (!(high > low)) return [low];
  if (log && high >= 100 * low) { // powers of ten
    const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9), every = Math.ceil((last - first + 1) / 6);
    return Array.from({ length: Math.floor((last - first) / every) + 1 }, (_, i) => 10 ** (first + i * every));
  }
  const power = 10 ** Math.floor(Math.log10((high - low) / 5)), step = [1, 2, 5, 10].map((m) => m * power).find((each) => each * 5 >= (high - low) * (1 - 1e-9));
  const first = Math.ceil(low / step - 1e-6), last = Math.floor(high / step + 1e-6);
  return Array.from({ length: last - first + 1 }, (_, i) => (first + i) * step);
}
function tickLabel(v, span) { // in as few digits as put it within a thousandth of the axis, and of itself, as on a log axis
  const most = Math.min(span, Math.abs(v)) / 1000 + 1e-12 * Math.abs(v);
  for (let digits = 1; digits < 16; digits++) { const shown = Number(v.toPrecision(digits)); if (Math.abs(shown - v) <= most) return String(shown); }
  return String(v);
}
function tickLabels(values) { // of an axis; null where there is none
  const known = values.filter((v) => v !== null), span = Math.max(...known) - Math.min(...known);
  return values.map((v) => (v === null ? null : tickLabel(v, span)));
}
function plot(place, kind, names, data) {
  const style = getComputedStyle(document.body), ink = style.getPropertyValue("--ink"), line = style.getPropertyValue("--line");
  const value = (_, v) => (v === null || v === undefined ? "" : number(v));
  const series = names.map((label) => ({ label, width: 1.6, spanGaps: true, value, points: { size: 5, ...(isCrowded() && data[0].length > 1 ? { show: false } : {}) }, show: !curve.hidden.has(label), ...lineStyle(label, names) }));
  const raw = curve.smooth > 0 ? names.map((label) => ({ label: label + ", as it is", width: 0.6, alpha: 0.4, spanGaps: true, value, points: { show: false }, show: !curve.hidden.has(label), ...lineStyle(label, names) })) : [];
  const axis = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, font: "11px system-ui" };
  const options = {
    title: kind, width: Math.max(200, place.clientWidth), height: 240,
    scales: { x: { time: false }, y: { distr: curve.log ? 3 : 1 } },
    axes: [{ ...axis, label: "step", labelSize: 18, labelFont: "11px system-ui" }, { ...axis, size: 64, values: (_, values) => tickLabels(values) }],
    series: [{ label: "step" }, ...series, ...raw],
    ...(isCrowded() ? { legend: { show: false }, focus: { alpha: 0.12 }, cursor: { focus: { prox: 24 } }, hooks: { setCursor: [(made) => sayPoint(place.nextSibling, made, names)], setSeries: [(made, i, how) => { if (how.focus) nearLine(place, i ? names[(i - 1) % names.length] : null); }] } } : {}),
  };
  return new uPlot(options, plotted(data), place);
}
function nearLine(place, name) { // the line that the pointer is near is near in every chart
  if (curve.near || place !== curve.over) return;
  curve.near = true; focusOn(name); curve.near = false;
}
function focusOn(name) { // of that run, in every chart; null for all alike
  if (!isCrowded() || curve.focus === name) return;
  curve.focus = name;
  for (const { made, names } of plots) { const i = names.indexOf(name); made?.setSeries(i < 0 ? null : i + 1, { focus: true }); }
  for (const row of document.querySelectorAll("tr[data-run]")) row.classList.toggle("on", row.dataset.run === name);
  for (const key of document.querySelectorAll("#keys button")) key.style.borderColor = key.dataset.run === name ? "var(--mark)" : "";
}
function sayPoint(output, made, names) { // the value of the line in focus, at the step under the pointer or the last one before
  const i = names.indexOf(curve.focus);
  let k = made.cursor.idx ?? -1;
  while (k >= 0 && i >= 0 && (made.data[i + 1][k] ?? null) === null) k--;
  output.textContent = k >= 0 && i >= 0 ? curve.focus + ": " + number(made.data[i + 1][k]) + " at step " + made.data[0][k] : "";
}
function buildKeys() { // one legend for all charts: points a run out, or takes it away
  const place = document.getElementById("keys");
  place.hidden = !isCrowded();
  if (!isCrowded()) return;
  for (const name of curve.names) {
    const { stroke, dash } = lineStyle(name, curve.names), key = el("button", place, { type: "button" });
    key.dataset.run = name;
    key.innerHTML = '<svg viewBox="0 0 22 8"><path d="M0 4H22" stroke="' + stroke + '" stroke-width="2" stroke-dasharray="' + dash.join(" ") + '"/></svg>';
    el("span", key, { textContent: name });
    key.setAttribute("aria-pressed", String(!curve.hidden.has(name)));
    key.onpointerenter = key.onfocus = () => focusOn(name);
    key.onpointerleave = key.onblur = () => focusOn(null);
    key.onclick = () => {
      if (!curve.hidden.delete(name)) curve.hidden.add(name);
      key.setAttribute("aria-pressed", String(!curve.hidden.has(name)));
      drawPlots();
    };
  }
}
function plotDrawing(kind, all, lines, made) { // the part that is shown, as SVG with text
  const [names, data] = shownLines(all, lines);
  const rows = plotted(data), { min, max } = made.scales.x, { min: low, max: high } = made.scales.y;
  const scale = (v) => (curve.log ? Math.log(v) : v), x = (v) => 60 + ((v - min) / (max - min || 1)) * 320;
  const y = (v) => 200 - ((scale(v) - scale(low)) / (scale(high) - scale(low) || 1)) * 170;
  const parts = ['<svg xmlns="http://www.w3.org/2000/svg" width="400" height="' + (240 + 14 * names.length) + '" font-family="sans-serif" font-size="11">', '<text x="60" y="18" font-size="13">' + escaped(kind) + '</text><path d="M60 30V200H380" fill="none" stroke="#555"/>'];
  const shown = ticks(low, high, curve.log), words = tickLabels(shown);
  shown.forEach((v, i) => parts.push('<text x="55" y="' + (y(v) + 4).toFixed(1) + '" text-anchor="end">' + words[i] + "</text>"));
  parts.push('<text x="60" y="216">' + tickLabel(min, max - min) + '</text><text x="220" y="216" text-anchor="middle">step</text><text x="380" y="216" text-anchor="end">' + tickLabel(max, max - min) + "</text>");
  rows.slice(1).forEach((row, i) => {
    const { stroke, dash } = lineStyle(names[i % names.length], all), is_raw = i >= names.length;
    const points = row.map((v, k) => (v === null || rows[0][k] < min || rows[0][k] > max ? null : x(rows[0][k]).toFixed(1) + " " + y(v).toFixed(1))).filter(Boolean);
    if (points.length) parts.push('<path d="M' + points.join("L") + '" fill="none" stroke="' + stroke + '" stroke-dasharray="' + dash.join(" ") + '" stroke-width="' + (is_raw ? 0.5 : 1.5) + '"/>');
  });
  names.forEach((name, i) => parts.push('<text x="60" y="' + (236 + 14 * i) + '" fill="' + lineStyle(name, all).stroke + '">' + escaped(name) + "</text>"));
  return parts.join("") + "</svg>\n";
}
function plotRows(all, lines, made) {
  const [names, data] = shownLines(all, lines), { min, max } = made.scales.x;
  return names.flatMap((name, i) => data[0].map((step, k) => ({ name, step, value: data[i + 1][k] })).filter((row) => row.value !== null && row.step >= min && row.step <= max));
}
function shownLines(names, data) { // without the runs that the key hides
  const kept = names.map((_, i) => i).filter((i) => !curve.hidden.has(names[i]));
  return [kept.map((i) => names[i]), [data[0], ...kept.map((i) => data[i + 1])]];
}
function drawPlots() {
  for (const one of plots) {
    const seen = one.made && [one.made.scales.x.min, one.made.scales.x.max];
    one.made?.destroy();
    one.made = plot(one.place, one.kind, one.names, one.data);
    if (seen && seen[0] !== null && seen[0] !== undefined) one.made.setScale("x", { min: seen[0], max: seen[1] });
  }
  document.getElementById("smoothed").textContent = curve.smooth > 0 ? curve.smooth.toFixed(2) : "none";
  remember({ smooth: curve.smooth > 0 ? curve.smooth : null, log: curve.log ? 1 : null });
}
function buildCurves() {
  const smooth = document.getElementById("smooth"), log = document.getElementById("log");
  curve.smooth = Math.min(0.98, Math.max(0, Number(shown.smooth) || 0));
  curve.log = shown.log === "1";
  smooth.value = curve.smooth; log.checked = curve.log;
  const metrics = Object.entries(content("metrics"));
  const is_crowded = document.getElementById("overview") || metrics.some(([, lines]) => Object.keys(lines).length > LEGEND);
  curve.names = is_crowded ? [...new Set(metrics.flatMap(([, lines]) => Object.keys(lines)))] : [];
  for (const [kind, lines] of metrics) {
    const card = el("div", document.getElementById("plots"), { className: "card" }), names = Object.keys(lines), data = aligned(Object.values(lines));
    const one = { kind, names, data, place: el("div", card, { className: "plot" }) };
    el("output", card, { className: "note under", hidden: !isCrowded() });
    one.place.onpointerenter = () => { curve.over = one.place; };
    one.place.onpointerleave = () => { curve.over = null; focusOn(null); };
    plots.push(one);
    const every = Math.max(...Object.values(lines).map((line) => line.every));
    if (every > 1) el("p", card, { className: "note", textContent: "one point of " + every + " is shown" });
    saveButtons(card, kind, () => plotRows(names, data, one.made), () => plotDrawing(kind, names, data, one.made));
  }
  smooth.oninput = () => { curve.smooth = Number(smooth.value); drawPlots(); };
  log.onchange = () => { curve.log = log.checked; drawPlots(); };
  let width = 0;
  new ResizeObserver(() => {
    const now = plots[0]?.place.clientWidth ?? 0;
    if (now !== width) { width = now; for (const one of plots) one.made?.setSize({ width: Math.max(200, one.place.clientWidth), height: 240 }); }
  }).observe(document.getElementById("plots"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawPlots);
  buildKeys();
  drawPlots();
}
if (typeof module !== "undefined") module.exports = { curve, plotDrawing, plotRows, tickLabels }; // for node
else if (content("metrics")) buildCurves();
