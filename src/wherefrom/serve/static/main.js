// The page: what is asked, what comes back, and what is left out of it.

import { Refused, ask, follow } from "./api.js";
import { $, calm, counted, make, picture, say } from "./dom.js";
import { open } from "./item.js";
import { show, waiting, words } from "./sources.js";

const FRAME = 90; // milliseconds that a step is seen at least
let about = null; // the run
let current = null; // the query that is shown
let steps = []; // of the query: { image, sources, sigma }
let exact = false; // whether its ranking is exact TID's
let job = null; // what the server is at, for us
let turn = 0; // counts what was asked: answers to older questions come too late

const left = {
  items: new Map(), groups: [],
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
};
const to = { open: (id) => open(id, about.of, left), leaveOut: (source) => left.item(source, true) };

// --- what is asked --------------------------------------------------------------------------------

// Captions are written; so are classes that have numbers alone.
const wordsWanted = () => about.prompts || (about.classes && about.classes.length === 0);

function condition() {
  if (wordsWanted()) return $("prompt").value;
  return about.classes ? $("class").value : null;
}

async function generate() {
  const seed = $("seed").valueAsNumber;
  const mine = begin(`seed ${seed}`, "Generating");
  await attempt(mine, async () => {
    job = (await ask("/api/generate", { method: "POST", json: { seed, cond: condition() } })).job;
    const forming = film(mine);
    const result = await follow(job, (event) => {
      if (event.kind === "step") forming.add(event);
      else if (event.kind === "progress") progress(event);
    });
    await forming.over();
    if (mine === turn) finished(result);
  });
}

// Steps are shown one after the other, each long enough to be seen.
function film(mine) {
  let last = Promise.resolve();
  return {
    add(event) {
      last = last.then(async () => {
        if (mine !== turn) return;
        if (event.image) image(event.image, "The image as it forms");
        if (event.sources.length) show(event.sources, about.of, to);
        if (!calm()) await new Promise((resolve) => setTimeout(resolve, FRAME));
      });
    },
    over: () => last,
  };
}

async function search(file) {
  if (!file) return;
  const mine = begin(file.name || "an image", "Searching");
  await attempt(mine, async () => {
    if (file.size > about.limits.upload_bytes) {
      const most = Math.floor(about.limits.upload_bytes / 2 ** 20);
      throw new Refused(413, `The image has more than ${most} MB: send a smaller one.`);
    }
    const asked = new URLSearchParams({ name: (file.name || "").slice(0, 200) });
    if (condition() !== null) asked.set("cond", condition());
    const result = await ask(`/api/search?${asked}`, { method: "POST", body: file });
    if (mine === turn) finished(result);
  });
}

async function settle() {
  const mine = working(`Exact TID looks at the best ${counted(about.candidates)}`);
  const name = current.id;
  await attempt(mine, async () => {
    job = (await ask(`/api/queries/${name}/settle`, { method: "POST", json: {} })).job;
    const result = await follow(job, (event) => event.kind === "progress" && progress(event));
    if (mine !== turn) return;
    current.settled = result.settled;
    exact = true;
    await rank();
    say("Settled: these are ranked by exact TID.");
  });
}

function begin(title, label) {
  const mine = working(label);
  current = null;
  steps = [];
  $("asked-said").textContent = title;
  $("notes").replaceChildren();
  for (const part of ["steps", "then", "image"]) $(part).hidden = true;
  $("nothing").hidden = true;
  $("found-said").textContent = "";
  marked();
  return mine;
}

function working(label) {
  turn += 1;
  job = null;
  $("problem").hidden = true;
  $("working").hidden = false;
  $("progress-said").textContent = label;
  $("progress").removeAttribute("value");
  $("settle").disabled = true;
  $("stop").hidden = label === "Searching";
  say(label);
  return turn;
}

function progress({ label, done, of }) {
  const names = { scoring: "Exact TID", sampling: "Generating", searching: "Comparing" };
  $("progress-said").textContent = `${names[label] || label} ${counted(done)} of ${counted(of)}`;
  $("progress").max = of;
  $("progress").value = done;
}

async function attempt(mine, work) {
  try {
    await work();
  } catch (error) {
    if (mine !== turn) return;
    if (error.status === 401) return enter();
    problem(error.message);
    if (!current) nothing();
  } finally {
    if (mine === turn) {
      $("working").hidden = true;
      $("settle").disabled = false;
      job = null;
    }
  }
}

