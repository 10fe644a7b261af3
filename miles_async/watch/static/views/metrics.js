// Every metric, by section, of one run or of several over each other.

import { chart, smoothed } from "../chart.js";
import { empty, h, number, replace, settled } from "../dom.js";
import { get } from "../source.js";
import { differingFlags } from "./flags.js";

export const title = "Metrics";

const POINTS = 500;

export async function open(context) {
  let found = await get("metrics", { run: context.chosen });
  const state = {
    search: context.value("search"),
    smooth: Number(context.value("smooth", "0")),
    log: context.value("log") === "1",
    from: context.value("from") || null,
    to: context.value("to") || null,
  };
  const root = h("div", { class: "view" });
  const body = h("div");
  const panels = new Map();
  const observer = new IntersectionObserver((entries) => entries.forEach((entry) => entry.isIntersecting && load(panels.get(entry.target))), { rootMargin: "300px" });

  const load = settledBatch((wanted) => fetchAndDraw(wanted, context, state, zoom));
  const redraw = () => {
    for (const panel of panels.values()) panel.destroy();
    panels.clear();
    observer.disconnect();
    replace(body, sections(found, state.search, (panel) => (panels.set(panel.root, panel), observer.observe(panel.root))));
  };
  const change = (values) => {
    Object.assign(state, values);
    context.keep({ search: state.search, smooth: state.smooth || "", log: state.log ? "1" : "", from: state.from, to: state.to });
    redraw();
    replace(range, rangeText(state, () => change({ from: null, to: null })));
  };
  const zoom = (from, to) => change({ from: Math.max(0, from), to });
  const range = h("span", null, rangeText(state, () => change({ from: null, to: null })));
  const differing = context.chosen.length > 1 ? await differingFlags(context) : null;
  root.append(controls(state, change, range), ...(differing ? [differing] : []), body);
  redraw();
  const refresh = async () => {
    const known = entries(found);
    found = await get("metrics", { run: context.chosen });
    const now = entries(found);
    if (now.size !== known.size || [...now.keys()].some((name) => !known.has(name))) return redraw();
    for (const panel of panels.values()) {
      panel.last.textContent = lastText(now.get(panel.entry.name));
      if (panel.loaded) load(panel);
    }
  };
  const key = (event) => event.key === "0" && change({ from: null, to: null });
  return { root, refresh, key, destroy: () => (observer.disconnect(), panels.forEach((panel) => panel.destroy())) };
}

const entries = (found) => new Map(found.sections.flatMap((each) => each.metrics.map((entry) => [entry.name, entry])));

const lastText = (entry) => entry.last.map((value) => number(value, 4)).join("  ·  ");

function controls(state, change, range) {
  const search = h("input", { type: "search", placeholder: "search metrics", "aria-label": "search metrics", value: state.search, oninput: settled((event) => change({ search: event.target.value })) });
  const smooth = h("input", { type: "range", min: "0", max: "0.98", step: "0.02", value: String(state.smooth), "aria-label": "smoothing", oninput: settled((event) => change({ smooth: Number(event.target.value) })) });
  const log = h("input", { type: "checkbox", checked: state.log, onchange: (event) => change({ log: event.target.checked }) });
  return h("div", { class: "controls" }, search, h("label", null, "smoothing ", smooth), h("label", null, log, " log scale"), range);
}

function rangeText(state, all) {
  if (state.from === null && state.to === null) return h("span", { class: "muted" }, "drag over a chart to zoom all");
  return h("button", { onclick: all }, `steps ${number(Number(state.from))}–${number(Number(state.to))} ✕`);
}

function sections(found, search, add) {
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  const fits = (entry) => words.every((word) => `${entry.name} ${entry.meaning} ${entry.worries}`.toLowerCase().includes(word));
  const shown = found.sections.map((each) => ({ ...each, metrics: each.metrics.filter(fits) })).filter((each) => each.metrics.length);
  if (!shown.length) return empty(found.sections.length ? "no metric fits" : "no metric was written yet");
  return shown.map((each) => h("details", { open: true, class: "metrics-section" }, h("summary", null, h("h2", null, each.title), h("small", null, ` ${each.metrics.length}`)), h("div", { class: "grid" }, each.metrics.map((entry) => panelOf(entry, add)))));
}

function panelOf(entry, add) {
  const canvas = h("div", { class: "slot" });
  const last = h("span", { class: "last" }, lastText(entry));
  const unit = entry.unit === "number" ? "" : ` (${entry.unit})`;
  const meaning = entry.meaning && `${entry.meaning}${unit}${entry.worries && `. Look closer when: ${entry.worries}`}`;
  const root = h("figure", { class: "card metric", title: meaning || null, "data-metric": entry.name }, h("figcaption", null, h("b", null, entry.name.split(/(?<=[/_])/).flatMap((part, index) => (index ? [h("wbr"), part] : [part]))), last), meaning && h("p", { class: "meaning muted" }, meaning), canvas);
  const panel = { entry, root, canvas, last, drawn: null, loaded: false, destroy: () => panel.drawn?.destroy() };
  add(panel);
  return root;
}

// Charts that come into sight together are asked for together.
function settledBatch(action) {
  let waiting = new Set();
  return (panel) => {
    if (!waiting.size) queueMicrotask(() => (action([...waiting]), (waiting = new Set())));
    waiting.add(panel);
  };
}

async function fetchAndDraw(panels, context, state, zoom) {
  const name = panels.map((panel) => panel.entry.name);
  const ask = (run) => get("series", { run, name, points: POINTS, from: state.from, to: state.to });
  const answers = await Promise.all(context.chosen.map(ask));
  for (const panel of panels) draw(panel, answers, context, state, zoom);
}

function draw(panel, answers, context, state, zoom) {
  const name = panel.entry.name;
  const few = name.startsWith("eval/") || name.startsWith("checkpoint/");
  const lines = answers.flatMap((answer, position) => {
    const line = { ...answer[name], label: context.runs[context.chosen[position]].name, index: position, dots: few };
    if (!state.smooth || few) return [line];
    const means = line.means ?? line; // of stretches, where the line itself has extremes only
    return [{ ...line, label: `${line.label}, raw`, faint: true }, { ...line, steps: means.steps, values: smoothed(means.values, state.smooth) }];
  });
  panel.drawn?.destroy();
  panel.loaded = true;
  panel.drawn = chart(lines, { log: state.log, onzoom: zoom, label: name });
  replace(panel.canvas, panel.drawn.root);
}
