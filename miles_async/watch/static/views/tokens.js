// Tokens of a sample, shaded by what training made of each. Shades come with a legend, and the token that the pointer
// or the keyboard is at is described in words, so that nothing depends on colour.

import { h, number, replace, visible } from "../dom.js";

const MODES = [
  ["versions", "weight version"],
  ["ages", "age"],
  ["reasons", "why it carries loss, or not"],
  ["advantages", "advantage"],
  ["differences", "engine − trainer (log-prob)"],
  ["logprobs", "log-prob of the engine"],
  ["trainer_logprobs", "log-prob of the trainer"],
  ["entropies", "entropy"],
  ["rewards", "reward of the token"],
];
const DEEPEST = 0.45; // share of a shade's colour: texts stand out from it in both themes
const SIGNED = new Set(["advantages", "differences", "rewards"]);

export function tokenView(tokens, reasons, load) {
  const modes = MODES.filter(([mode]) => tokens[mode] && tokens[mode].some((value) => value !== null));
  const state = { mode: modes[0]?.[0] ?? "reasons", at: -1 };
  const body = h("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": "tokens; arrow keys walk" });
  const legend = h("p", { class: "legend" });
  const told = h("output", { class: "mono" }, "point at a token, or walk with the arrow keys");
  const select = h("select", { "aria-label": "shade tokens by", onchange: (event) => draw(event.target.value) }, modes.map(([mode, text]) => h("option", { value: mode }, text)));
  const draw = (mode) => {
    state.mode = mode;
    const shades = shadesOf(tokens, mode, reasons);
    replace(legend, shades.legend);
    replace(body, tokens.texts.map((text, index) => token(text, index, shades, tokens)));
  };
  const say = (index) => {
    body.children[state.at]?.classList.remove("at");
    state.at = index;
    body.children[index]?.classList.add("at");
    told.textContent = described(tokens, index, reasons);
  };
  body.addEventListener("pointerover", (event) => event.target.dataset.index && say(Number(event.target.dataset.index)));
  body.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1, Home: -tokens.texts.length, End: tokens.texts.length }[event.key];
    if (!move) return;
    event.preventDefault();
    say(Math.min(tokens.texts.length - 1, Math.max(0, state.at + move)));
  });
  draw(state.mode);
  return h("div", null, h("div", { class: "controls" }, h("label", null, "shade by ", select), paging(tokens, load)), legend, told, body);
}

function paging(tokens, load) {
  const end = tokens.first + tokens.texts.length;
  const text = h("span", { class: "muted" }, `tokens ${number(tokens.first)}–${number(end - 1)} of ${number(tokens.tokens)}`);
  if (!load) return text;
  const before = tokens.first > 0 && h("button", { onclick: () => load(Math.max(0, tokens.first - 2000)) }, "earlier");
  const after = end < tokens.tokens && h("button", { onclick: () => load(end) }, "later");
  return [text, before, after];
}

function token(text, index, shades, tokens) {
  const shade = shades.of(index);
  const changed = shades.marks && shades.marks(index);
  const shown = visible(text).replaceAll("\n", "⏎\n").replaceAll("\t", "⇥");
  const pale = !tokens.loss[index] && (!shade.class || shade.style?.["--share"] === "0"); // on a shade it would be hard to read
  const properties = { "data-index": index, class: [shade.class, pale ? "no-loss" : "", changed ? "mark" : ""].join(" ").trim() || null, style: shade.style, "data-mark": changed || null };
  return h("span", properties, shown || "∅");
}

function shadesOf(tokens, mode, reasons) {
  const values = tokens[mode] ?? [];
  if (mode === "reasons") return kinds(values, (value) => reasons[value] ?? String(value), (value) => `kind-${value % 6}`);
  if (mode === "versions" || mode === "ages") return steps(values, mode === "versions" ? "v" : "age ");
  return amounts(values, SIGNED.has(mode), tokens.loss);
}

function kinds(values, name, className) {
  const present = [...new Set(values)].sort((a, b) => a - b);
  return {
    legend: present.map((value) => h("span", null, h("i", { class: `swatch ${className(value)}` }), name(value))),
    of: (index) => ({ class: className(values[index]) }),
  };
}

// Whole numbers: a darker shade the higher, and the number where it changes.
function steps(values, prefix) {
  const known = [...new Set(values.filter((value) => value !== null && value >= 0))].sort((a, b) => a - b);
  const share = (value) => (known.length > 1 ? 0.1 + ((DEEPEST - 0.1) * known.indexOf(value)) / (known.length - 1) : 0.25);
  const usable = (value) => value !== null && value >= 0;
  return {
    legend: [known.map((value) => h("span", null, h("i", { class: "swatch shade", style: { "--share": String(share(value)) } }), prefix, value)), h("span", null, h("i", { class: "swatch none" }), "sampled by no engine")],
    of: (index) => (usable(values[index]) ? { class: "shade", style: { "--share": String(share(values[index])) } } : {}),
    marks: (index) => (usable(values[index]) && values[index] !== values[index - 1] ? `${prefix}${values[index]}` : ""),
  };
}

// Amounts: the shade is the size next to the largest; below zero in the other colour and underlined.
function amounts(values, signed, loss) {
  const sizes = values.filter((value, index) => value !== null && (loss[index] || value !== 0)).map(Math.abs);
  const largest = Math.max(0, ...sizes);
  const style = (value) => ({ class: value < 0 && signed ? "shade negative" : "shade", style: { "--share": String(largest ? (DEEPEST * Math.abs(value)) / largest : 0) } });
  return {
    legend: [h("span", null, h("i", { class: "swatch shade", style: { "--share": String(DEEPEST) } }), signed ? `+${number(largest)}` : `size ${number(largest)}`), signed && h("span", null, h("i", { class: "swatch shade negative", style: { "--share": String(DEEPEST) } }), `−${number(largest)}`)],
    of: (index) => (values[index] === null || values[index] === undefined ? {} : style(values[index])),
  };
}

function described(tokens, index, reasons) {
  if (index < 0) return "";
  const parts = [`token ${tokens.first + index}, id ${tokens.ids[index]}`, tokens.versions[index] >= 0 ? `version ${tokens.versions[index]}` : "sampled by no engine"];
  if (tokens.ages[index] !== null) parts.push(`age ${tokens.ages[index]}`);
  parts.push(reasons[tokens.reasons[index]]);
  const named = { logprobs: "log-prob", trainer_logprobs: "trainer's log-prob", differences: "engine − trainer", advantages: "advantage", entropies: "entropy", rewards: "reward" };
  for (const [key, name] of Object.entries(named)) if (tokens[key] && tokens.loss[index]) parts.push(`${name} ${number(tokens[key][index], 4)}`);
  return parts.join(" · ");
}
