// The token, where the server wants one: it comes with the link, or is asked for.

import { ask } from "./api.js";
import { $ } from "./dom.js";

const entered = (token) => ask("/api/enter", { method: "POST", json: { token } });

export function enter() {
  $("enter").showModal();
  $("enter").addEventListener("cancel", (event) => event.preventDefault());
}

export async function byLink() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (!given) return;
  history.replaceState(null, "", location.pathname);
  await entered(given).catch(() => null);
}

export function entering(start) {
  $("enter-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    try {
      await entered($("token").value);
      await start();
      $("enter").close();
    } catch (error) {
      $("enter-said").textContent = error.message;
      $("enter-said").hidden = false;
    }
  });
}
