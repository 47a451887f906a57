// Sliders, segments, switches, menus and boxes with a list; all have native inputs underneath.
import { clamp, fill, h, icon } from "./dom.js";

/** A line of a form: a name, and its input. */
export const field = (name, ...inputs) => h("div.field.wide", h("span", name), ...inputs);

const place = (value, low, high) => clamp((value - low) / (high - low || 1), 0, 1);

/** Name, slider and number. Numbers outside the slider's range [min, max, step] widen it; 0 is marked inside of it. */
export function slider(name, [min, max, step], value, change, title) {
  const range = h("input", { type: "range", min, max, step, "aria-label": name });
  const number = h("input", { type: "number", step: "any", "aria-label": `${name}, as a number` });
  const box = h("span.range", min < 0 && h("i.zero"), range);
  const show = () => {
    if (value > range.max) range.max = value * 1.5;
    if (value < range.min) range.min = value * 1.5;
    range.value = value;
    number.value = String(Math.round(value * 1000) / 1000);
    const [low, high] = [Number(range.min), Number(range.max)];
    const at = place(Number(range.value), low, high);
    const zero = place(0, low, high);
    box.style = `--a: ${Math.min(at, zero)}; --b: ${Math.max(at, zero)}; --zero: ${zero}`;
  };
  const take = ({ target }) => {
    if (target.value !== "") value = Number(target.value);
    show();
    change(value);
  };
  range.addEventListener("input", take);
  number.addEventListener("change", take);
  show();
  return h("div.field", { title }, h("span", name), box, number);
}

/** Two ends on one track of whole numbers, shown at the right. */
export function interval(name, [min, max], [from, to], change) {
  const end = (value, which) =>
    h("input", { type: "range", min, max, value, "aria-label": `${name}: ${which}`, oninput: moved });
  const [a, b] = [end(from, "from"), end(to, "to")];
  const out = h("span.out");
  const box = h("span.range.dual", a, b);
  const show = () => {
    const [low, high] = [Number(a.value), Number(b.value)];
    box.style = `--a: ${place(low, min, max)}; --b: ${place(high, min, max)}`;
    a.style.zIndex = low > (min + max) / 2 ? 2 : 1; // the end that can still be moved lies on top
    out.textContent = low === high ? `${low}` : `${low}–${high}`;
    return [low, high];
  };
  function moved({ target }) {
    if (Number(a.value) > Number(b.value)) (target === a ? b : a).value = target.value;
    change(...show());
  }
  show();
  return h("div.field", h("span", name), box, out);
}

/** Buttons of which one is pressed; `options` are {value: name}. */
export function segments(label, options, value, change) {
  const buttons = Object.entries(options).map(([key, name]) => {
    const onclick = ({ target }) => {
      for (const one of buttons) one.setAttribute("aria-pressed", one === target);
      change(key);
    };
    return h("button", { "aria-pressed": `${key === value}`, onclick }, name);
  });
  return h("div.segments", { role: "group", "aria-label": label }, buttons);
}

export function toggle(name, checked, change) {
  const onchange = ({ target }) => change(target.checked);
  const input = h("input", { type: "checkbox", role: "switch", checked, onchange });
  return h("label.switch", input, h("i"), h("span", name));
}

/** A menu; `options` are {value: name}. */
export function choose(label, options, value, change) {
  const items = Object.entries(options).map(([key, name]) =>
    h("option", { value: key, selected: key === value }, name),
  );
  return h("select", { "aria-label": label, onchange: ({ target }) => change(target.value) }, items);
}

const MOST_ITEMS = 300;
let lists = 0;

/**
 * A text box with a list below it: typing narrows the list, arrows and Enter choose. `items()` → [{value, label, hint?,
 * depth?, find?} | {group}] is called each time the list opens. Returns the function that shows a text in the box.
 */
export function combo(root, { label, items, pick, placeholder = "" }) {
  let current = "";
  let at = 0;
  const list = h("ul", { id: `list${(lists += 1)}`, role: "listbox", hidden: true });
  const about = { type: "text", role: "combobox", autocomplete: "off", placeholder };
  const aria = { "aria-label": label, "aria-expanded": "false", "aria-controls": list.id, "aria-autocomplete": "list" };
  const input = h("input", { ...about, ...aria, onclick, oninput: () => open(input.value), onblur: close, onkeydown });
  const options = () => [...list.querySelectorAll("[role=option]")];

  function onclick() {
    if (!list.hidden) return;
    input.select(); // also when it had the focus already: typing replaces what was chosen
    open();
  }
  function open(narrow = "") {
    const words = narrow.toLowerCase().split(/\s+/).filter(Boolean);
    const fits = ({ label, find = "", hint = "" }) =>
      words.every((word) => `${label} ${find} ${hint}`.toLowerCase().includes(word));
    const found = items().filter((item) => (item.group ? !words.length : fits(item)));
    const rows = found.slice(0, MOST_ITEMS).map((item, i) => row(item, i, words.length > 0));
    if (!rows.length) rows.push(h("li.none", "Nothing has this name"));
    if (found.length > MOST_ITEMS)
      rows.push(h("li.none", `${found.length - MOST_ITEMS} more: type to narrow the list`));
    fill(list, rows);
    list.hidden = false;
    input.setAttribute("aria-expanded", "true");
    mark(words.length ? 0 : options().findIndex((one) => one.textContent === current));
  }
  /** One line of the list; a narrowed list is not indented. */
  function row(item, i, narrowed) {
    if (item.group) return h("li.group", { role: "presentation" }, item.group);
    const depth = narrowed ? 0 : (item.depth ?? 0);
    const given = { id: `${list.id}-${i}`, role: "option", "--depth": depth, onclick: () => take(item.value) };
    return h("li", given, item.label, item.hint && h("small", item.hint));
  }
  function mark(to) {
    const rows = options();
    at = clamp(to, 0, rows.length - 1);
    rows.forEach((one, i) => one.setAttribute("aria-selected", i === at));
    rows[at]?.scrollIntoView({ block: "nearest" });
    input.setAttribute("aria-activedescendant", rows[at]?.id ?? "");
  }
  function close() {
    list.hidden = true;
    input.setAttribute("aria-expanded", "false");
    input.removeAttribute("aria-activedescendant");
    input.value = current;
  }
  function take(value) {
    close();
    pick(value);
  }
  function onkeydown(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step) {
      if (list.hidden) open();
      else mark(at + step);
    } else if (list.hidden) return;
    else if (event.key === "Enter") options()[at]?.click();
    else if (event.key === "Escape") close();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
  list.addEventListener("pointerdown", (event) => event.preventDefault()); // the box keeps the focus
  root.append(input, icon("chevron"), list);
  return (text) => {
    current = text;
    if (list.hidden) input.value = text;
  };
}
