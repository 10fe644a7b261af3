// The frame: which runs and which view, the keyboard, the theme, and the poll for what a run wrote since.

import { h, replace, empty } from "./dom.js";
import { get, isReport, keepKey, NeedsKey, reportNote, takeKey } from "./source.js";
import * as overview from "./views/overview.js";
import * as metrics from "./views/metrics.js";
import * as samples from "./views/samples.js";
import * as attempts from "./views/attempts.js";
import * as engines from "./views/engines.js";
import * as flags from "./views/flags.js";
import * as logs from "./views/logs.js";

const VIEWS = { overview, metrics, samples, attempts, engines, flags, logs };
const POLL_MILLISECONDS = 2500;
const THEME = "miles-async-theme";
const THEMES = ["auto", "light", "dark"];

const app = document.getElementById("app");
const main = h("main", { id: "main", tabindex: "-1" });
const frame = { nav: h("nav", { "aria-label": "views" }), runs: h("div", { class: "runs" }), help: h("dialog", { class: "help" }) };
let runs = [];
let current = { name: "", view: null, key: "" };

// What the address says: #/metrics?run=0&run=1&search=reward
function place() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, ...rest] = path.split("/");
  const parameters = new URLSearchParams(query);
  const chosen = parameters.getAll("run").map(Number).filter((index) => index >= 0 && index < runs.length);
  if (isReport) chosen.sort((a, b) => a - b); // it has the runs in one order
  return { name: name in VIEWS ? name : "overview", rest, parameters, chosen: chosen.length ? chosen : [0] };
}

export function link(name, parameters = {}) {
  const query = new URLSearchParams();
  for (const index of parameters.run ?? place().chosen) query.append("run", index);
  for (const [key, value] of Object.entries(parameters)) {
    if (key !== "run" && value !== null && value !== undefined && value !== "") query.set(key, value);
  }
  return `#/${name}?${query}`;
}

function context() {
  const at = place();
  return {
    ...at,
    runs,
    run: at.chosen[0],
    value: (key, otherwise = "") => at.parameters.get(key) ?? otherwise,
    link,
    // Remember a setting of the view in the address, without opening the view again.
    keep: (values) => {
      for (const [key, value] of Object.entries(values)) value === "" || value === null ? at.parameters.delete(key) : at.parameters.set(key, value);
      history.replaceState(null, "", `#/${[at.name, ...at.rest].join("/")}?${at.parameters}`);
    },
  };
}

async function show() {
  const at = place();
  drawNav(at);
  drawRuns(at);
  current.view?.destroy?.();
  const token = (current = { name: at.name, view: null });
  document.title = `${runs[at.chosen[0]]?.name ?? ""} · ${at.name} · miles_async`;
  try {
    const view = await VIEWS[at.name].open(context());
    if (token !== current) return view.destroy?.();
    token.view = view;
    replace(main, view.root);
    main.dataset.view = at.name;
  } catch (error) {
    if (token === current) failed(error);
  }
}

function failed(error) {
  if (error instanceof NeedsKey) return askForKey();
  replace(main, h("section", { class: "card" }, h("h2", null, "This cannot be shown"), h("p", null, error.message)));
  main.dataset.view = "error";
}

function askForKey() {
  const input = h("input", { type: "password", id: "key", autocomplete: "off", size: "46" });
  const submit = (event) => (event.preventDefault(), keepKey(input.value.trim()), start());
  const form = h("form", { class: "card", onsubmit: submit }, h("h2", null, "This page needs its key"), h("p", null, "miles-async watch printed an address that has it. Open that address, or enter the part behind #key=."), h("label", { for: "key" }, "key "), input, h("button", null, "open"));
  replace(app, h("main", { id: "main" }, form));
  input.focus();
}

function drawNav(at) {
  replace(frame.nav, Object.keys(VIEWS).map((name, index) => h("a", { href: link(name), "aria-current": name === at.name ? "page" : null, accesskey: String(index + 1) }, VIEWS[name].title)));
}

function drawRuns(at) {
  replace(frame.runs, runs.map((run, index) => runChip(run, index, at)));
}

