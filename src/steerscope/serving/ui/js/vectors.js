// The Steer tab: a card for each vector, with the sliders that act on the next message; uploads and deletions.
import { $, fill, h, iconButton, short, spans } from "./dom.js";
import { ask, get } from "./api.js";
import { change, emit, on, settings, state } from "./state.js";
import { choose, field, interval, segments, slider, toggle } from "./controls.js";
import { knobs, layersOf, opText, opTextLong, steering } from "./steering.js";

let body;
const OPS = [
  ["add", "Add"],
  ["cap", "Cap"],
  ["ablate", "Ablate"],
];
const TOKENS = [
  ["all", "all tokens"],
  ["prompt", "the prompt"],
  ["generated", "the answer"],
  ["last_prompt", "last of the prompt"],
];

export function setUpVectors() {
  body = $("#tab-steer");
  on("vectors connection", show);
  on("run-end", () => {
    if (!body.contains(document.activeElement)) show();
  });
  on("steer rules lenses", showNext);
  body.addEventListener("dragover", (event) => {
    event.preventDefault();
    $(".drop", body)?.classList.add("over");
  });
  body.addEventListener("dragleave", () => $(".drop", body)?.classList.remove("over"));
  body.addEventListener("drop", (event) => {
    event.preventDefault();
    upload([...event.dataTransfer.files]);
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
  for (const file of files) {
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

async function remove(vector) {
  if (!confirm(`Delete ${vector.name} from the server?`)) return;
  try {
    await ask(`v1/vectors/${encodeURIComponent(vector.name)}`, { method: "DELETE" });
    const { [vector.name]: _, ...steer } = settings.steer;
    change({ steer });
    await loadVectors();
  } catch (error) {
    note(error.message);
  }
}

// --- the tab

function show() {
  if (state.connection === "starting" && !state.vectors.length) {
    fill(body, h("p.lead", "Waiting for the server."));
    return;
  }
  const scroll = body.scrollTop;
  const pick = h("input", {
    type: "file",
    accept: ".safetensors,.gguf",
    multiple: true,
    hidden: true,
    onchange: () => upload([...pick.files]),
  });
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
  const set = (changes) => {
    change({ steer: { ...settings.steer, [vector.name]: { ...knobs(vector), ...changes } } }, "steer");
  };
  const turn = (value) => {
    root.classList.toggle("off", !value);
    set({ on: value });
  };
  const about = [vector.method, vector.model, vector.site, vector.hidden && `${vector.hidden} numbers`];
  const head = h(
    "div.vector-head",
    toggle(vector.name, one.on, turn),
    h("small", { title: about.filter(Boolean).join(" · ") }, `layers ${spans(layersOf(vector))}`),
    iconButton("bin", `Delete ${vector.name} from the server`, () => remove(vector)),
  );
  const labels = { "data-vector": vector.name, "aria-label": `Vector ${vector.name}` };
  const root = h(`section.vector${one.on ? "" : ".off"}`, labels, head, knobFields(vector, one, set));
  return root;
}

function knobFields(vector, one, set) {
  const layers = layersOf(vector);
  const [first, last] = [layers[0], layers.at(-1)];
  const strength = h("div.stack", opFields(vector, one, set));
  const setOp = (op) => {
    set({ op });
    fill(strength, opFields(vector, knobs(vector), set));
  };
  const setLayers = (from, to) => set({ from, to });
  const span = (from, to) => (from === to ? `${from}` : `${from}–${to}`);
  const measure = toggle("project every token on it", one.measure, (value) => set({ measure: value }));
  const measureField = field("Measure", measure);
  measureField.classList.add("measure");
  return h(
    "div.vector-body",
    h(
      "div.top",
      segments("What to do with it", OPS, one.op, setOp),
      choose("Where it acts", TOKENS, one.tokens, (tokens) => set({ tokens })),
    ),
    strength,
    layers.length > 1 && interval("Layers", [first, last, 1], [one.from, one.to], setLayers, span),
    measureField,
  );
}

function opFields(vector, one, set) {
  if (one.op === "add")
    return [slider("Strength", [-2, 2, 0.05], one.scale, (scale) => set({ scale }), { signed: true })];
  if (one.op === "ablate") {
    const title = "The part of the component along the vector that is kept";
    return [slider("Keep", [0, 1, 0.05], one.keep, (keep) => set({ keep }), { title })];
  }
  const seen = observed(vector.name);
  const edge = seen ? Math.max(Math.abs(seen[0]), Math.abs(seen[1]), 1) * 1.2 : 50;
  const step = edge > 40 ? 1 : edge > 4 ? 0.1 : 0.01;
  const low = (min) => set({ min, max: Math.max(min, knobs(vector).max) });
  const high = (max) => set({ max, min: Math.min(max, knobs(vector).min) });
  const hint = seen ? `seen so far: ${short(seen[0])} … ${short(seen[1])}` : "measured when an answer ends";
  return [
    slider("At least", [-edge, edge, step], one.min, low, { signed: true }),
    slider("At most", [-edge, edge, step], one.max, high, { signed: true }),
    h("div.hint", hint),
  ];
}

/** The smallest and largest projection so far, over all answers and layers. */
function observed(name) {
  let low = Infinity;
  let high = -Infinity;
  for (const run of state.turns.flatMap((turn) => turn.runs)) {
    for (const value of Object.values(run.projections[name] ?? {}).flat()) {
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  return low <= high ? [low, high] : null;
}

/** Show below the message box what acts on the next message. */
function showNext() {
  const ops = steering();
  const chips = ops.map((op) => h("span.chip", { title: opTextLong(op) }, opText(op)));
  const rules = settings.pack ? settings.rules.length : 0;
  if (rules) chips.push(h("span.chip.plain-chip", rules === 1 ? "1 rule" : `${rules} rules`));
  if (chips.length) fill($("#next"), h("span.wide-only", "next message:"), chips);
  else fill($("#next"), h("span", state.vectors.length ? "unsteered" : ""));
  fill($('[data-tab="steer"]'), "Steer", ops.length > 0 && h("sup", `${ops.length}`));
}
