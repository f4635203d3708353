// Works at the page in frames of three sizes, and leaves what it saw in the body's data.
const SIZES = [[390, 844], [1200, 900], [1920, 1080]], said = [];
function overlapping(doc) { // texts and controls of one card that lie on one another
  const found = [], boxes = [];
  for (const each of doc.querySelectorAll("label, output, h1, h2, h3, button, .card, .note")) {
    if (!each.offsetParent || each.closest("details:not([open]), #scrolled, svg")) continue;
    boxes.push([each, each.getBoundingClientRect()]);
  }
  boxes.forEach(([a, p], i) => boxes.slice(i + 1).forEach(([b, q]) => {
    const inside = a.contains(b) || b.contains(a);
    const across = Math.min(p.right, q.right) - Math.max(p.left, q.left), down = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
    if (!inside && across > 2 && down > 2) found.push(a.tagName + a.textContent.slice(0, 20) + " / " + b.tagName + b.textContent.slice(0, 20));
  }));
  return found;
}
async function work(page, doc, width) {
  const at = (id) => doc.getElementById(id), pause = () => new Promise((done) => setTimeout(done, 60)), facts = { width };
  const stage = doc.querySelector("canvas.stage[tabindex]"), box = stage.getBoundingClientRect(), saved = [];
  const Blob = page.Blob; // what a button saves is kept here
  page.Blob = function (parts, options) { if (typeof parts[0] === "string") saved.push(parts[0]); return new Blob(parts, options); };
  page.URL.createObjectURL = () => "#";
  page.HTMLAnchorElement.prototype.click = function () { facts.file = this.download; };
  stage.dispatchEvent(new page.PointerEvent("pointermove", { clientX: box.left + box.width * 0.6, clientY: box.top + box.height * 0.3 }));
  facts.numbers = Array.from(doc.querySelectorAll("output.number"), (each) => each.textContent);
  at("saves").querySelector("button").click();
  facts.map = saved.pop();
  const epoch = at("epoch"), now = stage.toDataURL();
  epoch.value = 0; epoch.oninput();
  facts.epoch = at("when").textContent + "|" + (stage.toDataURL() !== now) + "|" + doc.querySelector("#stages .note").textContent;
  at("saves").querySelector("button").click();
  facts.then = saved.pop();
  epoch.value = epoch.max; epoch.oninput();
  at("map").value = "gradient x attention"; at("map").onchange();
  const map = () => { at("saves").querySelector("button").click(); return saved.pop(); };
  const predicted = stage.toDataURL(), target = at("target");
  facts.predicted = map();
  facts.classes = Array.from(target.options, (one) => one.textContent);
  target.value = Array.from(target.options).find((one) => one.textContent === "3" || one.textContent === "4").value; target.onchange();
  facts.target = stage.toDataURL() !== predicted;
  facts.classed = [target.value, map()];
  at("filter").value = "mistakes"; at("filter").onchange();
  facts.mistakes = at("counted").textContent;
  facts.bad = Array.from(doc.querySelectorAll("#rows tbody tr")).every((row) => row.querySelector(".bad"));
  at("listsaves").querySelector("button").click();
  facts.list = saved.pop();
  const row = doc.querySelector("#rows tbody tr"), before = at("embedding").toDataURL();
  row.dispatchEvent(new page.PointerEvent("pointerenter"));
  facts.linked = at("embedding").toDataURL() !== before && at("pointed").textContent.includes("image");
  facts.plots = doc.querySelectorAll(".uplot canvas").length;
  doc.querySelector("#plots .save").click();
  facts.curve = saved.pop().split("\n")[0];
  const svg = Array.from(doc.querySelectorAll(".analysis .saves .save")).find((one) => one.textContent === "svg");
  svg.click();
  for (let i = 0; i < 400 && !saved.length; i++) await pause();
  facts.svg = saved.pop().includes("<svg");
  new page.MutationObserver((all) => all.forEach((one) => one.addedNodes.forEach((node) => { facts.pdf ??= node.srcdoc; }))).observe(doc.body, { childList: true });
  at("saves").lastChild.click();
  for (let i = 0; i < 400 && !facts.pdf; i++) await pause();
  await pause();
  facts.wide = doc.documentElement.scrollWidth > width;
  facts.overlap = overlapping(doc).slice(0, 3);
  facts.dark = page.getComputedStyle(doc.body).backgroundColor;
  said.push(facts);
  if (said.length === SIZES.length) document.body.dataset.said = JSON.stringify(said);
}
for (const [width, height] of SIZES) {
  const frame = document.createElement("iframe");
  frame.style = "border:0;width:" + width + "px;height:" + height + "px";
  frame.srcdoc = PAGE;
  document.body.append(frame);
  frame.onload = () => setTimeout(() => work(frame.contentWindow, frame.contentDocument, width).catch((e) => { document.body.dataset.failed = String(e.stack); }), 300);
}
