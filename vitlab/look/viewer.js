"use strict";
let nets = [], loaded = []; // those that are drawn, and all of the page
const SHOWN = 3; // networks side by side; of more, two are chosen
const ATTENTION = "attention"; // of every layer and head; the other maps have one for each picture
const VIRIDIS = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
const PUOR = [[45, 0, 75], [153, 142, 195], [247, 247, 247], [241, 163, 64], [127, 59, 8]]; // white is 0
const POSITIONS = "cosine of positions";
const SPLIT = "T2T token layer "; // and its number, from 1
const LINES = 12; // strongest connections that are drawn
const state = { picture: 0, map: ATTENTION, layer: 0, head: -1, target: -1, epoch: -1, lines: false, at: null, over: null, tile: null };
const cache = new Map();

// Numbers: weights as they are, from 16 bits and a scale.
function bytes(text) { return Uint8Array.from(atob(text), (c) => c.charCodeAt(0)); }
function unpack({ text, low, high }) {
  const raw = bytes(text), found = new Float64Array(raw.length / 2);
  for (let i = 0; i < found.length; i++) found[i] = low + ((raw[2 * i] + 256 * raw[2 * i + 1]) * (high - low)) / 65535;
  return found;
}
function read(net, i, name) {
  const key = net + "/" + i + "/" + state.target + "/" + name;
  if (!cache.has(key)) {
    const one = nets[net].pictures[i], packed = one[name] ?? mapOf(one, name);
    cache.set(key, packed ? unpack(packed) : bytes(one.colors[name]));
  }
  return cache.get(key);
}
function mapOf(one, name) { // for the class that is asked for; some maps are of no class, some pictures lack a class
  if (name.startsWith(SPLIT)) return one.splits?.[Number(name.slice(SPLIT.length)) - 1];
  return one.targets?.[state.target]?.maps[name] ?? one.maps[name];
}
function kept(net) { // what was kept at the epoch that is shown, the last one where it is now; null without any
  const all = nets[net].moments;
  if (!all) return null;
  let i = state.epoch < 0 ? all.epochs.length - 1 : 0; // the last one up to this epoch
  while (i + 1 < all.epochs.length && all.epochs[i + 1] <= state.epoch) i++;
  return { i, all, epoch: all.epochs[i], said: all.said[i][state.picture] ?? "" };
}
function moment(net) { // what attention is shown of: an epoch, which was kept of the first pictures alone; null for now
  const then = state.epoch < 0 ? null : kept(net);
  return then && state.picture < then.all.count ? then : null;
}
function dated(net) { // the epoch that the large map is of; null for now
  return state.map === POSITIONS ? kept(net) : state.map === ATTENTION ? moment(net) : null;
}
function momentValues(net, name, start = 0, size = undefined) {
  const key = net + "/moments/" + name;
  if (!cache.has(key)) cache.set(key, unpack(nets[net].moments[name]));
  return cache.get(key).subarray(start, size && start + size);
}
// A layout of patches is [rows, columns, pool]: pool x pool neighbors have one value, their mean, and are a cell.
function patch(at, [h, w]) { return [Math.min(h - 1, Math.floor(at[0] * h)), Math.min(w - 1, Math.floor(at[1] * w))]; }
function cells([h, w, pool]) { return Math.ceil(h / pool) * Math.ceil(w / pool); }
function cellOf([y, x], [, w, pool]) { return Math.floor(y / pool) * Math.ceil(w / pool) + Math.floor(x / pool); }
function spread(values, layout) { // one for each patch, from one for each cell
  const [h, w, pool] = layout;
  return pool === 1 ? values : Float64Array.from({ length: h * w }, (_, n) => values[cellOf([Math.floor(n / w), n % w], layout)]);
}
function box(at, [h, w, pool = 1]) { // the cell that a place lies in: its first row and column of patches, and the ends
  const first = patch(at, [h, w]).map((v) => v - (v % pool));
  return [...first, Math.min(h, first[0] + pool), Math.min(w, first[1] + pool)];
}
function middle() { return state.at ?? [0.5, 0.5]; } // a map that is seen from a patch is seen from this one
function seenFrom(packed, map, from, to) { // of one of several maps, the part seen from the marked patch, and its layout
  const size = cells(to), start = (map * cells(from) + cellOf(patch(middle(), from), from)) * size;
  return [spread(packed.subarray(start, start + size), to), to];
}
function splitOf(net) { return nets[net].shape.splits[Number(state.map.slice(SPLIT.length)) - 1]; }
function together(query, key) { return "seen from " + query + " x " + query + " patches together" + (key > 1 ? ", and mapped for " + key + " x " + key : "") + ", for the page to stay small; a number is the mean of its cell"; }
function layeredOf(net) { // whether patches of the token layer that is shown share a cell
  const split = state.map.startsWith(SPLIT) ? splitOf(net) : null;
  return split && split.query[2] > 1 ? state.map + ": " + together(split.query[2], split.key[2]) : "";
}
function viewpoints(net) { // the layout of the patches that the large map can be seen from; null where it is seen from none
  const { grid, query } = nets[net].shape;
  if (state.map === POSITIONS) return [...grid, 1];
  if (state.map.startsWith(SPLIT)) return splitOf(net)?.query ?? null;
  const of_token = moment(net) || (!state.at && nets[net].pictures[state.picture].token);
  return state.map !== ATTENTION || of_token ? null : [...grid, query];
}
function tokenOf(net) { return state.map !== ATTENTION ? "" : moment(net) ? "what the head reads" : "the class token"; }
function attention(net, layer, head) { // the weights of one head, and their layout
  const { depth, heads, grid, query, key } = nets[net].shape, one = nets[net].pictures[state.picture], then = moment(net);
  const size = grid[0] * grid[1], map = layer * heads + head;
  if (then) return [momentValues(net, "token", ((then.i * then.all.count + state.picture) * depth * heads + map) * size, size), [...grid, 1]];
  if (state.at === null && one.token) return [read(net, state.picture, "token").subarray(map * size, (map + 1) * size), [...grid, 1]];
  return seenFrom(read(net, state.picture, "cells"), map, [...grid, query], [...grid, key]);
}
function layerOf({ shape }) { return Math.min(state.layer, shape.depth - 1); } // of a network with fewer, its last
function headOf({ shape }) { return state.head < 0 ? "mean" : Math.min(state.head, shape.heads - 1); }
function mapShown(net, layer) { // the head that is chosen, or the mean of all
  const { heads } = nets[net].shape;
  if (state.head >= 0) return attention(net, layer, headOf(nets[net]));
  const [first, size] = attention(net, layer, 0), sum = new Float64Array(first.length);
  for (let head = 0; head < heads; head++) attention(net, layer, head)[0].forEach((v, i) => { sum[i] += v / heads; });
  return [sum, size];
}
function large(net) { // the large map: its values, size, and whether it has a sign; null for colors
  const { depth, grid } = nets[net].shape, one = nets[net].pictures[state.picture];
  if (state.map === ATTENTION) return depth === 0 ? null : [...mapShown(net, layerOf(nets[net])), false];
  if (state.map === POSITIONS) return positions(net);
  const packed = mapOf(one, state.map);
  if (!packed) return null;
  const values = read(net, state.picture, state.map);
  if (!state.map.startsWith(SPLIT)) return [values, [...grid, 1], packed.signed];
  const { query, key } = splitOf(net);
  return [...seenFrom(values, 0, query, key), false];
}
function positions(net) { // cosines of the position vector of the marked patch with all, as kept at an epoch
  const then = kept(net), layout = [...nets[net].shape.grid, 1];
  if (!then?.all.positions) return null;
  return [...seenFrom(momentValues(net, "positions"), then.i, layout, layout), true];
}
function difference() { // the second network's map less the first one's; null where they are not of the same patches
  const [a, b] = [large(0), large(1)], from = [0, 1].map((n) => String(viewpoints(n) ?? tokenOf(n)));
  if (!a || !b || String(a[1]) !== String(b[1]) || from[0] !== from[1]) return null;
  return [b[0].map((v, i) => v - a[0][i]), a[1], true];
}
function range(maps, signed = false) { // one for all maps: attention from 0, signed ones with 0 in the middle
  let low = 0, high = 0;
  for (const values of maps) for (const v of values) { if (v > high) high = v; if (v < low) low = v; }
  const most = Math.max(high, -low);
  return signed ? [-most, most] : [low, high];
}

