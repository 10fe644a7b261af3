// Flags of a run, and where they differ from another run's or a preset's.

import { empty, h, replace, section, settled, table } from "../dom.js";
import { get } from "../source.js";
import { drawSettings } from "./settings.js";

export const title = "Flags";

export async function open(context) {
  const root = h("div", { class: "view flags" });
  const state = { search: context.value("search"), only: context.value("only", "all"), preset: context.value("preset") };
  const body = h("div");
  let found = null;
  const draw = (values = {}) => {
    Object.assign(state, values);
    context.keep({ search: state.search, only: state.only, preset: state.preset });
    replace(body, ...drawFlags(found, state));
  };
  const load = async (values = {}) => {
    Object.assign(state, values);
    found = await get("flags", { run: context.chosen, preset: state.preset });
    draw();
  };
  await load();
  const several = () => found.columns.length > 1;
  const search = h("input", { type: "search", placeholder: "search flags", "aria-label": "search flags", value: state.search, oninput: settled((event) => draw({ search: event.target.value })) });
  const only = h("select", { "aria-label": "which flags", onchange: (event) => draw({ only: event.target.value }) }, [["all", "all flags"], ["set", "not the default"], ["differs", "that differ"]].map(([value, text]) => h("option", { value, selected: value === state.only }, text)));
  const preset = h("select", { "aria-label": "compare with a preset", onchange: (event) => load({ preset: event.target.value, only: event.target.value ? "differs" : state.only }).then(() => (only.value = state.only)) }, h("option", { value: "" }, "no preset"), found.presets.map((each) => h("option", { value: each, selected: each === state.preset }, `preset ${each}`)));
  root.append(h("div", { class: "controls" }, search, only, h("label", null, "against ", preset), !several() && h("span", { class: "muted" }, "choose a second run above to compare")), ...[await drawSettings(context.run)].filter(Boolean), body);
  return { root };
}

// For the metrics view: a table of what differs between the chosen runs.
export async function differingFlags(context) {
  const found = await get("flags", { run: context.chosen });
  const rows = found.flags.filter((row) => row.differs);
  return section(`Flags that differ (${rows.length})`, rows.length ? flagTable(found, rows) : empty("none"));
}

function drawFlags(found, state) {
  if (!found.flags.length) return [empty("this run directory has no readable config.toml")];
  const words = state.search.toLowerCase().split(/\s+/).filter(Boolean);
  const fits = (row) => words.every((word) => `${row.flag} ${row.values.join(" ")} ${row.help}`.toLowerCase().includes(word));
  const chosen = { all: () => true, set: (row) => row.values[0] !== row.default, differs: (row) => row.differs }[state.only] ?? (() => true);
  const rows = found.flags.filter((row) => fits(row) && chosen(row));
  if (!rows.length) return [empty("no flag fits")];
  const groups = Map.groupBy ? Map.groupBy(rows, (row) => row.group) : grouped(rows);
  return [...groups].map(([group, members]) => section(group, flagTable(found, members)));
}

function grouped(rows) {
  const groups = new Map();
  for (const row of rows) groups.set(row.group, [...(groups.get(row.group) ?? []), row]);
  return groups;
}

function flagTable(found, rows) {
  const columns = [
    { title: "flag", class: "mono", cell: (row) => h("span", { title: row.help }, row.flag) },
    ...found.columns.map((name, index) => ({ title: name, class: "mono value", cell: (row) => shown(row, index) })),
    { title: "default", class: "mono muted value", cell: (row) => row.default ?? "" },
  ];
  return table(columns, rows);
}

function shown(row, index) {
  const value = row.values[index];
  if (value === null) return h("span", { class: "muted" }, "–");
  return row.differs ? h("mark", null, value) : row.default !== null && value !== row.default ? h("b", null, value) : value;
}
