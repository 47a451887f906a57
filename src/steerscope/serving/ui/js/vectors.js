// The Steer tab: a card for each vector, with the sliders that act on the next message; uploads and deletions.
import { $, fill, h, iconButton, plural, set, short, signed, spans } from "./dom.js";
import { ask, get } from "./api.js";
import { allRuns, change, emit, on, settings, state } from "./state.js";
import { choose, field, interval, segments, slider, toggle } from "./controls.js";

const OPS = { add: "Add", cap: "Cap", ablate: "Ablate" };
const TOKENS = { all: "all tokens", prompt: "the prompt", generated: "the answer", last_prompt: "last of the prompt" };
let body;

export function setUpVectors() {
  body = $("#tab-steer");
  on("vectors connection", show);
  on("run-end", () => {
    if (!body.contains(document.activeElement)) show();
  });
  on("steer rules lenses", showNext);
  const over = (is) => $(".drop", body)?.classList.toggle("over", is);
  set(body, {
    ondragover: (event) => {
      event.preventDefault();
      over(true);
    },
    ondragleave: () => over(false),
    ondrop: (event) => {
      event.preventDefault();
      upload(event.dataTransfer.files);
    },
  });
  show();
}

// --- vectors of the server

export async function loadVectors() {
  state.vectors = (await get("v1/vectors")).data;
  emit("vectors");
}

const note = (text) => {
  $("#vector-note").textContent = text;
};

async function upload(files) {
  for (const file of [...files]) {
    note(`Sending ${file.name}`);
    const name = encodeURIComponent(file.name.replace(/\.[^.]+$/, ""));
    try {
      await ask(`v1/vectors?name=${name}`, { method: "POST", body: file });
      await loadVectors();
      note(`${file.name} was added.`);
    } catch (error) {
      note(`${file.name}: ${error.message}`);
    }
  }
}

async function remove({ name }) {
  if (!confirm(`Delete ${name} from the server?`)) return;
  try {
    await ask(`v1/vectors/${encodeURIComponent(name)}`, { method: "DELETE" });
    const { [name]: _, ...steer } = settings.steer;
    change({ steer });
    await loadVectors();
  } catch (error) {
    note(error.message);
  }
}

// --- from the sliders to the ops of a request

/** The layers a vector can act on. */
export const layersOf = (vector) =>
  vector.layers?.length ? vector.layers : Array.from({ length: state.facts?.layers ?? 1 }, (_, i) => i);

/** The settings of a vector's card. */
function knobs(vector) {
  const layers = layersOf(vector);
  const [first, last] = [layers[0], layers.at(-1)];
  const bounds = { scale: 0.5, keep: 0, min: -10, max: 10 };
  const measure = state.vectors.indexOf(vector) < 6;
  const start = { on: false, op: "add", ...bounds, tokens: "all", from: first, to: last, measure };
  const one = { ...start, ...settings.steer[vector.name] };
  const misfits = one.from < first || one.to > last || one.from > one.to;
  return misfits ? { ...one, from: first, to: last } : one;
}

/** The ops of all vectors that are switched on. */
export const steering = () => state.vectors.filter((vector) => knobs(vector).on).map(op);

/** Names of the vectors on which tokens are projected. */
export const measured = () => state.vectors.filter((vector) => knobs(vector).measure).map((vector) => vector.name);

function op(vector) {
  const one = knobs(vector);
  const layers = layersOf(vector).filter((layer) => layer >= one.from && layer <= one.to);
  const strength = { add: { scale: one.scale }, cap: { min: one.min, max: one.max }, ablate: { scale: one.keep } };
  const found = { op: one.op, vector: vector.name, layers, ...strength[one.op] };
  if (vector.site && vector.site !== "resid_post") found.site = vector.site;
  if (one.tokens !== "all") found.tokens = one.tokens;
  return found;
}

/** "happy +0.50" */
function opText(op) {
  const name = typeof op.vector === "string" ? op.vector : "vector";
  if (op.op === "cap") return `${name} ${short(op.min ?? -Infinity)}…${short(op.max ?? Infinity)}`;
  if (op.op === "ablate") return op.scale ? `${name} ×${short(op.scale)}` : `without ${name}`;
  return `${name} ${signed(op.scale)}`;
}

export function opChip(op) {
  const tokens = op.tokens ? `, ${op.tokens} tokens` : "";
  return h("span.chip", { title: `${op.op} ${opText(op)}, layers ${spans(op.layers)}${tokens}` }, opText(op));
}

