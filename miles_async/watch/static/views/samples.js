// The samples of a step or an evaluation, as a table; search over all of them.

import { empty, h, number, replace, settled, table } from "../dom.js";
import { get, isReport } from "../source.js";
import { openSample } from "./sample.js";

export const title = "Samples";

const MOST_SHOWN = 400; // rows in the document at once
const NUMBERS = { group: "attempt_id", reward: "reward", tokens: "length", age: "age", turns: "turns", advantage: "advantage" };

export async function open(context) {
  if (context.value("attempt")) return openSample(context);
  const state = {
    kind: context.value("kind", "train"),
    step: context.value("step"),
    text: context.value("text"),
    finish: context.value("finish"),
    set: context.value("set"),
    group: context.value("group"),
    where: context.value("where"),
    sort: context.value("sort"),
    down: context.value("down") === "1",
    everywhere: context.value("everywhere") === "1",
    shown: MOST_SHOWN,
  };
  const root = h("div", { class: "view" });
  const bar = h("div", { class: "controls" });
  const body = h("div");
  let found = null;
  const draw = (values = {}) => {
    Object.assign(state, values);
    context.keep({ kind: state.kind, step: state.step, text: state.text, finish: state.finish, set: state.set, group: state.group, where: state.where, sort: state.sort, down: state.down ? "1" : "", everywhere: state.everywhere ? "1" : "" });
    replace(body, ...drawRows(found, state, context, draw, more));
  };
  const load = async (values = {}) => {
    Object.assign(state, values);
    found = await get("samples", { run: context.run, kind: state.kind, step: state.step });
    Object.assign(state, { kind: found.kind, step: found.step === null ? "" : String(found.step) });
    if (state.everywhere && state.text) found = { ...found, ...(await searched(context, state)) };
    replace(bar, ...controls(found, state, { load, draw }));
    draw();
  };
  const more = async () => {
    const next = await searched(context, state, found.next);
    found = { ...found, rows: [...found.rows, ...next.rows], next: next.next, notes: [...found.notes, ...next.notes] };
    draw();
  };
  root.append(bar, body);
  await load();
  const move = (way) => {
    const steps = found.steps[state.kind];
    const next = steps[steps.indexOf(Number(state.step)) + way];
    if (next !== undefined) load({ step: String(next) });
  };
  const key = (event) => ({ "[": () => move(-1), "]": () => move(1) })[event.key]?.();
  let known = found.steps[state.kind].length;
  const refresh = async () => {
    if (isReport || state.everywhere) return;
    const now = await get("samples", { run: context.run, kind: state.kind, step: state.step });
    if (now.step !== found.step) return load(); // the first file, or the one that was shown is gone
    if (now.steps[state.kind].length === known) return;
    known = now.steps[state.kind].length;
    found = now;
    if (!bar.contains(document.activeElement)) replace(bar, ...controls(found, state, { load, draw }));
  };
  return { root, key, refresh };
}

async function searched(context, state, before = "") {
  return get("search", { run: context.run, kind: state.kind, text: state.text, before });
}

function controls(found, state, { load, draw }) {
  const steps = found.steps[state.kind];
  const at = steps.indexOf(Number(state.step));
  const chosen = (value) => ({ value, selected: value === state.kind });
  const kinds = h("select", { "aria-label": "kind", onchange: (event) => load({ kind: event.target.value, step: "", set: "" }) }, ["train", "eval"].filter((kind) => found.steps[kind].length || kind === state.kind).map((kind) => h("option", chosen(kind), kind === "train" ? "trained" : "evaluations")));
  const step = h("input", { type: "number", "aria-label": "step", value: state.step, list: null, min: String(steps[0] ?? 0), max: String(steps.at(-1) ?? 0), onchange: (event) => load({ step: String(nearest(steps, Number(event.target.value))) }) });
  const way = (text, move, label) => h("button", { "aria-label": label, disabled: steps[at + move] === undefined, onclick: () => load({ step: String(steps[at + move]) }) }, text);
  const text = h("input", { type: "search", placeholder: "search prompts and answers", "aria-label": "search samples", value: state.text, oninput: settled((event) => (state.everywhere ? load({ text: event.target.value }) : draw({ text: event.target.value }))) });
  const everywhere = !isReport && h("label", null, h("input", { type: "checkbox", checked: state.everywhere, onchange: (event) => load({ everywhere: event.target.checked }) }), " full text, all steps");
  const where = h("input", { type: "text", placeholder: "reward>0.5 age=2", "aria-label": "conditions", title: `${Object.keys(NUMBERS).join(", ")} with < <= = >= >`, value: state.where, oninput: settled((event) => (mark(event.target), draw({ where: event.target.value }))) });
  const options = (name, values, all) => values.length > 1 && h("select", { "aria-label": name, onchange: (event) => draw({ [name]: event.target.value }) }, h("option", { value: "" }, all), values.map((value) => h("option", { value, selected: value === state[name] }, value)));
  const distinct = (key) => [...new Set(found.rows.map((row) => row[key]).filter(Boolean))].sort();
  return [kinds, h("span", { class: "stepper" }, way("◂", -1, "previous step"), step, way("▸", 1, "next step"), h("small", null, ` of ${number(steps.length)} steps`)), text, everywhere, where, options("finish", distinct("finish_reason"), "all ends"), options("set", distinct("data_set"), "all data sets")];
}

