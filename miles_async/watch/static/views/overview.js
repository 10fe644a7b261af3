// Where the run stands.

import { chart } from "../chart.js";
import { clock, duration, empty, h, MISSING, number, percent, replace, section } from "../dom.js";
import { get } from "../source.js";
import { ageStrip } from "./ages.js";

export const title = "Overview";

const ENDS = [
  ["trained", "trained"],
  ["cut", "with the trainer"],
  ["buffered", "buffered"],
  ["in_flight", "in flight"],
  ["recycled", "recycled: too old"],
  ["dropped", "dropped: too old"],
  ["filtered", "filtered"],
  ["failed", "failed"],
  ["quarantined", "quarantined"],
  ["cancelled", "cancelled"],
];
const OUTCOMES = { recycled: "stale_recycled", dropped: "stale_dropped" };

export async function open(context) {
  const root = h("div", { class: "view" });
  let drawn = [];
  let last = "";
  const refresh = async () => {
    const found = await get("overview", { run: context.run });
    const text = JSON.stringify({ ...found, tiles: { ...found.tiles, quiet_seconds: 0 } });
    if (text === last) return;
    last = text;
    drawn.forEach((each) => each.destroy());
    drawn = [];
    replace(root, ...draw(found, context, drawn));
  };
  await refresh();
  return { root, refresh, destroy: () => drawn.forEach((each) => each.destroy()) };
}

function draw(found, context, drawn) {
  return [
    heading(found),
    h("div", { class: "tiles" }, tiles(found)),
    h("div", { class: "columns" }, h("div", null, rewards(found, drawn), warnings(found)), h("div", null, section("Age of trained samples", ageStrip(found.ages)), groups(found, context), changes(found))),
  ];
}

function heading({ run, notes }) {
  const place = run.host ? `process ${run.pid} on ${run.host}, since ${clock(run.started)}` : "no run.json";
  return h("div", { class: "heading" }, h("h1", null, run.name), h("p", { class: "muted" }, run.directory, " · ", place), run.error && h("p", { class: "error", role: "alert" }, "✗ ", run.error), notes.map((note) => h("p", { class: "note" }, note)));
}

function tiles({ run, tiles: t }) {
  const bound = typeof t.max_weight_staleness === "number" ? ` (bound ${t.max_weight_staleness})` : "";
  const version = t.weight_version !== null ? `version ${t.weight_version}` : t.stepped_from !== null ? `stepped from version ${t.stepped_from}` : "";
  const rewarded = t.reward !== null || t.loss === null;
  return [
    tile("step", number(run.step), run.steps ? `of ${number(run.steps)}` : "", run.steps ? run.step / run.steps : null),
    rewarded ? tile("reward", number(t.reward), t.reward_steps ? `mean of ${t.reward_steps} steps` : "") : tile("loss", number(t.loss, 4), ""),
    tile("evaluation", number(t.eval_reward), t.eval_step === null ? "none yet" : `after step ${t.eval_step}`),
    tile("age", number(t.age_mean), `max ${number(t.age_max)}${bound}`),
    tile("tokens/s", number(t.tokens_per_second), "trained"),
    tile("step time", t.step_seconds === null ? MISSING : `${number(t.step_seconds)} s`, `ETA ${duration(t.eta_seconds)}`),
    tile("trainer idle", percent(t.trainer_idle), "of all steps", t.trainer_idle),
    t.rollout_idle === null ? tile("rollout idle", percent(t.rollout_idle_lately), "lately, no groups", t.rollout_idle_lately) : tile("rollout idle", percent(t.rollout_idle), "no requests", t.rollout_idle),
    tile("checkpoint", t.checkpoint === null ? MISSING : `step ${t.checkpoint}`, version),
  ];
}

function tile(name, value, detail, share = null) {
  const bar = share === null || share === undefined ? null : h("span", { class: "bar" }, h("i", { style: { width: `${Math.min(100, share * 100)}%` } }));
  return h("div", { class: "tile", "data-name": name }, h("span", { class: "name" }, name), h("b", null, value), h("small", null, detail || "\u00a0"), bar);
}

function rewards({ curves, averaged_steps }, drawn) {
  const reward = curves["reward/mean"];
  const lines = reward.steps.length
    ? [
        { ...reward, label: "each step", index: 0, faint: true },
        { ...curves.averaged, label: `mean of ${averaged_steps} steps`, index: 0 },
        { ...curves["eval/reward"], label: "evaluation", index: 1, dots: true },
      ]
    : [{ ...curves["train/loss"], label: "loss", index: 0 }];
  const made = chart(lines, { height: 240, label: "reward" });
  drawn.push(made);
  return section(reward.steps.length ? "Reward" : "Loss", made.root);
}

function groups({ groups: counts, reasons, standing }, context) {
  const shown = ENDS.filter(([key]) => counts[key]);
  if (!shown.length) return section("Groups", empty("no attempts"));
  const total = counts.issued || 1;
  const bar = h("div", { class: "stack", role: "img", "aria-label": shown.map(([key, text]) => `${counts[key]} ${text}`).join(", ") }, shown.map(([key]) => h("i", { class: `end-${key}`, title: `${key}: ${counts[key]}`, style: { "flex-grow": String(counts[key] / total) } })));
  const list = h("ul", { class: "ends" }, shown.map(([key, text]) => h("li", null, h("i", { class: `swatch end-${key}` }), h("a", { href: context.link("attempts", { end: OUTCOMES[key] ?? key }) }, text), h("b", null, number(counts[key])), h("small", null, percent(counts[key] / total)))));
  const why = reasons.length > 0 && h("details", null, h("summary", null, "reasons"), h("ul", { class: "reasons" }, reasons.map((each) => h("li", null, h("b", null, number(each.count)), " ", each.outcome.replaceAll("_", " "), ": ", each.reason))));
  return section("Groups", h("p", { class: "muted" }, `${number(counts.issued)} issued`, standing && ` · ${standing}`), bar, list, why);
}

function changes({ changes: found }) {
  return found.length > 0 && section("Settings changed", h("ul", { class: "reasons" }, found.map((change) => h("li", null, change))));
}

function warnings({ warnings: found }) {
  if (!found.length) return section("Errors and warnings", empty("none"));
  return section("Errors and warnings", h("ol", { class: "warnings" }, found.map(warning)));
}

function warning(entry) {
  const fields = Object.entries(entry.fields).map(([name, value]) => `${name}=${value}`).join("  ");
  const help = [...entry.flags, entry.page].filter(Boolean);
  return h("li", { class: entry.level }, h("b", null, entry.level === "warning" ? "⚠ " : "✗ ", entry.event), h("small", null, ` ${entry.side} · ${entry.timestamp ?? ""}`), fields && h("div", { class: "mono clamp", title: fields }, fields), help.length > 0 && h("div", { class: "muted" }, "see ", help.join(", ")));
}

