// Settings of a live run, and a line to change them; shown to who has the write key only.

import { empty, h, replace, section } from "../dom.js";
import { get, isReport, post } from "../source.js";

export async function drawSettings(run) {
  const found = isReport ? null : await get("settings", { run });
  if (found === null) return null;
  if (found.over !== null) return section("Settings", empty(found.over));
  const list = h("pre", { class: "mono" }, found.settings.join("\n"));
  const said = h("pre", { class: "mono", role: "status" });
  const line = h("input", { type: "text", placeholder: "lr=1e-6 max-weight-staleness=1", "aria-label": "changes, NAME=VALUE", size: 50 });
  const button = h("button", { type: "submit" }, "set");
  const send = async (event) => {
    event.preventDefault();
    button.disabled = true;
    try {
      const pairs = line.value.trim().split(/\s+/).filter(Boolean).map((word) => [word.split("=", 1)[0], word.slice(word.indexOf("=") + 1 || word.length)]);
      replace(said, (await post("set", { run }, Object.fromEntries(pairs))).said);
      replace(list, (await get("settings", { run })).settings.join("\n"));
      line.value = "";
    } catch (error) {
      replace(said, error.message);
    }
    button.disabled = false;
  };
  return section("Settings", list, h("form", { class: "controls", onsubmit: send }, line, button), said);
}
