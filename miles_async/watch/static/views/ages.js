// Ages over steps: a row per age, a column per stretch of steps, darker where more of its samples had that age.

import { empty, h, number, percent } from "../dom.js";

export function ageStrip({ from, to, ages, counts }) {
  if (!ages.length) return empty("no age was recorded yet");
  const totals = from.map((_, column) => counts.reduce((sum, row) => sum + row[column], 0));
  const told = h("output", { class: "muted" }, summary(ages, counts));
  const say = (column) => (told.textContent = described(column, { from, to, ages, counts, totals }));
  const rows = ages.map((age, row) => [age, counts[row]]).reverse();
  const grid = h("div", { class: "strip", role: "img", tabindex: "0", "aria-label": `ages over steps: ${summary(ages, counts)}` }, rows.map(([age, values]) => [h("span", { class: "age" }, age), h("div", { class: "cells" }, values.map((value, column) => cell(value, totals[column])))]));
  let at = 0;
  grid.addEventListener("pointermove", (event) => {
    const box = event.target.closest(".cells")?.getBoundingClientRect();
    if (box) say((at = Math.min(from.length - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * from.length)))));
  });
  grid.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    say((at = Math.min(from.length - 1, Math.max(0, at + move))));
  });
  const axis = h("div", { class: "strip-axis muted" }, h("span", null, "step ", number(from[0])), h("span", null, number(to.at(-1))));
  return h("div", null, grid, axis, told);
}

function cell(value, total) {
  const share = total ? value / total : 0;
  return h("i", { style: { "--share": String(share > 0 ? 0.08 + 0.92 * share : 0) } });
}

function described(column, { from, to, ages, counts, totals }) {
  const steps = from[column] === to[column] ? `step ${from[column]}` : `steps ${from[column]}–${to[column]}`;
  const parts = ages.map((age, row) => [age, counts[row][column]]).filter(([, count]) => count);
  return `${steps}: ${parts.map(([age, count]) => `age ${age}: ${number(count)} (${percent(count / totals[column])})`).join(", ")}`;
}

function summary(ages, counts) {
  return ages.map((age, row) => `age ${age}: ${number(counts[row].reduce((sum, count) => sum + count, 0))}`).join(", ");
}
