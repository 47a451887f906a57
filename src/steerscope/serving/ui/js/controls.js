// Sliders, pairs of sliders, segments, switches and menus, all native inputs underneath.
import { h, short } from "./dom.js";

/** A line of a form: a name, and its input. */
export const field = (name, ...inputs) => h("div.field.wide", h("span", name), ...inputs);

const place = (value, low, high) => Math.max(0, Math.min(1, (value - low) / (high - low || 1)));

/** Name, slider and number. Numbers outside the slider's range [min, max, step] widen it. */
export function slider(name, [min, max, step], value, change, { signed = false, title } = {}) {
  const range = h("input", { type: "range", min, max, step, "aria-label": name });
  const number = h("input", { type: "number", step: "any", "aria-label": `${name}, as a number` });
  const box = h(`span.range${signed ? ".signed" : ""}`, signed && h("i.zero"), range);
  const show = () => {
    number.value = String(Math.round(value * 1000) / 1000);
    const [low, high] = [Number(range.min), Number(range.max)];
    const at = place(Number(range.value), low, high);
    const zero = signed ? place(0, low, high) : 0;
    box.style.setProperty("--a", Math.min(at, zero));
    box.style.setProperty("--b", Math.max(at, zero));
    box.style.setProperty("--zero", zero);
  };
  const set = (to) => {
    value = to;
    if (to > range.max) range.max = to * 1.5;
    if (to < range.min) range.min = to * 1.5;
    range.value = to;
    show();
  };
  range.addEventListener("input", () => {
    value = Number(range.value);
    show();
    change(value);
  });
  number.addEventListener("change", () => {
    const to = Number(number.value);
    if (!Number.isFinite(to) || number.value === "") return show();
    set(to);
    change(to);
  });
  set(value);
  return h("div.field", { title }, h("span", name), box, number);
}

/** Two ends on one track; `text` of both is shown at the right. */
export function interval(name, [min, max, step], [from, to], change, text = (a, b) => `${short(a)}…${short(b)}`) {
  const end = (value, which) =>
    h("input", { type: "range", min, max, step, value, "aria-label": `${name}: ${which}`, oninput: moved });
  const [a, b] = [end(from, "from"), end(to, "to")];
  const out = h("span.out");
  const box = h("span.range.dual", a, b);
  const show = () => {
    const [low, high] = [Number(a.value), Number(b.value)];
    box.style.setProperty("--a", place(low, min, max));
    box.style.setProperty("--b", place(high, min, max));
    a.style.zIndex = low > (min + max) / 2 ? 2 : 1; // the end that can still be moved lies on top
    out.textContent = text(low, high);
  };
  function moved(event) {
    if (Number(a.value) > Number(b.value)) {
      const other = event.target === a ? b : a;
      other.value = event.target.value;
    }
    show();
    change(Number(a.value), Number(b.value));
  }
  show();
  return h("div.field", h("span", name), box, out);
}

export function segments(label, options, value, change) {
  const choose = (chosen) => {
    buttons.forEach((one, i) => one.setAttribute("aria-pressed", options[i][0] === chosen));
  };
  const pick = (key) => () => {
    choose(key);
    change(key);
  };
  const buttons = options.map(([key, name]) => h("button", { onclick: pick(key) }, name));
  choose(value);
  return h("div.segments", { role: "group", "aria-label": label }, buttons);
}

export function toggle(name, checked, change) {
  const onchange = (event) => change(event.target.checked);
  return h(
    "label.switch",
    h("input", { type: "checkbox", role: "switch", checked, onchange }),
    h("i"),
    h("span", name),
  );
}

export function choose(label, options, value, change) {
  const items = options.map(([key, name]) => h("option", { value: key, selected: key === value }, name));
  return h("select", { "aria-label": label, onchange: (event) => change(event.target.value) }, items);
}
