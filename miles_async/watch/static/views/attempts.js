// Attempts of the ledger, quarantined prompts, and the story of one.

import { duration, empty, h, number, replace, section, settled, table } from "../dom.js";
import { get } from "../source.js";

export const title = "Attempts";

const ENDS = ["in_flight", "buffered", "cut", "trained", "stale_recycled", "stale_dropped", "filtered", "failed", "quarantined", "cancelled"];

export async function open(context) {
  const subject = context.value("subject");
  return subject ? story(context, subject) : list(context);
}

async function list(context) {
  const root = h("div", { class: "view" });
  const state = { text: context.value("text"), end: context.value("end"), before: "" };
  const body = h("div");
  const load = async (values = {}) => {
    Object.assign(state, { before: "" }, values);
    context.keep({ text: state.text, end: state.end });
    const found = await get("attempts", { run: context.run, ...state });
    replace(body, ...drawList(found, context, state, load));
  };
  const search = h("input", { type: "search", placeholder: "prompt id or reason", "aria-label": "search attempts", value: state.text, oninput: settled((event) => load({ text: event.target.value })) });
  const end = h("select", { "aria-label": "how it ended", onchange: (event) => load({ end: event.target.value }) }, h("option", { value: "" }, "all ends"), ENDS.map((each) => h("option", { value: each, selected: each === state.end }, each.replaceAll("_", " "))));
  const field = h("input", { size: "16", placeholder: "attempt or prompt", "aria-label": "attempt or prompt" });
  const go = (event) => (event.preventDefault(), (location.hash = context.link("attempts", { subject: field.value.trim() })));
  root.append(h("div", { class: "controls" }, search, end, h("form", { onsubmit: go }, field, h("button", null, "tell its story"))), body);
  await load();
  return { root, refresh: () => (state.before ? null : load()) };
}

function drawList(found, context, state, load) {
  if (found.missing) return [empty(found.missing)];
  const columns = [
    { title: "attempt", numeric: true, cell: (row) => number(row.attempt) },
    { title: "prompt", class: "mono", cell: (row) => row.prompt },
    { title: "end", cell: (row) => row.end.replaceAll("_", " ") },
    { title: "step", numeric: true, cell: (row) => number(row.step) },
    { title: "reward", numeric: true, cell: (row) => number(row.reward) },
    { title: "versions", numeric: true, cell: versions },
    { title: "longest", numeric: true, help: "tokens of the longest response", cell: (row) => number(row.longest) },
    { title: "seconds", numeric: true, help: "from issue until its last sample", cell: (row) => number(row.seconds) },
    { title: "reason", class: "clamp", cell: (row) => row.reason ?? "" },
  ];
  const open = (row) => (location.hash = context.link("attempts", { subject: String(row.attempt) }));
  const older = found.more && h("button", { onclick: () => load({ before: String(found.rows.at(-1).attempt) }) }, "older");
  const newer = state.before && h("button", { onclick: () => load() }, "newest");
  return [
    found.quarantined.length > 0 && quarantined(found.quarantined, context),
    found.rows.length ? h("section", { class: "card" }, table(columns, found.rows, { open, caption: "newest attempts first" })) : empty("no attempt fits"),
    h("p", null, newer, " ", older),
  ];
}

function quarantined(letters, context) {
  return section(`Quarantined prompts (${letters.length})`, h("p", { class: "muted" }, "They get no more attempts. `miles-async ledger RUN_DIR --readmit PROMPT` gives one another budget at the next --load."), h("ul", { class: "reasons" }, letters.map((letter) => h("li", null, h("a", { href: context.link("attempts", { subject: letter.prompt_id }), class: "mono" }, letter.prompt_id), h("ol", null, letter.reasons.map((reason) => h("li", null, reason)))))));
}

const versions = ({ versions: [low, high] }) => (low === null ? "" : low === high ? String(low) : `${low}–${high}`);

async function story(context, subject) {
  const root = h("div", { class: "view" });
  const refresh = async () => {
    const found = await get("story", { run: context.run, subject });
    const back = h("p", null, h("a", { href: context.link("attempts") }, "← attempts"));
    replace(root, back, found.missing && empty(found.missing), found.stories.map((each) => told(each, context)));
  };
  await refresh();
  return { root, refresh };
}

function told(each, context) {
  const [headline, ...lines] = each.lines;
  return section(headline, h("ul", { class: "story" }, lines.map((line) => h("li", null, line))), h("p", null, h("a", { href: context.link("attempts", { subject: each.prompt }) }, "all attempts of this prompt"), each.step !== null && [" · ", h("a", { href: context.link("samples", { kind: "train", step: each.step, group: each.attempt }) }, "its samples")], each.seconds !== null && h("small", null, ` · generated in ${duration(each.seconds)}`)));
}