function runChip(run, index, at) {
  const chosen = at.chosen.includes(index);
  const first = at.chosen[0] === index;
  const others = chosen ? at.chosen.filter((each) => each !== index) : [...at.chosen, index];
  const beside = runs.length > 1 && h("input", { type: "checkbox", "aria-label": `compare ${run.name}`, checked: chosen, onchange: () => (location.hash = link(at.name, { run: others.length ? others : [index] })) });
  const position = at.chosen.indexOf(index);
  return h("span", { class: `chip${first ? " first" : ""}` }, beside, chosen && h("i", { class: `swatch s${position % 6}` }), h("a", { href: link(at.name, { run: [index] }), title: run.directory }, run.name), h("em", { class: `state ${stateClass(run)}` }, stateText(run)));
}

export function stateText(run) {
  if (run.state === "running") return `▶ step ${run.step}${run.steps ? `/${run.steps}` : ""}`;
  if (run.state === "restarting") return "↻ restarting";
  if (run.ending) return { finished: "✓ finished", failed: "✗ failed" }[run.ending] ?? `■ ${run.ending}`;
  if (run.state === "over") return "✗ killed";
  if (run.missing) return "? moved or removed";
  return run.host ? `? on ${run.host}` : "? no run.json";
}

const stateClass = (run) => (run.state === "running" ? "good" : run.ending === "finished" ? "done" : "bad");

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  try {
    localStorage.setItem(THEME, name);
  } catch {} // some browsers keep nothing for files
}

function lastTheme() {
  try {
    return localStorage.getItem(THEME) ?? "auto";
  } catch {
    return "auto";
  }
}

function nextTheme(event) {
  const name = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
  setTheme(name);
  event.currentTarget.textContent = `theme: ${name}`;
  show();
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || frame.help.open) return;
  if (/INPUT|SELECT|TEXTAREA/.test(event.target.tagName)) return event.key === "Escape" && event.target.blur();
  const name = Object.keys(VIEWS)[Number(event.key) - 1];
  if (name) location.hash = link(name);
  else if (event.key === "/") event.preventDefault(), main.querySelector("input[type=search]")?.focus();
  else if (event.key === "?") frame.help.showModal();
  else current.view?.key?.(event);
}

function helpText() {
  const keys = [["1 – 7", "the views"], ["/", "search"], ["j k ↓ ↑", "rows of a table"], ["Enter", "open a row"], ["[ ]", "previous and next step or sample"], ["0", "whole range of steps"], ["Esc", "leave a field"], ["?", "this list"]];
  return [h("h2", null, "Keys"), h("dl", null, keys.map(([key, text]) => [h("dt", null, key), h("dd", null, text)])), h("form", { method: "dialog" }, h("button", null, "close"))];
}

async function poll() {
  if (!document.hidden && !isReport) {
    try {
      const before = runs;
      runs = await get("runs");
      drawRuns(place());
      const changes = (index) => runs[index]?.state !== "over" || before[index]?.state !== "over"; // once more at its end
      if (place().chosen.some(changes)) await current.view?.refresh?.(runs);
    } catch (error) {
      if (error instanceof NeedsKey) return askForKey();
    }
  }
  setTimeout(poll, POLL_MILLISECONDS);
}

async function start() {
  replace(app, empty("reading the run directory …"));
  try {
    runs = await get("runs");
  } catch (error) {
    return error instanceof NeedsKey ? askForKey() : replace(app, empty(error.message));
  }
  const theme = h("button", { class: "quiet", onclick: nextTheme }, `theme: ${document.documentElement.dataset.theme}`);
  const help = h("button", { class: "quiet", onclick: () => frame.help.showModal() }, "keys ?");
  replace(frame.help, helpText());
  const top = h("header", null, h("strong", { class: "brand" }, "miles_async"), frame.runs, h("span", { class: "spring" }), theme, help);
  replace(app, h("a", { class: "skip", href: "#main", onclick: (event) => (event.preventDefault(), main.focus()) }, "to the content"), top, frame.nav, isReport && h("p", { class: "note" }, reportNote), main, frame.help);
  window.addEventListener("hashchange", show);
  document.addEventListener("keydown", onKey);
  await show();
  setTimeout(poll, POLL_MILLISECONDS);
}

setTheme(lastTheme());
if (!isReport) takeKey();
start();
