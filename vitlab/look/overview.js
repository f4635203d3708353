// Of many runs: the table that sorts, each against one of them, and cards that a link opens.
function sortRows(body, n, up) { // by the numbers of a column where it has them, else by its text
  const key = (row) => { const cell = row.cells[n]; return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value); };
  const order = (a, b) => {
    const [x, y] = [key(a), key(b)];
    if (typeof x !== typeof y) return typeof x === "number" ? -1 : 1; // what was not measured comes last
    return (up ? 1 : -1) * (typeof x === "string" ? x.localeCompare(y, undefined, { numeric: true }) : x - y);
  };
  body.append(...Array.from(body.rows).sort(order));
}
function sortable(table, first) { // first: the column of numbers that a first click puts the largest of on top
  table.querySelectorAll("th").forEach((head, n, heads) => {
    head.querySelector("button").onclick = () => {
      const up = head.getAttribute("aria-sort") === "none" ? !first.includes(n) : head.getAttribute("aria-sort") === "descending";
      heads.forEach((each) => each.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      sortRows(table.tBodies[0], n, up);
    };
  });
}
function rowsOf(table) { // as they stand, for a csv file
  const heads = Array.from(table.querySelectorAll("th"), (head) => head.title || head.textContent), interval = 2; // sorts by its result
  const said = (cell, i) => (i === interval ? cell.textContent : (cell.dataset.value ?? cell.textContent));
  return Array.from(table.tBodies[0].rows, (row) => Object.fromEntries(Array.from(row.cells, (cell, i) => [heads[i], said(cell, i)])));
}
function pointsToRun(table) {
  for (const row of table.tBodies[0].rows) {
    row.onpointerenter = row.onfocus = () => focusOn(row.dataset.run);
    row.onpointerleave = row.onblur = () => focusOn(null);
  }
}
function against(pairs, run) { // every other run less this one
  return pairs.filter((pair) => pair.a === run || pair.b === run).map((pair) => {
    const same = pair.a === run, [low, high] = same ? [pair.low, pair.high] : [-pair.high, -pair.low];
    return { run: same ? pair.b : pair.a, difference: same ? pair.difference : -pair.difference, low, high, alone: same ? pair.only_b : pair.only_a, without: same ? pair.only_a : pair.only_b, p: pair.p };
  });
}
function drawPairs(pairs, run) {
  const table = document.getElementById("paired"), signed = (v) => (v < 0 ? "" : "+") + v.toFixed(4);
  const head = el("tr", (table.replaceChildren(), el("thead", table))), body = el("tbody", table);
  for (const name of ["run", "minus " + run, "95 % interval over images", "right alone", run + " right alone", "McNemar's p"]) { const cell = el("th", head); cell.setAttribute("aria-sort", "none"); el("button", cell, { type: "button", textContent: name }); }
  for (const one of against(pairs, run)) {
    const row = el("tr", body);
    row.dataset.run = one.run;
    for (const [text, value] of [[one.run], [signed(one.difference), one.difference], [signed(one.low) + " to " + signed(one.high), one.low], [one.alone, one.alone], [one.without, one.without], [number(one.p), one.p]]) { const cell = el("td", row, { textContent: text }); if (value !== undefined) cell.dataset.value = value; }
  }
  sortable(table, [1, 2, 3, 4]);
  table.querySelectorAll("th button")[1].click();
  pointsToRun(table);
}
function buildPairs() {
  const pairs = content("pairsof"), select = document.getElementById("against");
  if (!select) return;
  const runs = [...new Set(pairs.flatMap((pair) => [pair.a, pair.b]))];
  for (const run of runs) el("option", select, { value: run, textContent: run });
  if (runs.includes(shown.against)) select.value = shown.against;
  select.onchange = () => { drawPairs(pairs, select.value); remember({ against: select.value === runs[0] ? null : select.value }); };
  saveButtons(document.getElementById("pairsaves"), "pairs", () => against(pairs, select.value).map((one) => ({ against: select.value, ...one })));
  drawPairs(pairs, select.value);
}
function openRun() { // whose link was followed
  const at = /^#run\d+$/.test(location.hash) && document.getElementById(location.hash.slice(1)), card = at && at.closest("details");
  if (card && !card.open) { card.open = true; at.scrollIntoView(); }
}
function buildOverview() {
  const table = document.getElementById("overview");
  sortable(table, [1, 2]);
  pointsToRun(table);
  saveButtons(document.getElementById("overviewsaves"), "runs", () => rowsOf(table));
  buildPairs();
  addEventListener("hashchange", openRun);
  openRun();
}
if (typeof module !== "undefined") module.exports = { rowsOf }; // for node
else if (document.getElementById("overview")) buildOverview();
