// Lanes of the trainer, of each of its ranks and of each engine: what they did over time. Kinds differ by height as well as by colour.

import { clock, duration, h, percent } from "../dom.js";

const HEIGHTS = { g: 1, t: 1, f: 1, l: 0.75, e: 0.75, u: 0.45, a: 0.45, k: 0.3, r: 0.2, c: 0.45, o: 0.3, s: 0.2, b: 0.12, p: 0.12 }; // of a lane
const COLOURS = { g: 0, t: 0, f: 0, l: 2, e: 2, u: 1, a: 1, k: 3, r: 5, c: 1, o: 3, s: 3, b: 5, p: 4 }; // numbers of series
const LABELLED = 40; // lanes that have room for their names
const SCALE = 4; // pixels of the canvas for a column

export function laneView({ since, until, kinds, lanes }) {
  const height = lanes.length <= LABELLED ? 18 : Math.max(4, Math.floor(720 / lanes.length));
  const columns = lanes[0].columns.length;
  const told = h("output", { class: "muted" }, "point at a lane, or walk with the arrow keys");
  const canvas = h("canvas", { width: columns * SCALE, height: lanes.length * height, role: "img", tabindex: "0", "aria-label": `lanes over ${duration(until - since)}: ${lanes.slice(0, 8).map((lane) => described(lane, kinds)).join("; ")}` });
  const at = { lane: 0, column: columns - 1 };
  const say = (lane, column) => {
    at.lane = Math.min(lanes.length - 1, Math.max(0, lane));
    at.column = Math.min(columns - 1, Math.max(0, column));
    const found = lanes[at.lane];
    told.textContent = `${clock(since + ((until - since) * at.column) / columns)}: ${found.name} ${kinds[found.columns[at.column]]} · all of it: ${described(found, kinds)}`;
  };
  canvas.addEventListener("pointermove", (event) => say(Math.floor((event.offsetY / canvas.clientHeight) * lanes.length), Math.floor((event.offsetX / canvas.clientWidth) * columns)));
  canvas.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!move) return;
    event.preventDefault();
    say(at.lane + move[0], at.column + move[1]);
  });
  draw(canvas, lanes, height);
  const names = lanes.length <= LABELLED && h("div", { class: "lane-names" }, lanes.map((lane) => h("span", { style: { height: `${height}px` } }, lane.name)));
  const present = Object.keys(kinds).filter((letter) => HEIGHTS[letter] && lanes.some((lane) => lane.shares[letter]));
  const legend = h("p", { class: "legend" }, present.map((letter) => h("span", null, h("i", { class: `swatch s${COLOURS[letter]}`, style: { height: `${3 + 9 * HEIGHTS[letter]}px` } }), kinds[letter])));
  const axis = h("div", { class: "strip-axis muted" }, h("span", null, clock(since)), h("span", null, clock(until)));
  return h("div", { class: "lanes" }, legend, h("div", { class: "lane-rows" }, names, canvas), axis, told);
}

function draw(canvas, lanes, height) {
  const paint = canvas.getContext("2d");
  const style = getComputedStyle(document.documentElement);
  const colours = Object.fromEntries(Object.entries(COLOURS).map(([letter, series]) => [letter, style.getPropertyValue(`--series-${series}`)]));
  lanes.forEach(({ columns }, lane) => {
    for (const { 0: run, index } of columns.matchAll(/(.)\1*/g)) {
      const size = Math.round((HEIGHTS[run[0]] ?? 0) * (height - 1));
      if (!size) continue;
      paint.fillStyle = colours[run[0]];
      paint.fillRect(index * SCALE, (lane + 1) * height - size, run.length * SCALE, size);
    }
  });
}

function described({ name, shares }, kinds) {
  const known = Object.entries(shares).filter(([, share]) => share >= 0.005).sort((a, b) => b[1] - a[1]);
  return `${name} ${known.map(([letter, share]) => `${kinds[letter]} ${percent(share)}`).join(", ")}`;
}