function problem(sentence) {
  $("problem").textContent = sentence.charAt(0).toUpperCase() + sentence.slice(1);
  $("problem").hidden = false;
}

// --- what comes back ------------------------------------------------------------------------------

function image(source, alt) {
  $("image").src = source;
  $("image").alt = alt;
  $("image").hidden = false;
  $("nothing").hidden = true;
}

function finished(query) {
  current = query;
  exact = false;
  const at = (step) => `/api/queries/${query.id}/image${step === undefined ? "" : `?step=${step}`}`;
  steps = query.steps.map((step, place) => ({ ...step, image: step.picture ? at(place) : null }));
  $("asked-said").textContent = query.title;
  image(at(), `The image: ${query.title}`);
  $("notes").replaceChildren(...query.notes.map((note) => make("li", {}, note)));
  $("steps").hidden = steps.length < 2;
  $("step").max = steps.length;
  $("step").value = steps.length;
  $("step-said").textContent = "finished";
  $("then").hidden = false;
  if (left.none()) ranked(query.ranking);
  else rank();
  past();
  say(`${query.title}: ${query.ranking.sources.length} sources, the first is ${
    query.ranking.sources.length ? words(query.ranking.sources[0]) : "none"}.`);
}

function ranked(ranking) {
  show(ranking.sources, about.of, to);
  const all = ranking.left === ranking.of ? counted(ranking.of)
    : `${counted(ranking.left)} of ${counted(ranking.of)}`;
  $("found-said").textContent = ranking.exact
    ? `of ${all} training images, the best ${counted(ranking.candidates)} settled by exact TID`
    : `of ${all} training images, by ${about.method}`;
  $("which").hidden = !current.settled;
  $("settle").hidden = Boolean(current.settled) || !about.can_settle;
  $("by-first").textContent = about.kind === "index" ? "the index" : about.method;
  $("by-first").setAttribute("aria-pressed", String(!ranking.exact));
  $("by-exact").setAttribute("aria-pressed", String(ranking.exact));
  $("report").href = `/api/queries/${current.id}/report?exact=${ranking.exact}`;
}

async function rank() {
  if (!current) return;
  const name = current.id;
  const asked = { items: [...left.items.keys()], groups: left.groups, exact };
  try {
    const ranking = await ask(`/api/queries/${name}/ranking`, { method: "POST", json: asked });
    if (current && current.id === name && asked.exact === exact) ranked(ranking);
  } catch (error) {
    problem(error.message);
  }
}

function changed() {
  $("left-out").hidden = left.none();
  const chip = (label, back) => make("li", {}, make("button", { type: "button", class: "chip",
    "aria-label": `Put back ${label}`, title: label, onclick: back }, `${label} ×`));
  $("chips").replaceChildren(
    ...[...left.items].map(([id, name]) => chip(name, () => left.item({ id }, false))),
    ...left.groups.map(({ column, value }) => chip(`${column} “${value}”`,
      () => left.group(column, value, false))),
  );
  if (current && Number($("step").value) !== steps.length) toStep(steps.length);
  else rank();
}

function toStep(place) {
  $("step").value = place;
  if (place >= steps.length) {
    image(`/api/queries/${current.id}/image`, `The image: ${current.title}`);
    $("step-said").textContent = "finished";
    rank();
    return;
  }
  const step = steps[place];
  const seen = steps.slice(0, place + 1).reverse().find((one) => one.image);
  if (seen) image(seen.image, `The image at step ${place + 1}`);
  $("step-said").textContent = `step ${place + 1} of ${steps.length}, noise ${step.sigma.toPrecision(2)}`;
  if (!step.sources.length) return;
  show(step.sources, about.of, to);
  $("found-said").textContent = "by the image's own states at this step, with none left out";
}

// --- past queries ---------------------------------------------------------------------------------

async function past() {
  let queries;
  try {
    queries = await ask("/api/queries");
  } catch (error) {
    problem(error.message);
    return [];
  }
  $("past").replaceChildren(...queries.map((query) => make("li", {},
    make("button", { type: "button", "data-query": query.id, "aria-label": `Past query: ${query.title}`,
      onclick: () => again(query.id) },
    make("span", { class: "thumb" }, picture(`/api/queries/${query.id}/image`, "")),
    make("span", { class: "under", title: query.title }, query.title)))));
  const none = queries.length ? "" : "Nothing was asked yet. What you ask is kept here.";
  $("past-notes").textContent = [none, ...about.notes].filter(Boolean).join(" ");
  marked();
  return queries;
}

