// Asks for the class or the caption of an image whose file does not say it. The file is kept, and
// goes on with the answer.

import { $, make } from "./dom.js";

let kept = null; // the file, and who takes it with its answer

export function unsaid(file, { kind, names }, then) {
  kept = { file, then, written: names === null };
  $("unsaid-said").textContent = `Which ${kind} has ${file.name ? `“${file.name}”` : "this image"}?`;
  $("unsaid-image").src = URL.createObjectURL(file);
  $("unsaid-words").value = "";
  $("unsaid-words").setAttribute("aria-label", `Its ${kind}`);
  for (const part of ["unsaid-words", "unsaid-send"]) $(part).hidden = !kept.written;
  $("unsaid-words").disabled = !kept.written;
  $("unsaid-class").hidden = kept.written;
  // nothing is preselected: whichever is chosen is a choice
  $("unsaid-class").replaceChildren(
    make("option", { value: "", disabled: true, selected: true }, "Choose one"),
    ...(names || []).map((one) => make("option", { value: one }, one)));
  $("unsaid").hidden = false;
  $(kept.written ? "unsaid-words" : "unsaid-class").focus();
}

export function unasked() {
  if (!kept) return;
  kept = null;
  URL.revokeObjectURL($("unsaid-image").src);
  $("unsaid-image").removeAttribute("src");
  $("unsaid").hidden = true;
}

function answered(said) {
  if (kept && said.trim()) kept.then(kept.file, said);
}

$("unsaid-class").addEventListener("change", () => answered($("unsaid-class").value));
$("unsaid").addEventListener("submit", (event) => {
  event.preventDefault();
  if (kept && kept.written) answered($("unsaid-words").value);
});
$("unsaid-never").addEventListener("click", () => { unasked(); $("problem").hidden = true; });
