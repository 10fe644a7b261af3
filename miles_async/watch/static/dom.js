// Elements and texts. Whatever a run wrote becomes text nodes only: nothing here parses HTML.

// Characters that would be invisible, or would reorder what is around them, are shown by their code point.
// eslint-disable-next-line no-control-regex
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\u{e0000}-\u{e007f}]/gu;

export function visible(text) {
  return String(text).replace(HIDDEN, (c) => `⟨U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
}

// h("a", {class: "x", href: "#/", onclick: f}, "text", child, null)
export function h(tag, properties, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, item] of Object.entries(value)) element.style.setProperty(key, item);
    else if (name === "value" || name === "checked" || name === "selected") element[name] = value;
    else element.setAttribute(name, value === true ? "" : visible(value));
  }
  append(element, children);
  return element;
}

export function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(visible(child)));
  }
}

export function replace(element, ...children) {
  const scroll = [element.scrollLeft, element.scrollTop];
  element.replaceChildren();
  append(element, children);
  [element.scrollLeft, element.scrollTop] = scroll;
}

export const MISSING = "–";

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return MISSING;
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(Math.max(digits, size >= 100 ? 4 : digits))));
}

export const percent = (value) => (value === null || value === undefined ? MISSING : `${Math.round(value * 100)} %`);

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return MISSING;
  const whole = Math.round(seconds);
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const two = (value) => String(value).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}

export function bytes(count) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let unit = 0;
  while (count >= 1000 && unit < units.length - 1) [count, unit] = [count / 1000, unit + 1];
  return `${unit ? count.toPrecision(3) : count} ${units[unit]}`;
}

export const clock = (seconds) => new Date(seconds * 1000).toLocaleString();

// A call that waits until its arguments stop changing.
export function settled(action, milliseconds = 180) {
  let timer = 0;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...values), milliseconds);
  };
}

export function empty(text, ...more) {
  return h("p", { class: "empty" }, text, ...more);
}

export function section(title, ...children) {
  return h("section", { class: "card" }, h("h2", null, title), ...children);
}

// A table whose rows can be walked with the keyboard (arrows, j and k; Enter opens).
export function table(columns, rows, { open = null, sort = null, caption = "" } = {}) {
  const head = h("tr", null, columns.map((column) => headCell(column, sort)));
  const body = h("tbody", null, rows.map((row, index) => bodyRow(columns, row, index, open)));
  body.addEventListener("keydown", walk);
  return h("div", { class: "scroll" }, h("table", null, caption && h("caption", null, caption), h("thead", null, head), body));
}

function headCell(column, sort) {
  const label = column.title;
  const properties = { scope: "col", class: column.numeric ? "numeric" : null, title: column.help };
  if (!sort || !column.key) return h("th", properties, label);
  const active = sort.key === column.key;
  const state = active ? (sort.down ? "descending" : "ascending") : "none";
  const mark = active ? (sort.down ? " ▾" : " ▴") : "";
  return h("th", { ...properties, "aria-sort": state }, h("button", { class: "plain", onclick: () => sort.by(column.key) }, label, mark));
}

function bodyRow(columns, row, index, open) {
  const cells = columns.map((column) => h("td", { class: [column.numeric ? "numeric" : "", column.class || ""].join(" ").trim() || null }, column.cell(row)));
  if (!open) return h("tr", null, cells);
  const properties = { tabindex: index ? "-1" : "0", class: "opens", onclick: () => open(row) };
  return h("tr", { ...properties, onkeydown: (event) => event.key === "Enter" && event.target.tagName === "TR" && open(row) }, cells);
}

function walk(event) {
  const row = event.target.closest("tr");
  const next = { ArrowDown: "nextElementSibling", j: "nextElementSibling", ArrowUp: "previousElementSibling", k: "previousElementSibling" }[event.key];
  if (!row || !next || !row[next]) return;
  event.preventDefault();
  row.tabIndex = -1;
  row[next].tabIndex = 0;
  row[next].focus();
}
