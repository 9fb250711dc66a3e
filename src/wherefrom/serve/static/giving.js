// The ways to give an image: choose it, drop it anywhere, or paste it.

import { $ } from "./dom.js";

const isFile = (event) => [...event.dataTransfer.types].includes("Files");

export function giving(take) {
  $("file").addEventListener("change", () => { take($("file").files[0]); $("file").value = ""; });
  document.addEventListener("paste", (event) => {
    take([...event.clipboardData.files].find((one) => one.type.startsWith("image/")));
  });
  document.addEventListener("dragover", (event) => {
    if (!isFile(event)) return;
    event.preventDefault();
    $("drop").hidden = false;
  });
  document.addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) $("drop").hidden = true;
  });
  document.addEventListener("drop", (event) => {
    if (!isFile(event)) return;
    event.preventDefault();
    $("drop").hidden = true;
    take(event.dataTransfer.files[0]);
  });
}
