// One sample: as a conversation, and token by token.

import { clock, h, MISSING, number, replace, section, table } from "../dom.js";
import { get, isReport } from "../source.js";
import { tokenView } from "./tokens.js";

export async function openSample(context) {
  const place = { kind: context.value("kind", "train"), step: context.value("step"), attempt: context.value("attempt"), sample: context.value("sample", "0") };
  const root = h("div", { class: "view" });
  const load = async (more = {}) => {
    const found = await get("sample", { run: context.run, ...place, ...more });
    replace(root, ...draw(found, place, context, load));
    return found;
  };
  const found = await load();
  const numbers = found.group.map((each) => each.sample);
  const move = (way) => {
    const next = numbers[numbers.indexOf(Number(place.sample)) + way];
    if (next !== undefined) location.hash = context.link("samples", { ...place, sample: next });
  };
  const key = (event) => ({ "[": () => move(-1), "]": () => move(1), Escape: () => history.back() })[event.key]?.();
  return { root, key };
}

function draw(found, place, context, load) {
  const first = found.branches[0];
  const back = h("a", { href: context.link("samples", { kind: place.kind, step: place.step }) }, `← samples of step ${place.step}`);
  const own = first.attempt_id >= 0 && h("a", { href: context.link("attempts", { subject: first.attempt_id }) }, `story of attempt ${first.attempt_id}`);
  const prompt = h("a", { href: context.link("attempts", { subject: first.prompt_id }) }, `prompt ${first.prompt_id}`);
  return [
    h("p", { class: "links" }, back, own, prompt),
    h("div", { class: "heading" }, h("h1", null, `Sample ${first.sample} of group ${first.attempt_id}`)),
    group(found.group, place, context),
    found.branches.map((branch) => drawBranch(branch, found, load)),
  ];
}

function group(members, place, context) {
  return h("nav", { class: "group", "aria-label": "samples of the group" }, members.map((each) => h("a", { href: context.link("samples", { ...place, sample: each.sample }), "aria-current": String(each.sample) === place.sample ? "page" : null }, `#${each.sample} `, h("b", null, number(each.reward)))));
}

function drawBranch(branch, found, load) {
  const several = found.branches.length > 1 ? `, branch ${branch.branch + 1} of ${found.branches.length}` : "";
  return [
    section(`Facts${several}`, facts(branch)),
    branch.turns.length > 1 && section(`Turns${several}`, turns(branch)),
    section(`Conversation${several}`, conversation(branch, load)),
    section(`Tokens${several}`, tokenView(branch.window, found.reasons, isReport ? null : (first) => load({ first: String(first) }))),
    (branch.metadata !== "{}" || branch.prompt_metadata !== "{}") && h("details", { class: "card" }, h("summary", null, "metadata"), h("pre", null, branch.prompt_metadata), h("pre", null, branch.metadata)),
  ];
}

function facts(branch) {
  const versions = branch.oldest_version === null ? MISSING : branch.oldest_version === branch.newest_version ? String(branch.oldest_version) : `${branch.oldest_version}–${branch.newest_version}`;
  const seconds = branch.turns.map((turn) => turn.seconds).filter((each) => each !== null);
  const entries = [
    ["reward", number(branch.reward)],
    ["reward's parts", branch.reward_parts],
    ["label", branch.label],
    ["ended by", branch.finish_reason + (branch.truncated ? " (truncated)" : "")],
    ["not trained", branch.filtered],
    ["tokens", `${number(branch.length)} after a prompt of ${number(branch.prompt_length)}, ${number(branch.loss_tokens)} carry loss`],
    ["versions", versions],
    ["age", branch.age === null ? null : `${branch.age} (stepped from version ${branch.target_version})`],
    ["advantage", branch.advantage === null ? null : number(branch.advantage, 4)],
    ["|engine − trainer|", branch.logprob_difference === null ? null : number(branch.logprob_difference)],
    ["turns", branch.turns.length + (seconds.length ? `, ${number(seconds.reduce((a, b) => a + b, 0))} s` : "")],
    ["data set", branch.data_set],
  ];
  return h("dl", { class: "pairs" }, entries.filter(([, value]) => value !== null && value !== undefined).map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value))));
}

function turns(branch) {
  const columns = [
    { title: "turn", numeric: true, cell: (turn) => number(branch.turns.indexOf(turn) + 1) },
    { title: "from token", numeric: true, cell: (turn) => number(turn.start) },
    { title: "tokens", numeric: true, cell: (turn) => number(turn.end - turn.start) },
    { title: "began", cell: (turn) => (turn.started_at === null ? MISSING : clock(turn.started_at)) },
    { title: "seconds", numeric: true, cell: (turn) => number(turn.seconds) },
  ];
  return h("div", { class: "engines" }, table(columns, branch.turns));
}

function conversation(branch, load) {
  const cut = branch.conversation.some((message) => message.text.length < message.characters);
  const all = cut && !isReport && h("button", { onclick: () => load({ whole: "1" }) }, "load the whole texts");
  return h("div", null, branch.conversation.map(message), all);
}

function message({ role, text, characters }) {
  const kind = role.split(",")[0].replaceAll(/[^a-z]/g, "");
  const missing = characters - [...text].length;
  return h("article", { class: `message ${kind}` }, h("h3", null, role), h("div", { class: "words" }, text), missing > 0 && h("p", { class: "muted" }, `… ${number(missing)} more characters`));
}

