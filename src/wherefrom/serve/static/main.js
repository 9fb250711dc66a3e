// The page: what is asked, what comes back, and what is left out of it.

import { Refused, ask, follow } from "./api.js";
import { $, calm, counted, cut, make, picture, say } from "./dom.js";
import { byLink, enter, entering } from "./enter.js";
import { giving } from "./giving.js";
import { open } from "./item.js";
import { left } from "./left.js";
import { show, waiting, words } from "./sources.js";
import { unasked, unsaid } from "./unsaid.js";

const FRAME = 90; // milliseconds that a step is seen at least
let about = null; // the run
let known; // called when it is
const isKnown = new Promise((resolve) => { known = resolve; }); // what is given before waits
let current = null; // the query that is shown
let steps = []; // of the query: { image, sources, sigma }
let exact = false; // whether its ranking is exact TID's
let job = null; // what the server is at, for us
let turn = 0; // counts what was asked: answers to older questions come too late
let chosen = false; // whether the class or the caption in the form is somebody's choice
const UNSAID = 428; // the status of a question that lacks its class or caption
const LINK = 12000; // characters of an address that every server takes

const to = {
  open: (id) => open(id, about.of, left),
  leaveOut: (source) => left.item(source, true),
  column: () => about.column,
};

// --- what is asked --------------------------------------------------------------------------------

// Captions are written; so are classes that have numbers alone.
const wordsWanted = () => about.prompts || (about.classes && about.classes.length === 0);

function condition() {
  if (wordsWanted()) return $("prompt").value.trim() ? $("prompt").value : null;
  return about.classes ? $("class").value : null;
}

