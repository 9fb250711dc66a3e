// Elements without a line of HTML: whatever a caption holds, it is text.

export const $ = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

export function picture(source, alt) {
  return make("img", { src: source, alt, decoding: "async", draggable: "false" });
}

// What is long is cut in its middle: names of files differ at their ends.
export function cut(words) {
  const letters = [...words];
  if (letters.length <= 14) return make("span", { class: "cut", title: words }, words);
  return make("span", { class: "cut", title: words },
    make("span", {}, letters.slice(0, -12).join("")), make("span", {}, letters.slice(-12).join("")));
}

// Small pictures are shown dot for dot, as in the report.
document.addEventListener("load", ({ target }) => {
  if (target.tagName === "IMG") {
    target.classList.toggle("dots", Math.max(target.naturalWidth, target.naturalHeight) <= 64);
  }
}, true);

export const counted = (number) => number.toLocaleString("en");

export const calm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

export function say(words) {
  $("live").textContent = words;
}