/** Show below the message box what acts on the next message. */
function showNext() {
  const chips = steering().map(opChip);
  fill($('[data-tab="steer"]'), "Steer", chips.length > 0 && h("sup", `${chips.length}`));
  const rules = settings.pack ? settings.rules.length : 0;
  if (rules) chips.push(h("span.chip.plain-chip", plural(rules, "rule")));
  const unsteered = h("span", state.vectors.length > 0 && "unsteered");
  fill($("#next"), chips.length ? [h("span.wide-only", "next message:"), chips].flat() : unsteered);
}

// --- the tab

function show() {
  if (state.connection === "starting" && !state.vectors.length) {
    fill(body, h("p.lead", "Waiting for the server."));
    return;
  }
  const scroll = body.scrollTop;
  const accept = ".safetensors,.gguf";
  const onchange = () => upload(pick.files);
  const pick = h("input", { type: "file", accept, multiple: true, hidden: true, onchange });
  const lead = state.vectors.length
    ? "Vectors that are switched on act on the next message."
    : "A vector is a direction in the model’s activations. Add one to push answers along it.";
  const server = state.serverSteering?.map(opText).join(", ");
  const add = h("button.link", { onclick: () => pick.click() }, "Add a vector");
  fill(
    body,
    h("p.lead", lead),
    server && h("p.server-note", `The server steers every request: ${server}. Unsteered answers (B) are free of it.`),
    state.vectors.map(card),
    h("div.drop", pick, add, " or drop it here", h("small", "safetensors or GGUF")),
    h("div.note", { id: "vector-note", role: "status" }),
  );
  body.scrollTop = scroll;
  showNext();
}

function card(vector) {
  const one = knobs(vector);
  const layers = layersOf(vector);
  const take = (changes) => {
    change({ steer: { ...settings.steer, [vector.name]: { ...knobs(vector), ...changes } } }, "steer");
    root.classList.toggle("off", !knobs(vector).on);
  };
  const strength = h("div.stack", strengthFields(vector, take));
  const setOp = (op) => {
    take({ op });
    fill(strength, strengthFields(vector, take));
  };
  const about = [vector.method, vector.model, vector.site, vector.hidden && `${vector.hidden} numbers`];
  const ends = [layers[0], layers.at(-1)];
  const measure = field(
    "Measure",
    toggle("project every token on it", one.measure, (measure) => take({ measure })),
  );
  measure.classList.add("measure");
  const root = h(
    `section.vector${one.on ? "" : ".off"}`,
    { "data-vector": vector.name, "aria-label": `Vector ${vector.name}` },
    h(
      "div.vector-head",
      toggle(vector.name, one.on, (on) => take({ on })),
      h("small", { title: about.filter(Boolean).join(" · ") }, `layers ${spans(layers)}`),
      iconButton("bin", `Delete ${vector.name} from the server`, () => remove(vector)),
    ),
    h(
      "div.vector-body",
      h(
        "div.top",
        segments("What to do with it", OPS, one.op, setOp),
        choose("Where it acts", TOKENS, one.tokens, (tokens) => take({ tokens })),
      ),
      strength,
      layers.length > 1 && interval("Layers", ends, [one.from, one.to], (from, to) => take({ from, to })),
      measure,
    ),
  );
  return root;
}

function strengthFields(vector, take) {
  const one = knobs(vector);
  if (one.op === "add") return [slider("Strength", [-2, 2, 0.05], one.scale, (scale) => take({ scale }))];
  if (one.op === "ablate") {
    const title = "The part of the component along the vector that is kept";
    return [slider("Keep", [0, 1, 0.05], one.keep, (keep) => take({ keep }), title)];
  }
  const seen = observed(vector.name);
  const edge = seen ? Math.max(Math.abs(seen[0]), Math.abs(seen[1]), 1) * 1.2 : 50;
  const range = [-edge, edge, edge > 40 ? 1 : edge > 4 ? 0.1 : 0.01];
  const low = (min) => take({ min, max: Math.max(min, knobs(vector).max) });
  const high = (max) => take({ max, min: Math.min(max, knobs(vector).min) });
  const hint = seen ? `seen so far: ${short(seen[0])} … ${short(seen[1])}` : "measured when an answer ends";
  return [slider("At least", range, one.min, low), slider("At most", range, one.max, high), h("div.hint", hint)];
}

/** The smallest and largest projection so far, over all answers and layers. */
function observed(name) {
  const all = allRuns().flatMap((run) => Object.values(run.projections[name] ?? {}).flat());
  const values = all.filter(Number.isFinite).sort((a, b) => a - b);
  return values.length ? [values[0], values.at(-1)] : null;
}