async function generate() {
  const seed = $("seed").valueAsNumber;
  const mine = working("Generating");
  const [before, byExact] = [current, exact];
  let begun = null;
  await attempt(mine, async () => {
    begun = await ask("/api/generate", { method: "POST", json: { seed, cond: condition() } });
    if (mine !== turn) return;
    job = begun.job;
    begin(`seed ${seed}`);
    const forming = film(mine);
    const result = await follow(job, (event) => {
      if (event.kind === "step") forming.add(event);
      else if (event.kind === "progress") progress(event);
    });
    await forming.over();
    if (mine === turn) finished(result);
  }, () => {
    if (!begun) return;
    if (before) shown(before, byExact);
    else nothing();
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

async function search(file, answer = null) {
  if (!file) return false;
  await isKnown;
  const mine = working("Searching");
  const cond = answer ?? (chosen ? condition() : null);
  let found = false;
  await attempt(mine, async () => {
    if (file.size > about.limits.upload_bytes) {
      const most = Math.floor(about.limits.upload_bytes / 2 ** 20);
      throw new Refused(413, `The image has more than ${most} MB: send a smaller one.`);
    }
    const asked = new URLSearchParams({ name: (file.name || "").slice(0, 200) });
    if (cond !== null) asked.set("cond", cond);
    const result = await ask(`/api/search?${asked}`, { method: "POST", body: file });
    if (mine !== turn) return;
    finished(result);
    found = true;
  }, (error) => {
    if (error.status !== UNSAID && answer === null) return;
    const kind = about.prompts ? "caption" : "class";
    unsaid(file, { kind, names: wordsWanted() ? null : about.classes }, answered);
  });
  return found;
}

// What is answered holds for the next image, too, and stands in the form.
async function answered(file, said) {
  if (!(await search(file, said))) return;
  $(wordsWanted() ? "prompt" : "class").value = said;
  chosen = true;
}

async function settle() {
  const mine = working("Exact TID looks at the best of what is left");
  const name = current.id;
  await attempt(mine, async () => {
    const begun = await ask(`/api/queries/${name}/settle`, { method: "POST", json: left.asked() });
    job = begun.job;
    const result = await follow(job, (event) => event.kind === "progress" && progress(event));
    if (mine !== turn) return;
    current.settled = result.settled;
    exact = true;
    await rank();
    say("Settled: these are ranked by exact TID.");
  });
}

// The page without what was asked before: the answer fills in.
function begin(title) {
  current = null;
  steps = [];
  $("asked-said").textContent = title;
  $("asked-cond").textContent = "";
  $("notes").replaceChildren();
  for (const part of ["steps", "then", "image", "unsettled"]) $(part).hidden = true;
  $("nothing").hidden = true;
  $("found-said").textContent = "";
  marked();
}

function working(label) {
  turn += 1;
  job = null;
  $("problem").hidden = true;
  unasked();
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

// What is refused leaves the page as it was; `back` brings back what was changed already.
async function attempt(mine, work, back = () => {}) {
  try {
    await work();
  } catch (error) {
    if (mine !== turn) return;
    if (error.status === 401) return enter();
    problem(error.message);
    back(error);
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
  say($("problem").textContent);
}

// --- what comes back ------------------------------------------------------------------------------

function image(source, alt) {
  $("image").src = source;
  $("image").alt = alt;
  $("image").hidden = false;
  $("nothing").hidden = true;
}

function finished(query) {
  shown(query, false);
  past();
  say(`${titled(query)}: ${query.ranking.sources.length} sources, the first is ${
    query.ranking.sources.length ? words(query.ranking.sources[0]) : "none"}.`);
}

const titled = (query) => [query.title, query.condition].filter(Boolean).join(", ");

function shown(query, byExact) {
  current = query;
  exact = byExact;
  const at = (step) => `/api/queries/${query.id}/image${step === undefined ? "" : `?step=${step}`}`;
  steps = query.steps.map((step, place) => ({ ...step, image: step.picture ? at(place) : null }));
  $("asked-said").textContent = query.title;
  $("asked-cond").textContent = query.condition || "";
  image(at(), `The image: ${titled(query)}`);
  $("notes").replaceChildren(...query.notes.map((note) => make("li", {}, note)));
  $("steps").hidden = steps.length < 2;
  $("step").max = steps.length;
  $("step").value = steps.length;
  $("step-said").textContent = "finished";
  $("then").hidden = false;
  marked();
  if (left.none() && !exact) ranked(query.ranking);
  else rank();
}

function ranked(ranking) {
  show(ranking.sources, about.of, to);
  const all = ranking.left === ranking.of ? counted(ranking.of)
    : `${counted(ranking.left)} of ${counted(ranking.of)}`;
  const { candidates, not_looked: missing, looked } = ranking;
  const best = missing ? `${counted(candidates - missing)} of the best ${counted(candidates)}`
    : `the best ${counted(looked)}`;
  $("found-said").textContent = ranking.exact ? `of ${all} training images, ${best} settled by exact TID`
    : `of ${all} training images, by ${about.method}`;
  $("which").hidden = !current.settled;
  unsettled(ranking);
  $("by-first").textContent = about.kind === "index" ? "the index" : about.method;
  $("by-first").setAttribute("aria-pressed", String(!ranking.exact));
  $("by-exact").setAttribute("aria-pressed", String(ranking.exact));
  link(ranking.reported);
}

// What exact TID has still to look at, of the best that are left.
function unsettled({ candidates, not_looked: missing }) {
  $("settle").hidden = !missing || !about.can_settle;
  $("settle").textContent = missing === candidates
    ? `Settle it: exact TID on the best ${counted(candidates)}`
    : `Settle it: exact TID on ${counted(missing)} more of the best ${counted(candidates)}`;
  $("unsettled").hidden = !missing || !current.settled;
  $("unsettled").textContent = `Exact TID has not looked at ${
    missing === candidates ? "any" : counted(missing)} of the best ${counted(candidates)} that are left.`;
}

// The report is of what is shown: the link says what is left out.
function link(reported) {
  const asked = new URLSearchParams({ exact });
  if (!left.none()) asked.set("left_out", JSON.stringify(left.asked()));
  const address = `/api/queries/${current.id}/report?${asked}`;
  $("report").hidden = !reported || address.length > LINK;
  $("no-report").hidden = !reported || address.length <= LINK;
  $("report").href = address;
}

async function rank() {
  if (!current) return;
  const name = current.id;
  const asked = { ...left.asked(), exact };
  $("report").hidden = true; // until it is of what is shown
  try {
    const ranking = await ask(`/api/queries/${name}/ranking`, { method: "POST", json: asked });
    const now = JSON.stringify({ ...left.asked(), exact });
    if (current && current.id === name && JSON.stringify(asked) === now) ranked(ranking);
  } catch (error) {
    problem(error.message);
  }
}

left.then = () => {
  if (current && Number($("step").value) !== steps.length) toStep(steps.length);
  else rank();
};

function toStep(place) {
  $("step").value = place;
  if (place >= steps.length) {
    image(`/api/queries/${current.id}/image`, `The image: ${titled(current)}`);
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
    make("button", { type: "button", "data-query": query.id, "aria-label": `Past query: ${titled(query)}`,
      onclick: () => again(query.id) },
    make("span", { class: "thumb" }, picture(`/api/queries/${query.id}/image`, "")),
    make("span", { class: "under" }, cut(query.title)),
    query.condition && make("span", { class: "under", title: query.condition }, query.condition)))));
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
  unasked();
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
  for (const part of ["image", "steps", "then", "unsettled"]) $(part).hidden = true;
  $("nothing").hidden = false;
  for (const part of ["asked-said", "asked-cond"]) $(part).textContent = "";
  $("found-said").textContent = `are among these ${counted(about.items)} training images`;
  waiting(about.some, about.of, to);
}

// --- coming in ------------------------------------------------------------------------------------

async function start() {
  await byLink();
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
  for (const button of ["generate", "dice"]) $(button).disabled = false;
  nothing();
  known();
  const queries = await past();
  if (queries.length && !current && turn === 0) again(queries[0].id);
}

$("ask").addEventListener("submit", (event) => { event.preventDefault(); generate(); });
$("dice").addEventListener("click", () => {
  $("seed").value = crypto.getRandomValues(new Uint32Array(1))[0] % 100000;
  generate();
});
$("class").addEventListener("change", () => { chosen = true; });
$("prompt").addEventListener("input", () => { chosen = true; });
$("step").addEventListener("input", () => toStep(Number($("step").value)));
$("settle").addEventListener("click", settle);
$("stop").addEventListener("click", () => {
  if (job) ask(`/api/jobs/${job}`, { method: "DELETE" }).catch((error) => problem(error.message));
});
$("by-first").addEventListener("click", () => { exact = false; rank(); });
$("by-exact").addEventListener("click", () => { exact = true; rank(); });
$("forget").addEventListener("click", forget);
entering(start);
giving((file) => search(file));
start();
