// The Steer tab: a card for each vector, with the sliders that act on the next message.
import { $, h, iconButton, short, spans } from "./dom.js";
import { change, on, settings, state } from "./state.js";
import { choose, interval, segments, slider, toggle } from "./controls.js";
import { remove, upload } from "./vectorfiles.js";
import { knobs, layersOf, steering, told, toldLong } from "./steering.js";

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
  on("vectors", show);
  on("connection", show);
  on("run-end", () => {
    if (!body.contains(document.activeElement)) show();
  });
  on("steer rules lenses", next);
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

function turnKnob(vector, changes) {
  change({ steer: { ...settings.steer, [vector.name]: { ...knobs(vector), ...changes } } }, "steer");
}

function show() {
  if (state.connection === "starting" && !state.vectors.length) {
    body.replaceChildren(h("p.lead", {}, "Waiting for the server."));
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
  const server = state.serverSteering?.length
    ? h(
        "p.server-note",
        {},
        `The server itself steers every request: ${state.serverSteering.map(told).join(", ")}. ` +
          "An unsteered answer (B) is free of it.",
      )
    : null;
  body.replaceChildren(
    h(
      "p.lead",
      {},
      state.vectors.length
        ? "What is switched on acts on the next message."
        : "A vector is a direction in the model’s activations. Add one to push answers along it.",
    ),
    ...(server ? [server] : []),
    ...state.vectors.map(card),
    h(
      "div.drop",
      {},
      pick,
      h("button.link", { type: "button", onclick: () => pick.click() }, "Add a vector"),
      " or drop it here",
      h("small", {}, "safetensors or GGUF"),
    ),
    h("div.note", { id: "vector-note", role: "status" }),
  );
  body.scrollTop = scroll;
  next();
}

function card(vector) {
  const one = knobs(vector);
  const has = layersOf(vector);
  const root = h(`section.vector${one.on ? "" : ".off"}`, {
    "data-vector": vector.name,
    "aria-label": `Vector ${vector.name}`,
  });
  const set = (changes) => turnKnob(vector, changes);
  const onOff = toggle({
    name: vector.name,
    value: one.on,
    change: (value) => {
      root.classList.toggle("off", !value);
      set({ on: value });
    },
  });
  const strength = h("div.stack");
  const showOp = () => strength.replaceChildren(...opFields(vector, knobs(vector), set));
  showOp();
  root.append(
    h(
      "div.vector-head",
      {},
      onOff,
      h("small", { title: about(vector) }, `layers ${spans(has)}`),
      iconButton("bin", `Delete ${vector.name} from the server`, () => remove(vector)),
    ),
    h(
      "div.vector-body",
      {},
      h(
        "div.top",
        {},
        segments({
          label: "What to do with it",
          options: OPS,
          value: one.op,
          change: (op) => {
            set({ op });
            showOp();
          },
        }),
        choose({ label: "Where it acts", options: TOKENS, value: one.tokens, change: (tokens) => set({ tokens }) }),
      ),
      strength,
      has.length > 1
        ? interval({
            name: "Layers",
            min: has[0],
            max: has.at(-1),
            step: 1,
            from: one.from,
            to: one.to,
            out: (a, b) => (a === b ? `${a}` : `${a}–${b}`),
            change: (from, to) => set({ from, to }),
          })
        : null,
      h(
        "div.field.wide.measure",
        {},
        h("span", {}, "Measure"),
        toggle({ name: "every token along it", value: one.measure, change: (measure) => set({ measure }) }),
      ),
    ),
  );
  return root;
}

function opFields(vector, one, set) {
  if (one.op === "add")
    return [
      slider({
        name: "Strength",
        min: -2,
        max: 2,
        step: 0.05,
        value: one.scale,
        signed: true,
        change: (scale) => set({ scale }),
      }),
    ];
  if (one.op === "ablate")
    return [
      slider({
        name: "Keep",
        min: 0,
        max: 1,
        step: 0.05,
        value: one.keep,
        change: (keep) => set({ keep }),
        title: "How much of the component along the vector is kept",
      }),
    ];
  const seen = observed(vector.name);
  const edge = seen ? Math.max(Math.abs(seen[0]), Math.abs(seen[1]), 1) * 1.2 : 50;
  const step = edge > 40 ? 1 : edge > 4 ? 0.1 : 0.01;
  const low = slider({
    name: "At least",
    min: -edge,
    max: edge,
    step,
    value: one.min,
    signed: true,
    change: (min) => set({ min, max: Math.max(min, knobs(vector).max) }),
  });
  const high = slider({
    name: "At most",
    min: -edge,
    max: edge,
    step,
    value: one.max,
    signed: true,
    change: (max) => set({ max, min: Math.min(max, knobs(vector).min) }),
  });
  return [
    low,
    high,
    h(
      "div.hint",
      {},
      seen ? `seen so far: ${short(seen[0])} … ${short(seen[1])}` : "measured once an answer was written",
    ),
  ];
}

/** The smallest and largest projection so far, over all answers and layers. */
function observed(name) {
  let low = Infinity,
    high = -Infinity;
  for (const turn of state.turns) {
    for (const run of turn.runs) {
      for (const values of Object.values(run.projections[name] ?? {})) {
        for (const value of values) {
          if (value < low) low = value;
          if (value > high) high = value;
        }
      }
    }
  }
  return low <= high ? [low, high] : null;
}

const about = (vector) =>
  [vector.method, vector.model, vector.site, vector.hidden && `${vector.hidden} numbers`].filter(Boolean).join(" · ");

const rulesTold = () => (settings.rules.length === 1 ? "1 rule" : `${settings.rules.length} rules`);

/** What the next message will be sent with, below the message box. */
function next() {
  const ops = steering();
  const chips = ops.map((op) => h("span.chip", { title: toldLong(op) }, told(op)));
  if (settings.pack && settings.rules.length) chips.push(h("span.chip.plain-chip", {}, rulesTold()));
  $("#next").replaceChildren(
    ...(chips.length
      ? [h("span.wide-only", {}, "next message:"), ...chips]
      : [h("span", {}, state.vectors.length ? "unsteered" : "")]),
  );
  const tab = $('[data-tab="steer"]');
  tab.replaceChildren("Steer", ...(ops.length ? [h("sup", {}, `${ops.length}`)] : []));
}