const nearest = (steps, wanted) => steps.reduce((best, step) => (Math.abs(step - wanted) < Math.abs(best - wanted) ? step : best), steps[0]);

function drawRows(found, state, context, draw, more) {
  const notes = found.notes.map((note) => h("p", { class: "note" }, note));
  if (found.step === null) return notes;
  const rows = sorted(found.rows.filter((row) => fits(row, state)), state);
  const sort = { key: state.sort, down: state.down, by: (key) => draw({ sort: key, down: state.sort === key ? !state.down : true }) };
  const open = (row) => (location.hash = context.link("samples", { kind: state.kind, step: row.step, attempt: row.attempt_id, sample: row.sample }));
  const shown = rows.slice(0, state.shown);
  const rest = rows.length > shown.length && h("button", { onclick: () => draw({ shown: state.shown + MOST_SHOWN }) }, `show more of ${number(rows.length)}`);
  const older = state.everywhere && state.text && found.next !== null && found.next !== undefined && h("button", { onclick: more }, `search on, from step ${found.next} back`);
  const grouped = state.group && h("button", { onclick: () => draw({ group: "" }) }, `group ${state.group} ✕`);
  return [notes, grouped && h("p", null, grouped), h("section", { class: "card" }, rows.length ? table(columns(state, draw), shown, { open, sort, caption: told(rows, state) }) : empty("no sample fits")), h("p", null, rest, " ", older)];
}

function told(rows, state) {
  const rewards = rows.map((row) => row.reward).filter((reward) => reward !== null);
  const mean = rewards.length ? `, mean reward ${number(rewards.reduce((a, b) => a + b, 0) / rewards.length)}` : "";
  return `${number(rows.length)} samples${state.everywhere && state.text ? " found" : ` of step ${state.step}`}${mean}`;
}

function fits(row, state) {
  const text = state.text.toLowerCase();
  const here = state.everywhere || !text || `${row.prompt}\n${row.response}\n${row.label ?? ""}\n${row.prompt_id}`.toLowerCase().includes(text);
  return here && (!state.finish || row.finish_reason === state.finish) && (!state.set || row.data_set === state.set) && (!state.group || String(row.attempt_id) === state.group) && conditions(state.where).every((holds) => holds === null || holds(row));
}

// "reward>0.5 age=2": a test of a row for each word, null for a word that is none.
function conditions(text) {
  return text.split(/\s+/).filter(Boolean).map((word) => {
    const [, name, sign, wanted] = word.match(/^(\w+)(<=|>=|=|<|>)(-?\d*\.?\d+)$/) ?? [];
    const compare = { "<": (a, b) => a < b, "<=": (a, b) => a <= b, "=": (a, b) => a === b, ">=": (a, b) => a >= b, ">": (a, b) => a > b }[sign];
    const key = NUMBERS[name];
    return key === undefined ? null : (row) => row[key] !== null && compare(row[key], Number(wanted));
  });
}

const mark = (input) => input.setAttribute("aria-invalid", String(conditions(input.value).includes(null)));

function sorted(rows, { sort, down }) {
  if (!sort) return rows;
  const way = down ? -1 : 1;
  const last = (value) => value === null || value === undefined;
  return [...rows].sort((a, b) => (last(a[sort]) ? 1 : last(b[sort]) ? -1 : a[sort] < b[sort] ? -way : a[sort] > b[sort] ? way : 0));
}

function columns(state, draw) {
  const group = (row) => h("button", { class: "plain link", title: "only this group", onclick: (event) => (event.stopPropagation(), draw({ group: String(row.attempt_id) })) }, number(row.attempt_id));
  return [
    { title: "group", key: "attempt_id", numeric: true, help: "the attempt; its samples are compared together", cell: group },
    { title: "#", key: "sample", numeric: true, cell: (row) => `${row.sample}${row.branches > 1 ? `.${row.branch}` : ""}` },
    { title: "reward", key: "reward", numeric: true, cell: (row) => number(row.reward) },
    { title: "end", key: "finish_reason", cell: (row) => (row.filtered ? h("span", { title: row.filtered }, `${row.finish_reason}, filtered`) : row.finish_reason) },
    { title: "tokens", key: "length", numeric: true, help: "after the prompt", cell: (row) => number(row.length) },
    { title: "age", key: "age", numeric: true, cell: (row) => number(row.age) },
    { title: "turns", key: "turns", numeric: true, cell: (row) => number(row.turns) },
    { title: "advantage", key: "advantage", numeric: true, cell: (row) => number(row.advantage) },
    { title: "|e − t|", key: "logprob_difference", numeric: true, help: "mean of |engine − trainer| over log-probs", cell: (row) => number(row.logprob_difference) },
    state.everywhere && state.text ? { title: "step", key: "step", numeric: true, cell: (row) => number(row.step) } : null,
    { title: "prompt", key: "prompt", class: "text", cell: (row) => row.prompt },
    { title: "answer", key: "response", class: "text", cell: (row) => row.response },
    { title: "label", key: "label", class: "text", cell: (row) => row.label ?? "" },
  ].filter(Boolean);
}
