// Engines, ranks, and the publications that bring weights from one to the other.

import { bytes, clock, empty, h, number, percent, replace, section, table } from "../dom.js";
import { get } from "../source.js";
import { laneView } from "./lanes.js";

export const title = "Engines";

export async function open(context) {
  const root = h("div", { class: "view" });
  const refresh = async () => replace(root, ...draw(await get("engines", { run: context.run }), context));
  await refresh();
  return { root, refresh };
}

function draw(found, context) {
  return [
    found.notes.map((note) => h("p", { class: "note" }, note)),
    section("Engines", h("div", { class: "engines" }, engineTable(found, context))),
    found.lanes && section("Lanes of the last steps", laneView(found.lanes)),
    section("Now", nowList(found.now)),
    section("Publications", h("p", { class: "muted" }, `Seconds of each phase from the trainer's copy until engines are admitted again${found.rolling ? ", summed over engines that took turns" : ""}; the last ones, newest first.`), publications(found)),
    section("Trainer ranks", ranks(found.ranks, context)),
  ];
}

function engineTable({ engines, recent, reported }, context) {
  if (!engines.length) return empty("neither ledger nor logs name an engine");
  const columns = [
    { title: "engine", cell: (row) => row.engine },
    engines.some((row) => row.role && row.role !== "train") && { title: "for", cell: (row) => row.role ?? "" },
    { title: "state", cell: (row) => row.state ?? "unknown" },
    { title: "starts", numeric: true, cell: (row) => number(row.starts) },
    { title: "KV use", numeric: true, help: "part of the cache that running requests hold, when it was last asked", cell: (row) => (row.kv_use === null ? "" : percent(row.kv_use)) },
    { title: "requests", numeric: true, help: "that run, then", cell: (row) => (row.running === null ? "" : number(row.running)) },
    { title: "queued", numeric: true, help: "requests that wait, then", cell: (row) => (row.waiting === null ? "" : number(row.waiting)) },
    { title: "newest version", numeric: true, help: "that a finished group was sampled with", cell: (row) => number(row.version) },
    { title: "groups", numeric: true, help: `of the last ${recent}`, cell: (row) => number(row.groups) },
    { title: "tokens", numeric: true, help: "of these groups; shared equally where several engines took part", cell: (row) => number(row.tokens) },
    { title: "log", cell: (row) => (row.log ? h("a", { href: context.link("logs", { name: row.log }) }, row.log) : "") },
  ].filter(Boolean);
  return table(columns, engines, { caption: `groups and tokens by the last ${number(recent)} attempts${reported === null ? "" : `; the rest as of ${clock(reported)}`}` });
}

function nowList(now) {
  const entries = Object.entries(now);
  if (!entries.length) return empty("no metric yet");
  return h("dl", { class: "pairs" }, entries.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, number(value)))));
}

function publications({ publications: found, phases }) {
  if (!found.length) return empty("none yet");
  // The first ones, while caches are cold, are many times longer: full width is twice the median.
  const longest = 2 * found.map(total).sort((a, b) => a - b)[Math.floor(found.length / 2)];
  const legend = h("p", { class: "legend" }, phases.map((phase, index) => h("span", null, h("i", { class: `swatch p${index}` }), phase)));
  const bar = (row) => h("div", { class: "stack", style: { width: `${Math.min(100, (100 * total(row)) / (longest || 1))}%` } }, phases.map((phase, index) => row.phases[phase] > 0 && h("i", { class: `p${index}`, title: `${phase} ${number(row.phases[phase])} s`, style: { "flex-grow": String(row.phases[phase]) } })));
  const columns = [
    { title: "step", numeric: true, cell: (row) => number(row.step) },
    { title: "phases", class: "wide", cell: bar },
    { title: "all", numeric: true, cell: (row) => `${number(total(row))} s` },
    { title: "pause", numeric: true, cell: (row) => (row.pause === null ? "" : `${number(row.pause)} s`) },
    { title: "size", numeric: true, cell: (row) => (row.bytes === null ? "" : bytes(row.bytes)) },
  ];
  return h("div", null, legend, table(columns, [...found].reverse()));
}

const total = (each) => Object.values(each.phases).reduce((sum, seconds) => sum + seconds, 0);

function ranks(found, context) {
  if (!found.length) return empty("no log of a rank");
  const columns = [
    { title: "rank", numeric: true, cell: (row) => number(row.rank) },
    { title: "log", cell: (row) => h("a", { href: context.link("logs", { name: row.log }) }, row.log) },
  ];
  return table(columns, [...found].sort((a, b) => a.rank - b.rank));
}
