// Helpers for elements, one animation frame for all drawing, and texts of numbers.

/** h("p.note", {title: "x", onclick: f}, "text", child): properties may be left out, and null children are skipped. */
export function h(what, ...rest) {
  const [tag, ...classes] = what.split(".");
  const element = document.createElement(tag);
  if (classes.length) element.className = classes.join(" ");
  if (tag === "button") element.type = "button";
  const given = rest[0]?.constructor === Object ? rest.shift() : {};
  for (const [name, value] of Object.entries(given)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name.startsWith("--")) element.style.setProperty(name, value);
    else if (name in element && !name.startsWith("aria") && name !== "list") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  return fill(element, ...rest);
}

/** Replace what is in an element. */
export function fill(element, ...children) {
  const missing = [null, undefined, false, ""];
  element.replaceChildren(...children.flat().filter((child) => !missing.includes(child)));
  return element;
}

export const $ = (selector, root = document) => root.querySelector(selector);

export function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return fill(element, ...children);
}

export const icon = (name) => svg("svg", { "aria-hidden": "true" }, svg("use", { href: `#i-${name}` }));

export const iconButton = (name, title, onclick) =>
  h("button.icon-button.small", { title, "aria-label": title, onclick }, icon(name));

/** Counts of changes to the document, for tests: `steerscope.work` in the console. */
export const work = { frames: 0, spans: 0, tints: 0, columns: 0, largestFrame: 0 };

const waiting = new Set();
let asked = false;

/** Run `job` once in the next animation frame. */
export function soon(job) {
  waiting.add(job);
  if (asked) return;
  asked = true;
  requestAnimationFrame(flush);
}

function flush() {
  asked = false;
  work.frames += 1;
  const jobs = [...waiting];
  waiting.clear();
  const before = work.spans + work.tints + work.columns;
  for (const job of jobs) job();
  work.largestFrame = Math.max(work.largestFrame, work.spans + work.tints + work.columns - before);
}

export function later(job, ms) {
  let timer = 0;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(job, ms);
  };
}

/** Announce a text to screen readers. */
export function say(text) {
  $("#live").textContent = text;
}

/** A computed colour as the canvas understands it; custom properties hold light-dark() and cannot be read directly. */
export function colour(name) {
  const probe = h("i", { hidden: true });
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

export const shown = (text) => text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/ /g, "\u00b7") || "∅";
export const signed = (value) => `${value < 0 ? "" : "+"}${short(value)}`;
export function short(value) {
  const size = Math.abs(value);
  if (size === Infinity) return value < 0 ? "−∞" : "∞";
  const text = size >= 100 ? size.toFixed(0) : size >= 10 ? size.toFixed(1).replace(/\.0$/, "") : size.toFixed(2);
  return value < 0 ? `−${text}` : text;
}
export function bytes(n) {
  const units = ["B", "kB", "MB", "GB"];
  let i = 0;
  while (n >= 1000 && i < 3) {
    n /= 1000;
    i += 1;
  }
  return `${n >= 10 || i === 0 ? n.toFixed(0) : n.toFixed(1)} ${units[i]}`;
}
/** [10, 11, 12, 15] → "10–12, 15" */
export function spans(layers) {
  const parts = [];
  for (let i = 0; i < layers.length; i += 1) {
    const first = layers[i];
    while (layers[i + 1] === layers[i] + 1) i += 1;
    parts.push(layers[i] === first ? `${first}` : `${first}–${layers[i]}`);
  }
  return parts.join(", ");
}