function marked() {
  for (const button of $("past").querySelectorAll("button")) {
    button.setAttribute("aria-current", String(current !== null && button.dataset.query === current.id));
  }
}

async function again(name) {
  turn += 1;
  const mine = turn;
  $("problem").hidden = true;
  $("working").hidden = true;
  try {
    const query = await ask(`/api/queries/${name}`);
    if (mine === turn) finished(query);
  } catch (error) {
    problem(error.message);
    past();
  }
}

async function forget() {
  try {
    await ask(`/api/queries/${current.id}`, { method: "DELETE" });
  } catch (error) {
    if (error.status !== 404) return problem(error.message);
  }
  current = null;
  const queries = await past();
  if (queries.length) again(queries[0].id);
  else nothing();
}

function nothing() {
  current = null;
  steps = [];
  for (const part of ["image", "steps", "then"]) $(part).hidden = true;
  $("nothing").hidden = false;
  $("asked-said").textContent = "";
  $("found-said").textContent = `are among these ${counted(about.items)} training images`;
  waiting(about.some, about.of, to);
}

// --- coming in ------------------------------------------------------------------------------------

async function enter() {
  $("enter").showModal();
  $("enter").addEventListener("cancel", (event) => event.preventDefault());
}

async function entered(token) {
  await ask("/api/enter", { method: "POST", json: { token } });
  await start();
}

async function start() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    history.replaceState(null, "", location.pathname);
    await ask("/api/enter", { method: "POST", json: { token: given } }).catch(() => null);
  }
  try {
    about = await ask("/api/about");
  } catch (error) {
    if (error.status === 401) return enter();
    return problem(error.message);
  }
  document.title = `${about.name} · wherefrom`;
  $("run-name").textContent = about.name;
  const kind = about.kind === "index" ? "an index of TID" : `a bank of ${about.method}`;
  $("run-about").textContent = `${counted(about.items)} training images, ${kind}`;
  $("cond-prompt").hidden = !wordsWanted();
  $("cond-prompt-name").textContent = about.prompts ? "Caption" : "Class";
  const classes = wordsWanted() ? [] : about.classes || [];
  $("cond-class").hidden = classes.length === 0;
  $("class").replaceChildren(...classes.map((name) => make("option", { value: name }, name)));
  $("settle").textContent = `Settle it: exact TID on the best ${counted(about.candidates)}`;
  nothing();
  const queries = await past();
  if (queries.length && !current && turn === 0) again(queries[0].id);
}

$("ask").addEventListener("submit", (event) => { event.preventDefault(); generate(); });
$("dice").addEventListener("click", () => {
  $("seed").value = crypto.getRandomValues(new Uint32Array(1))[0] % 100000;
  generate();
});
$("file").addEventListener("change", () => { search($("file").files[0]); $("file").value = ""; });
$("step").addEventListener("input", () => toStep(Number($("step").value)));
$("settle").addEventListener("click", settle);
$("stop").addEventListener("click", () => {
  if (job) ask(`/api/jobs/${job}`, { method: "DELETE" }).catch((error) => problem(error.message));
});
$("by-first").addEventListener("click", () => { exact = false; rank(); });
$("by-exact").addEventListener("click", () => { exact = true; rank(); });
$("restore").addEventListener("click", () => { left.items.clear(); left.groups = []; changed(); });
$("forget").addEventListener("click", forget);
$("enter-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  try {
    await entered($("token").value);
    $("enter").close();
  } catch (error) {
    $("enter-said").textContent = error.message;
    $("enter-said").hidden = false;
  }
});

document.addEventListener("paste", (event) => {
  const file = [...event.clipboardData.files].find((one) => one.type.startsWith("image/"));
  if (file && about) search(file);
});
const isFile = (event) => [...event.dataTransfer.types].includes("Files");
document.addEventListener("dragover", (event) => {
  if (!isFile(event)) return;
  event.preventDefault();
  $("drop").hidden = false;
});
document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) $("drop").hidden = true; });
document.addEventListener("drop", (event) => {
  if (!isFile(event)) return;
  event.preventDefault();
  $("drop").hidden = true;
  if (about) search(event.dataTransfer.files[0]);
});

start();
