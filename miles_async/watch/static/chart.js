// Curves over steps, drawn by uPlot. Runs differ by colour, by dashes and by name.

import uPlot from "./vendor/uplot/uPlot.js";
import { h, number } from "./dom.js";

const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3], [14, 4], [4, 2, 4, 6]];
const cursors = uPlot.sync("steps");

export function color(index) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--series-${index % 6}`).trim();
}

const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export function smoothed(values, weight) {
  if (!weight) return values;
  let mean = null;
  return values.map((value) => (value === null ? null : (mean = mean === null ? value : weight * mean + (1 - weight) * value)));
}

// lines: [{label, steps, values, index (of colour and dashes), dots, faint}]
export function chart(lines, { height = 190, log = false, onzoom = null, label = "" } = {}) {
  const shown = lines.filter((line) => line.steps.length);
  const root = h("div", { class: "chart", role: "img", "aria-label": `${label}: ${shown.map(spoken).join("; ") || "no values"}` });
  if (!shown.length) {
    root.append(h("p", { class: "empty" }, "not measured"));
    return { root, destroy: () => {} };
  }
  const data = uPlot.join(shown.map((line) => [line.steps, log ? line.values.map((v) => (v > 0 ? v : null)) : line.values]));
  let plot = null;
  const options = {
    width: 320,
    height,
    cursor: { sync: { key: cursors.key, setSeries: false }, drag: { x: Boolean(onzoom), y: false }, points: { size: 7 } },
    legend: { live: true },
    scales: { x: { time: false }, y: log ? { distr: 3 } : { range: padded } },
    axes: [axis(34, (u, values) => values.map((v) => (Number.isInteger(v) ? String(v) : ""))), axis(58, (u, values) => values.map((v) => (v === null ? "" : number(v))))],
    series: [{ label: "step", value: (u, value) => (value === null ? "last" : number(value)) }, ...shown.map(style)],
    hooks: { setSelect: [(u) => zoomed(u, onzoom)] },
  };
  const observer = new ResizeObserver(([entry]) => {
    const width = Math.floor(entry.contentRect.width);
    if (width < 40) return;
    if (plot) plot.setSize({ width, height });
    else plot = new uPlot({ ...options, width }, data, root);
  });
  observer.observe(root);
  return { root, destroy: () => (observer.disconnect(), plot && plot.destroy()) };
}

function axis(size, values) {
  return {
    stroke: variable("--muted"),
    grid: { stroke: variable("--line"), width: 1 },
    ticks: { stroke: variable("--line"), width: 1, size: 4 },
    font: "11px system-ui, sans-serif",
    size,
    values,
  };
}

function style(line) {
  const stroke = color(line.index);
  return {
    label: line.label,
    stroke: line.faint ? `color-mix(in srgb, ${stroke} 35%, transparent)` : stroke,
    width: line.faint ? 1 : 2,
    dash: line.dots ? [] : DASHES[Math.floor(line.index) % DASHES.length],
    spanGaps: true,
    points: { show: Boolean(line.dots) || line.steps.length === 1, size: 7, fill: stroke },
    value: (u, value, series, index) => number(index === null ? line.values.findLast((each) => each !== null) : value, 4), // without a cursor the last one
  };
}

// At least a sliver around a constant, and no more digits than the values have.
function padded(u, low, high) {
  if (low === null || high === null) return [0, 1];
  const room = (high - low || Math.abs(high) || 1) * 0.08;
  return [low - room, high + room];
}

function zoomed(plot, onzoom) {
  if (!onzoom || plot.select.width < 4) return;
  const [low, high] = [plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x")];
  plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
  onzoom(Math.floor(low), Math.ceil(high));
}

function spoken(line) {
  const values = line.values.filter((value) => value !== null);
  return `${line.label} from ${number(values[0])} to ${number(values.at(-1))} over steps ${line.steps[0]} to ${line.steps.at(-1)}`;
}
