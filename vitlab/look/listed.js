// Predictions image by image, and the map of images by their features; each shows what is pointed at in the other.
const list = { data: null, rows: [], sort: "image", up: true, filter: "all", of: -1, run: 0, map: "PCA", color: "class", over: -1, most: 60 };
const LIST = ["filter", "of", "color", "run"];
const SIDE_BY_SIDE = 3; // runs; of more, one has columns, and the others are counted
function nameOf(k) { return list.data.classes[k] ?? "class " + k; }
function runsOf() { return Object.keys(list.data.runs); }
function listedRuns() { return runsOf().length > SIDE_BY_SIDE ? [runsOf()[list.run]] : runsOf(); } // those with columns
function isWrong(run, i) { return list.data.runs[run].prediction[i] !== list.data.target[i]; }
function passes(i) {
  const { target, runs } = list.data, said = runsOf().map((run) => runs[run].prediction[i]), wrong = runsOf().filter((run) => isWrong(run, i));
  if (list.of >= 0 && target[i] !== list.of && !said.includes(list.of)) return false;
  if (list.filter === "mistakes") return wrong.length > 0;
  if (list.filter === "right") return wrong.length === 0;
  if (list.filter === "disagree") return new Set(said).size > 1;
  return list.filter.startsWith("wrong:") ? wrong.length === 1 && wrong[0] === list.filter.slice(6) : true;
}
function columns() { // heads and the value that each sorts by
  const { index, target, runs } = list.data, found = [["image", (i) => index[i]], ["class", (i) => nameOf(target[i])]];
  if (runsOf().length > SIDE_BY_SIDE) found.push(["runs wrong", (i) => runsOf().filter((run) => isWrong(run, i)).length]);
  for (const run of listedRuns()) {
    const before = runsOf().length > 1 ? run + " " : "";
    found.push([before + "predicts", (i) => nameOf(runs[run].prediction[i])], [before + "probability", (i) => runs[run].probability[i]]);
  }
  return found;
}
function filterRows() {
  const by = columns().find(([name]) => name === list.sort) ?? columns()[0], sign = list.up ? 1 : -1;
  const order = (a, b) => { const [x, y] = [by[1](a), by[1](b)]; return sign * (typeof x === "string" ? x.localeCompare(y, undefined, { numeric: true }) : x - y) || a - b; };
  list.rows = list.data.index.map((_, i) => i).filter(passes).sort(order);
}
function thumb(parent, i, side) {
  const { sheet, columns: across, index } = list.data, place = el("span", parent, { className: "thumb" });
  if (!sheet) return;
  Object.assign(place.style, { width: side + "px", height: side + "px", backgroundImage: "url(" + sheet + ")", backgroundSize: across * side + "px " + Math.ceil(index.length / across) * side + "px", backgroundPosition: -(i % across) * side + "px " + -Math.floor(i / across) * side + "px" });
}
function drawRows() {
  const table = document.getElementById("rows"), head = el("tr", (table.replaceChildren(), el("thead", table)));
  if (list.data.sheet) el("th", head);
  for (const [name] of columns()) {
    const cell = el("th", head), sorted = name === list.sort;
    cell.setAttribute("aria-sort", sorted ? (list.up ? "ascending" : "descending") : "none");
    el("button", cell, { type: "button", textContent: name + (sorted ? (list.up ? " ▲" : " ▼") : ""), onclick: () => { list.up = sorted ? !list.up : true; list.sort = name; drawList(); } });
  }
  const body = el("tbody", table);
  for (const i of list.rows.slice(0, list.most)) {
    const row = el("tr", body, { tabIndex: 0, onpointerenter: () => pointAt(i), onfocus: () => pointAt(i), onpointerleave: () => pointAt(-1) });
    row.dataset.row = i;
    if (list.data.sheet) thumb(el("td", row), i, 32);
    for (const [name, value] of columns()) el("td", row, { textContent: name.endsWith("probability") ? (value(i)?.toFixed(3) ?? "NaN") : value(i) });
    listedRuns().forEach((run, n, all) => { if (isWrong(run, i)) row.children[row.children.length - 2 * (all.length - n)].className = "bad"; });
  }
  const more = document.getElementById("more"), left = list.rows.length - list.most;
  more.hidden = left <= 0;
  more.textContent = "show " + Math.min(left, 200) + " more";
  document.getElementById("counted").textContent = list.rows.length + " of " + list.data.index.length + " images";
}
function placesShown() { return list.data.runs[runsOf()[list.run]].maps[list.map]?.xy ?? null; }
function pointColor(i) {
  const k = list.data.target[i], n = list.data.classes.length;
  if (list.color === "mistake") return isWrong(runsOf()[list.run], i) ? "#D55E00" : "#56B4E9";
  return n <= OKABE.length ? OKABE[k] : "hsl(" + (360 * k) / n + " 65% " + (k % 2 ? 62 : 45) + "%)";
}
function onMap([x, y]) { return [208 + 195 * x, 208 - 195 * y]; }
function drawMap() {
  const places = placesShown(), canvas = document.getElementById("embedding"), context = canvas.getContext("2d");
  canvas.width = canvas.height = 832;
  context.scale(2, 2);
  if (!places) return;
  const seen = new Set(list.rows), ink = getComputedStyle(document.body).getPropertyValue("--ink");
  const dot = (i, size) => { const [x, y] = onMap(places[i]); context.fillStyle = pointColor(i); context.beginPath(); context.arc(x, y, size, 0, 7); context.fill(); };
  context.globalAlpha = 0.12;
  places.forEach((_, i) => { if (!seen.has(i)) dot(i, 2.5); });
  context.globalAlpha = 1;
  list.rows.forEach((i) => dot(i, 3.2));
  context.fillStyle = context.strokeStyle = ink;
  if (list.color === "class" && list.data.classes.length <= 30) for (const [x, y, name] of labels(places)) { context.font = "bold 12px system-ui"; context.textAlign = "center"; context.fillText(name, x, y); }
  if (list.over >= 0) { const [x, y] = onMap(places[list.over]); context.lineWidth = 2; context.beginPath(); context.arc(x, y, 7, 0, 7); context.stroke(); }
}
function labels(places) { // each class's name at the middle of its points
  const middle = (values) => values.sort((a, b) => a - b)[Math.floor(values.length / 2)];
  return list.data.classes.map((name, k) => {
    const mine = places.filter((_, i) => list.data.target[i] === k).map(onMap);
    return mine.length ? [middle(mine.map((p) => p[0])), middle(mine.map((p) => p[1])), name] : null;
  }).filter(Boolean);
}
function pointAt(i, scroll = false) { // in both, the list and the map
  if (list.over === i) return;
  list.over = i;
  document.querySelectorAll("#rows tr.on").forEach((row) => row.classList.remove("on"));
  const row = i < 0 ? null : document.querySelector('#rows tr[data-row="' + i + '"]'), said = document.getElementById("pointed");
  row?.classList.add("on");
  if (row && scroll) { const box = document.getElementById("scrolled"); box.scrollTop = row.offsetTop - box.clientHeight / 2; }
  said.replaceChildren();
  if (i >= 0) {
    thumb(said, i, 64);
    const words = runsOf().length > SIDE_BY_SIDE ? votes(i) : runsOf().map((run) => (runsOf().length > 1 ? run + ": " : "") + nameOf(list.data.runs[run].prediction[i]) + ", " + percent(list.data.runs[run].probability[i]));
    el("span", said, { textContent: " image " + list.data.index[i] + ", " + nameOf(list.data.target[i]) + "; predicted " + words.join("; ") });
  } else el("span", said, { textContent: "point at an image, here or in the list" });
  drawMap();
}
function percent(share) { return share === null ? "NaN" : (100 * share).toFixed(0) + " %"; } // of a network that diverged
function votes(i) { // how many runs say what, the most first
  const counts = new Map();
  for (const run of runsOf()) { const k = list.data.runs[run].prediction[i]; counts.set(k, (counts.get(k) ?? 0) + 1); }
  return [...counts].sort((a, b) => b[1] - a[1]).map(([k, n]) => nameOf(k) + " by " + n);
}
function nearest(event) {
  const box = event.currentTarget.getBoundingClientRect(), places = placesShown();
  const [x, y] = [((event.clientX - box.left) * 416) / box.width, ((event.clientY - box.top) * 416) / box.height];
  let best = -1, least = 144; // within 12 pixels
  for (const i of places ? list.rows : []) {
    const [a, b] = onMap(places[i]), far = (a - x) ** 2 + (b - y) ** 2;
    if (far < least) [best, least] = [i, far];
  }
  return best;
}
function drawList() {
  filterRows();
  drawRows();
  drawMap();
  const map = list.data.runs[runsOf()[list.run]].maps[list.map];
  document.getElementById("projection").textContent = map ? map.said : "of this run there is no map";
  remember({ run: list.run === 0 ? null : list.run, filter: list.filter === "all" ? null : list.filter, of: list.of < 0 ? null : list.of, color: list.color === "class" ? null : list.color });
}
function listRows() {
  const rows = list.rows.map((i) => Object.fromEntries(columns().map(([name, value]) => [name, value(i)])));
  const places = placesShown();
  if (places) rows.forEach((row, n) => Object.assign(row, { x: places[list.rows[n]][0], y: places[list.rows[n]][1] }));
  return rows;
}
function mapDrawing() {
  const places = placesShown(), parts = ['<svg xmlns="http://www.w3.org/2000/svg" width="416" height="440" font-family="sans-serif" font-size="12">'];
  for (const i of places ? list.rows : []) { const [x, y] = onMap(places[i]); parts.push('<circle cx="' + x.toFixed(1) + '" cy="' + y.toFixed(1) + '" r="3" fill="' + pointColor(i) + '"/>'); }
  if (places && list.color === "class") for (const [x, y, name] of labels(places)) parts.push('<text x="' + x.toFixed(1) + '" y="' + y.toFixed(1) + '" text-anchor="middle" font-weight="bold">' + escaped(name) + "</text>");
  parts.push('<text x="4" y="434">' + escaped(runsOf()[list.run] + ", " + list.map + ", color: " + list.color) + "</text>");
  return parts.join("") + "</svg>\n";
}
function choice(id, options, key, number = false) {
  const select = document.getElementById(id);
  for (const [value, text] of options) el("option", select, { value, textContent: text });
  const given = number ? Number(shown[key]) : shown[key];
  if (LIST.includes(key) && key in shown && options.some(([value]) => value === given)) list[key] = given;
  select.value = list[key];
  select.onchange = () => { list[key] = number ? Number(select.value) : select.value; list.most = 60; drawList(); };
  select.parentElement.hidden = options.length < 2;
}
function buildList() {
  list.data = content("listed");
  const runs = runsOf(), kinds = [...new Set(runs.flatMap((run) => Object.keys(list.data.runs[run].maps)))];
  const between = runs.length > 1 ? [["disagree", "runs that disagree"], ...(runs.length === 2 ? runs.map((run) => ["wrong:" + run, "only " + run + " wrong"]) : [])] : [];
  choice("filter", [["all", "all"], ["mistakes", "mistakes"], ["right", "right"], ...between], "filter");
  choice("of", [[-1, "any"], ...list.data.classes.map((name, k) => [k, name])], "of", true);
  choice("color", [["class", "class"], ["mistake", "mistake"]], "color");
  choice("mapped", runs.map((run, n) => [n, run]), "run", true);
  list.map = kinds[0] ?? "PCA";
  choice("kind", kinds.map((kind) => [kind, kind]), "map");
  document.getElementById("mapcard").hidden = kinds.length === 0;
  const canvas = document.getElementById("embedding");
  canvas.onpointermove = (event) => pointAt(nearest(event), true);
  canvas.onpointerleave = () => pointAt(-1);
  document.getElementById("more").onclick = () => { list.most += 200; drawRows(); };
  saveButtons(document.getElementById("listsaves"), "predictions", listRows, null);
  saveButtons(document.getElementById("mapsaves"), "embedding", null, mapDrawing);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawMap);
  drawList();
  pointAt(-2);
}
if (typeof module === "undefined" && content("listed")) buildList();
