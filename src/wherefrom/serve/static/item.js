// One training image, large: its words, its rank for every query so far, its own nearest others,
// and the switches that leave it or its groups out.

import { ask } from "./api.js";
import { $, counted, cut, make, picture } from "./dom.js";
import { itemImage, words } from "./sources.js";

let shown = null; // the id of the one that is open: answers for others come too late

$("item-close").addEventListener("click", () => $("item").close());
$("item").addEventListener("click", (event) => {
  if (event.target === $("item")) $("item").close(); // beside it
});
$("item").addEventListener("close", () => { shown = null; });

// `left`: what is left out, with has, toggle and the like; `to.query` opens a past query.
export async function open(id, of, left, to) {
  shown = id;
  $("item-image").src = itemImage(id, of);
  $("item-image").alt = `Training image ${id}`;
  $("item-name").textContent = `#${id}`;
  for (const part of ["item-caption", "item-said"]) $(part).textContent = "";
  for (const part of ["item-switches", "item-ranks", "item-nearest"]) $(part).replaceChildren();
  if (!$("item").open) $("item").showModal();
  try {
    const item = await ask(`/api/items/${id}`);
    if (shown !== id) return;
    describe(item, left, to);
    $("item-said").textContent = "Looking…";
    const near = await ask(`/api/items/${id}/nearest`);
    if (shown !== id) return;
    $("item-said").textContent = near.sources.length ? "" : "There are no others.";
    $("item-nearest").replaceChildren(...near.sources.map((source) => make("li", {},
      make("button", { type: "button", "aria-label": `Training image ${words(source)}`,
        onclick: () => open(source.id, of, left, to) },
      make("span", { class: "thumb" }, picture(itemImage(source.id, of), "")),
      make("span", { class: "under" }, cut(source.name))))));
  } catch (error) {
    if (shown === id) $("item-said").textContent = error.message;
  }
}

function describe(item, left, to) {
  $("item-name").textContent = item.name;
  $("item-image").alt = `Training image ${words(item)}`;
  $("item-caption").textContent = item.caption || "";
  const switches = [lever("this image", left.hasItem(item.id), (on) => left.item(item, on))];
  for (const { column, value, count } of item.groups) {
    const label = count === 1 ? `the one image with ${column} “${value}”`
      : `all ${counted(count)} images with ${column} “${value}”`;
    switches.push(lever(label, left.hasGroup(column, value), (on) => left.group(column, value, on)));
  }
  $("item-switches").replaceChildren(...switches);
  const ranks = item.ranks.map((one) => make("li", {},
    make("span", {}, [one.title, one.condition].filter(Boolean).join(", ")), make("b", {}, `#${counted(one.rank)} of ${counted(item.of)}`)));
  $("item-ranks").replaceChildren(...(ranks.length ? ranks
    : [make("li", { class: "small" }, "Nothing was asked yet.")]));
}

// On: it takes part in the ranking.
function lever(label, out, change) {
  const box = make("input", { type: "checkbox", role: "switch", checked: !out });
  box.addEventListener("change", () => change(!box.checked));
  return make("label", {}, box, label);
}
