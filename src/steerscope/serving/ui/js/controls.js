// Sliders, pairs of sliders and segments, all native inputs underneath.
import { h, short } from "./dom.js";

/** Name, slider and number. Numbers outside the slider's range widen it. */
export function slider({ name, min, max, step, value, change, signed = false, title }) {
  const range = h("input", { type: "range", min, max, step, value, "aria-label": name });
  const number = h("input", { type: "number", step: "any", value: trim(value), "aria-label": `${name}, as a number` });
  const box = h(`span.range${signed ? ".signed" : ""}`, {}, signed ? h("i.zero") : null, range);
  const fit = (to) => {
    if (to > range.max) range.max = to * 1.5;
    if (to < range.min) range.min = to * 1.5;
  };
  const fill = () => {
    const [low, high] = [Number(range.min), Number(range.max)];
    const place = (Number(range.value) - low) / (high - low || 1);
    const zero = signed ? Math.max(0, Math.min(1, -low / (high - low))) : 0;
    box.style.setProperty("--a", Math.min(place, zero));
    box.style.setProperty("--b", Math.max(place, zero));
    box.style.setProperty("--zero", zero);
  };
  fit(value);
  range.value = value;
  range.addEventListener("input", () => {
    number.value = trim(Number(range.value));
    fill();
    change(Number(range.value));
  });
  number.addEventListener("change", () => {
    const to = Number(number.value);
    if (!Number.isFinite(to) || number.value === "") {
      number.value = trim(Number(range.value));
      return;
    }
    fit(to);
    range.value = to;
    fill();
    change(to);
  });
  fill();
  return h("div.field", { title }, h("span", {}, name), box, number);
}
const trim = (value) => String(Math.round(value * 1000) / 1000);

/** Two ends on one track; `out` is the text at the right, or two numbers when `numbers` is set. */
export function interval({ name, min, max, step, from, to, change, out }) {
  const [a, b] = [from, to].map((value, k) =>
    h("input", {
      type: "range",
      min: Math.min(min, from),
      max: Math.max(max, to),
      step,
      value,
      "aria-label": `${name}: ${k ? "to" : "from"}`,
    }),
  );
  const told = h("span.out");
  const box = h("span.range.dual", {}, a, b);
  const fill = () => {
    const size = Number(a.max) - Number(a.min) || 1;
    box.style.setProperty("--a", (Number(a.value) - Number(a.min)) / size);
    box.style.setProperty("--b", (Number(b.value) - Number(a.min)) / size);
    told.textContent = (out ?? ((x, y) => `${short(x)}…${short(y)}`))(Number(a.value), Number(b.value));
  };
  const moved = (which) => () => {
    if (Number(a.value) > Number(b.value)) which === a ? (b.value = a.value) : (a.value = b.value);
    a.style.zIndex = Number(a.value) > (Number(a.min) + Number(a.max)) / 2 ? 2 : 1;
    fill();
    change(Number(a.value), Number(b.value));
  };
  a.addEventListener("input", moved(a));
  b.addEventListener("input", moved(b));
  a.style.zIndex = from > (min + max) / 2 ? 2 : 1;
  fill();
  return h("div.field", {}, h("span", {}, name), box, told);
}

export function segments({ label, options, value, change }) {
  const buttons = options.map(([key, name]) =>
    h(
      "button",
      {
        type: "button",
        "aria-pressed": key === value ? "true" : "false",
        onclick: () => {
          buttons.forEach((one, i) => one.setAttribute("aria-pressed", options[i][0] === key));
          change(key);
        },
      },
      name,
    ),
  );
  return h("div.segments", { role: "group", "aria-label": label }, buttons);
}

export function toggle({ name, value, change, title }) {
  return h(
    "label.switch",
    { title },
    h("input", { type: "checkbox", role: "switch", checked: value, onchange: (event) => change(event.target.checked) }),
    h("i"),
    h("span", {}, name),
  );
}

export function choose({ label, options, value, change }) {
  return h(
    "select",
    { "aria-label": label, onchange: (event) => change(event.target.value) },
    options.map(([key, name]) => h("option", { value: key, selected: key === value }, name)),
  );
}
