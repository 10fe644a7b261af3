// Logs by process, from their end, with search over the whole file; and files for other programs.

import { bytes, clock, empty, h, number, replace, settled } from "../dom.js";
import { download, get, isReport } from "../source.js";

export const title = "Logs";

const ALL = "*"; // in the address, for all logs

export async function open(context) {
  const root = h("div", { class: "view logs" });
  const files = await get("logs", { run: context.run });
  const downloads = await drawDownloads(context.run);
  if (!files.length) return { root: h("div", { class: "view" }, downloads, empty("this run directory has no logs")) };
  const preferred = files.find((file) => file.name === "driver.log") ?? files[0];
  const state = { name: context.value("name", preferred.name).replace(ALL, ""), search: context.value("search"), before: "" };
  const body = h("div");
  const load = async (values = {}) => {
    Object.assign(state, { before: "" }, values);
    context.keep({ name: state.name || ALL, search: state.search });
    replace(body, ...(state.name ? drawLog(await lines(context.run, state), state, load) : drawAll(await get("log", { run: context.run, search: state.search }), state, load, names)));
  };
  const options = (process) => files.filter((file) => file.process === process).map((file) => h("option", { value: file.name, selected: file.name === state.name }, `${file.name} (${bytes(file.bytes)})`));
  const processes = [...new Set(files.map((file) => file.process))];
  const names = h("select", { "aria-label": "process", onchange: (event) => load({ name: event.target.value }) }, !isReport && h("option", { value: "", selected: !state.name }, "all logs"), processes.map((process) => h("optgroup", { label: process }, options(process))));
  const search = h("input", { type: "search", placeholder: "search", "aria-label": "search logs", value: state.search, oninput: settled((event) => load({ search: event.target.value }), 300) });
  const changed = h("span", { class: "muted" }, `written ${clock(Math.max(...files.map((file) => file.changed)))}`);
  root.append(...[downloads].filter(Boolean), h("div", { class: "controls" }, names, search, changed), body);
  await load();
  return { root, refresh: () => (state.before || state.search ? null : load()) };
}

// The lines of one log; a report has its last lines only, which are searched here.
async function lines(run, { name, search, before }) {
  if (!isReport) return get("log", { run, name, ...(search ? { search } : { before }) });
  const found = await get("log", { run, name });
  const kept = found.lines.filter((each) => JSON.stringify(each).toLowerCase().includes(search.toLowerCase()));
  return { ...found, lines: kept, matches: kept.length };
}

// Matches in all logs, by log.
function drawAll(found, { search }, load, names) {
  if (!search) return [empty("enter what to search for in all logs")];
  const open = (name) => ((names.value = name), load({ name }));
  const more = ({ name, matches, lines }) => matches > lines.length && h("button", { onclick: () => open(name) }, `all ${number(matches)} matches`);
  return [h("p", { class: "muted" }, matching(found.matches)), found.logs.map((log) => h("section", { class: "card" }, h("h2", null, h("button", { class: "plain link", onclick: () => open(log.name) }, log.name), " ", more(log)), h("ol", { class: "log" }, log.lines.map(line))))];
}

const matching = (count) => (count === 1 ? "1 line matches" : `${number(count)} lines match`);

// Buttons that save the timeline and profiles; a report has no files.
async function drawDownloads(run) {
  if (isReport) return null;
  const failed = h("span", { class: "muted", role: "status" });
  const save = async (file, button) => {
    button.disabled = true;
    replace(failed, "");
    try {
      await download({ run, name: file.name });
    } catch (error) {
      replace(failed, error.message);
    }
    button.disabled = false;
  };
  const buttons = (await get("files", { run })).map((file) => h("button", { onclick: (event) => save(file, event.currentTarget), title: "open it in ui.perfetto.dev, or with the program that the documentation names" }, file.bytes === null ? file.name : `${file.name} (${bytes(file.bytes)})`));
  return h("div", { class: "controls files" }, h("span", { class: "muted" }, "Files to save:"), buttons, failed);
}

function drawLog(found, state, load) {
  const lines = found.lines;
  const earlier = !state.search && found.start > 0 && h("button", { onclick: () => load({ before: String(found.start) }) }, "earlier lines");
  const latest = state.before && h("button", { onclick: () => load() }, "the end");
  const count = state.search ? `${matching(found.matches)}${found.matches > lines.length ? `, the last ${lines.length} are shown` : ""}` : `${lines.length} lines of ${bytes(found.bytes)}`;
  return [found.missing && empty(found.missing), h("p", { class: "muted" }, count, " ", earlier, " ", latest), lines.length ? h("ol", { class: "log card" }, lines.map(line)) : empty("no lines")];
}

function line(entry) {
  if (entry.level === undefined) return h("li", null, h("code", null, entry.text));
  const fields = Object.entries(entry.fields).map(([name, value]) => h("span", { class: "field" }, h("i", null, name, "="), value));
  const mark = { warning: "⚠", error: "✗", critical: "✗" }[entry.level] ?? "";
  return h("li", { class: entry.level }, h("time", null, entry.timestamp.replace("T", " ").slice(0, 23)), h("b", { class: "level" }, mark, " ", entry.level), h("code", null, entry.text), fields, h("small", null, ` ${entry.logger}`));
}
