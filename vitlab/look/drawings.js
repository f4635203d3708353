// A box of a drawing opens what is inside it. The address stays: it says what the rest of the page shows.
function openLevel(event) {
  const link = event.target.closest(".vl a"), inside = link && document.getElementById(link.getAttribute("href").slice(1));
  if (!inside) return;
  event.preventDefault();
  inside.closest("details").open = true;
  inside.scrollIntoView({ block: "nearest" });
}
if (typeof module === "undefined") document.addEventListener("click", openLevel);
