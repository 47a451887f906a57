// Small tools for elements, and one animation frame for everything that wants to be drawn.

/** h("p.note", {title: "x", onclick: f}, "text", child) */
export function h(what, props, ...children) {
  const [tag, ...classes] = what.split(".");
  const element = document.createElement(tag || "div");
  if (classes.length) element.className = classes.join(" ");
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name.startsWith("--")) element.style.setProperty(name, value);
    else if (name in element && !name.startsWith("aria") && name !== "list") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const $ = (selector, root = document) => root.querySelector(selector);

export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("aria-hidden", "true");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  use.setAttribute("href", `#i-${name}`);
  svg.append(use);
  return svg;
}

export function iconButton(name, title, onclick, small = true) {
  return h(
    `button.icon-button${small ? ".small" : ""}`,
    { type: "button", title, "aria-label": title, onclick },
    icon(name),
  );
}

/** What was done to the document, for tests and for the curious: `steerscope.work` in the console. */
export const work = { frames: 0, spans: 0, tints: 0, columns: 0, largestFrame: 0 };

const waiting = new Set();
let asked = false;

/** Run `job` in the next animation frame, once, however often it is asked for before that. */
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
