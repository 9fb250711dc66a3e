// What is left out of the ranking, and the chips that put it back.

import { $, make } from "./dom.js";
import { words } from "./sources.js";

export const left = {
  items: new Map(), groups: [],
  then: () => {}, // called whenever it changes
  hasItem: (id) => left.items.has(id),
  hasGroup: (column, value) => left.groups.some((g) => g.column === column && g.value === value),
  item(source, out) {
    if (out) left.items.set(source.id, words(source));
    else left.items.delete(source.id);
    changed();
  },
  group(column, value, out) {
    left.groups = left.groups.filter((g) => g.column !== column || g.value !== value);
    if (out) left.groups.push({ column, value });
    changed();
  },
  none: () => left.items.size + left.groups.length === 0,
  asked: () => ({ items: [...left.items.keys()], groups: left.groups }),
};

function changed() {
  $("left-out").hidden = left.none();
  const chip = (label, back) => make("li", {}, make("button", { type: "button", class: "chip",
    "aria-label": `Put back ${label}`, title: label, onclick: back }, `${label} ×`));
  $("chips").replaceChildren(
    ...[...left.items].map(([id, name]) => chip(name, () => left.item({ id }, false))),
    ...left.groups.map(({ column, value }) => chip(`${column} “${value}”`,
      () => left.group(column, value, false))),
  );
  left.then();
}

$("restore").addEventListener("click", () => { left.items.clear(); left.groups = []; changed(); });