function color(share, signed) {
  const map = signed ? PUOR : VIRIDIS, x = Math.min(1, Math.max(0, share)) * (map.length - 1);
  const i = Math.min(Math.floor(x), map.length - 2);
  return map[i].map((low, k) => low + (map[i + 1][k] - low) * (x - i));
}
function share(value, [low, high], signed) { // where all are 0 a map with a sign is white
  return high > low ? (value - low) / (high - low) : signed ? 0.5 : 0;
}
function paint(canvas, values, [h, w], [low, high], signed = false) {
  canvas.width = w; canvas.height = h;
  const data = new ImageData(w, h);
  for (let n = 0; n < h * w; n++) data.data.set([...color(share(values[n], [low, high], signed), signed), 255], 4 * n);
  canvas.getContext("2d").putImageData(data, 0, 0);
}
function paintColors(canvas, values, [h, w]) {
  canvas.width = w; canvas.height = h;
  const data = new ImageData(w, h);
  for (let n = 0; n < h * w; n++) data.data.set([values[3 * n], values[3 * n + 1], values[3 * n + 2], 255], 4 * n);
  canvas.getContext("2d").putImageData(data, 0, 0);
}
function mark(context, at, layout, style) {
  const [h, w] = layout, [top, left, bottom, right] = box(at, layout);
  context.strokeStyle = style; context.lineWidth = 3;
  context.strokeRect((left * 416) / w + 1, (top * 416) / h + 1, ((right - left) * 416) / w - 2, ((bottom - top) * 416) / h - 2);
}
function drawPicture(net, size, map, from) {
  const image = net.images[state.picture], context = net.picture.getContext("2d");
  net.picture.width = net.picture.height = 416;
  context.imageSmoothingEnabled = false;
  if (image.complete) context.drawImage(image, 0, 0, 416, 416);
  if (state.over) mark(context, state.over, size, "#56B4E9");
  if (state.at && from) mark(context, state.at, from, "#D55E00");
  if (state.lines && map && (state.map === ATTENTION || state.map.startsWith(SPLIT))) drawLines(context, map, from);
}
function drawLines(context, [values, layout], from) { // from the token that is looked from to the cells that it weighs most
  const centers = (at, on) => { const [top, left, bottom, right] = box(at, on); return [((top + bottom) * 208) / on[0], ((left + right) * 208) / on[1]]; };
  const [h, w, pool] = layout, start = from ? centers(middle(), from) : [8, 8];
  const firsts = Array.from(values.keys()).filter((n) => Math.floor(n / w) % pool === 0 && (n % w) % pool === 0); // of each cell
  const most = Math.max(...values), order = firsts.sort((a, b) => values[b] - values[a]).slice(0, LINES);
  for (const n of order) {
    context.strokeStyle = "#E69F00"; context.lineWidth = 0.5 + (7 * values[n]) / most; context.globalAlpha = 0.25 + (0.7 * values[n]) / most;
    const end = centers([(Math.floor(n / w) + 0.5) / h, ((n % w) + 0.5) / w], layout);
    context.beginPath(); context.moveTo(start[1], start[0]);
    context.lineTo(end[1], end[0]); context.stroke();
  }
  context.globalAlpha = 1; context.fillStyle = "#E69F00";
  context.fillRect(start[1] - 6, start[0] - 6, 12, 12);
}
function numberUnderPointer(net, n, map) {
  if (state.tile) {
    const [layer, head] = state.tile;
    if (layer >= net.shape.depth || head >= net.shape.heads) return "";
    return place("layer " + layer + ", head " + head + ", ", ...attention(n, layer, head));
  }
  if (!map && !(state.map in net.pictures[state.picture].colors)) return "this network has no such map";
  return map && state.over ? place("", map[0], map[1]) : map ? "point at a patch to read its number" : "";
}
function place(before, values, [h, w]) {
  const [y, x] = patch(state.over, [h, w]);
  return before + "row " + y + ", column " + x + ": " + number(values[y * w + x]);
}
function buildBar(parent) { // the ends of a scale, and its colors between them
  const bar = el("div", parent, { className: "bar" });
  for (const name of ["span", "i", "span"]) el(name, bar);
  return bar;
}
function drawBar(bar, map, scale, signed) {
  bar.hidden = !map;
  bar.querySelector("i").style.background = "linear-gradient(90deg," + (signed ? PUOR : VIRIDIS).map((c) => "rgb(" + c + ")") + ")";
  bar.firstChild.textContent = number(scale[0]);
  bar.lastChild.textContent = number(scale[1]);
}
function drawDifference() {
  if (!between.card) return;
  const map = difference(), { stage, bar, said, number: output } = between;
  stage.hidden = !map;
  said.textContent = map ? nets[1].shape.name + " minus " + nets[0].shape.name + ": orange is more in " + nets[1].shape.name + ", purple more in " + nets[0].shape.name : "these two maps have no common grid, or are seen from different places, so there is no difference";
  output.textContent = map && state.over && !state.tile ? place("", map[0], map[1]) : "";
  const scale = map ? range([map[0]], true) : [0, 0];
  drawBar(bar, map, scale, true);
  if (map) paint(stage, map[0], map[1], scale, true);
}
function saidOf(net, n) { // what the network says of the picture, then or now
  const one = net.pictures[state.picture], then = dated(n), of = one.target ? " (it is " + one.target + ")" : "";
  const is_other = state.map === ATTENTION && net.shape.depth > 0 && (layerOf(net) < state.layer || headOf(net) < state.head);
  const last = is_other ? "; layer " + layerOf(net) + (state.head < 0 ? "" : ", head " + headOf(net)) + ": it has no more" : "";
  if (then) return "epoch " + then.epoch + (then.said ? ": " + then.said : "") + of + last;
  const is_kept = state.map === ATTENTION || state.map === POSITIONS;
  const now = state.epoch < 0 ? "" : is_kept ? "now (nothing was kept of this run): " : "now (of epochs only attention and positions are kept): ";
  const asked = state.target >= 0 && !(state.target in (one.targets ?? {})) && state.target !== one.class ? "; maps are of the predicted class: those of the class chosen were not made for this picture" : "";
  return now + one.said + of + asked + last;
}
function largeMaps() { // of all networks, whether any has a sign, and one scale for all
  const maps = nets.map((_, n) => large(n)), signed = maps.some((map) => map && map[2]);
  return { maps, signed, scale: range(maps.filter(Boolean).map((map) => map[0]), signed) };
}
function draw() {
  const { maps, signed, scale } = largeMaps();
  const tiles = nets.map(({ shape }, n) => Array.from({ length: shape.depth * shape.heads }, (_, i) => attention(n, Math.floor(i / shape.heads), i % shape.heads)));
  const common = range(tiles.flat().map((tile) => tile[0]));
  nets.forEach((net, n) => {
    const map = maps[n], size = map ? map[1] : net.shape.grid, from = map && viewpoints(n), small = document.createElement("canvas");
    if (map) paint(small, map[0], size, scale, signed);
    else if (state.map in (net.pictures[state.picture].colors ?? {})) paintColors(small, read(n, state.picture, state.map), size);
    const context = net.stage.getContext("2d");
    net.stage.width = net.stage.height = 416;
    context.imageSmoothingEnabled = false;
    if (small.width) context.drawImage(small, 0, 0, 416, 416);
    if (state.over && !state.tile) mark(context, state.over, size, "#56B4E9");
    if (state.at && from) mark(context, state.at, from, "#D55E00");
    drawPicture(net, size, map, from);
    drawBar(net.bar, map, scale, signed);
    net.tiles.forEach((tile, i) => paint(tile, ...tiles[n][i], common));
    net.common.textContent = net.shape.unseen || "every layer (rows, first above) and head (columns), all from 0 to " + number(common[1]);
    net.said.textContent = saidOf(net, n);
    net.layered.textContent = layeredOf(n);
    net.number.textContent = numberUnderPointer(net, n, map);
  });
  drawDifference();
  offerClasses();
  const time = document.getElementById("epoch"), epochs = nets.flatMap((net) => net.moments?.epochs ?? []);
  document.getElementById("when").textContent = state.epoch < 0 ? "now" : state.epoch + (state.map !== POSITIONS && state.picture >= Math.max(...nets.map((net) => net.moments?.count ?? 0)) ? ": nothing was kept of this picture" : "");
  time.value = state.epoch < 0 ? time.max : epochList().indexOf(state.epoch);
  document.getElementById("time").hidden = epochs.length === 0;
  document.getElementById("lines").checked = state.lines;
  remember({ picture: state.picture, map: state.map, layer: state.layer, head: state.head < 0 ? null : state.head, class: state.target < 0 ? null : state.target, epoch: state.epoch < 0 ? null : state.epoch, at: state.at ? state.at.map((v) => v.toFixed(3)).join(",") : null, lines: state.lines ? 1 : null });
  const what = [...new Set(nets.map((_, n) => (maps[n] ? (viewpoints(n) ? (state.at ? "the marked patch" : "the middle") : tokenOf(n)) : "")).filter(Boolean))];
  document.getElementById("said").textContent = [...(state.map === ATTENTION ? ["layer " + state.layer] : []), ...(what.length ? ["seen from " + what.join(" or ")] : [])].join(", ");
  document.getElementById("map").value = state.map;
  document.getElementById("layer").value = state.layer;
  document.getElementById("head").value = state.head;
  document.querySelectorAll("#thumbs button").forEach((b, i) => b.setAttribute("aria-pressed", String(i === state.picture)));
}
const between = {}; // the card of the difference of two networks
const epochList = () => [...new Set(nets.flatMap((net) => net.moments?.epochs ?? []))].sort((a, b) => a - b);
function offerClasses() { // those that maps were made for, by name
  const select = document.getElementById("target"), offered = new Map();
  for (const net of nets) for (const [k, one] of Object.entries(net.pictures[state.picture].targets ?? {})) offered.set(Number(k), one.name);
  for (const net of nets) { const one = net.pictures[state.picture]; if ("class" in one) offered.set(one.class, saidClass(one)); }
  if (state.target >= 0 && !offered.has(state.target)) offered.set(state.target, nets.flatMap((net) => net.pictures).map((one) => one.targets?.[state.target]?.name).find(Boolean) ?? "class " + state.target);
  select.replaceChildren();
  el("option", select, { value: -1, textContent: "the predicted one" });
  for (const [k, name] of [...offered].sort((a, b) => a[0] - b[0])) el("option", select, { value: k, textContent: name });
  select.value = state.target;
  select.parentElement.hidden = offered.size < 2;
}
function classOf(one) { // that the map is of; "" of a map that is the same for all
  const asked = one.targets?.[state.target], others = Object.values(one.targets ?? {});
  if (asked && state.map in asked.maps) return asked.name;
  return !others.some(({ maps }) => state.map in maps) ? "" : state.target === one.class ? saidClass(one) : "predicted";
}
function saidClass(one) { return one.said.replace(/, \S+$/, ""); } // without its share
function fromWhere(n) { // rows and columns of the patches that the map is seen from, or the token
  const layout = viewpoints(n);
  if (!layout) return tokenOf(n);
  const [top, left, bottom, right] = box(middle(), layout), span = (first, end) => (end - first > 1 ? first + "-" + (end - 1) : String(first));
  return "row " + span(top, bottom) + " column " + span(left, right);
}
function rowsShown() { // the numbers of the maps as they are shown
  const found = [];
  nets.forEach((net, n) => {
    const map = large(n), one = net.pictures[state.picture];
    if (!map) return;
    const is_attention = state.map === ATTENTION;
    const of = { run: net.shape.name, picture: state.picture, map: state.map, layer: is_attention ? layerOf(net) : "", head: is_attention ? headOf(net) : "", class: classOf(one), epoch: dated(n)?.epoch ?? "now", from: fromWhere(n), cell: map[1][2] + " x " + map[1][2] };
    map[0].forEach((value, i) => found.push({ ...of, row: Math.floor(i / map[1][1]), column: i % map[1][1], value: Number(value.toPrecision(6)) }));
  });
  return found;
}
function drawingShown() {
  const { maps, signed, scale } = largeMaps();
  const tall = Math.round(Math.max(...nets.map((net) => 200 / net.shape.ratio)));
  const parts = ['<svg xmlns="http://www.w3.org/2000/svg" width="' + 220 * nets.length + '" height="' + (tall + 70) + '" font-family="sans-serif" font-size="11">'];
  nets.forEach((net, n) => {
    if (!maps[n]) return;
    const [values, [h, w]] = maps[n], rgb = (part) => "rgb(" + color(part, signed).map(Math.round) + ")", left = 10 + 220 * n, high = 200 / net.shape.ratio;
    parts.push('<text x="' + left + '" y="14">' + escaped(net.shape.name) + "</text>", '<text x="' + left + '" y="28">' + escaped(state.map + (state.map === ATTENTION ? ", layer " + layerOf(net) : "")) + "</text>");
    values.forEach((v, i) => parts.push('<rect x="' + (left + ((i % w) * 200) / w).toFixed(2) + '" y="' + (34 + (Math.floor(i / w) * high) / h).toFixed(2) + '" width="' + (200 / w).toFixed(2) + '" height="' + (high / h).toFixed(2) + '" fill="' + rgb(share(v, scale, signed)) + '"/>'));
    for (let i = 0; i < 50; i++) parts.push('<rect x="' + (left + 4 * i) + '" y="' + (tall + 40) + '" width="4" height="8" fill="' + rgb(i / 49) + '"/>');
    parts.push('<text x="' + left + '" y="' + (tall + 62) + '">' + number(scale[0]) + '</text><text x="' + (left + 200) + '" y="' + (tall + 62) + '" text-anchor="end">' + number(scale[1]) + "</text>");
  });
  return parts.join("") + "</svg>\n";
}
function pictureCount() { return Math.min(...loaded.map((net) => net.pictures.length)); } // that all have
function restore() { // what the link asks for, as far as it is there
  const whole = (word, low, high) => { const n = Number.parseInt(shown[word] ?? "", 10); return n >= low && n <= high ? n : null; };
  const layer = document.getElementById("layer"), maps = Array.from(document.getElementById("map").options, (o) => o.value);
  state.picture = whole("picture", 0, pictureCount() - 1) ?? 0;
  state.layer = whole("layer", 0, Number(layer.max)) ?? Number(layer.max);
  state.head = whole("head", 0, Math.max(...nets.map((net) => net.shape.heads)) - 1) ?? -1;
  state.target = whole("class", 0, 1e6) ?? -1;
  state.epoch = epochList().includes(whole("epoch", 0, 1e9)) ? whole("epoch", 0, 1e9) : -1;
  state.lines = shown.lines === "1";
  if (maps.includes(shown.map)) state.map = shown.map;
  const at = (shown.at ?? "").split(",").map(Number);
  if (at.length === 2 && at.every((v) => v >= 0 && v < 1)) state.at = at;
}
function buildDifference(stages) {
  if (nets.length !== 2) return;
  const card = (between.card = el("div", stages, { className: "card" }));
  card.style.setProperty("--ratio", nets[0].shape.ratio);
  el("b", card, { textContent: "difference" });
  between.said = el("div", card, { className: "note" });
  between.stage = el("canvas", card, { className: "stage" });
  between.stage.setAttribute("aria-label", "difference of the two maps");
  between.bar = buildBar(card);
  between.number = el("output", card, { className: "number" });
}
function buildViewer() {
  loaded = nets = content("data");
  const thumbs = document.getElementById("thumbs"), select = document.getElementById("map");
  nets[0].pictures.slice(0, pictureCount()).forEach((one, i) => {
    const button = el("button", thumbs, { type: "button", onclick: () => { state.picture = i; draw(); } });
    button.setAttribute("aria-label", "picture " + (i + 1));
    el("img", button, { src: one.src, alt: "" });
  });
  const all = (what) => new Set(nets.flatMap((net) => Object.keys(net.pictures[0][what]))); // maps of any network
  const splits = Math.max(...nets.map((net) => net.shape.splits.length));
  const names = [...(nets.some((net) => net.shape.depth > 0) ? [ATTENTION] : []), ...all("maps")];
  for (let i = 1; i <= splits; i++) names.push(SPLIT + i);
  if (nets.some((net) => net.moments?.positions)) names.push(POSITIONS);
  for (const name of names) el("option", select, { value: name, textContent: name });
  for (const name of all("colors")) el("option", select, { value: name, textContent: "PCA colors, " + name + " blocks passed" });
  state.map = select.options[0]?.value ?? ATTENTION;
  select.onchange = () => { state.map = select.value; draw(); };
  const layer = document.getElementById("layer");
  layer.max = Math.max(1, ...nets.map((net) => net.shape.depth)) - 1;
  const head = document.getElementById("head"), most = Math.max(...nets.map((net) => net.shape.heads));
  for (let i = -1; i < most; i++) el("option", head, { value: i, textContent: i < 0 ? "mean of heads" : i });
  head.onchange = () => { state.head = Number(head.value); draw(); };
  const target = document.getElementById("target"), epoch = document.getElementById("epoch"), lines = document.getElementById("lines");
  if (most === 0) for (const control of [layer, head, ...(splits > 0 ? [] : [lines])]) control.parentElement.hidden = true; // of attention alone
  target.onchange = () => { state.target = Number(target.value); draw(); };
  epoch.oninput = () => { state.epoch = epochList()[Number(epoch.value)] ?? -1; draw(); };
  lines.onchange = () => { state.lines = lines.checked; draw(); };
  saveButtons(document.getElementById("saves"), "map", rowsShown, drawingShown);
  restore();
  layer.oninput = () => { state.layer = Number(layer.value); draw(); };
  offerNets();
  buildStages();
}
function offerNets() { // of many networks two are drawn, which menus choose
  if (loaded.length <= SHOWN) return;
  const menus = ["left", "right"].map((id) => document.getElementById(id));
  menus.forEach((menu, n) => {
    loaded.forEach(({ shape }, i) => el("option", menu, { value: i, textContent: shape.name }));
    menu.value = Number(shown[menu.id]) in loaded ? Number(shown[menu.id]) : n;
    menu.parentElement.hidden = false;
    menu.onchange = () => { choose(); buildStages(); };
  });
  function choose() {
    nets = menus.map((menu) => loaded[menu.value]).filter((net, n, both) => both.indexOf(net) === n);
    menus.forEach((menu, n) => remember({ [menu.id]: Number(menu.value) === n ? null : menu.value }));
    cache.clear();
  }
  choose();
}
function buildStages() {
  const stages = document.getElementById("stages"), epoch = document.getElementById("epoch");
  stages.replaceChildren();
  between.card = null;
  epoch.max = epochList().length;
  if (!epochList().includes(state.epoch)) state.epoch = -1;
  nets.forEach((net, n) => {
    const card = el("div", stages, { className: "card" });
    card.style.setProperty("--ratio", net.shape.ratio); // width to height of its images
    el("b", card, { textContent: net.shape.name });
    net.said = el("div", card, { className: "note" });
    const view = el("div", card, { className: "view" }), left = el("div", view), right = el("div", view);
    const pair = el("div", left, { className: "pair" });
    net.picture = el("canvas", pair, { className: "stage" });
    net.picture.setAttribute("aria-label", "picture; point at a patch");
    net.stage = el("canvas", pair, { className: "stage", tabIndex: 0 });
    net.stage.setAttribute("aria-label", "map; arrow keys choose the patch that it is seen from");
    net.bar = buildBar(left);
    net.number = el("output", left, { className: "number" });
    net.images = net.pictures.map((one) => Object.assign(new Image(), { src: one.src, onload: draw }));
    const within = (event) => {
      const box = event.currentTarget.getBoundingClientRect(), inside = (v) => Math.min(0.999, Math.max(0, v));
      return [inside((event.clientY - box.top) / box.height), inside((event.clientX - box.left) / box.width)];
    };
    const over = (event, tile = null) => { Object.assign(state, { over: within(event), tile }); draw(); };
    const point = (event) => { state.at = within(event); over(event); };
    const leave = () => { Object.assign(state, { over: null, tile: null }); draw(); };
    for (const canvas of [net.stage, net.picture]) {
      canvas.onpointermove = (event) => (event.buttons ? point(event) : over(event));
      canvas.onpointerdown = point;
      canvas.onpointerleave = leave;
    }
    net.stage.onkeydown = (event) => {
      const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (event.key === "Escape") Object.assign(state, { at: null, over: null, tile: null });
      else if (move) {
        const on = viewpoints(n) ?? [...net.shape.grid, net.shape.query]; // to the middle of a patch of the next cell
        state.at = patch(middle(), on).map((v, i) => (Math.min(on[i] - 1, Math.max(0, v + move[i] * on[2])) + 0.5) / on[i]);
        Object.assign(state, { over: state.at, tile: null });
        event.preventDefault();
      } else return;
      draw();
    };
    const { depth, heads, query, key } = net.shape;
    if (depth > 0 && query > 1) el("div", left, { className: "note", textContent: together(query, key) });
    net.layered = el("div", left, { className: "note" });
    net.common = el("div", right, { className: "note" });
    const all = el("div", right, { className: "heads" });
    all.style.gridTemplateColumns = "repeat(" + heads + ", minmax(14px, " + Math.max(24, Math.min(96, 400 / Math.max(depth, heads))) + "px))";
    net.tiles = Array.from({ length: depth * heads }, (_, i) => {
      const at = [Math.floor(i / heads), i % heads];
      return el("canvas", all, {
        title: "layer " + at[0] + ", head " + at[1],
        onclick: () => { Object.assign(state, { map: ATTENTION, layer: at[0], head: at[1], tile: null }); draw(); },
        onpointermove: (event) => over(event, at),
        onpointerleave: leave,
      });
    });
  });
  buildDifference(stages);
  draw();
}
if (typeof module === "undefined") { if (content("data")) buildViewer(); }
else module.exports = { state, load: (pages) => { nets = pages; cache.clear(); }, read, shown: mapShown, large, difference, rows: rowsShown, range, number, share, layered: layeredOf }; // for node
