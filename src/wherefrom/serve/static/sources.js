// The cards of the sources: those that stay move to their new places, so that a ranking is seen to
// change.

import { $, calm, cut, make, picture } from "./dom.js";

let cards = new Map();

export const itemImage = (id, of) => `/api/items/${id}/image?of=${of}`;

export function words(source) {
  return source.caption || source.name;
}

// Shows a list of sources; `to` opens one, leaves one out, and knows the column that is shown.
export function show(sources, of, to) {
  const list = $("cards");
  list.classList.remove("waiting");
  const before = new Map([...cards].map(([id, card]) => [id, card.getBoundingClientRect()]));
  const strongest = Math.max(...sources.map(strength), 1e-9);
  const next = new Map();
  sources.forEach((source, place) => {
    const card = cards.get(source.id) || fresh(source, of, to);
    fill(card, source, place + 1, strength(source) / strongest, to.column());
    next.set(source.id, card);
  });
  cards = next;
  const focused = document.activeElement;
  list.replaceChildren(...cards.values());
  if (focused && list.contains(focused)) focused.focus();
  if (calm()) return;
  for (const [id, card] of cards) {
    const from = before.get(id);
    const now = card.getBoundingClientRect();
    if (!from) {
      card.animate([{ opacity: 0 }, { opacity: 1 }], { duration: 160 });
    } else if (from.left !== now.left || from.top !== now.top) {
      const by = `translate(${from.left - now.left}px, ${from.top - now.top}px)`;
      card.animate([{ transform: by }, { transform: "none" }], { duration: 180, easing: "ease-out" });
    }
  }
}

// Some of the training images, before anything was asked.
export function waiting(ids, of, to) {
  cards = new Map();
  $("cards").classList.add("waiting");
  $("cards").replaceChildren(...ids.map((id) => make(
    "li", { class: "card" },
    make("button", { class: "open", type: "button", "aria-label": `Training image ${id}`,
      onclick: () => to.open(id) }, picture(itemImage(id, of), "")),
  )));
}

const strength = (source) => Math.max(0, source.standardised ?? source.score);

function fresh(source, of, to) {
  const open = make("button", { class: "open", type: "button", onclick: () => to.open(source.id) },
    picture(itemImage(source.id, of), ""));
  const out = make("button", { class: "out", type: "button", title: "Leave it out",
    "aria-label": `Leave out ${words(source)}`, onclick: () => to.leaveOut(source) },
  make("span", { "aria-hidden": "true" }, "×"));
  return make("li", { class: "card", "data-id": source.id }, open, out,
    make("p", { class: "said", "aria-hidden": "true" }, make("span", { class: "rank" }),
      make("span", { class: "score" })),
    make("div", { class: "bar", "aria-hidden": "true" }, make("i")),
    make("p", { class: "was" }), make("p", { class: "name", "aria-hidden": "true" }),
    make("p", { class: "caption", "aria-hidden": "true" }),
    make("p", { class: "column", "aria-hidden": "true" }));
}

function fill(card, source, rank, share, column) {
  // where scores stand among all is known, that is said; otherwise how far they are from the best
  const above = source.standardised == null ? null : source.standardised.toFixed(1);
  const percent = Math.round(100 * share);
  const score = above === null ? `${percent} %` : `${above < 0 ? "−" : "+"}${Math.abs(above).toFixed(1)} sd`;
  const moved = source.was && source.was !== rank ? `was #${source.was}` : "";
  const said = above === null ? `${percent} % of the best score`
    : `${above} standard deviations above the mean of all training images`;
  const about = source.caption || source.groups.label || "";
  const own = (column && source.groups[column]) || "";
  const named = [words(source), own && `${column} ${own}`].filter(Boolean).join(", ");
  card.querySelector(".open").setAttribute("aria-label", `${rank}: ${named}, ${said}`);
  card.querySelector(".rank").textContent = `#${rank}`;
  card.querySelector(".name").replaceChildren(cut(source.name));
  card.querySelector(".score").textContent = score;
  card.querySelector(".score").title = `${said}; score ${source.score.toPrecision(4)}`;
  card.querySelector(".bar i").style.width = `${Math.max(0, percent)}%`;
  card.querySelector(".was").textContent = moved;
  card.querySelector(".caption").textContent = about;
  card.querySelector(".caption").title = about;
  card.querySelector(".column").replaceChildren(cut(own));
  card.querySelector(".column").title = own && `${column}: ${own}`;
}
