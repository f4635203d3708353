"use strict";
const nets = JSON.parse(document.getElementById("data").textContent);
const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
const el = (name, parent, props = {}) => parent.appendChild(Object.assign(document.createElement(name), props));
const VIRIDIS = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
const state = { picture: 0, map: "attention", layer: 0, head: -1, at: null };
const cache = new Map();

function read(net, i, name) {
  const key = net + "/" + i + "/" + name;
  if (!cache.has(key)) {
    const one = nets[net].pictures[i];
    cache.set(key, bytes(one[name] ?? one.maps[name] ?? one.colors[name]));
  }
  return cache.get(key);
}
function color(value) {
  const x = (value / 255) * (VIRIDIS.length - 1), i = Math.min(Math.floor(x), VIRIDIS.length - 2), t = x - i;
  return VIRIDIS[i].map((low, k) => low + (VIRIDIS[i + 1][k] - low) * t);
}
function paint(canvas, values, [h, w], rgb = false, over = false) { // over a picture low values let it through
  canvas.width = w; canvas.height = h;
  const data = new ImageData(w, h);
  for (let n = 0; n < h * w; n++) {
    const c = rgb ? [values[3 * n], values[3 * n + 1], values[3 * n + 2]] : color(values[n]);
    data.data.set([...c, rgb || !over ? 255 : 70 + 0.6 * values[n]], 4 * n);
  }
  canvas.getContext("2d").putImageData(data, 0, 0);
}
function attention(net, layer, head) {
  const { heads, grid, query, key } = nets[net].shape, one = nets[net].pictures[state.picture];
  if (state.at === null && one.token) {
    const size = grid[0] * grid[1], start = (layer * heads + head) * size;
    return [read(net, state.picture, "token").subarray(start, start + size), grid];
  }
  const at = state.at ?? [0.5, 0.5];
  const y = Math.min(query[0] - 1, Math.floor(at[0] * query[0])), x = Math.min(query[1] - 1, Math.floor(at[1] * query[1]));
  const size = key[0] * key[1], start = ((layer * heads + head) * query[0] * query[1] + y * query[1] + x) * size;
  return [read(net, state.picture, "cells").subarray(start, start + size), key];
}
function shown(net, layer) {
  const { heads } = nets[net].shape;
  if (state.head >= 0) return attention(net, layer, Math.min(state.head, heads - 1));
  const [first, size] = attention(net, layer, 0), sum = new Float32Array(first.length);
  for (let head = 0; head < heads; head++) attention(net, layer, head)[0].forEach((v, i) => { sum[i] += v / heads; });
  return [sum, size];
}
function draw() {
  nets.forEach((net, n) => {
    const { depth, heads, grid } = net.shape, layer = Math.min(state.layer, depth - 1), stage = net.stage;
    const small = document.createElement("canvas"), image = net.images[state.picture];
    const layered = state.map === "attention";
    if (layered) paint(small, ...shown(n, layer), false, true);
    else if (state.map in (net.pictures[state.picture].colors ?? {})) paint(small, read(n, state.picture, state.map), grid, true);
    else if (state.map in net.pictures[state.picture].maps) paint(small, read(n, state.picture, state.map), grid, false, true);
    const context = stage.getContext("2d");
    stage.width = stage.height = 416;
    context.imageSmoothingEnabled = false;
    if (image.complete) context.drawImage(image, 0, 0, 416, 416);
    context.globalAlpha = isNaN(state.map) ? 1 : 0.9;
    if (small.width) context.drawImage(small, 0, 0, 416, 416);
    context.globalAlpha = 1;
    if (state.at) {
      const [h, w] = layered ? net.shape.query : grid;
      context.strokeStyle = "#D55E00"; context.lineWidth = 3;
      const y = Math.min(h - 1, Math.floor(state.at[0] * h)), x = Math.min(w - 1, Math.floor(state.at[1] * w));
      context.strokeRect((x * 416) / w + 1, (y * 416) / h + 1, 416 / w - 2, 416 / h - 2);
    }
    net.tiles.forEach((tile, i) => paint(tile, ...attention(n, Math.floor(i / heads), i % heads)));
    net.said.textContent = net.pictures[state.picture].said;
  });
  const what = state.at ? "seen from the marked patch" : nets[0].pictures[0].token ? "seen from the class token" : "seen from the middle";
  document.getElementById("said").textContent = state.map === "attention" ? "layer " + state.layer + ", " + what : "";
  document.getElementById("map").value = state.map;
  document.getElementById("layer").value = state.layer;
  document.getElementById("head").value = state.head;
  document.querySelectorAll("#thumbs button").forEach((b, i) => b.setAttribute("aria-pressed", String(i === state.picture)));
}
function build() {
  const thumbs = document.getElementById("thumbs"), stages = document.getElementById("stages"), select = document.getElementById("map");
  nets[0].pictures.forEach((one, i) => {
    const button = el("button", thumbs, { type: "button", onclick: () => { state.picture = i; draw(); } });
    button.setAttribute("aria-label", "picture " + (i + 1));
    el("img", button, { src: one.src, alt: "" });
  });
  for (const name of ["attention", ...Object.keys(nets[0].pictures[0].maps)]) el("option", select, { value: name, textContent: name });
  for (const name of Object.keys(nets[0].pictures[0].colors)) el("option", select, { value: name, textContent: "PCA colors, " + name + " blocks passed" });
  select.onchange = () => { state.map = select.value; draw(); };
  const layer = document.getElementById("layer");
  layer.max = Math.max(...nets.map((net) => net.shape.depth)) - 1;
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
    net.stage = el("canvas", left, { className: "stage", tabIndex: 0 });
    net.stage.setAttribute("aria-label", "picture with map; arrow keys move the patch");
    net.images = net.pictures.map((one) => Object.assign(new Image(), { src: one.src, onload: draw }));
    const point = (event) => {
      const box = net.stage.getBoundingClientRect(), inside = (v) => Math.min(0.999, Math.max(0, v));
      state.at = [inside((event.clientY - box.top) / box.height), inside((event.clientX - box.left) / box.width)];
      draw();
    };
    net.stage.onpointermove = point; net.stage.onpointerdown = point;
    net.stage.onkeydown = (event) => {
      const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (event.key === "Escape") state.at = null;
      else if (move) {
        const at = state.at ?? [0.5, 0.5];
        state.at = at.map((v, i) => Math.min(0.999, Math.max(0, v + move[i] / net.shape.query[i])));
        event.preventDefault();
      } else return;
      draw();
    };
    const { depth, heads, query, key, grid } = net.shape;
    if (key[0] < grid[0] || query[0] < grid[0]) {
      const text = "from a patch: cells of " + query.join(" x ") + ", maps of " + key.join(" x ") + ", for the page to stay small";
      el("div", left, { className: "note", textContent: text });
    }
    el("div", right, { className: "note", textContent: "every layer (rows, first above) and head (columns)" });
    const all = el("div", right, { className: "heads" });
    all.style.gridTemplateColumns = "repeat(" + heads + ", minmax(14px, " + Math.max(24, Math.min(96, 400 / Math.max(depth, heads))) + "px))";
    net.tiles = Array.from({ length: depth * heads }, (_, i) =>
      el("canvas", all, {
        title: "layer " + Math.floor(i / heads) + ", head " + (i % heads),
        onclick: () => { Object.assign(state, { map: "attention", layer: Math.floor(i / heads), head: i % heads }); draw(); },
      }));
  });
  draw();
}
build();
