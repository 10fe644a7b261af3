// Where the page's data comes from: the server, with the read key, or the block of a report that opens without one.

const KEY = "miles-async-watch-key";
const block = document.getElementById("report-data");
const report = block ? JSON.parse(block.textContent) : null;

export const isReport = report !== null;
export const reportNote = report ? report.note : "";

export class NeedsKey extends Error {}

// The key arrives behind "#key=", which browsers send to no server, and leaves the address at once.
export function takeKey() {
  const given = new URLSearchParams(location.hash.slice(1)).get("key");
  if (given) keepKey(given);
}

export function keepKey(key) {
  sessionStorage.setItem(KEY, key);
  history.replaceState(null, "", `${location.pathname}#/overview`);
}

export function address(name, parameters = {}) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(parameters)) {
    for (const item of [value].flat()) if (item !== null && item !== undefined && item !== "") query.append(key, item);
  }
  return query.size ? `${name}?${query}` : name;
}

export async function get(name, parameters = {}) {
  const path = address(name, parameters);
  if (isReport) return fromReport(name, path, parameters);
  return (await ask(path)).json();
}

// A file of the run, as the browser saves it. The key goes in a header, so a plain link would not do.
export async function download(parameters) {
  const content = URL.createObjectURL(await (await ask(address("file", parameters))).blob());
  const link = document.createElement("a");
  Object.assign(link, { href: content, download: parameters.name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(content), 60_000);
}

// Ask for a change; the answer is what the run says. Needs the write key.
export async function post(name, parameters, content) {
  return (await ask(address(name, parameters), { method: "POST", body: JSON.stringify(content) })).json();
}

async function ask(path, options = {}) {
  const headers = { Authorization: `Bearer ${sessionStorage.getItem(KEY) || ""}` };
  const answer = await fetch(`/api/${path}`, { ...options, headers, cache: "no-store" });
  if (answer.status === 401) throw new NeedsKey("this page needs its key");
  if (!answer.ok) throw new Error((await answer.json()).error || `HTTP ${answer.status}`);
  return answer;
}

function fromReport(name, path, parameters) {
  if (name === "series") {
    const found = {};
    for (const metric of [parameters.name].flat()) found[metric] = within(report.series[parameters.run]?.[metric], parameters);
    return found;
  }
  if (!(path in report.answers)) throw new Error("this is not in the report: it holds a part of the run; open the run directory with `miles-async watch`");
  return report.answers[path];
}

function within(series, { from = -Infinity, to = Infinity }) {
  if (!series) return { steps: [], values: [] };
  const means = series.means && { means: within(series.means, { from, to }) };
  const kept = series.steps.map((step, index) => [step, index]).filter(([step]) => step >= (from ?? -Infinity) && step <= (to ?? Infinity));
  return { steps: kept.map(([step]) => step), values: kept.map(([, index]) => series.values[index]), ...means };
}
