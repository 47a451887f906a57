// Helpers for elements, one animation frame for all drawing, and texts of numbers.

export const $ = (selector, root = document) => root.querySelector(selector);

/** h("p.note", {title: "x", onclick: f}, "text", child): properties may be left out, and empty children are skipped. */
export function h(what, ...rest) {
  const [tag, ...classes] = what.split(".");
  const element = document.createElement(tag);
  if (classes.length) element.className = classes.join(" ");
  if (tag === "button") element.type = "button";
  if (rest[0]?.constructor === Object) set(element, rest.shift());
  return fill(element, ...rest);
}

/** Give an element properties, attributes, custom CSS properties and listeners; empty values are skipped. */
export function set(element, given) {
  for (const [name, value] of Object.entries(given)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name.startsWith("--")) element.style.setProperty(name, value);
    else if (name in element && !name.startsWith("aria")) element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  return element;
}

/** Replace what is in an element. */
export function fill(element, ...children) {
  const missing = [null, undefined, false, ""];
  element.replaceChildren(...children.flat().filter((child) => !missing.includes(child)));
  return element;
}

export function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return fill(element, ...children);
}

export const icon = (name) => svg("svg", { "aria-hidden": "true" }, svg("use", { href: `#i-${name}` }));

export const iconButton = (name, title, onclick) =>
  h("button.icon-button.small", { title, "aria-label": title, onclick }, icon(name));

/** Show the line below the bar, for messages about the whole page; `action` is {name, act}. */
export function notice(text, { kind = "bad", action = null, progress = false, stays = false } = {}) {
  const bar = $("#notice");
  bar.dataset.kind = kind;
  fill(
    bar,
    h("span", text),
    progress && h("progress"),
    action && h("button.plain", { onclick: action.act }, action.name),
    !stays && iconButton("close", "Close", hush),
  );
  bar.hidden = false;
}

export function hush() {
  $("#notice").hidden = true;
}

/** Announce a text to screen readers. */
export function say(text) {
  $("#live").textContent = text;
}

/** A computed colour as the canvas understands it; custom properties hold light-dark() and cannot be read directly. */
export function colour(name) {
  const probe = h("i", { hidden: true, style: `color: var(${name})` });
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

// --- one animation frame for all drawing

/** Counts of changes to the document, for tests: `steerscope.work` in the console. */
export const work = { frames: 0, spans: 0, tints: 0, columns: 0 };

const waiting = new Set();

/** Run `job` once in the next animation frame. */
export function soon(job) {
  if (!waiting.size) requestAnimationFrame(flush);
  waiting.add(job);
}

function flush() {
  work.frames += 1;
  const jobs = [...waiting];
  waiting.clear();
  for (const job of jobs) job();
}

// --- texts

export const clamp = (value, low, high) => Math.max(low, Math.min(high, value));
export const shown = (text) => text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/ /g, "\u00b7") || "∅";
export const plural = (n, name) => `${n} ${name}${n === 1 ? "" : "s"}`;
export const signed = (value) => `${value < 0 ? "" : "+"}${short(value)}`;

export function short(value) {
  const size = Math.abs(value);
  if (size === Infinity) return value < 0 ? "−∞" : "∞";
  const text = size >= 100 ? size.toFixed(0) : size >= 10 ? size.toFixed(1).replace(/\.0$/, "") : size.toFixed(2);
  return value < 0 ? `−${text}` : text;
}

export function bytes(n) {
  const power = n < 1000 ? 0 : Math.min(3, Math.floor(Math.log10(n) / 3));
  const size = n / 1000 ** power;
  return `${size.toFixed(size >= 10 || power === 0 ? 0 : 1)} ${["B", "kB", "MB", "GB"][power]}`;
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
