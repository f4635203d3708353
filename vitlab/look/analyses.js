// The tables and figures of analyses leave the page.
async function unzipped(text) {
  const stream = new Blob([Uint8Array.from(atob(text), (c) => c.charCodeAt(0))]).stream();
  return new Response(stream.pipeThrough(new DecompressionStream("gzip"))).text();
}
function buildAnalyses() {
  const files = content("files");
  for (const place of document.querySelectorAll(".saves")) {
    const { table, run, name } = place.dataset, one = files[Number(table)];
    if (run === undefined) { saveButtons(place, name, () => one.differences); continue; }
    const { table: text, svg } = one.runs[run] ?? {}, file = name + "_" + run;
    if (text) saveButtons(place, file, () => text);
    if (svg) drawingButtons(place, file, () => unzipped(svg));
  }
}
if (typeof module === "undefined" && content("files")) buildAnalyses();
