"use strict";
let nets = [];
const ATTENTION = "attention"; // of every layer and head; the other maps have one for each picture
const el = (name, parent, props = {}) => parent.appendChild(Object.assign(document.createElement(name), props));
const VIRIDIS = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
const PUOR = [[45, 0, 75], [153, 142, 195], [247, 247, 247], [241, 163, 64], [127, 59, 8]]; // white is 0
const state = { picture: 0, map: ATTENTION, layer: 0, head: -1, at: null, over: null, tile: null };
const cache = new Map();

// Numbers: weights as they are, from 16 bits and a scale.
function bytes(text) { return Uint8Array.from(atob(text), (c) => c.charCodeAt(0)); }
function unpack({ text, low, high }) {
  const raw = bytes(text), found = new Float64Array(raw.length / 2);
  for (let i = 0; i < found.length; i++) found[i] = low + ((raw[2 * i] + 256 * raw[2 * i + 1]) * (high - low)) / 65535;
  return found;
}
function read(net, i, name) {
  const key = net + "/" + i + "/" + name;
  if (!cache.has(key)) {
    const one = nets[net].pictures[i], packed = one[name] ?? one.maps[name];
    cache.set(key, packed ? unpack(packed) : bytes(one.colors[name]));
  }
  return cache.get(key);
}
function cell(at, [h, w]) { return [Math.min(h - 1, Math.floor(at[0] * h)), Math.min(w - 1, Math.floor(at[1] * w))]; }
function attention(net, layer, head) { // the weights of one head, and their rows and columns
  const { heads, grid, query, key } = nets[net].shape, one = nets[net].pictures[state.picture];
  if (state.at === null && one.token) {
    const size = grid[0] * grid[1], start = (layer * heads + head) * size;
    return [read(net, state.picture, "token").subarray(start, start + size), grid];
  }
  const [y, x] = cell(state.at ?? [0.5, 0.5], query), size = key[0] * key[1];
  const start = ((layer * heads + head) * query[0] * query[1] + y * query[1] + x) * size;
  return [read(net, state.picture, "cells").subarray(start, start + size), key];
}
function shown(net, layer) { // the head that is chosen, or the mean of all
  const { heads } = nets[net].shape;
  if (state.head >= 0) return attention(net, layer, Math.min(state.head, heads - 1));
  const [first, size] = attention(net, layer, 0), sum = new Float64Array(first.length);
  for (let head = 0; head < heads; head++) attention(net, layer, head)[0].forEach((v, i) => { sum[i] += v / heads; });
  return [sum, size];
}
function large(net) { // the large map: its values, size, and whether it has a sign; null for colors
  const { depth, grid } = nets[net].shape, one = nets[net].pictures[state.picture];
  if (state.map === ATTENTION) return depth === 0 ? null : [...shown(net, Math.min(state.layer, depth - 1)), false];
  return state.map in one.maps ? [read(net, state.picture, state.map), grid, one.maps[state.map].signed] : null;
}
function range(maps, signed = false) { // one for all maps: attention from 0, signed ones with 0 in the middle
  let low = 0, high = 0;
  for (const values of maps) for (const v of values) { if (v > high) high = v; if (v < low) low = v; }
  const most = Math.max(high, -low);
  return signed ? [-most, most] : [low, high];
}
function number(value) { return value === 0 ? "0" : Math.abs(value) >= 0.001 ? value.toPrecision(4) : value.toExponential(2); }

