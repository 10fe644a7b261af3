// Lanes of the trainer, of each of its ranks and of each engine: what they did over time. In one lane, no two kinds have the same shape.

import { clock, duration, h, percent } from "../dom.js";

// Of each kind: its share of the lane's height, the number of its colour, and whether it has stripes.
export const LOOKS = {
  g: { height: 1, series: 0 },
  e: { height: 0.6, series: 2 },
  u: { height: 0.4, series: 1 },
  t: { height: 1, series: 0 },
  f: { height: 0.8, series: 0 },
  l: { height: 0.6, series: 2 },
  a: { height: 0.6, series: 3, striped: true },
  c: { height: 0.4, series: 1 },
  k: { height: 0.4, series: 3, striped: true },
  r: { height: 0.25, series: 5 },
  o: { height: 0.25, series: 3, striped: true },
  b: { height: 0.12, series: 5 },
  p: { height: 0.12, series: 4, striped: true },
  s: { height: 0.8, series: 4, striped: true },
};
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
  const present = Object.keys(kinds).filter((letter) => LOOKS[letter] && lanes.some((lane) => lane.shares[letter]));
  const legend = h("p", { class: "legend" }, present.map((letter) => h("span", null, h("i", { class: `swatch s${LOOKS[letter].series}${LOOKS[letter].striped ? " striped" : ""}`, style: { height: `${3 + 9 * LOOKS[letter].height}px` } }), kinds[letter])));
  const axis = h("div", { class: "strip-axis muted" }, h("span", null, clock(since)), h("span", null, clock(until)));
  return h("div", { class: "lanes" }, legend, h("div", { class: "lane-rows" }, names, canvas), axis, told);
}

function draw(canvas, lanes, height) {
  const paint = canvas.getContext("2d");
  const style = getComputedStyle(document.documentElement);
  const colours = [0, 1, 2, 3, 4, 5].map((series) => style.getPropertyValue(`--series-${series}`));
  lanes.forEach(({ columns }, lane) => {
    for (const { 0: run, index } of columns.matchAll(/(.)\1*/g)) {
      const look = LOOKS[run[0]];
      if (!look) continue;
      const size = Math.max(1, Math.round(look.height * (height - 1)));
      const [part, width] = look.striped ? [1, SCALE / 2] : [run.length, run.length * SCALE];
      paint.fillStyle = colours[look.series];
      for (let column = 0; column < run.length; column += part) paint.fillRect((index + column) * SCALE, (lane + 1) * height - size, width, size);
    }
  });
}

function described({ name, shares }, kinds) {
  const known = Object.entries(shares).filter(([, share]) => share >= 0.005).sort((a, b) => b[1] - a[1]);
  return `${name} ${known.map(([letter, share]) => `${kinds[letter]} ${percent(share)}`).join(", ")}`;
}