function color(share, signed) {
  const map = signed ? PUOR : VIRIDIS, x = Math.min(1, Math.max(0, share)) * (map.length - 1);
  const i = Math.min(Math.floor(x), map.length - 2);
  return map[i].map((low, k) => low + (map[i + 1][k] - low) * (x - i));
}
function paint(canvas, values, [h, w], [low, high], signed = false) {
  canvas.width = w; canvas.height = h;
  const data = new ImageData(w, h), over = high > low ? 1 / (high - low) : 0;
  for (let n = 0; n < h * w; n++) data.data.set([...color((values[n] - low) * over, signed), 255], 4 * n);
  canvas.getContext("2d").putImageData(data, 0, 0);
}
function paintColors(canvas, values, [h, w]) {
  canvas.width = w; canvas.height = h;
  const data = new ImageData(w, h);
  for (let n = 0; n < h * w; n++) data.data.set([values[3 * n], values[3 * n + 1], values[3 * n + 2], 255], 4 * n);
  canvas.getContext("2d").putImageData(data, 0, 0);
}
function mark(context, at, [h, w], style) {
  const [y, x] = cell(at, [h, w]);
  context.strokeStyle = style; context.lineWidth = 3;
  context.strokeRect((x * 416) / w + 1, (y * 416) / h + 1, 416 / w - 2, 416 / h - 2);
}
function drawPicture(net, size) {
  const image = net.images[state.picture], context = net.picture.getContext("2d");
  net.picture.width = net.picture.height = 416;
  context.imageSmoothingEnabled = false;
  if (image.complete) context.drawImage(image, 0, 0, 416, 416);
  if (state.over) mark(context, state.over, size, "#56B4E9");
  if (state.at) mark(context, state.at, net.shape.query, "#D55E00");
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
  const [y, x] = cell(state.over, [h, w]);
  return before + "row " + y + ", column " + x + ": " + number(values[y * w + x]);
}
function draw() {
  const maps = nets.map((_, n) => large(n)), signed = maps.some((map) => map && map[2]);
  const scale = range(maps.filter(Boolean).map((map) => map[0]), signed);
  const tiles = nets.map(({ shape }, n) => Array.from({ length: shape.depth * shape.heads }, (_, i) => attention(n, Math.floor(i / shape.heads), i % shape.heads)));
  const common = range(tiles.flat().map((tile) => tile[0]));
  nets.forEach((net, n) => {
    const map = maps[n], size = map ? map[1] : net.shape.grid, small = document.createElement("canvas");
    if (map) paint(small, map[0], size, scale, signed);
    else if (state.map in (net.pictures[state.picture].colors ?? {})) paintColors(small, read(n, state.picture, state.map), size);
    const context = net.stage.getContext("2d");
    net.stage.width = net.stage.height = 416;
    context.imageSmoothingEnabled = false;
    if (small.width) context.drawImage(small, 0, 0, 416, 416);
    if (state.over && !state.tile) mark(context, state.over, size, "#56B4E9");
    if (state.at) mark(context, state.at, net.shape.query, "#D55E00");
    drawPicture(net, size);
    net.bar.hidden = !map;
    net.bar.querySelector("i").style.background = "linear-gradient(90deg," + (signed ? PUOR : VIRIDIS).map((c) => "rgb(" + c + ")") + ")";
    net.bar.firstChild.textContent = number(scale[0]);
    net.bar.lastChild.textContent = number(scale[1]);
    net.tiles.forEach((tile, i) => paint(tile, ...tiles[n][i], common));
    net.common.textContent = net.shape.depth === 0 ? "no attention with a weight for each pair of patches" : "every layer (rows, first above) and head (columns), all from 0 to " + number(common[1]);
    net.said.textContent = net.pictures[state.picture].said;
    net.number.textContent = numberUnderPointer(net, n, map);
  });
  const what = state.at ? "seen from the marked patch" : nets.some((net) => net.pictures[0].token) ? "seen from the class token" : "seen from the middle";
  document.getElementById("said").textContent = state.map === ATTENTION ? "layer " + state.layer + ", " + what : "";
  document.getElementById("map").value = state.map;
  document.getElementById("layer").value = state.layer;
  document.getElementById("head").value = state.head;
  document.querySelectorAll("#thumbs button").forEach((b, i) => b.setAttribute("aria-pressed", String(i === state.picture)));
}
function build() {
  nets = JSON.parse(document.getElementById("data").textContent);
  const thumbs = document.getElementById("thumbs"), stages = document.getElementById("stages"), select = document.getElementById("map");
  nets[0].pictures.forEach((one, i) => {
    const button = el("button", thumbs, { type: "button", onclick: () => { state.picture = i; draw(); } });
    button.setAttribute("aria-label", "picture " + (i + 1));
    el("img", button, { src: one.src, alt: "" });
  });
  const all = (what) => new Set(nets.flatMap((net) => Object.keys(net.pictures[0][what]))); // maps of any network
  const names = [...(nets.some((net) => net.shape.depth > 0) ? [ATTENTION] : []), ...all("maps")];
  state.map = names[0] ?? ATTENTION;
  for (const name of names) el("option", select, { value: name, textContent: name });
  for (const name of all("colors")) el("option", select, { value: name, textContent: "PCA colors, " + name + " blocks passed" });
  select.onchange = () => { state.map = select.value; draw(); };
  const layer = document.getElementById("layer");
  layer.max = Math.max(1, ...nets.map((net) => net.shape.depth)) - 1;
  layer.value = state.layer = Number(layer.max);
  const head = document.getElementById("head"), most = Math.max(...nets.map((net) => net.shape.heads));
  for (let i = -1; i < most; i++) el("option", head, { value: i, textContent: i < 0 ? "mean of heads" : i });
  head.onchange = () => { state.head = Number(head.value); draw(); };
  layer.oninput = () => { state.layer = Number(layer.value); draw(); };
  nets.forEach((net, n) => {
    const card = el("div", stages, { className: "card" });
    el("b", card, { textContent: net.shape.name });
    net.said = el("div", card, { className: "note" });
    const view = el("div", card, { className: "view" }), left = el("div", view), right = el("div", view);
    const pair = el("div", left, { className: "pair" });
    net.picture = el("canvas", pair, { className: "stage" });
    net.picture.setAttribute("aria-label", "picture; point at a patch");
    net.stage = el("canvas", pair, { className: "stage", tabIndex: 0 });
    net.stage.setAttribute("aria-label", "map; arrow keys choose the patch that it is seen from");
    net.bar = el("div", left, { className: "bar" });
    for (const name of ["span", "i", "span"]) el(name, net.bar);
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
        const at = state.at ?? [0.5, 0.5];
        state.at = at.map((v, i) => Math.min(0.999, Math.max(0, v + move[i] / net.shape.query[i])));
        Object.assign(state, { over: state.at, tile: null });
        event.preventDefault();
      } else return;
      draw();
    };
    const { depth, heads, query, key, grid } = net.shape;
    if (key[0] < grid[0] || query[0] < grid[0]) {
      const text = "from a patch: cells of " + query.join(" x ") + ", maps of " + key.join(" x ") + ", for the page to stay small; a number is the mean of its cell";
      el("div", left, { className: "note", textContent: text });
    }
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
  draw();
}
if (typeof module === "undefined") build();
else module.exports = { state, load: (pages) => { nets = pages; cache.clear(); }, read, shown, large, range, number }; // for node
